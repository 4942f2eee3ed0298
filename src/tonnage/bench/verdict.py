"""What a soak saw, and whether that is good."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tonnage.bench.failures import Failures
from tonnage.bench.probes import Compared
from tonnage.bench.timing import LoadFigures, PhaseFigures
from tonnage.bench.watch import FreeFigures

if TYPE_CHECKING:
    from tonnage.report import RunResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One rule and how often it was broken."""

    rule: str
    meaning: str
    num_broken: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Adversities:
    """What a storm had for the engine beside requests, and what came of it.

    floor_bytes, free       what must be free on the card at any time, and what was; None: it is no card
    allocator               how often torch's allocator failed, or had to try again
    naps                    by what slept; freed_bytes: the most that the card had more of meanwhile
    neighbour_takes         so often another process took memory, neighbour_bytes at most at once; None: there was none
    probes                  texts beside those of the same requests alone, by moment; is_exact: they must be equal
    """

    floor_bytes: int | None = None
    free: FreeFigures | None = None
    allocator: Mapping[str, int] = field(default_factory=dict)
    naps: Mapping[str, int] = field(default_factory=dict)
    can_sleep: bool = False
    freed_bytes: int | None = None
    neighbour_takes: int | None = None
    neighbour_bytes: int = 0
    probes: Mapping[str, Compared] = field(default_factory=dict)
    is_exact: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakReport:
    """What a soak saw.

    outcomes             requests by how they ended, and refused ones
    counts               entries of the log by kind
    longest_wait_steps   steps from arrival or suspension to admission
    most_overtaken       how often the oldest waiting request was passed while it was that
    told                 the first violations, in words
    cache                what the KV cache did: tokens looked for and found, blocks by what was done with them
    faults               failures that were made, by kind
    phases, load         when tokens came, by phase; how full the batch was. ``adversities``: None without a storm
    """

    verdicts: tuple[Verdict, ...]
    told: tuple[str, ...]
    outcomes: dict[str, int]
    counts: dict[str, int]
    num_tokens: int
    longest_wait_steps: int
    most_overtaken: int
    seconds: float
    result: RunResult
    cache: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    failures: tuple[Failures, ...] = ()
    phases: tuple[PhaseFigures, ...] = ()
    load: LoadFigures = field(default_factory=LoadFigures)
    adversities: Adversities | None = None

    @property
    def is_good(self) -> bool:
        return not any(verdict.num_broken for verdict in self.verdicts)
