"""What an engine on a card gives: output tokens a second, prefill, one sequence alone; beside the limit of the card.

``tonnage bench`` with the shape of ``card_runs``, and a peer's figures on the same card beside it. Random token ids,
greedy, ends ignored, no prefix cache. ``--runs`` times each: what is filed has the figures of every run, and the gaps
between tokens of all requests with ``--samples`` only, for they are tens of megabytes.

    python benchmarks/serve_card.py alone prefill mix even arrivals --output benchmarks/results/serve-card.json
"""

from __future__ import annotations

import sys

from card_runs import beside_weights_and_kv_gib, tonnage
from filing import file_away, parser

#: What ``tonnage bench`` calls them.
WORKLOADS = {
    "alone": "single", "few": "batch32", "many": "batch256", "prefill": "prefill", "mix": "uniform", "even": "long",
    "arrivals": "arrivals",
}  # fmt: skip
#: What is counted of each: output tokens, but for one. vLLM 0.26.0 on an H200 with the same shape, 2026-11-29.
COUNTED = {"prefill": "input_tokens"}
PEER = {"alone": 199, "few": 3491, "many": 6103, "prefill": 43_570, "mix": 10_359, "even": 9744}


def main() -> int:
    options = parser(__doc__)
    options.add_argument("workloads", nargs="+", choices=list(WORKLOADS))
    options.add_argument("--runs", type=int, default=3)
    options.add_argument("--rate", help="arrivals a second, of all that is asked for")
    options.add_argument("--attention", default="auto")
    options.add_argument("--no-compile", action="store_true")
    options.add_argument("--graphs", default=None, help="batch sizes between commas, or none")
    options.add_argument("--samples", action="store_true", help="file the times of every token, too")
    options.set_defaults(device="cuda")
    asked = options.parse_args()
    if asked.runs < 2:
        options.error("a median wants at least two runs")
    names = list(dict.fromkeys(asked.workloads))
    flags = ["--device", asked.device, "--attention", asked.attention, "--no-prefix-caching"]
    flags += ["--workload", ",".join(WORKLOADS[name] for name in names), "--runs", str(asked.runs)]
    flags += ["--no-compile"] if asked.no_compile else []
    for flag, value in (("--graphs", asked.graphs), ("--rate", asked.rate)):
        flags += [] if value is None else [flag, value]
    code, document = tonnage("bench", *flags)
    for series in document["series"] if not asked.samples else ():
        for run in series["runs"]:
            del run["samples"]
    peers = {}
    for name, series in zip(names, document["series"], strict=False):  # an interrupted one has fewer
        counted = COUNTED.get(name, "output_tokens")
        median = series["median_per_second"][counted]
        if name in PEER and median is not None:
            peers[name] = {"counted": counted, "median": median, "of_vllm": round(median / PEER[name], 3)}
            print(
                f"{name:10s} {median:>10,.0f} {counted.replace('_', ' ')} a second, {median / PEER[name]:.2f} of vLLM"
            )
    beside = beside_weights_and_kv_gib(document["audit"])
    print(f"neither weights nor KV: {beside:.2f} GiB")
    figures = {"peers": peers, "beside_weights_and_kv_gib": round(beside, 3), **document}
    file_away(asked.output, figures, commit=asked.commit)
    return code


if __name__ == "__main__":
    sys.exit(main())
