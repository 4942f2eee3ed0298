"""Where the time of a decode step goes on a card: graph, projection and sampler, and the host around them.

``tonnage buckets --step-times`` reads the file: name enough batches that straight lines between their times will do.

python benchmarks/step_parts.py 1 2 4 8 16 24 32 48 64 96 128 160 192 224 256 --output benchmarks/results/parts.json
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from card_runs import llama_options, started
from filing import file_away, parser
from tonnage.engine import Engine, start
from tonnage.sampling import SamplingParams

CONTEXT, STEPS = 1024, 40


def device_samples_us(run: Callable[[], object], times: int = 20) -> list[float]:
    """Microseconds on the device of each call, one behind the other."""
    run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    marks[-1].synchronize()
    return [round(1000 * before.elapsed_time(after), 1) for before, after in pairwise(marks)]


def device_us(run: Callable[[], object], times: int = 20) -> float:
    return statistics.median(device_samples_us(run, times))


def padding_samples_us(graphs: Any, size: int) -> list[float]:
    """Replays of rows that are all padding: what a graph takes whoever is in it. The inputs hold nobody afterwards."""
    graphs._backend.rest(graphs._inputs, size)
    return device_samples_us(graphs._graphs[size].replay)


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
        graph_samples = device_samples_us(executor.graphs._graphs[size].replay)
        graph = statistics.median(graph_samples)
        hidden = executor.graphs._hidden[:rows]
        logits = executor._logits(hidden)
        head = device_us(lambda: executor._logits(hidden))
        slots = engine._scheduler.batch.due_slots()
        batch = engine._scheduler.batch
        wanted = batch.sampling.rows(slots, batch.computed[slots] + 1)
        sampler = device_us(lambda: executor._sampler.sample(logits, wanted, None))
        padded_samples = padding_samples_us(executor.graphs, size)
    for i in range(rows):
        engine.cancel(f"{rows}-{i}")
    engine.step()
    step = 1e6 * statistics.median(steps)
    row = {"rows": rows, "bucket": size, "step_us": step, "graph_us": graph, "head_us": head, "sampler_us": sampler}
    row |= {"padded_us": statistics.median(padded_samples), "host_us": step - graph - head - sampler}
    told = {key: round(value, 1) if isinstance(value, float) else value for key, value in row.items()}
    print(told, flush=True)
    return told | {"graph_samples_us": graph_samples, "padded_samples_us": padded_samples}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("rows", nargs="+", type=int)
    asked = options.parse_args()
    with start(llama_options()) as engine:
        print(begun := started(engine), flush=True)
        rows = [parts(engine, rows) for rows in asked.rows]
    file_away(asked.output, {"start": begun, "rows": rows}, commit=asked.commit)


if __name__ == "__main__":
    main()
