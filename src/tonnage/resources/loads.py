"""Admitted sequences whose blocks are on their way from the host."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tonnage.errors import ResourceError
from tonnage.resources.blocks import as_ids
from tonnage.resources.cache import BlockCache
from tonnage.resources.mover import Ids


class Loads:
    """Who waits for which blocks. A load is asked for when its sequence is admitted and begun once that is final."""

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self._asked: dict[str, Sequence[int]] = {}
        self._begun: dict[str, Ids] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._asked or request_id in self._begun

    def __len__(self) -> int:
        return len(self._asked) + len(self._begun)

    def ask(self, request_id: str, ids: Sequence[int]) -> None:
        self._asked[request_id] = ids

    def check(self, request_ids: Sequence[str]) -> None:
        """Raises ``ResourceError`` for one that cannot be in a step yet."""
        if self and (early := next(filter(self.__contains__, request_ids), None)):
            raise ResourceError(f"request {early!r} is in a step while its blocks are loading")

    def drop(self, request_id: str) -> None:
        """It waits no more. A transfer under way goes on; the cache holds its blocks until it is done."""
        self._asked.pop(request_id, None)
        self._begun.pop(request_id, None)

    def begin(self) -> None:
        """All in one transfer; what another sequence has begun to load already is on its way."""
        if not self._asked:
            return
        self._cache.load(as_ids(list(dict.fromkeys(block for ids in self._asked.values() for block in ids))))
        for request_id, ids in self._asked.items():
            self._begun[request_id] = as_ids(ids)
        self._asked.clear()

    def waiting(self) -> Collection[str]:
        self._cache.look_at_loads()  # those that nobody waits for any more give their blocks back, too
        for request_id in [one for one, ids in self._begun.items() if self._cache.is_loaded(ids)]:
            del self._begun[request_id]
        return [*self._asked, *self._begun]

    def wait(self) -> None:
        """Until the first that waits has all its blocks; where nobody waits, until the oldest transfer has ended."""
        self.begin()
        self._cache.wait(next(iter(self._begun.values()), None))
        self._cache.look_at_loads()
