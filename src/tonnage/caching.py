"""What a request asks of the KV cache: who may share its blocks, and for how long they are worth keeping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from tonnage.errors import InvalidSetting

#: Priorities of cached blocks: larger ones are evicted later.
MIN_PRIORITY, DEFAULT_PRIORITY, MAX_PRIORITY = 0, 35, 100
#: Blocks of at least this priority go to the host when they are evicted from the device.
OFFLOAD_PRIORITY = 30
#: UTF-8 bytes of a salt.
MAX_SALT_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheParams:
    """How a request's KV blocks are shared and kept. The defaults share with everybody and keep by age.

    reuse           False: the request reads nothing from the cache and leaves nothing in it
    salt            requests share blocks only with requests of the same salt, so that nobody learns from the time to
                    the first token what others have asked
    priority        0 to 100 (default 35): blocks of a lower priority are evicted first, older ones of the same first
    retain_seconds  after so long without use the priority falls back to the default; None: it stays
    retain_tokens   priority and time hold for the first so many tokens, the others are kept by default; None: for all

    Raises ``InvalidSetting``.
    """

    reuse: bool = True
    salt: str | None = None
    priority: int = DEFAULT_PRIORITY
    retain_seconds: float | None = None
    retain_tokens: int | None = None

    @classmethod
    def read(cls, value: object) -> CacheParams:
        """A ``CacheParams``, or a mapping of its fields as a line of JSON has it. Raises ``InvalidSetting``."""
        if isinstance(value, cls):
            return value
        names = [each.name for each in fields(cls)]
        if not isinstance(value, Mapping) or not all(name in names for name in value):
            raise InvalidSetting("cache", value, "not what it may hold", remedy=f"write any of {', '.join(names)}")
        return cls(**value)

    def __post_init__(self) -> None:
        if not isinstance(self.reuse, bool):
            raise InvalidSetting("reuse", self.reuse, "neither True nor False", remedy="write True or False")
        _check_salt(self.salt)
        if not _is_whole(self.priority) or not MIN_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise InvalidSetting(
                "cache priority", self.priority, "out of range", remedy=f"write {MIN_PRIORITY} to {MAX_PRIORITY}"
            )
        seconds = self.retain_seconds
        if seconds is not None and not _is_time(seconds):
            raise InvalidSetting("retain_seconds", seconds, "no time above 0", remedy="write seconds, or leave it out")
        if self.retain_tokens is not None and (not _is_whole(self.retain_tokens) or self.retain_tokens < 0):
            raise InvalidSetting(
                "retain_tokens", self.retain_tokens, "no number of tokens", remedy="write 0 or more, or leave it out"
            )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _check_salt(salt: object) -> None:
    if salt is None:
        return
    if not isinstance(salt, str) or not 0 < len(salt.encode(errors="surrogatepass")) <= MAX_SALT_BYTES:
        raise InvalidSetting(
            "salt", salt, "no text of a useful length", remedy=f"write 1 to {MAX_SALT_BYTES} bytes of text"
        )
