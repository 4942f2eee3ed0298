"""What a load of a soak does, one move after the other; how it sees the engine meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from tonnage.sampling import SamplingParams

#: Where a request stands; None: it has ended, was refused, or is not there yet.
Stage: TypeAlias = Literal["waiting", "prefilling", "decoding"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request of a soak.

    goes_on             what it generates is remembered by the mix, for a prompt that begins with all of it
    is_malformed        makes no sense and must be refused
    cancel_after_steps  the caller takes it back so many steps later, 0: at once; None: it does not
    cancels_when_done   the caller takes it back right after it has ended, which must do nothing
    listens             it has a callback, which may at its n-th delta raise, or cancel a request: its own or another
    phase               of the storm that asks for it, or "mix"; probe: the number of a probe, whose text is compared
    """

    id: str
    token_ids: list[int]
    params: SamplingParams
    goes_on: bool = False
    is_malformed: bool = False
    cancel_after_steps: int | None = None
    cancels_when_done: bool = False
    listens: bool = False
    cancels_at_delta: int | None = None
    cancels_another: bool = False
    raises_at_delta: int | None = None
    phase: str = "mix"
    probe: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine, if it has anything to do."""


@dataclass(frozen=True, slots=True)
class Settle:
    """Nothing is left to do: everything must be back where it was."""


@dataclass(frozen=True, slots=True)
class Rest:
    """Nobody asks for anything, for so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of that name begins, or all that it asks for has been asked."""

    name: str
    begins: bool


@dataclass(frozen=True, slots=True)
class Nap:
    """The engine is sent to sleep (``Engine.sleep(*tags)``) for ``seconds``; meanwhile ``asks`` arrive."""

    tags: tuple[str, ...]
    seconds: float
    asks: Sequence[Ask] = field(default=())


@dataclass(frozen=True, slots=True)
class Take:
    """Another process takes so many hundredths of what ``keep_free_bytes`` lets it have; 0: it gives all back."""

    hundredths: int


Move: TypeAlias = Ask | Step | Settle | Rest | Cancel | Phase | Nap | Take


class View(Protocol):
    """What a load may look at between two moves."""

    @property
    def has_work(self) -> bool: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    def stage(self, request_id: str) -> Stage: ...


class Load(Protocol):
    """Moves without end, decided by ``seed`` and by what is seen; ``heard`` tells what a request was answered."""

    seed: int

    def moves(self, view: View) -> Iterator[Move]: ...
    def heard(self, ask: Ask, generated: Sequence[int]) -> None: ...
