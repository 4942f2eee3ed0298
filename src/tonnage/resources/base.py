"""What every resource manager answers: how much there is, how much a request needs, and the hooks of a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tonnage.config import Limits
from tonnage.sampling import SamplingParams
from tonnage.step import Ints, StepPlan, Txn
from tonnage.terms import Claim


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Admitted: ``units`` taken for the request's whole life, ``cached_tokens`` of what it knows already in the cache.

    ``cached_tokens`` None: the manager has no cache, and nothing to say of where the request begins.

    ``is_loading``: some of them are on their way from the host, and the request runs once they have come.
    """

    cached_tokens: int | None = None
    units: int = 0
    is_loading: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferral:
    """Not now: ``manager`` has ``have`` units free and the request needs ``need``. Nothing was taken.

    ``waits_for``: units would do; the running request of that id computes what this one begins with, so that a step
    later it is there.
    unit        what ``need`` and ``have`` count
    held_back   what keeps units for as long as somebody outside likes, in words; empty: time frees them
    """

    manager: str
    need: int
    have: int
    waits_for: str | None = None
    held_back: str = ""
    unit: str = field(default="unit", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Never: ``manager`` owns ``have`` units (named ``unit``) in all and the request needs ``need``."""

    manager: str
    unit: str
    need: int
    have: int


class RequestView(Protocol):
    """What a manager may know about a request. ``max_total_tokens`` = prompt + the most it may generate.

    token_ids: prompt and what was generated so far (a request that was suspended comes back with its output).
    num_computed_tokens: tokens whose KV entries exist; 0 for a request that arrives or comes back.
    adapter_id: the adapter it runs with, None for the model itself.
    """

    @property
    def id(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def max_total_tokens(self) -> int: ...
    @property
    def params(self) -> SamplingParams: ...
    @property
    def adapter_id(self) -> int | None: ...


class StepOutcome(Protocol):
    """What a finished step tells the managers: the token that each of ``request_ids``, the sampling rows, drew."""

    @property
    def request_ids(self) -> Sequence[str]: ...
    @property
    def tokens(self) -> Sequence[int]: ...


class DraftOutcome(StepOutcome, Protocol):
    """Of a plan with drafts: how many of each row's drafts were accepted, 0 <= accepted <= drafts."""

    @property
    def accepted(self) -> Ints: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """A stand-in that a manager asks the engine to run, so that the measured peak holds what the manager causes."""

    id: str
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    max_total_tokens: int
    params: SamplingParams = field(default_factory=SamplingParams)
    adapter_id: int | None = None

    @property
    def token_ids(self) -> Sequence[int]:
        return (0,) * self.num_prompt_tokens


class ResourceManager(Protocol):
    """One countable resource. ``unit`` names what capacity, need and available are counted in.

    after       managers whose hooks run first in ``admit`` and ``prepare`` (and last in ``free``)
    may_refuse  whether a request that needs more than ``capacity`` is refused on arrival
    rerunnable  whether a step may be run again after a failure: its state is as before
    """

    @property
    def name(self) -> str: ...
    @property
    def unit(self) -> str: ...
    @property
    def after(self) -> frozenset[str]: ...
    @property
    def may_refuse(self) -> bool: ...
    @property
    def rerunnable(self) -> bool: ...

    def capacity(self) -> int: ...
    def available(self) -> int: ...
    def lifetime_need(self, request: RequestView) -> int:
        """Units from nothing held to the end; more than ``capacity()``: refuse on arrival."""

    def remaining(self, request: RequestView) -> int:
        """Units still to come for a request that holds some: the sum that reserve-to-completion admission adds up."""

    def claims(self, limits: Limits) -> Sequence[Claim]:
        """The memory this manager takes under ``limits``, for the planner."""

    def probe(self, stage: str, limits: Limits) -> Sequence[RequestView]:
        """Stand-ins whose step ("prefill", "decode") shows this manager's peak; takes nothing."""

    def admit(self, request: RequestView, txn: Txn) -> Grant | Deferral:
        """Take what the request needs to start, as the admission policy has it, and register the undo, or nothing."""

    def short_of(self, request_ids: Sequence[str], ends: Ints) -> int:
        """Units missing for a step that computes each of these admitted requests up to ``ends``; 0: it can be
        prepared. Takes nothing. A policy that reserves whole lives is never short."""

    def held_back(self) -> str:
        """What keeps units until somebody outside gives them back, in words; empty: nothing does."""

    def prepare(self, plan: StepPlan, txn: Txn) -> None:
        """Make ready what the step will write; may raise ``Veto``; registers its undo in ``txn``."""

    def committed(self) -> None:
        """The transaction that admitted or prepared is final: begin what cannot be undone, such as loads."""

    def loading(self) -> Collection[str]:
        """Admitted requests that cannot run yet; asked between steps, and what has come is not among them."""

    def wait_loaded(self) -> None:
        """Return once at least one of ``loading`` can run, or none is loading."""

    def update(self, plan: StepPlan, outcome: StepOutcome | None) -> None:
        """Called with the step that finished (one behind under overlap); None: nothing was sampled."""

    def free(self, request_id: str, *, keep_cached: bool = True) -> object:
        """Give everything back; idempotent, unknown ids are fine. What is returned is the manager's own affair."""

    def reset(self) -> None:
        """As after construction: nothing held."""

    def close(self) -> None:
        """Give everything up; idempotent. ``admit`` and ``prepare`` raise ``ResourceError`` afterwards."""

    def stats(self) -> Mapping[str, int]: ...
