"""What enters the cache and what leaves it, told to whoever routes requests to where their prefix lies."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tonnage.resources.tree import PrefixTree


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEvent:
    """A block of the prefix tree is stored on a level, or removed from it. A block that goes to the host is removed
    from the device and stored on the host.

    digest     names the block and all that comes before it: ``chain.Chain``; parent: the block before, None for a first
    scope      digest of adapter and salt
    token_ids  its tokens, fewer than a block's for the end of a text; () of one that is removed
    group      of layers, by its index in the layout
    """

    kind: Literal["stored", "removed"]
    level: Literal["device", "host"]
    digest: bytes
    parent: bytes | None
    scope: bytes
    token_ids: tuple[int, ...]
    group: int


#: Called with what happened since the last call, in order.
OnEvents: TypeAlias = Callable[[tuple[KVEvent, ...]], None]


class CacheEvents:
    """Collects while the cache works and tells when ``flush`` is called, so that nobody is called back in the middle.

    A subscriber that raises is dropped, with a ``RuntimeWarning``. Without subscribers nothing is collected.
    """

    def __init__(self) -> None:
        self._subscribers: dict[int, tuple[OnEvents, int]] = {}  # and the number of the first event that is theirs
        self._noted: list[KVEvent] = []
        self._num_told = 0
        self._next = 0

    @property
    def has_subscribers(self) -> bool:
        return bool(self._subscribers)

    def subscribe(self, callback: OnEvents) -> Callable[[], None]:
        """``callback`` hears of what happens from now on; returns what ends that, and may be called twice."""
        key, self._next = self._next, self._next + 1
        self._subscribers[key] = callback, self._num_told + len(self._noted)

        def unsubscribe() -> None:
            self._subscribers.pop(key, None)

        return unsubscribe

    def note_nodes(
        self,
        kind: Literal["stored", "removed"],
        level: Literal["device", "host"],
        tree: PrefixTree,
        nodes: Iterable[tuple[int, int]],
    ) -> None:
        """Blocks by (node, group), as the tree knows them now."""
        if not self._subscribers:
            return
        for node, group in nodes:
            parent = tree.parent(node)
            self._noted.append(
                KVEvent(
                    kind=kind,
                    level=level,
                    digest=tree.digest(node),
                    parent=None if parent == PrefixTree.ROOT else tree.digest(parent),
                    scope=tree.scope(node),
                    token_ids=tree.token_ids(node) if kind == "stored" else (),
                    group=group,
                )
            )

    def flush(self) -> None:
        """Tell everybody; what a callback causes is told at the next call."""
        if not self._noted:
            return
        noted, self._noted = tuple(self._noted), []
        first, self._num_told = self._num_told, self._num_told + len(noted)
        raised: list[Exception] = []
        for key, (callback, since) in list(self._subscribers.items()):
            theirs = noted[max(0, since - first) :]
            if not theirs or key not in self._subscribers:  # another callback may have ended it
                continue
            try:
                callback(theirs)
            except Exception as error:  # noqa: BLE001 - whatever it raises, it must not stop the step
                self._subscribers.pop(key, None)
                raised.append(error)
        for one in raised:  # when all have been told: a warning may be made an error
            told = f"a cache subscriber raised {type(one).__name__}: {one}"
            warnings.warn(told, RuntimeWarning, stacklevel=2)
