"""A start-up log as figures: each with the name that our records use, its rank, and how far it was rounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from tonnage.peers.commands.command import Flag


class Unit(StrEnum):
    """What a figure counts. Sizes are kept in bytes."""

    GIB = "GiB"  # SGLang writes GB and divides by 1024^3 all the same
    MIB = "MiB"
    BYTES = "bytes"
    COUNT = "count"  # tokens, blocks, sequences
    TIMES = "times"  # concurrency, kept in thousandths
    SHARE = "share"  # kept in millionths


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of one line.

    name      as in our records of logged starts, without its unit: "weights", "kv_cache", "kv_cache_tokens"
    value     bytes, a count, thousandths or millionths, by ``unit``
    rounding  half of the last digit that was printed, in the same unit
    rank      the tag of the process that wrote it ("TP0"); empty where there is none
    line      number in the log, from 1
    """

    name: str
    value: int
    unit: Unit
    rounding: int
    rank: str
    line: int

    @property
    def is_bytes(self) -> bool:
        return self.unit in (Unit.GIB, Unit.MIB, Unit.BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A line on which the start ended. ``kind``: see ``failures.KINDS``; ``numbers`` as in ``Figure.value``."""

    kind: str
    line: int
    text: str
    numbers: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """The last start in a log. What it does not say is None or empty.

    flags     settings that it prints, as if they were typed
    num_lines lines that were read
    """

    engine: str
    version: str | None = None
    model: str | None = None
    flags: tuple[Flag, ...] = ()
    figures: tuple[Figure, ...] = ()
    failures: tuple[Failure, ...] = ()
    num_lines: int = 0

    @property
    def rank(self) -> str:
        """The rank whose figures are compared: the first that tells of its pool, or tells anything."""
        pool = next((f for f in self.figures if f.name in ("kv_cache", "avail_after_pool")), None)
        first = pool or next(iter(self.figures), None)
        return "" if first is None else first.rank

    def figure(self, name: str) -> Figure | None:
        """The last figure of that name of the compared rank, or else of a process without a tag, or of any."""
        named = [figure for figure in self.figures if figure.name == name]
        for tag in (self.rank, ""):
            own = [figure for figure in named if figure.rank == tag]
            if own:
                return own[-1]
        return named[-1] if named else None

    def spread(self, name: str) -> tuple[Figure, Figure] | None:
        """The smallest and the largest of all ranks, where they differ by more than they were rounded."""
        last = {figure.rank: figure for figure in self.figures if figure.name == name}
        if len(last) < 2:
            return None
        low, high = min(last.values(), key=lambda f: f.value), max(last.values(), key=lambda f: f.value)
        return (low, high) if high.value - low.value > 2 * high.rounding else None
