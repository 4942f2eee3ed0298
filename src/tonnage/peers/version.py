"""Versions of other engines: ordered, and as vague as the people who tell them ("0.19", "0.2x", "2026-07 fork")."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tonnage.errors import InvalidSetting
from tonnage.units import shown

_NUMBER = re.compile(r"v?(\d{1,9}(?:\.\d{1,9})*)")
_VAGUE = re.compile(r"v?(\d{1,9})\.(\d)x(?![\w])")
_VAGUE_PATCH = re.compile(r"v?(\d{1,9})\.(\d{1,9})\.(\d?)x(?![\w])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A release, or a run of releases where the text does not say which.

    text        as it was written
    first, last the earliest and the latest release that it can mean, as (major, minor, patch); None: not known
    """

    text: str
    first: tuple[int, ...] | None
    last: tuple[int, ...] | None

    @classmethod
    def read(cls, text: str) -> Version:
        """From a log or a report: what cannot be read is kept, as a version that may be any."""
        written = text.strip()
        if vague := _VAGUE.match(written):
            major, tens = int(vague[1]), int(vague[2]) * 10
            return cls(text=written, first=(major, tens, 0), last=(major, tens + 9, 10**6))
        if vague := _VAGUE_PATCH.match(written):
            major, minor = int(vague[1]), int(vague[2])
            first, last = (int(vague[3]) * 10, int(vague[3]) * 10 + 9) if vague[3] else (0, 10**6)
            return cls(text=written, first=(major, minor, first), last=(major, minor, last))
        found = _NUMBER.match(written)
        if found is None or (len(found[1]) > 3 and "." not in found[1]):  # a year is no release
            return cls(text=written, first=None, last=None)
        numbers = tuple(int(part) for part in found[1].split("."))[:3]
        rest = 3 - len(numbers)
        return cls(text=written, first=numbers + (0,) * rest, last=numbers + (10**6,) * rest)

    @classmethod
    def asked(cls, text: str, *, knob: str) -> Version:
        """As a user types it: raises ``InvalidSetting`` where it names no release."""
        version = cls.read(text)
        if version.first is None:
            remedy = "write one such as 0.19 or 0.19.1"
            raise InvalidSetting(knob, shown(text), "no release has such a name", remedy=remedy)
        return version

    def may_be(self, *, since: tuple[int, ...] | None = None, before: tuple[int, ...] | None = None) -> bool:
        """Whether a release in [since, before) can be meant; None is open."""
        late = self.last is None or since is None or self.last >= _padded(since)
        return late and (self.first is None or before is None or self.first < _padded(before))

    def is_surely(self, *, since: tuple[int, ...] | None = None, before: tuple[int, ...] | None = None) -> bool:
        """Whether every release that can be meant lies in [since, before)."""
        if self.first is None or self.last is None:
            return since is None and before is None
        late = since is None or self.first >= _padded(since)
        return late and (before is None or self.last < _padded(before))

    def __str__(self) -> str:
        return self.text


def _padded(numbers: tuple[int, ...]) -> tuple[int, ...]:
    return (*numbers, 0, 0, 0)[:3]
