"""A plan as one self-contained HTML page: what it shows, and the text of the file.

``Page`` is all that the page knows; the same object lies in it as JSON, for its script to look things up in. No
formula is on the page: whatever moves there is a cell of a grid that was computed before. Another engine's prediction
is one more ``Series``. Every text from outside is escaped where it enters the markup.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tonnage.budget.grid import Grid, GridCell
from tonnage.config import Setting
from tonnage.report.codec import to_json
from tonnage.report.draw import plural, spread
from tonnage.report.table import SHAPES, amount_text, asked_settings, left_text, origin_text
from tonnage.terms import Line, MemoryPlan
from tonnage.units import format_bytes

PAGE_SCHEMA = "tonnage.page/1"
_SLOT = re.compile(r"<!--slot:(\w+)-->")
_KEYS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One owner of a part of the device. ``key`` stands beside its colour, which says nothing alone."""

    key: str
    name: str
    kind: str
    bytes: int
    low: int
    high: int
    source: str
    ref: str
    reason: str
    parts: tuple[Segment, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One shape: numbers to draw, and the sentence that is shown for it."""

    kv_tokens: int
    num_sequences: int
    refused: str
    told: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """What one engine would have, by length and by batch size. ``name`` is whose prediction it is."""

    name: str
    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    cells: tuple[tuple[Cell, ...], ...]
    own: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Everything on the page. ``facts`` are pairs for its head; ``steps`` and ``caps`` rows of text."""

    schema: str = PAGE_SCHEMA
    model: str
    device: str
    device_bytes: int
    headline: str
    facts: tuple[tuple[str, str], ...]
    segments: tuple[Segment, ...]
    steps: tuple[tuple[str, ...], ...]
    caps: tuple[tuple[str, ...], ...]
    warnings: tuple[str, ...]
    series: tuple[Series, ...]
    version: str


def page_of(made: MemoryPlan, grid: Grid, *, version: str) -> Page:
    """The page of a plan and the grid around it."""
    return Page(
        model=made.model_name,
        device=made.device_name,
        device_bytes=made.device_bytes,
        headline=_headline(made),
        facts=tuple(_facts(made)),
        segments=tuple(
            _segment(line, _key(place)) for place, line in enumerate(each for each in made.lines if each.bytes)
        ),
        steps=tuple((step.name, step.op, amount_text(step), left_text(step), step.reason) for step in made.steps),
        caps=tuple(
            (cap.name, format_bytes(cap.kv_bytes), cap.setting, "binds" if cap.binding else "") for cap in made.caps
        ),
        warnings=made.warnings,
        series=(_series("Tonnage", grid, own=(made.limits.max_seq_len, made.limits.max_batch_size)),),
        version=version,
    )


def page_text(page: Page) -> str:
    """The whole file. Slots are filled once; what fills them is not looked at again."""
    from tonnage.report.page_parts import parts

    template = (Path(__file__).parent / "data" / "page.html").read_text(encoding="utf-8")
    filled: Mapping[str, str] = {**parts(page), "data": _script_json(page)}
    return _SLOT.sub(lambda slot: filled[slot[1]], template)


def _script_json(page: Page) -> str:
    """JSON that no parser of HTML takes for markup, whatever a model is called."""
    text = json.dumps(to_json(page), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _headline(made: MemoryPlan) -> str:
    sequences = plural(made.max_concurrency, "sequence")
    return f"{made.kv.tokens:,} tokens of cache: room for {sequences} of {made.limits.max_seq_len:,} tokens at once"


def _key(place: int) -> str:
    """A letter; behind the last one two of them."""
    rounds, rest = divmod(place, len(_KEYS))
    return (_KEYS[rounds - 1] if rounds else "") + _KEYS[rest]


def _facts(made: MemoryPlan) -> Iterable[tuple[str, str]]:
    yield "model", made.model_name
    yield "device", f"{made.device_name}, {format_bytes(made.device_bytes)} ({made.device_bytes:,} bytes)"
    if made.rank.size > 1:
        yield "rank", f"{made.rank.index} of {made.rank.size} (tp {made.rank.tp}, pp {made.rank.pp}, ep {made.rank.ep})"
    for name in SHAPES:
        yield name, f"{getattr(made.limits, name):,} ({origin_text(getattr(made.limit_knobs, name))})"
    for name, setting in asked_settings(made):
        yield name, _asked(setting)
    if made.attended_cap is not None:
        yield "attended tokens", f"at most {made.attended_cap:,} in one step"


def _asked(setting: Setting[object]) -> str:
    return f"{setting.text or setting.value} ({origin_text(setting)})"


def _segment(line: Line, key: str) -> Segment:
    return Segment(
        key=key,
        name=line.name,
        kind=line.kind.value,
        bytes=line.bytes,
        low=line.low,
        high=line.high,
        source=line.source.value,
        ref=line.ref,
        reason=line.reason,
        parts=tuple(_segment(child, "") for child in line.children if child.bytes),
    )


def _series(name: str, grid: Grid, *, own: tuple[int, int]) -> Series:
    return Series(
        name=name,
        lengths=grid.lengths,
        batches=grid.batches,
        cells=tuple(tuple(_cell(cell) for cell in row) for row in grid.cells),
        own=own,
    )


def _cell(cell: GridCell) -> Cell:
    shape = f"max_seq_len {cell.max_seq_len:,}, max_batch_size {cell.max_batch_size:,}"
    if cell.refused:
        return Cell(kv_tokens=0, num_sequences=0, refused=cell.refused, told=f"{shape}: refused, {cell.refused}.")
    around = spread(cell.low, cell.high)
    size = format_bytes(cell.kv_bytes) + (f", {around}" if around else "")
    running = f"{plural(cell.num_running, 'sequence')} of full length at once"
    if cell.num_sequences < cell.max_batch_size:
        running += f"; {cell.max_batch_size:,} only while they are shorter"
    return Cell(
        kv_tokens=cell.kv_tokens,
        num_sequences=cell.num_running,
        refused="",
        told=f"{shape}: {plural(cell.kv_tokens, 'token')} of cache ({size}), {running}.",
    )
