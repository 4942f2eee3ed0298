"""What running sequences hold: their blocks row by row, what of them is in the prefix tree, and pins."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress

import numpy as np

from tonnage.errors import ResourceError
from tonnage.resources.cache import BlockCache
from tonnage.resources.match import Match, Partial
from tonnage.resources.mover import Ids
from tonnage.resources.pins import Guard, PinHandle
from tonnage.resources.prefixes import Prefixes, Text
from tonnage.resources.sequences import NEVER, ROOT, Sequences, Start
from tonnage.resources.tables import PageTables, entries
from tonnage.step import Ints

#: Generated tokens go into the tree so many blocks at a time.
RUN_BLOCKS = 4


class Holdings:
    """The blocks that ``live`` sequences hold in each of the ``groups`` of the cache.

    A sequence begins with the whole blocks that were found for it. Where a cached block begins as the text goes on,
    its contents are copied by the sequence's first step (``partials``); the copy's source stays held until that step
    is final (``copied``), for the step may be taken back.
    """

    def __init__(
        self,
        cache: BlockCache,
        prefixes: Prefixes,
        groups: Sequence[int],
        *,
        block_tokens: int,
        num_rows: int,
        width: int,
    ) -> None:
        self.cache, self._prefixes, self._groups, self._block_tokens = cache, prefixes, tuple(groups), block_tokens
        self._run_blocks = 1 if any(group.window for group in cache.groups) else RUN_BLOCKS
        self.tables = PageTables(cache, groups, num_rows=num_rows, width=width)
        self.live = Sequences(num_rows, len(self._groups))
        self.texts: dict[int, Text] = {}
        self.pins: set[PinHandle] = set()
        #: The most blocks that anybody held at once.
        self.high_water = 0
        self._partials: dict[int, Partial] = {}
        self._to_retain: dict[int, Match] = {}
        self._copied: dict[int, Partial] = {}

    # Entering and leaving.

    def start(self, text: Text, match: Match) -> Start:
        """Where a sequence begins with what was found for it."""
        rows = [match.blocks[group] for group in self._groups]
        return Start(
            cached_tokens=match.num_tokens,
            held=match.num_blocks,
            fronts=tuple(next((i for i, block in enumerate(row) if block >= 0), 0) for row in rows),
            num_shared=match.num_shared,
            parent=match.nodes[-1] if match.nodes else ROOT,
            stores=text.stores,
        )

    def enter(self, row: int, text: Text, match: Match, *, lifetime: int) -> None:
        """The match is claimed: what it holds is the row's now."""
        self.live.enter(row, text.request, lifetime=lifetime, start=self.start(text, match))
        self._set_due(row)
        self.texts[row] = text
        self.tables.set(row, 0, [match.blocks[group] for group in self._groups])
        if match.partial is not None:
            self._partials[row] = match.partial
        self._to_retain[row] = match
        self._prefixes.promise(text, int(self.live.held[row]))
        self.high_water = max(self.high_water, self.cache.num_live)

    def release(self, row: int, *, keep_cached: bool) -> None:
        """Give up its blocks, from the back. ``keep_cached`` False: what it computed and nobody else holds is
        forgotten."""
        held, matched = int(self.live.held[row]), int(self.live.matched[row])
        own, found = self.tables.row(row, matched, held), self.tables.row(row, 0, matched)
        if self.texts[row].is_distrusted:
            self.cache.distrust(np.concatenate([found, own]), also=self.texts[row].copied_from)
        for waiting in (self._partials, self._copied):
            if row in waiting:
                self.cache.release(_sources(waiting.pop(row)))
        self.cache.release(own)
        if not keep_cached:
            self.cache.forget(own)
        self.cache.release(found)

    def leave(self, row: int) -> None:
        """Out of every list, whoever holds its blocks."""
        self._partials.pop(row, None)
        self._to_retain.pop(row, None)
        self._prefixes.retract(self.texts.pop(row))
        self.tables.blank(row, int(self.live.held[row]))
        self.live.leave(row)

    def retain_claimed(self) -> None:
        """Admissions are final: what their requests ask of the blocks they began with, they have."""
        while self._to_retain:
            row, match = self._to_retain.popitem()
            self.cache.retain(match, self.texts[row].retention)

    # Growing and shrinking.

    def grow(self, rows: Ints, counts: Ints) -> None:
        """``counts`` more positions; all of them or none."""
        held = self.live.held[rows]
        self.tables.grow(entries(rows, held, counts))
        self.live.held[rows] = held + counts
        self.high_water = max(self.high_water, self.cache.num_live)

    def cut(self, rows: Ints, held: Ints) -> None:
        """Only the first ``held`` positions, where they are fewer than there are."""
        now = self.live.held[rows]
        held = np.minimum(held, now)
        self.tables.cut(entries(rows, held, now - held))
        self.live.held[rows] = held

    def reject(self, rows: Ints, ends: Ints, rejected: Ints, *, extra_tokens: int) -> None:
        """Rows that were scheduled up to ``ends`` go on so much earlier; blocks beyond what the extra tokens may fill
        from there are given up."""
        some = rejected > 0
        rows, ends, rejected = rows[some], ends[some], rejected[some]
        if (self.live.scheduled[rows] != ends).any():
            raise ResourceError("a step was prepared before it was known which drafts of the one before are kept")
        self.live.scheduled[rows] = ends - rejected
        self.cut(rows, (ends - rejected + extra_tokens + self._block_tokens - 1) // self._block_tokens)

    def cut_window(self, group: int, window: int, rows: Ints) -> None:
        """Give up the blocks that no token to come will look at."""
        fronts, ends = self.live.front[group, rows], (self.live.computed[rows] - window + 1) // self._block_tokens
        for i in np.flatnonzero(ends > fronts).tolist():
            row, end = int(rows[i]), int(ends[i])
            self.tables.cut_front(group, row, slice(int(fronts[i]), end))
            self.live.front[group, row] = end

    # What becomes of computed blocks.

    def store_due(self, rows: Ints) -> None:
        """Of rows that were computed further: those that have blocks enough by now store them."""
        is_due = self.live.computed[rows] // self._block_tokens >= self.live.due[rows]
        if is_due.any():
            due = rows[is_due]
            # What cannot be stored for want of memory is not: it is found later, or never, and the text goes on.
            with suppress(MemoryError):
                for row in due.tolist():
                    self.store(row)
                self._set_due(due)

    def store(self, row: int, *, with_partial: bool = False) -> None:
        """Its computed blocks into the tree; where another has stored the same, it goes on with that one.

        An exception leaves the blocks before it stored.
        """
        text, first = self.texts[row], int(self.live.stored[row])
        if not text.stores:
            return
        # Stand-ins compute more than they know.
        num_tokens = min(int(self.live.computed[row]), len(text.tokens))
        last, rest = divmod(num_tokens, self._block_tokens)
        for index, mine in enumerate(self.tables.columns(row, first, last), first):
            self.live.parent[row] = self._store_block(row, text, index, self._block_tokens, mine)
            self.live.stored[row] = index + 1
            self._prefixes.keep(text, index)
        # Without a block of its own, what it begins with is not copied yet.
        if with_partial and rest and self.live.held[row] > last:
            self._store_block(row, text, last, rest, self._column(row, last))

    def _store_block(self, row: int, text: Text, index: int, num_tokens: int, mine: list[int]) -> int:
        parent = int(self.live.parent[row])
        node, kept = self.cache.store(text.chain, index, num_tokens, parent, mine, text.retention)
        if kept != mine:
            self.tables.set(row, index, [[block] for block in kept])
        return node

    def _set_due(self, rows: Ints | int) -> None:
        """Known tokens are stored block by block, since neighbours wait for them. Those that are generated follow
        several blocks at once, at half the cost of each, and not those of all rows in one step; hardly anybody asks
        for them before their sequence has ended. A window may have left them by then: with one none waits."""
        stored = self.live.stored[rows]
        later = (stored + rows) // self._run_blocks * self._run_blocks + self._run_blocks - rows
        self.live.due[rows] = np.where(stored < self.live.known[rows] // self._block_tokens, stored + 1, later)

    def _column(self, row: int, index: int) -> list[int]:
        return self.tables.columns(row, index, index + 1)[0]

    def unstore(self, rows: Ints, starts: Ints) -> None:
        """A step is taken back: what it stored stays in the tree, as nobody's."""
        for row, num_blocks in zip(rows.tolist(), (starts // self._block_tokens).tolist(), strict=True):
            stored = int(self.live.stored[row])
            if num_blocks >= stored or stored == NEVER:
                continue
            for _ in range(stored - num_blocks):
                self.live.parent[row] = self.cache.tree.parent(int(self.live.parent[row]))
            self.live.stored[row] = num_blocks
            self._set_due(row)

    def distrust(self, row: int) -> None:
        """Its entries give no numbers: from here on nothing of it is stored, and what is leaves the tree with it."""
        self.texts[row].stores, self.texts[row].is_distrusted = False, True

    # Partial reuse.

    def copy_partials(self, rows: Ints) -> None:
        """Into the block where each sequence goes on, one batch after the other in the order of the stream."""
        for row in [row for row in rows.tolist() if row in self._partials] if self._partials else ():
            source = self._partials[row]
            self.texts[row].copied_from = [
                (block, digest) for block in source.sources if block >= 0 and (digest := self.cache.digest(block))
            ]
            self.cache.hold(_sources(source))
            try:
                self.cache.copy_partial(source, self._column(row, int(self.live.matched[row])))
            except BaseException:
                self.cache.release(_sources(source))
                raise
            self._copied[row] = self._partials.pop(row)

    def uncopy_partials(self, rows: Ints) -> None:
        for row in [row for row in rows.tolist() if row in self._copied] if self._copied else ():
            self._partials[row] = self._copied.pop(row)

    def copies_are_final(self) -> None:
        while self._copied:
            self.cache.release(_sources(self._copied.popitem()[1]))

    # Pins.

    def pin(self, row: int, num_blocks: int, *, guard: Guard = nullcontext) -> PinHandle:
        ids = self.tables.row(row, 0, min(num_blocks, int(self.live.held[row])))
        self.cache.hold(ids)
        pin = PinHandle(ids, self._unpin, guard)
        self.pins.add(pin)
        return pin

    def pins_told(self) -> str:
        if not self.pins:
            return ""
        blocks = {block for pin in self.pins for block in pin.ids}
        return f"{len(self.pins)} open pin{'s' * (len(self.pins) > 1)} with {len(blocks)} blocks"

    def _unpin(self, pin: PinHandle, ids: Ids) -> None:
        self.pins.discard(pin)
        self.cache.release(ids)


def _sources(source: Partial) -> Ids:
    return np.array([block for block in source.sources if block >= 0], np.int32)
