"""Settings of a launch by name and type, with what is written down of those that were left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeVar

from tonnage.errors import InvalidSetting
from tonnage.peers.launch import Launch, Value
from tonnage.units import ceil_div

T = TypeVar("T")


@dataclass(slots=True)
class Settings:
    """Reads a launch's settings; ``defaults`` gathers those that were left out, with the value and why, ``seen`` the
    names that were asked for.

    Every reader raises ``InvalidSetting`` for a value of another type, or below ``least``.
    """

    launch: Launch
    defaults: list[tuple[str, str, str]] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def get(self, name: str) -> Value:
        """The setting as it was given, None where it was left out."""
        self.seen.add(name)
        return self.launch.get(name)

    def has(self, name: str) -> bool:
        return self.get(name) is not None

    def unread(self) -> tuple[str, ...]:
        """A sentence for each setting that was given and that nothing looked at."""
        names = (name for name in self.launch.settings if name not in self.seen)
        return tuple(f"{name} was given, and decides nothing here." for name in sorted(names))

    def whole(self, name: str, default: int, why: str, *, least: int = 1) -> int:
        """A whole number of at least ``least``."""
        value = self.get(name)
        if value is None:
            return self.took(name, default, f"{default:,}", why)
        return _whole(name, value, least)

    def maybe(self, name: str, *, least: int = 1) -> int | None:
        """A whole number, None where it was left out: that is no default of a size."""
        value = self.get(name)
        return None if value is None else _whole(name, value, least)

    def share(self, name: str, default: Fraction, why: str) -> Fraction:
        """A share above 0; ratios may be above 1."""
        value = self.get(name)
        if value is None:
            return self.took(name, default, f"{float(default):g}", why)
        if isinstance(value, bool) or not isinstance(value, int | Fraction) or value <= 0:
            raise InvalidSetting(name, str(value), "not a number above 0", remedy="write one such as 0.9")
        return Fraction(value)

    def switch(self, name: str) -> bool:
        """False where it was left out."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidSetting(name, str(value), "neither true nor false", remedy="write true or false")
        return bool(value)

    def text(self, name: str, default: str) -> str:
        value = self.get(name)
        return default if value is None else str(value)

    def sizes(self, name: str) -> tuple[int, ...]:
        """A list of sizes in order; empty where it was left out."""
        value = self.get(name)
        if value is None:
            return ()
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise InvalidSetting(name, str(value), "not a list of sizes", remedy="write sizes such as 1,2,4,8")
        return tuple(sorted({_whole(name, each, 1) for each in value}))

    def took(self, name: str, value: T, shown: str, why: str) -> T:
        """Note the default that was taken."""
        self.defaults.append((name, shown, why))
        return value


def _whole(name: str, value: Value, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidSetting(
            name, str(value), f"not a whole number of at least {least}", remedy=f"write {least} or more"
        )
    return value


def decimal_up(part: int, whole: int, *, digits: int = 3) -> str:
    """``part / whole`` rounded up to so many digits, as a share is typed."""
    one = 10**digits
    units = ceil_div(part * one, whole)
    return f"{units // one}.{units % one:0{digits}d}"
