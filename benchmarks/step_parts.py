"""Where the time of a decode step goes on a card: graph, projection and sampler, and the host around them.

python benchmarks/step_parts.py 1 32 256 --output benchmarks/results/step-parts.json
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from card_runs import LLAMA_8B
from filing import file_away, parser
from tonnage.config import LimitKnobs, Setting
from tonnage.engine import Engine, EngineOptions, start
from tonnage.sampling import SamplingParams

CONTEXT, STEPS = 1024, 40


def device_us(run: Callable[[], object], times: int = 20) -> float:
    """Microseconds on the device, one call behind the other."""
    run()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(times):
        run()
    ended.record()
    ended.synchronize()
    return 1000 * began.elapsed_time(ended) / times


def parts(engine: Engine, rows: int) -> dict[str, Any]:
    for i in range(rows):
        params = SamplingParams(max_tokens=STEPS + 64, ignore_eos=True)
        engine.submit(engine.request(f"{rows}-{i}", params, token_ids=[1000 + i, *range(2000, 2000 + CONTEXT - 1)]))
    while engine.progress().num_running < rows or engine.progress().num_waiting:
        engine.step()
    for _ in range(8):
        engine.step()
    steps = []
    for _ in range(STEPS):
        before = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - before)
    runtime: Any = engine._runtime
    executor = runtime.executor
    with runtime.active(), torch.inference_mode():
        size = executor.graphs.bucket(rows)
        graph = device_us(executor.graphs._graphs[size].replay)
        hidden = executor.graphs._hidden[:rows]
        logits = executor._logits(hidden)
        head = device_us(lambda: executor._logits(hidden))
        slots = engine._scheduler.batch.live_slots()
        batch = engine._scheduler.batch
        wanted = batch.sampling.rows(slots, batch.computed[slots] + 1)
        sampler = device_us(lambda: executor._sampler.sample(logits, wanted, None))
    for i in range(rows):
        engine.cancel(f"{rows}-{i}")
    engine.step()
    step = 1e6 * statistics.median(steps)
    row = {"rows": rows, "bucket": size, "step_us": step, "graph_us": graph, "head_us": head, "sampler_us": sampler}
    row["host_us"] = step - graph - head - sampler
    told = {key: round(value, 1) if isinstance(value, float) else value for key, value in row.items()}
    print(told, flush=True)
    return told


def main() -> None:
    options = parser(__doc__)
    options.add_argument("rows", nargs="+", type=int)
    asked = options.parse_args()
    limits = LimitKnobs(max_batch_size=Setting(256), max_num_tokens=Setting(8192), max_seq_len=Setting(4096))
    with start(
        EngineOptions(
            model=str(LLAMA_8B), device="cuda", attention="triton", dtype="bfloat16", random_weights=True,
            limit_knobs=limits,
        )
    ) as engine:  # fmt: skip
        print({stage.name: stage.elapsed_ms for stage in engine.stages})
        rows = [parts(engine, rows) for rows in asked.rows]
    file_away(asked.output, {"rows": rows})


if __name__ == "__main__":
    main()
