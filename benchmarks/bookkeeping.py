"""What a step costs the host beside the model: scheduler, managers, sampling parameters, outcome, all but a forward.

Sequences decode on the stub engine and never end. The figures are the median step for several numbers of sequences,
the ratio to one pass of a numpy loop over 256 rows (``calibrate.py``) taken between the samples, a line fitted through
them, and whether a step depends on how long the sequences are: if somewhere a list or an array of a sequence's pages
were built anew, the memory that a step takes for the moment would grow with them.

    python benchmarks/bookkeeping.py --output benchmarks/results/bookkeeping.json
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import json
import os
import platform
import statistics
import sys
import time
import tracemalloc
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from calibrate import pass_ns
from tonnage.engine import Engine
from tonnage.engine.stub import stub_engine
from tonnage.sampling import SamplingParams

BLOCK_TOKENS = 16
ROWS = (64, 128, 256, 512)
#: Prompt tokens in a step, so many that all sequences soon decode.
PREFILL_TOKENS = 65_536
#: The bar is for this many sequences: a step costs at most so many passes over as many rows.
BAR_ROWS, BAR_PASSES, AIM_US = 256, 12, 300
SHORT_TOKENS, LONG_TOKENS = 64, 4096
#: A list of the pages of LONG_TOKENS is 256 entries a row; growth of less than an entry a row is none.
BAR_BYTES_PER_ROW = 8.0


def decoding(rows: int, *, prompt_tokens: int, steps: int) -> Engine:
    """A stub engine in which ``rows`` sequences decode, with room for so many ``steps`` more."""
    most = 64 + rows * prompt_tokens // PREFILL_TOKENS + steps
    max_seq_len = prompt_tokens + most
    engine = stub_engine(
        kv_tokens=rows * (max_seq_len + BLOCK_TOKENS), max_seq_len=max_seq_len, max_batch_size=rows,
        max_num_tokens=PREFILL_TOKENS, chunk_tokens=PREFILL_TOKENS, block_tokens=BLOCK_TOKENS,
    )  # fmt: skip
    params = SamplingParams(max_tokens=most, ignore_eos=True, seed=1)
    requests = [engine.request(f"r{row}", params, token_ids=[7] * prompt_tokens) for row in range(rows)]
    for request in requests:
        engine.submit(request)
    while any(request.num_generated_tokens < 5 for request in requests):
        engine.step()
    assert engine.progress().num_running == rows
    return engine


def step_us(rows: int, *, steps: int) -> float:
    """Median microseconds of ``Engine.step`` with ``rows`` decodes."""
    taken = []
    with decoding(rows, prompt_tokens=SHORT_TOKENS, steps=steps) as engine:
        for _ in range(steps):
            began = time.perf_counter_ns()
            ended = engine.step()
            taken.append(time.perf_counter_ns() - began)
            assert not ended
    return statistics.median(taken) / 1000


def step_bytes(rows: int, *, prompt_tokens: int, steps: int = 32) -> float:
    """Median bytes that a step takes for the moment, as tracemalloc sees them (numpy's arrays are among them).

    The steps cross two block borders in every sequence, so some of them allocate blocks and most do not.
    """
    taken = []
    with decoding(rows, prompt_tokens=prompt_tokens, steps=steps) as engine:
        gc.collect()
        gc.disable()
        tracemalloc.start()
        for _ in range(steps):
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            engine.step()
            taken.append(tracemalloc.get_traced_memory()[1] - before)
        tracemalloc.stop()
        gc.enable()
    return statistics.median(taken)


def measure(*, repeats: int, steps: int) -> dict[str, Any]:
    """Samples of all sizes and of the pass by turns, so that whatever else the machine does falls on all alike."""
    samples: dict[int, list[float]] = {rows: [] for rows in ROWS}
    passes: list[float] = []
    for _ in range(repeats):
        for rows in ROWS:
            samples[rows].append(step_us(rows, steps=steps))
            passes.append(pass_ns(BAR_ROWS) / 1000)
    medians = {rows: statistics.median(values) for rows, values in samples.items()}
    slope, fixed = np.polyfit(list(medians), list(medians.values()), 1)
    return {
        "step_us": {str(rows): [round(value, 1) for value in values] for rows, values in samples.items()},
        "median_us": {str(rows): round(value, 1) for rows, value in medians.items()},
        "pass_us": [round(value, 1) for value in passes],
        "passes_per_step": round(medians[BAR_ROWS] / statistics.median(passes), 2),
        "fit": {"fixed_us": round(float(fixed), 1), "us_per_row": round(float(slope), 3)},
        # 2.0: a step of twice the rows takes twice the time; above, growth would not be linear.
        "growth_of_double": [round(medians[b] / medians[a], 2) for a, b in itertools.pairwise(ROWS)],
    }


def contexts() -> dict[str, Any]:
    """Bytes of a step over short and over long sequences of the same number."""
    found = {tokens: step_bytes(BAR_ROWS, prompt_tokens=tokens) for tokens in (SHORT_TOKENS, LONG_TOKENS)}
    growth = (found[LONG_TOKENS] - found[SHORT_TOKENS]) / BAR_ROWS
    return {
        "step_bytes": {str(tokens): int(value) for tokens, value in found.items()},
        "pages_per_row": {str(tokens): tokens // BLOCK_TOKENS for tokens in found},
        "growth_bytes_per_row": round(growth, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    found = {**measure(repeats=given.repeats, steps=given.steps), "contexts": contexts()}
    within = found["passes_per_step"] <= BAR_PASSES and found["contexts"]["growth_bytes_per_row"] < BAR_BYTES_PER_ROW
    report = {
        "command": " ".join(sys.argv),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "load": list(os.getloadavg()),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("tonnage", "numpy")},
        **found,
        "bar": f"at {BAR_ROWS} rows at most {BAR_PASSES} passes a step (aim: {AIM_US} us), no growth with the context",
        "within_bar": within,
    }
    text = json.dumps(report, indent=1)
    print(text)
    if given.output is not None:
        given.output.write_text(text + "\n")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
