"""How long a plan takes in process, for every shape that the tests know: the slowest must stay under 50 ms.

    python benchmarks/plan_speed.py [--repeats 7]

Reading config.json is not counted, nor is the first plan, which imports. Rows 0-4 need neither torch nor numpy, and
both are blocked here.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.modules["torch"] = sys.modules["numpy"] = None  # type: ignore[assignment]
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))

import shapes  # noqa: E402

from tonnage.config import LimitKnobs, Setting  # noqa: E402
from tonnage.costs.config import ModelConfig  # noqa: E402
from tonnage.hardware import generic_card  # noqa: E402
from tonnage.planner import plan_without_device  # noqa: E402
from tonnage.units import TiB  # noqa: E402

BAR_MS = 50


def best_ms(config: ModelConfig, repeats: int) -> float:
    """The best of ``repeats`` plans of 256 sequences on a device that holds any shape."""
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        plan_without_device(config, card=generic_card(16 * TiB), limit_knobs=LimitKnobs(max_batch_size=Setting(256)))
        found.append((time.perf_counter() - began) * 1000)
    return min(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    best_ms(shapes.config("llama-3.1-8b"), 1)
    times = sorted((best_ms(shapes.config(key), repeats), key) for key in shapes.complete())
    for each, key in times[-5:]:
        print(f"{each:6.1f} ms  {key}")
    median = times[len(times) // 2][0]
    print(f"{len(times)} shapes, median {median:.1f} ms, slowest {times[-1][0]:.1f} ms, bar {BAR_MS} ms")
    return int(times[-1][0] > BAR_MS)


if __name__ == "__main__":
    sys.exit(main())
