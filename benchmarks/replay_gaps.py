"""The device's time between two replays of a decode: from the end of one graph to the start of the next.

What a graph does not hold lies in that gap: the sampler's kernels, the next inputs on their way, and the time that the
device waits for the host. ``kernels`` is what the profiler saw the device do meanwhile; the rest is exposed.
On a card, with Llama-3.1-8B's shape and random weights.

python benchmarks/replay_gaps.py 256 128 1 --output benchmarks/results/replay-gaps.json
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import Any

import torch

from card_runs import llama_options, started
from filing import file_away, parser
from step_profile import submit
from tonnage.engine import Engine, start
from tonnage.graphs.runner import DecodeGraphs

WARM_STEPS, STEPS = 16, 128


class Timed:
    """A graph whose replays lie between two events each."""

    def __init__(self, graph: torch.cuda.CUDAGraph, spans: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> None:
        self._graph, self._spans = graph, spans

    def replay(self) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self._graph.replay()
        end.record()
        self._spans.append((begin, end))

    def reset(self) -> None:
        self._graph.reset()


def gaps_of(engine: Engine, graphs: DecodeGraphs, rows: int) -> dict[str, Any]:
    submit(engine, f"gap-{rows}", rows, tokens=WARM_STEPS + STEPS + 300)
    while engine.progress().num_running < rows or engine.progress().num_waiting:
        engine.step()
    for _ in range(WARM_STEPS):
        engine.step()
    spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    untimed = graphs._graphs
    graphs._graphs = {size: Timed(graph, spans) for size, graph in untimed.items()}  # type: ignore[misc]
    try:
        for _ in range(STEPS):
            engine.step()
        torch.cuda.synchronize()
    finally:
        graphs._graphs = untimed
    busy = busy_between(engine)
    for i in range(rows):
        engine.cancel(f"gap-{rows}-{i}")
    while engine.has_work:
        engine.step()
    gaps = sorted(1000 * one[1].elapsed_time(after[0]) for one, after in pairwise(spans))
    steps = [1000 * begin.elapsed_time(end) for begin, end in spans]
    p90 = gaps[len(gaps) * 9 // 10]
    figures = {
        "rows": rows,
        "num_gaps": len(gaps),
        "replay_us": round(median(steps), 1),
        "gap_us": {"median": round(median(gaps), 1), "p90": round(p90, 1), "max": round(gaps[-1], 1)},
        "kernels_in_gap_us": round(busy, 1),
    }
    print(figures, flush=True)
    return figures


def busy_between(engine: Engine, steps: int = 16) -> float:
    """Microseconds of kernels and copies a step that no graph holds, by the profiler: what it ties to no graph."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    # A replay is one call of the host, so that all of its kernels carry the number of that call.
    launches = {
        event.id for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CPU and "GraphLaunch" in event.name
    }  # fmt: skip
    device = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(event.time_range.elapsed_us() for event in device if event.id not in launches) / steps


def main() -> None:
    options = parser(__doc__)
    options.add_argument("rows", nargs="+", type=int)
    asked = options.parse_args()
    with start(llama_options()) as engine:
        print(begun := started(engine), flush=True)
        graphs = engine._runtime.executor.graphs
        rows = [gaps_of(engine, graphs, rows) for rows in asked.rows]
    file_away(asked.output, {"start": begun, "rows": rows}, commit=asked.commit)


if __name__ == "__main__":
    main()
