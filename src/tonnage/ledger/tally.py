"""What many changes together make of the accounts: counted first, and then put into them in one go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tonnage.ledger.account import Account, Level
    from tonnage.ledger.journal import Change


class Tally:
    """One account's part of the changes: what is added to its figures, and its highest, now and of its line."""

    __slots__ = (
        "account", "delta_bytes", "high_bytes", "high_phase", "level", "level_high_bytes", "num_frees", "num_takes",
        "released_bytes",
    )  # fmt: skip

    def __init__(self, account: Account) -> None:
        self.account, self.level = account, account._level
        self.delta_bytes = self.released_bytes = self.num_takes = self.num_frees = self.level_high_bytes = 0
        self.high_bytes, self.high_phase = account._high_water_bytes, account._high_phase

    def count(self, run: Iterable[Change], line_bytes: int) -> int:
        """Changes of this account that follow one another, from a line that holds ``line_bytes``; what it holds then.

        Every change is one allocation made (positive) or freed.
        """
        before = held = self.account._physical_bytes + self.delta_bytes
        highest, at = self.high_bytes, None
        top = num_takes = num_frees = released = 0
        for _, _, delta, _, moment in run:
            held += delta
            if delta > 0:
                num_takes += 1
                if held > top:
                    top = held
                    if held > highest:
                        highest, at = held, moment
            else:
                num_frees += 1
                released -= delta
        if at is not None:
            self.high_bytes, self.high_phase = highest, at[0]
        self.delta_bytes += held - before
        self.num_takes += num_takes
        self.num_frees += num_frees
        self.released_bytes += released
        self.level_high_bytes = max(self.level_high_bytes, line_bytes + top - before)
        return line_bytes + held - before


def tallies_of(changes: Sequence[Change], accounts: Sequence[Account]) -> Iterable[Tally]:
    """One tally an account; nothing is changed yet."""
    tallies: dict[int, Tally] = {}
    lines: dict[Level, int] = {}
    for number, run in groupby(changes, key=itemgetter(1)):
        tally = tallies.get(number)
        if tally is None:
            tally = tallies[number] = Tally(accounts[number])
        level = tally.level
        lines[level] = tally.count(run, lines.get(level, level.bytes))
    return tallies.values()
