"""What CUDA graphs take on a card, by how many there are: the pool that all share, and the price of one more.

An engine is started once for each list of sizes, and what its captures took of the device is read from its plan. All
lists end at the largest batch, so the pool is the same in all: the slope over the number of graphs is what one more
takes.

    python benchmarks/graph_bytes.py --device cuda --output benchmarks/results/graph-bytes.json
"""

from __future__ import annotations

from typing import Any

from card_runs import LLAMA_8B
from filing import file_away, parser
from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.engine import EngineOptions, start
from tonnage.terms import LineKind
from tonnage.units import MiB

MOST = 256
#: From one graph to sixty-six.
LISTS = (str(MOST), "x2", "default", ",".join(map(str, (*range(4, MOST, 4), 1, 2, MOST))))


def captured(graphs: str, model: str) -> dict[str, Any]:
    limits = LimitKnobs(max_batch_size=Setting(MOST), max_num_tokens=Setting(8192), max_seq_len=Setting(4096))
    options = EngineOptions(
        model=model, device="cuda", dtype="bfloat16", random_weights=True, limit_knobs=limits,
        knobs=Knobs(graphs=Setting(graphs)),
    )  # fmt: skip
    with start(options) as engine:
        plan = engine.plan
        row = {
            "graphs": graphs,
            "num_graphs": len(plan.limits.graph_batch_sizes),
            "bytes": plan.bytes_of(LineKind.GRAPHS),
            "probe_ms": next(stage.elapsed_ms for stage in engine.stages if stage.name == "probe"),
        }
    print(row, flush=True)
    return row


def slope(rows: list[dict[str, Any]]) -> float:
    """Least squares of bytes over the number of graphs."""
    counts, sizes = [row["num_graphs"] for row in rows], [row["bytes"] for row in rows]
    middle, mean = sum(counts) / len(rows), sum(sizes) / len(rows)
    rise = sum((count - middle) * (size - mean) for count, size in zip(counts, sizes, strict=True))
    return rise / sum((count - middle) ** 2 for count in counts)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", default=str(LLAMA_8B))
    options.add_argument("--graphs", nargs="+", default=LISTS, help="at least two lists of batch sizes")
    asked = options.parse_args()
    rows = [captured(graphs, asked.model) for graphs in asked.graphs]
    each = round(slope(rows))
    print(f"{each / MiB:.2f} MiB for one more graph")
    file_away(asked.output, {"bytes_per_graph": each, "rows": rows}, commit=asked.commit)


if __name__ == "__main__":
    main()
