"""A soak sends its engine to sleep and wakes it again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from tonnage.bench import inside
from tonnage.errors import UserError
from tonnage.units import format_bytes

if TYPE_CHECKING:
    from tonnage.engine import Engine

#: What is slept with, each as likely; () is everything.
TAG_SETS: tuple[tuple[str, ...], ...] = ((), (), ("kv",), ("weights",), ("weights", "kv"))
#: Tags of memory that is given back to the device.
GIVING = frozenset({"weights", "kv"})


class Naps:
    """``fall_asleep``, then ``wake``. ``tell(rule, text)`` of broken rules; ``num_naps`` and ``most_freed_bytes``, what
    the device had more of while it slept, where that is known."""

    def __init__(self, engine: Engine, tell: Callable[[str, str], None]) -> None:
        self._engine, self._tell = engine, tell
        self._free = inside.device_free(engine)
        self._tags: tuple[str, ...] = ()
        self.counts: Counter[str] = Counter()
        self.most_freed_bytes: int | None = None

    def fall_asleep(self, tags: tuple[str, ...]) -> None:
        if self._engine.stats()["kv.pins"]:
            tags = ("weights",)  # blocks that are pinned must stay
        self._tags = tags
        before = self._free() if self._free is not None else 0
        self._engine.sleep(*tags)
        self.counts[" ".join(tags) or "everything"] += 1
        if self._free is not None:
            freed = self._free() - before
            self.most_freed_bytes = max(freed, self.most_freed_bytes or 0)
            if freed <= 0 and (not tags or GIVING & set(tags)):
                self._tell("sleep", f"asleep with {tags or 'everything'} it gave {format_bytes(freed)} back")
        self._check_refuses()

    def wake(self) -> None:
        self._engine.wake(*self._tags)

    def _check_refuses(self) -> None:
        if self._engine.has_ended:
            return  # that it tells all the same
        try:
            self._engine.step()
        except UserError:
            return
        self._tell("sleep", f"it steps though it sleeps with {self._tags or 'everything'}")
