"""Broken rules, counted, with the first few of each in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

#: Cases of one rule that are told.
MAX_TOLD = 5


class Breaches:
    """``note`` a case of one of ``rules``; ``broken`` counts them, ``told`` describes the first few."""

    def __init__(self, rules: Mapping[str, str]) -> None:
        self._rules = rules
        self.broken: Counter[str] = Counter()
        self.told: list[str] = []

    def note(self, rule: str, told: str) -> None:
        assert rule in self._rules
        self.broken[rule] += 1
        if self.broken[rule] <= MAX_TOLD:
            self.told.append(f"{rule}: {told}")
