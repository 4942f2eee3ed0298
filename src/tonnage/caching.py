"""What a request asks of the KV cache: who may share its blocks, and for how long they are worth keeping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from tonnage.errors import InvalidSetting
from tonnage.units import Told, check_number, check_whole, shown

#: Priorities of cached blocks: larger ones are evicted later.
MIN_PRIORITY, DEFAULT_PRIORITY, MAX_PRIORITY = 0, 35, 100
#: Blocks of at least this priority go to the host when they are evicted from the device.
OFFLOAD_PRIORITY = 30
#: UTF-8 bytes of a salt.
MAX_SALT_BYTES = 1024
#: Thirty years and more: beyond it a time is as good as none.
MAX_RETAIN_SECONDS = 10**9


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
        """A ``CacheParams``, a mapping of its fields as a line of JSON has it, or None: the defaults.

        Raises ``InvalidSetting``, in which no salt is told.
        """
        if value is None or isinstance(value, cls):
            return value or cls()
        names = [each.name for each in fields(cls)]
        remedy = f"write any of {', '.join(names)}"
        if not isinstance(value, Mapping):
            raise InvalidSetting("cache", Told(f"a {type(value).__name__}"), "not a mapping", remedy=remedy)
        for name in value:
            if name not in names:
                raise InvalidSetting("cache", shown(name), "no field of that name", remedy=remedy)
        return cls(**value)

    def __post_init__(self) -> None:
        if not isinstance(self.reuse, bool):
            raise InvalidSetting("reuse", shown(self.reuse), "neither True nor False", remedy="write True or False")
        _check_salt(self.salt)
        check_whole("cache priority", self.priority, MIN_PRIORITY, MAX_PRIORITY)
        if self.retain_seconds is not None:
            check_number("retain_seconds", self.retain_seconds, 0, MAX_RETAIN_SECONDS, above=True)
        if self.retain_tokens is not None:
            check_whole("retain_tokens", self.retain_tokens, 0)


def _check_salt(salt: object) -> None:
    """What is wrong with a salt is told without it: who reads the message may not be who may know it."""
    if salt is None:
        return
    remedy = f"write 1 to {MAX_SALT_BYTES:,} bytes of text"
    if not isinstance(salt, str):
        raise InvalidSetting("salt", Told(f"a {type(salt).__name__}"), "not a text", remedy=remedy)
    num_bytes = len(salt.encode(errors="surrogatepass"))
    if not 0 < num_bytes <= MAX_SALT_BYTES:
        raise InvalidSetting("salt", Told(f"{num_bytes:,} bytes"), "no text of a useful length", remedy=remedy)
