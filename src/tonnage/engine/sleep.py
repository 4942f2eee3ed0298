"""An engine gives its memory back for a while and keeps its requests: to be woken later, at once or piece by piece.

==========  =================================================  ====================================================
tag         asleep                                             awake again
==========  =================================================  ====================================================
weights     kept on the host, off the device                   as they were, at the same addresses
kv          running requests are suspended and wait; cached    empty: what the host kept is found and loaded, the
            blocks go to the host tier as far as it has room,  rest is computed again. The scratch, penalty tables
            and are dropped beyond                             and what torch cached for steps go and come with it
graphs      gone                                               captured again, over the same addresses
==========  =================================================  ====================================================

No step runs while weights or KV sleep. Without its graphs the engine runs, step by step. Graphs that stay awake stay
right: whatever wakes does so where it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tonnage.engine.faults import culprit, release_frames
from tonnage.engine.runtime import Runtime
from tonnage.engine.scheduler import Scheduler
from tonnage.engine.site import KV, WEIGHTS
from tonnage.errors import DriverError, InvalidSetting, UserError
from tonnage.units import shown

GRAPHS = "graphs"
TAGS = (WEIGHTS, KV, GRAPHS)
#: No step without them.
NEEDED = frozenset({WEIGHTS, KV})


@dataclass(frozen=True, slots=True, kw_only=True)
class Slept:
    """``freed_bytes`` of the device by tag, and what the engine still holds of it, by owner; the largest first.

    ``own_bytes`` is what the driver says of this process, of which ``left`` is the explanation; None: it does not tell.
    """

    freed_bytes: Mapping[str, int]
    left: tuple[tuple[str, int], ...]
    own_bytes: int | None


class Sleeper:
    """``asleep``: the tags that sleep now."""

    def __init__(self, runtime: Runtime, scheduler: Scheduler) -> None:
        self.asleep: frozenset[str] = frozenset()
        self._runtime, self._scheduler = runtime, scheduler

    def sleep(self, tags: tuple[str, ...]) -> Slept:
        """No step is under way. What sleeps already stays so; no tags are all of them.

        Raises ``InvalidSetting`` for an unknown tag; ``UserError``, with nothing changed, while pins hold blocks of
        the KV cache and on a device without virtual memory; and what a release raises: running requests have been
        suspended then and the cache is empty, but no request and no weight is lost. After a ``DriverError`` some of
        the memory may be gone: it counts as asleep, and a wake brings back what can be.
        """
        asked = _checked(tags) - self.asleep
        freed: dict[str, int] = {}
        if memory := asked & NEEDED:
            self._runtime.require_sleepable()
            if KV in memory:
                self._vacate()
            freed |= self._release(memory)
        if GRAPHS in asked:
            freed[GRAPHS] = self._runtime.drop_graphs()
            self.asleep |= {GRAPHS}
        left, own_bytes = self._runtime.holdings()
        return Slept(freed_bytes=freed, left=left, own_bytes=own_bytes)

    def wake(self, tags: tuple[str, ...]) -> None:
        """What is awake stays so; no tags are all. Weights and KV first: graphs are captured over both.

        Raises ``CannotMaterialize``, with everything as it was, where the device has not the memory now, and
        ``UserError`` for graphs without what they run over, or without memory to capture them: they sleep on then.
        """
        asked = _checked(tags) & self.asleep
        memory = asked & NEEDED
        if GRAPHS in asked and (missing := (self.asleep & NEEDED) - memory):
            raise UserError(
                f"Graphs are captured over weights and KV, and {' and '.join(sorted(missing))} would stay asleep",
                remedy="wake them before the graphs, or everything at once",
            )
        if memory:
            self._runtime.materialize(memory)
            self.asleep -= memory
        if GRAPHS in asked:
            self._recapture()
            self.asleep -= {GRAPHS}

    def _release(self, memory: frozenset[str]) -> Mapping[str, int]:
        try:
            freed = self._runtime.release(memory)
        except DriverError:
            self.asleep |= memory  # unmapping failed half way: nobody may touch any of it
            raise
        self.asleep |= memory
        return freed

    @property
    def is_asleep(self) -> bool:
        return bool(self.asleep & NEEDED)

    def require_awake(self) -> None:
        """Raises ``UserError`` where no step can run."""
        if sleeping := self.asleep & NEEDED:
            raise UserError(
                f"This engine is asleep ({', '.join(sorted(sleeping))})",
                remedy="call wake() first; requests that are submitted meanwhile wait",
            )

    def _recapture(self) -> None:
        """Raises ``UserError`` where the device lacks the memory now: there are no graphs then, and steps run."""
        try:
            self._runtime.recapture()
        except Exception as error:
            if (who := culprit(error)) is None:
                raise
            release_frames(error)
            raise UserError(
                f"Graphs could not be captured again for want of memory ({who}); steps run without them",
                remedy="let go of what else took the memory of the device, and wake them again",
            ) from None

    def _vacate(self) -> None:
        """Nobody holds a block of the device afterwards, and none is cached there."""
        kv, penalties = self._runtime.managers.kv, self._runtime.managers.penalties
        if num_pins := kv.stats()["pins"]:
            raise UserError(
                f"{num_pins} pins hold blocks of the KV cache, whose contents would be lost",
                remedy="close the pins first, or let the KV cache stay awake",
            )
        self._scheduler.suspend_all()
        kv.cache.vacate()
        penalties.give_back()


def _checked(tags: tuple[str, ...]) -> frozenset[str]:
    for tag in tags:
        if tag not in TAGS:
            raise InvalidSetting("tags", shown(tag), "nothing of the engine has that tag", remedy=f"use {_told()}")
    return frozenset(tags or TAGS)


def _told() -> str:
    return ", ".join(TAGS[:-1]) + f" and {TAGS[-1]}, or none of them for all"
