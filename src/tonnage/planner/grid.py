"""The plan at many lengths and numbers of sequences: each cell is a whole plan, by the same calls as any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Unpack

from tonnage.budget.grid import Grid, GridCell
from tonnage.config import Origin, Setting
from tonnage.costs.config import ModelConfig
from tonnage.errors import DoesNotFit, UserError
from tonnage.planner.asked import Asked
from tonnage.planner.question import refuse_small_tier
from tonnage.planner.ranks import plan_stages, questions_for
from tonnage.terms import LineKind, MemoryPlan
from tonnage.units import format_bytes

#: Shortest length and most points of either axis: a few dozen plans are made in a second.
LEAST_LENGTH, MOST_LENGTHS, MOST_BATCHES = 1024, 8, 6


def grid_without_device(
    config: ModelConfig,
    *,
    lengths: Sequence[int],
    batches: Sequence[int],
    shown: Callable[[Sequence[MemoryPlan]], MemoryPlan],
    **asked: Unpack[Asked],
) -> Grid:
    """The grid of one question with its length and its batch size varied. ``shown`` picks the stage to look at.

    A shape that is refused is a cell with the reason. Raises nothing that a single plan would not raise for all shapes.
    """
    return Grid(
        lengths=tuple(lengths),
        batches=tuple(batches),
        cells=tuple(tuple(_cell(config, length, rows, shown, asked) for rows in batches) for length in lengths),
    )


def axes(made: MemoryPlan, *, positions: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(lengths, batch sizes) around a plan: powers of two, and what the plan itself has. Where there are too many,
    some are left out, never the ends nor the plan's own."""
    limits = made.limits
    longest = max(limits.max_seq_len, positions)
    lengths = _thinned(_powers(min(LEAST_LENGTH, longest), longest, 2), limits.max_seq_len, MOST_LENGTHS)
    batches = _thinned(_powers(1, max(limits.max_batch_size, 256), 4), limits.max_batch_size, MOST_BATCHES)
    return lengths, batches


def _powers(low: int, high: int, factor: int) -> list[int]:
    found = [low]
    while found[-1] * factor <= high:
        found.append(found[-1] * factor)
    return found if found[-1] == high else [*found, high]


def _thinned(values: Sequence[int], own: int, most: int) -> tuple[int, ...]:
    """At most so many of them, both ends and ``own`` among them: whoever leaves the smallest gap goes first."""
    kept = sorted({*values, own})
    while len(kept) > most:
        inner = [i for i in range(1, len(kept) - 1) if kept[i] != own]
        kept.pop(min(inner, key=lambda i: (Fraction(kept[i + 1], kept[i - 1]), i)))
    return tuple(kept)


def _cell(
    config: ModelConfig, length: int, rows: int, shown: Callable[[Sequence[MemoryPlan]], MemoryPlan], asked: Asked
) -> GridCell:
    knobs = asked.get("limit_knobs")
    assert knobs is not None, "a grid varies the limits of a plan that was made"
    limits = replace(
        knobs,
        max_seq_len=Setting(length, None, Origin.FIT, None),
        max_batch_size=Setting(rows, None, Origin.FIT, None),
    )
    varied: Asked = {**asked, "limit_knobs": limits}
    try:
        questions = questions_for(config, **varied)
        refuse_small_tier(questions)
        made = shown(plan_stages(questions))
    except DoesNotFit as refusal:
        need, have = format_bytes(refusal.need_bytes), format_bytes(refusal.have_bytes)
        return GridCell(max_seq_len=length, max_batch_size=rows, refused=f"needs {need}, has {have}")
    except UserError as error:
        return GridCell(max_seq_len=length, max_batch_size=rows, refused=error.what)
    pool = made.line(LineKind.KV)
    assert pool is not None, "every plan has a pool"
    return GridCell(
        max_seq_len=length,
        max_batch_size=rows,
        kv_tokens=made.kv.tokens,
        num_sequences=made.max_concurrency,
        kv_bytes=pool.bytes,
        low=pool.low,
        high=pool.high,
    )
