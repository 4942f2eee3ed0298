"""What many changes together make of the accounts: counted first, and then put into them in one go."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tonnage.ledger.account import Account, Level
    from tonnage.ledger.journal import Change


class Tally:
    """What changes of one account add to its figures, and its highest. Each is one allocation made or freed.

    ``level_high_bytes`` is the highest of its line, 0 where another tally says it.
    """

    __slots__ = (
        "account", "delta_bytes", "high_bytes", "high_phase", "level", "level_high_bytes", "num_frees", "num_takes",
        "released_bytes", "top_bytes",
    )  # fmt: skip

    def __init__(self, account: Account) -> None:
        self.account, self.level, self.level_high_bytes = account, account._level, 0

    def count(self, changes: Sequence[Change]) -> list[Change]:
        """Count those that are this account's; returns the others."""
        account, others = self.account, []
        number, highest, phase = account.number, account._high_water_bytes, account._high_phase
        before = held = account._physical_bytes
        top = num_frees = released = 0
        for change in changes:
            if change[1] != number:
                others.append(change)
                continue
            delta = change[2]
            held += delta
            if delta < 0:
                num_frees += 1
                released -= delta
            elif held > top:
                top = held
                if held > highest:
                    highest, phase = held, change[4][0]
        self.delta_bytes, self.top_bytes, self.released_bytes = held - before, top - before, released
        self.num_frees, self.num_takes = num_frees, len(changes) - len(others) - num_frees
        self.high_bytes, self.high_phase = highest, phase
        return others


def tallies_of(changes: Sequence[Change], accounts: Sequence[Account]) -> list[Tally]:
    """One tally an account; nothing is changed yet."""
    levels: dict[Level, list[Tally]] = {}
    left = changes
    while left:
        tally = Tally(accounts[left[0][1]])
        left = tally.count(left)
        levels.setdefault(tally.level, []).append(tally)
    for level, on_it in levels.items():
        top_bytes = on_it[0].top_bytes
        if len(on_it) > 1:  # the highest together is at no account's own
            numbers = {tally.account.number for tally in on_it}
            top_bytes = max(accumulate([change[2] for change in changes if change[1] in numbers]))
        on_it[0].level_high_bytes = level.bytes + top_bytes
    return [tally for on_it in levels.values() for tally in on_it]
