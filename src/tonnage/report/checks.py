"""What a plan or a run cannot say although its types allow it: no table or sum of such values would be true."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from tonnage.layout import KVGroupKind
from tonnage.report.codec import Path, Reader
from tonnage.terms import Line, MemoryPlan

#: Numbers that are at least 1; every other number of a plan is at least 0.
AT_LEAST_ONE = frozenset(
    {
        "device_bytes", "size", "tp", "pp", "cp", "ep", "max_seq_len", "max_batch_size", "max_num_tokens",
        "slab_bytes", "block_tokens", "block_bytes",
    }
)  # fmt: skip


def check_plan(plan: MemoryPlan, reader: Reader, at: Path) -> None:
    """Raises ``InputError`` with the place of the first impossible value; ``at`` is the plan's place in its file."""
    for name, found in (("caps", plan.caps), ("kv.layout.groups", plan.kv.layout.groups)):
        if not found:
            reader.fail((*at, *name.split(".")), "is empty")
    check_numbers(_numbers_of_plan(plan), reader, at)
    if plan.rank.index >= plan.rank.size:
        reader.fail((*at, "rank", "index"), f"is {plan.rank.index}, but there are {plan.rank.size} ranks from 0")
    total = sum(line.bytes for line in plan.lines)
    if total != plan.device_bytes:
        reader.fail((*at, "lines"), f"the lines come to {total:,} bytes, the device has {plan.device_bytes:,}")


def check_numbers(numbers: Iterable[tuple[Path, int]], reader: Reader, at: Path) -> None:
    """Raises ``InputError`` for the first number below the least that its name allows."""
    for path, number in numbers:
        least = int(path[-1] in AT_LEAST_ONE)
        if number < least:
            reader.fail((*at, *path), f"is {number}, and cannot be less than {least}")


def numbers_in(value: Any, at: Path) -> Iterator[tuple[Path, int]]:
    """The whole numbers that are fields of a data class, with their paths; what lies deeper is left out."""
    named: Mapping[str, Any] = {f.name: getattr(value, f.name) for f in fields(value)}
    for name, number in named.items():
        if isinstance(number, int) and not isinstance(number, bool):
            yield (*at, name), number


def _numbers_of_plan(plan: MemoryPlan) -> Iterator[tuple[Path, int]]:
    yield from numbers_in(plan, ())
    for name in ("rank", "limits", "host", "kv"):
        yield from numbers_in(getattr(plan, name), (name,))
    yield from numbers_in(plan.kv.layout, ("kv", "layout"))
    for place, group in enumerate(plan.kv.layout.groups):
        numbers = numbers_in(group, ("kv", "layout", "groups", place))
        is_state = group.kind == KVGroupKind.STATE  # a state holds no tokens
        yield from (found for found in numbers if not (is_state and found[0][-1] == "block_tokens"))
    for place, cap in enumerate(plan.caps):
        yield from numbers_in(cap, ("caps", place))
    yield from _numbers_of_lines(plan.lines, ("lines",))


def _numbers_of_lines(lines: tuple[Line, ...], at: Path) -> Iterator[tuple[Path, int]]:
    for place, line in enumerate(lines):
        yield (*at, place, "bytes"), line.bytes  # low and high are an error bar, which may reach below 0
        yield from _numbers_of_lines(line.children, (*at, place, "children"))
