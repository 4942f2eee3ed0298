"""The long soak of an engine on a card: eight minutes of a storm at full load, everything sampled and judged, filed.

``tonnage soak --adversarial`` with the shape of ``card_runs``. The bar: nothing runs out of memory, no request fails
that could have been served, and at least 128 MiB of the card are free at any sample, ten a second, while another
process takes what ``keep_free_bytes`` leaves it. The run ends some seconds after its minutes: what then still waits or
has long to go is taken back.

    python benchmarks/soak_card.py --output benchmarks/results/soak-card.json
"""

from __future__ import annotations

import sys

from card_runs import beside_weights_and_kv_gib, tonnage
from filing import file_away, parser
from tonnage.units import GiB, MiB

#: The rules, and so the counts, that the bar is about.
BAR_FREE_BYTES = 128 * MiB


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--minutes", default="8")
    options.add_argument("--seed", default="0")
    options.add_argument("--attention", default="auto")
    options.add_argument("--keep-free-bytes", default=None)
    options.add_argument("--no-neighbour", action="store_true")
    options.set_defaults(device="cuda")
    asked = options.parse_args()
    flags = ["--device", asked.device, "--adversarial", "--minutes", asked.minutes, "--seed", asked.seed]
    flags += ["--attention", asked.attention] + ["--no-neighbour"] * asked.no_neighbour
    flags += [] if asked.keep_free_bytes is None else ["--keep-free-bytes", asked.keep_free_bytes]
    code, document = tonnage("soak", *flags)
    free = document["adversities"]["free"]
    kv_bytes = next(row["planned_bytes"] for row in document["audit"] if row["line"] == "kv")
    bar = {
        "ran_out_of_memory": len(document["retried_steps"]) + sum(document["adversities"]["allocator"].values()),
        "feasible_failures": sum(one["feasible"] for one in document["failures"].values()),
        "lowest_free_mib": None if free is None else round(free["lowest_bytes"] / MiB, 1),
        "kv_gib": round(kv_bytes / GiB, 2),
        "beside_weights_and_kv_gib": round(beside_weights_and_kv_gib(document["audit"]), 3),
    }
    print(bar)
    file_away(asked.output, {"bar": bar, **document}, commit=asked.commit)
    is_low = free is not None and free["lowest_bytes"] < BAR_FREE_BYTES
    return code or int(bar["ran_out_of_memory"] > 0 or bar["feasible_failures"] > 0 or is_low)


if __name__ == "__main__":
    sys.exit(main())
