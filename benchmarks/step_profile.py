"""Which kernels a step's time goes to on a card: decodes of so many rows, and a step of prompts; Llama-3.1-8B's shape.

python benchmarks/step_profile.py 1 256 --prompts 8 --output benchmarks/results/step-profile.json
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from card_runs import llama_options
from filing import file_away, parser
from tonnage.engine import Engine, start
from tonnage.sampling import SamplingParams

CONTEXT, STEPS = 1024, 8


def submit(engine: Engine, name: str, rows: int, *, tokens: int) -> None:
    for i in range(rows):
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        engine.submit(engine.request(f"{name}-{i}", params, token_ids=[1000 + i, *range(2000, 2000 + CONTEXT - 1)]))


def decodes(engine: Engine, rows: int) -> dict[str, Any]:
    submit(engine, f"decode-{rows}", rows, tokens=256)
    while engine.progress().num_running < rows or engine.progress().num_waiting:
        engine.step()
    for _ in range(8):
        engine.step()
    told = profiled(engine, STEPS)
    for i in range(rows):
        engine.cancel(f"decode-{rows}-{i}")
    engine.step()
    return {"rows": rows, "steps": STEPS, **told}


def prompts(engine: Engine, rows: int) -> dict[str, Any]:
    submit(engine, "warm", rows, tokens=1)
    while engine.has_work:
        engine.step()
    submit(engine, "prompt", rows, tokens=1)
    told = profiled(engine, 3)
    return {"prompts": rows, **told}


def profiled(engine: Engine, steps: int) -> dict[str, Any]:
    """Microseconds a step by kernel, all of the device's, and the span from the first kernel to the last."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    before = engine._steps.num_steps
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            if engine.has_work:
                engine.step()
        torch.cuda.synchronize()
    steps = engine._steps.num_steps - before  # as many as there were to make
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    begins, ends = [], []
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name[:110]] += event.time_range.elapsed_us()
            calls[event.name[:110]] += 1
            begins.append(event.time_range.start)
            ends.append(event.time_range.end)
    span, busy = max(ends) - min(begins), sum(spent.values())
    print(f"span {span / steps:.1f} us a step, kernels {busy / steps:.1f}")
    for name, micros in spent.most_common(24):
        print(f"{micros / steps:10.1f} us {calls[name] / steps:7.1f} x  {name}")
    kernels = {name: [round(micros / steps, 1), calls[name] / steps] for name, micros in spent.most_common(40)}
    return {"span_us": span / steps, "busy_us": busy / steps, "kernels_us_and_calls": kernels}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("rows", nargs="*", type=int)
    options.add_argument("--prompts", type=int, default=0)
    asked = options.parse_args()
    with start(llama_options()) as engine:
        rows = [decodes(engine, rows) for rows in asked.rows]
        rows += [prompts(engine, asked.prompts)] if asked.prompts else []
    file_away(asked.output, {"rows": rows})


if __name__ == "__main__":
    main()
