"""What an engine on a card gives: output tokens a second, prefill, one sequence alone; beside the limit of the card.

Llama-3.1-8B's shape with random bfloat16 weights, 8,192 tokens a step, 256 sequences, 4,096 tokens each; random token
ids, greedy, ends ignored, text not made. ``--runs`` times each, all samples filed.

    python benchmarks/serve_card.py alone prefill mix even --output benchmarks/results/serve-card.json
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filing import file_away, parser
from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.engine import Engine, EngineOptions, start
from tonnage.sampling import SamplingParams
from tonnage.terms import LineKind
from tonnage.units import GiB

LLAMA_8B = Path(__file__).parents[1] / "examples" / "configs" / "llama-3.1-8b"
#: (prompt tokens, output tokens) of each request.
Lengths = list[tuple[int, int]]
FIRST_ID, LAST_ID = 1000, 99_999


def _mix() -> Lengths:
    drawn = random.Random(0)
    return [(drawn.randint(100, 1024), drawn.randint(100, 1024)) for _ in range(256)]


#: By name: the requests, and what is counted: output tokens, or prompt tokens.
WORKLOADS: dict[str, tuple[Callable[[], Lengths], str]] = {
    "alone": (lambda: [(1024, 256)], "output"),
    "few": (lambda: [(1024, 256)] * 32, "output"),
    "many": (lambda: [(1024, 256)] * 256, "output"),
    "prefill": (lambda: [(1024, 1)] * 256, "prompt"),
    "mix": (_mix, "output"),
    "even": (lambda: [(1000, 1000)] * 512, "output"),
}
#: What the card allows (4.3 TB/s, 790 TFLOP/s), and vLLM 0.26.0 there: facts of 2026-11-29.
LIMITS = {"alone": 284, "mix": 16_000, "even": 12_100, "prefill": 55_500}
PEER = {"alone": 199, "few": 3491, "many": 6103, "prefill": 43_570, "mix": 10_359, "even": 9744}


def serve(engine: Engine, lengths: Lengths, seed: int) -> dict[str, Any]:
    """All at once, to the end."""
    drawn = random.Random(seed)
    for i, (prompt, output) in enumerate(lengths):
        ids = [drawn.randint(FIRST_ID, LAST_ID) for _ in range(prompt)]
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        engine.submit(engine.request(f"{seed}-{i}", params, token_ids=ids))
    done, steps = [], []
    began = time.perf_counter()
    while engine.has_work:
        before = time.perf_counter()
        done += engine.step()
        steps.append(time.perf_counter() - before)
    took = time.perf_counter() - began
    assert [one.error for one in done] == [None] * len(lengths)
    tail = sorted(steps)
    return {
        "seconds": round(took, 3),
        "output": sum(output for _, output in lengths) / took,
        "prompt": sum(prompt for prompt, _ in lengths) / took,
        "num_steps": len(steps),
        "step_ms_median": round(1000 * statistics.median(steps), 3),
        "step_ms_p99": round(1000 * tail[int(0.99 * (len(tail) - 1))], 3),
    }


def measure(engine: Engine, names: list[str], runs: int) -> Iterator[dict[str, Any]]:
    for name in names:
        lengths, counted = WORKLOADS[name]
        samples = [serve(engine, lengths(), seed) for seed in range(runs)]
        median = statistics.median(sample[counted] for sample in samples)
        row: dict[str, Any] = {"workload": name, "counted": f"{counted} tokens a second", "median": round(median)}
        row |= {"of_limit": round(median / LIMITS[name], 3)} if name in LIMITS else {}
        row |= {"of_vllm": round(median / PEER[name], 3), "samples": samples}
        print({key: value for key, value in row.items() if key != "samples"}, samples[-1], flush=True)
        yield row


def main() -> None:
    options = parser(__doc__)
    options.add_argument("workloads", nargs="+", choices=list(WORKLOADS))
    options.add_argument("--runs", type=int, default=3)
    options.add_argument("--attention", default="triton")
    options.add_argument("--no-compile", action="store_true")
    options.add_argument("--graphs", default=None, help="batch sizes between commas, or none")
    asked = options.parse_args()
    began = time.perf_counter()
    knobs = Knobs() if asked.graphs is None else Knobs(graphs=Setting(asked.graphs, asked.graphs))
    limits = LimitKnobs(
        max_batch_size=Setting(256), max_num_tokens=Setting(8192), max_seq_len=Setting(4096),
        prefix_caching=Setting(False),
    )  # fmt: skip
    with start(
        EngineOptions(
            model=str(LLAMA_8B), device="cuda", attention=asked.attention, dtype="bfloat16", random_weights=True,
            limit_knobs=limits, compile=not asked.no_compile, knobs=knobs,
        )
    ) as engine:  # fmt: skip
        started = time.perf_counter() - began
        stages = {stage.name: stage.elapsed_ms for stage in engine.stages}
        print(f"start {started:.1f} s", stages, flush=True)
        rows = list(measure(engine, asked.workloads, asked.runs))
        audit = {str(row.line): [row.planned_bytes, row.actual_bytes] for row in engine.ledger.audit()}
        others = sum(
            row.actual_bytes or 0
            for row in engine.ledger.audit()
            if row.line not in (LineKind.KV, LineKind.WEIGHTS, LineKind.KEEP_FREE, LineKind.FOREIGN)
        )
        print(f"neither weights nor KV: {others / GiB:.2f} GiB", audit)
        print(engine.plan.warnings)
    file_away(asked.output, {"start_s": round(started, 1), "stages_ms": stages, "rows": rows, "lines": audit})


if __name__ == "__main__":
    main()
