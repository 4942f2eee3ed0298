"""The closed form of activations beside forwards on fake tensors, family by family: the table of docs/activations.md.

Every published shape of tests/data/shapes that transformers has a class for, bfloat16, 8,192 tokens and 256 rows of
logits, and a decode of 256 rows; projections apart, operation by operation, which is what the closed form counts; and
compiled as the engine compiles, which its low end allows for. One row a family: the widest errors of its shapes.

    python benchmarks/closed_forms.py [--each]
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tonnage.costs.activations import Peak, forward_peak
from tonnage.costs.config import ModelConfig
from tonnage.engine.exact.probe import refuse, seen_step
from tonnage.engine.exact.skeleton import Skeleton, Unrunnable
from tonnage.engine.exact.steps import forward
from tonnage.engine.family import FAMILIES
from tonnage.terms import Rank, StepShape

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))

TOKENS, ROWS = 8192, 256
DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One shape: the closed form, and the two runs, bytes."""

    name: str
    family: str
    tokens: int
    closed: Peak
    plain_bytes: int
    engine_bytes: int

    @property
    def error(self) -> float:
        """Of the closed form, in parts of what was counted: above zero, it says too much."""
        return self.closed.bytes / self.plain_bytes - 1

    @property
    def holds(self) -> bool:
        """Whether its bar spans both runs."""
        return self.closed.low <= min(self.plain_bytes, self.engine_bytes) and self.closed.high >= max(
            self.plain_bytes, self.engine_bytes
        )


def rows_of(name: str, config: ModelConfig) -> list[Row]:
    """A prefill and a decode. Raises ``Unrunnable``, or whatever the class raises."""
    refuse(config, Rank())
    family = FAMILIES.get(config.model_type)
    layers = range(config.num_layers)
    plain = Skeleton(config, dtype=DTYPE, layers=layers, family=None)
    engine = Skeleton(config, dtype=DTYPE, layers=layers, family=family) if family else plain
    found = []
    for tokens in (TOKENS, ROWS):
        shape = StepShape(num_tokens=tokens)
        trace = forward(plain, num_tokens=tokens, logits_rows=ROWS)
        packed = forward(engine, num_tokens=tokens, logits_rows=ROWS)
        found.append(
            Row(
                name=name,
                family=config.model_type,
                tokens=tokens,
                closed=forward_peak(config, num_tokens=tokens, logits_rows=ROWS, dtype=DTYPE),
                plain_bytes=seen_step("", shape, trace, config, is_compiled=False).peak_bytes,
                engine_bytes=seen_step("", shape, packed, config, is_compiled=True).peak_bytes,
            )
        )
    return found


def main() -> int:
    from shapes import complete, raw_config

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--each", action="store_true", help="one row a shape")
    asked = options.parse_args()
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    for name in complete():
        raw = raw_config(name)
        if raw.get("kv_lora_rank"):
            raw.pop("head_dim", None)  # the published files have none
        try:
            rows += rows_of(name, ModelConfig.from_dict(raw, name=name))
        except Unrunnable as error:
            left_out[str(raw["model_type"])] = str(error)
        except Exception as error:  # noqa: BLE001 - an abbreviated config that its class does not take
            left_out[str(raw["model_type"])] = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.name if asked.each else row.family].append(row)
    print("| | shapes | phase at 8,192 | error, prefill | error, decode | compiled / closed form | bar holds |")
    print("|---|---|---|---|---|---|---|")
    for name, group in sorted(groups.items()):
        print(line(name, group))
    for family, why in sorted(left_out.items()):
        print(f"\nleft out: {family}: {why}", file=sys.stderr)
    return 0


def line(name: str, rows: list[Row]) -> str:
    prefill = [row for row in rows if row.tokens == TOKENS]
    decode = [row for row in rows if row.tokens == ROWS]
    shares = [row.engine_bytes / row.closed.bytes for row in prefill]
    phases = ", ".join(sorted({row.closed.phase for row in prefill}))
    held = sum(row.holds for row in rows)
    return (
        f"| {name} | {len(prefill)} | {phases} | {widest(prefill)} | {widest(decode)} "
        f"| {min(shares):.2f} to {max(shares):.2f} | {'yes' if held == len(rows) else f'{held} of {len(rows)}'} |"
    )


def widest(rows: list[Row]) -> str:
    return f"{max((row.error for row in rows), key=abs):+.1%}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    raise SystemExit(main())
