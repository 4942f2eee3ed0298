"""What a step costs the host beside the model: scheduler, managers, sampling parameters, outcome, all but a forward.

Sequences decode on the stub engine and never end. The figures are the median step for several numbers of sequences,
the ratio to one pass of a numpy loop over 256 rows (``calibrate.py``) taken between the samples, a line fitted through
them, and whether a step depends on how long the sequences are: if somewhere a list or an array of a sequence's pages
were built anew, the memory that a step takes for the moment would grow with them.

    python benchmarks/bookkeeping.py --output benchmarks/results/bookkeeping.json

With ``--baseline PATH``, a checkout of an older commit, its step and ours are measured by turns, each in processes of
its own and in passes of the same minute; ours with the prefix tree and a host tier. The bar is 1.5 times the other.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import inspect
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import tracemalloc
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from calibrate import pass_ns
from filing import file_away
from tonnage.engine import Engine
from tonnage.engine.stub import stub_engine
from tonnage.sampling import SamplingParams

BLOCK_TOKENS = 16
ROWS = (64, 128, 256, 512)
#: Prompt tokens in a step, so many that all sequences soon decode.
PREFILL_TOKENS = 65_536
#: The bar is for this many sequences: a step costs at most so many passes over as many rows.
BAR_ROWS, BAR_PASSES, AIM_US = 256, 12, 300
#: Of a step with prefix tree and host tier to one of the older commit.
BAR_RATIO = 1.5
SHORT_TOKENS, LONG_TOKENS = 64, 4096
#: Of the comparison: all sequences cross their block borders in the same steps; a sixteenth of them does in each step;
#: and that in a pool that is full of what others left. The bar is for the first two.
WAYS: dict[str, dict[str, bool]] = {
    "together": {},
    "staggered": {"staggered": True},
    "full": {"staggered": True, "used": True},
}
#: A list of the pages of LONG_TOKENS is 256 entries a row; growth of less than an entry a row is none.
BAR_BYTES_PER_ROW = 8.0


def decoding(rows: int, *, prompt_tokens: int, steps: int, staggered: bool = False, used: bool = False) -> Engine:
    """A stub engine in which ``rows`` sequences decode, with room for so many ``steps`` more.

    staggered: they cross their block borders one after the other, not all in one step. used: others have filled the
    whole pool before, so that where blocks are kept, every new one takes the place of an old one.
    """
    most = 64 + rows * prompt_tokens // PREFILL_TOKENS + steps
    max_seq_len = prompt_tokens + most + BLOCK_TOKENS
    engine = stub_engine(
        kv_tokens=rows * (max_seq_len + BLOCK_TOKENS), max_seq_len=max_seq_len, max_batch_size=rows,
        max_num_tokens=PREFILL_TOKENS, chunk_tokens=PREFILL_TOKENS, block_tokens=BLOCK_TOKENS, **_cache(rows),
    )  # fmt: skip
    params = SamplingParams(max_tokens=most, ignore_eos=True, seed=1)
    if used:
        _fill(engine, rows, max_seq_len - 1)
    lengths = [prompt_tokens + (row % BLOCK_TOKENS if staggered else 0) for row in range(rows)]
    requests = [engine.request(f"r{row}", params, token_ids=_prompt(row, lengths[row])) for row in range(rows)]
    for request in requests:
        engine.submit(request)
    while any(request.num_generated_tokens < 5 for request in requests):
        engine.step()
    assert engine.progress().num_running == rows
    return engine


def _fill(engine: Engine, rows: int, num_tokens: int) -> None:
    """Requests that come and go, as long as any can be."""
    for row in range(2 * rows):
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        engine.submit(engine.request(f"before-{row}", params, token_ids=_prompt(rows + row, num_tokens)))
    while engine.has_work:
        engine.step()


def step_passes(rows: int, *, steps: int, **how: bool) -> dict[str, float]:
    """A step in passes over as many rows: the median, and the mean, which knows of the steps at block borders.

    In time of the processor, so that other work on the machine counts little.
    """
    clock_ns, taken = time.process_time_ns, []
    passes = [pass_ns(rows, clock_ns=clock_ns)]
    with decoding(rows, prompt_tokens=SHORT_TOKENS, steps=steps, **how) as engine:
        for _ in range(steps):
            began = clock_ns()
            engine.step()
            taken.append(clock_ns() - began)
        passes.append(pass_ns(rows, clock_ns=clock_ns))
    one = statistics.fmean(passes)
    return {"median": round(statistics.median(taken) / one, 3), "mean": round(statistics.fmean(taken) / one, 3)}


def against(baseline: Path, *, repeats: int, steps: int) -> dict[str, Any]:
    """The older commit and this one by turns."""
    places = {"baseline": baseline / "src", "now": Path(__file__).parents[1] / "src"}
    found: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in places}
    for _ in range(repeats):
        for name, source in places.items():
            command = [sys.executable, __file__, "--one", "--steps", str(steps)]
            ran = subprocess.run(
                command, env=os.environ | {"PYTHONPATH": str(source)}, stdout=subprocess.PIPE, text=True, check=True
            )
            found[name].append(json.loads(ran.stdout))
    ratios = {}
    for how, kind in itertools.product(WAYS, ("median", "mean")):
        now, before = (statistics.median(one[how][kind] for one in found[name]) for name in ("now", "baseline"))
        ratios[f"{how}, {kind}"] = round(now / before, 3)
    commit = subprocess.run(["git", "-C", baseline, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {"baseline": commit.stdout.strip() or None, "rows": BAR_ROWS, "ratios": ratios, "passes_per_step": found}


def _prompt(row: int, num_tokens: int) -> list[int]:
    """No two begin alike: every sequence has blocks of its own."""
    return [1 + row % 255, 1 + row // 255, *[7] * (num_tokens - 2)]


def _cache(rows: int) -> dict[str, Any]:
    """Prefix tree and host tier, where the stub that is imported knows of them; an older one does not."""
    known = inspect.signature(stub_engine).parameters
    return {"prefix_caching": True, "host_kv_tokens": rows * 64} if "host_kv_tokens" in known else {}


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
    parser.add_argument("--baseline", type=Path, help="a checkout of an older commit to compare with")
    parser.add_argument("--one", action="store_true", help="print one measurement of whatever tonnage is imported")
    given = parser.parse_args()
    if given.one:
        print(json.dumps({name: step_passes(BAR_ROWS, steps=given.steps, **how) for name, how in WAYS.items()}))
        return 0
    if given.baseline is not None:
        compared = against(given.baseline, repeats=given.repeats, steps=given.steps)
        compared["bar"] = f"at most {BAR_RATIO} times the baseline, median and mean, together and staggered"
        print(json.dumps(compared, indent=1))
        file_away(given.output, compared)
        barred = [ratio for name, ratio in compared["ratios"].items() if not name.startswith("full")]
        return 0 if max(barred) <= BAR_RATIO else 1
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
