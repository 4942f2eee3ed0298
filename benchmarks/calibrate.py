"""What a row costs on this machine in a plain loop of numpy: the unit that bookkeeping is measured in.

Times in microseconds say as much of the machine as of the code; a ratio to this pass, taken in the same minute, does
not. Other benchmarks import it; run alone it prints the pass for several numbers of rows.

    python benchmarks/calibrate.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

#: Rows of a page table as an engine has it: int32, one entry a block.
_TABLE = np.zeros((1024, 128), np.int32)
#: Entries of a row that the pass touches: one small numpy operation, whose cost is the call and not the numbers.
_ENTRIES = 8


def numpy_loop_pass(rows: int) -> None:
    """One small numpy operation a row, in a Python loop: what code costs that handles sequences one by one."""
    for row in _TABLE[:rows]:
        row[:_ENTRIES] += 1


def median_ns(
    run: Callable[[], object], *, passes: int = 201, clock_ns: Callable[[], int] = time.perf_counter_ns
) -> int:
    """Median nanoseconds of ``passes`` calls, after a few that are not counted."""
    for _ in range(5):
        run()
    taken = []
    for _ in range(passes):
        began = clock_ns()
        run()
        taken.append(clock_ns() - began)
    return int(statistics.median(taken))


def pass_ns(rows: int, *, passes: int = 201, clock_ns: Callable[[], int] = time.perf_counter_ns) -> int:
    """Median nanoseconds of ``numpy_loop_pass(rows)``."""
    return median_ns(lambda: numpy_loop_pass(rows), passes=passes, clock_ns=clock_ns)


def main() -> None:
    for rows in (64, 128, 256, 512):
        print(f"{rows:4d} rows: {pass_ns(rows) / 1000:8.1f} us a pass")


if __name__ == "__main__":
    main()
