"""What the engine did, told as it happens to whoever listens (``Engine.observe``): the log that a soak audits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from tonnage.engine.request import Finish, Request
from tonnage.step import StepPlan


class EventKind(StrEnum):
    ARRIVED = "arrived"  # accepted into the queue
    REFUSED = "refused"  # can never be served
    ADMITTED = "admitted"  # starts, or starts again, to run; first it loads what of it lies on the host
    WITHDRAWN = "withdrawn"  # its admission was rolled back with its step; it waits again
    SUSPENDED = "suspended"  # gave its memory up; computed again later
    COMPUTED = "computed"  # one row of a launched step, which cannot fail any more: tokens [start, start + count)
    LEFT = "left"  # has all that it is to get, or must go: it runs no more, and what it held is back
    ENDED = "ended"  # its end is told, behind the step in which it left
    RETRIED = "retried"  # a step ran out of memory and is tried once more, smaller


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """``step`` counts launched steps. The fields that a kind does not speak of keep their defaults.

    num_prompt_tokens, max_tokens, priority   ARRIVED and REFUSED
    num_known_tokens                          ADMITTED, WITHDRAWN, SUSPENDED, LEFT, ENDED: prompt and output so far
    num_cached_tokens                         ADMITTED: so many of them are in the cache, its rows start behind them
    start, count                              COMPUTED
    finish                                    LEFT and ENDED: a callback that raises may change it in between
    """

    kind: EventKind
    step: int
    request_id: str = ""
    num_prompt_tokens: int = 0
    max_tokens: int = 0
    priority: int = 0
    num_known_tokens: int = 0
    num_cached_tokens: int = 0
    start: int = 0
    count: int = 0
    finish: Finish | None = None


OnEvent = Callable[[Event], None]


def event_of(kind: EventKind, request: Request, *, step: int) -> Event:
    """What happened to a request, with all that is known of it now."""
    return Event(
        kind=kind,
        step=step,
        request_id=request.id,
        num_prompt_tokens=request.num_prompt_tokens,
        max_tokens=request.max_tokens,
        priority=request.priority,
        num_known_tokens=len(request.token_ids),
        num_cached_tokens=request.num_computed_tokens if kind is EventKind.ADMITTED else 0,
        finish=request.finish,
    )


def computed_events(plan: StepPlan, *, step: int) -> Iterator[Event]:
    """One for each row of a step that was launched."""
    for row in plan.items:
        yield Event(kind=EventKind.COMPUTED, step=step, request_id=row.request_id, start=row.start, count=row.count)
