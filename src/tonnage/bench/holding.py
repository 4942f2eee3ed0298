"""Requests as the oracle knows them, and what of the pool they hold: at least, and at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tonnage.bench.rules import Limits
from tonnage.bench.texts import Held, Past, Text


@dataclass(slots=True, eq=False, kw_only=True)
class Live:
    """A request between arrival and end. ``state`` "left": cancelled, holds nothing, its end is still to be told.

    has_row     since it was admitted; before, it loads
    num_held    whole blocks that are counted as held
    is_sure     it shares as it was asked to: False once a load has failed, after which it may or may not
    spared      steps that had room for it while it loaded
    neighbours  whom it waited for, and how far they were; num_stuck: so often nobody had moved
    slack_tokens  that a row under way when it stopped running may add to what is known of it
    """

    id: str
    text: Text
    prompt: int
    most: int
    priority: int
    order: int
    known: int
    since: int
    computed: int = 0
    passed: int = 0
    has_row: bool = True
    num_held: int = 0
    is_sure: bool = True
    spared: int = 0
    neighbours: dict[str, int] = field(default_factory=dict)
    num_stuck: int = 0
    slack_tokens: int = 0
    state: Literal["waiting", "running", "left"] = "waiting"

    @property
    def decodes(self) -> bool:
        return self.computed > 0 and self.known - self.computed == 1

    @property
    def loads(self) -> bool:
        return self.state == "running" and not self.has_row

    @property
    def written(self) -> int:
        """Tokens that need KV entries in its whole life: the last one is sampled and never fed back."""
        return max(self.prompt, self.prompt + self.most - 1)


class Holding:
    """What running requests, pins and loads hold, by what is known of their texts."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._past, self._held = Past(), Held()
        self._pinned: dict[str, tuple[Text, int]] = {}
        self._orphans: list[list[int]] = []  # blocks of loads that nobody waits for any more, and steps that they take

    def step(self) -> None:
        self._orphans = [[num, steps - 1] for num, steps in self._orphans if steps]

    def enter(self, live: Live, cached: int) -> None:
        """It runs, and begins with what it has found."""
        live.state, live.has_row, live.computed = "running", False, cached
        live.spared = live.num_stuck = 0
        live.neighbours.clear()
        self._hold(live)

    def compute(self, live: Live, end: int) -> None:
        """It is computed that far: others can find its whole blocks."""
        live.computed, live.has_row = end, True
        first = live.num_held
        self._hold(live)
        if live.text.shares:
            for index in range(first, live.num_held):
                self._past.add(live.text, index + 1)

    def leave(self, live: Live) -> None:
        """It runs no more. All that it computed can be found, and what it was loading still comes."""
        if live.state != "running":
            return
        if live.loads:
            self._orphans.append([live.num_held + 1, self._limits.max_load_steps])
        if live.text.shares:
            self._past.add_part(live.text, live.computed)
        self.let_go(live)

    def let_go(self, live: Live) -> None:
        self._held.drop(live.text, live.num_held)
        live.num_held = 0

    def pin(self, live: Live) -> None:
        num_blocks = live.computed // self._limits.block_tokens
        self._pinned[live.id] = live.text, num_blocks
        self._held.add(live.text, 0, num_blocks)

    def unpin(self, request_id: str) -> None:
        self._held.drop(*self._pinned.pop(request_id))

    def was_computed(self, live: Live, num_tokens: int) -> bool:
        """Whether somebody has computed so many tokens of it."""
        return self._past.has(live.text, min(num_tokens, live.known))

    def surely_cached(self, live: Live, running: Sequence[Live]) -> int:
        """Tokens that it must find: whole blocks that somebody who runs has computed, so that nobody evicts them."""
        limits = self._limits
        if not (limits.shares and limits.keeps_all and live.text.may_match and live.is_sure):
            return 0
        most, found = (live.known - 1) // limits.block_tokens, 0
        for other in running:
            if other.text.shares and other.is_sure:
                found = max(found, live.text.num_common(other.text, min(most, other.computed // limits.block_tokens)))
        return found * limits.block_tokens

    def least(self, running: Sequence[Live]) -> int:
        """The fewest blocks that can hold what is computed. Whole ones that are alike are one block: two sequences may
        compute it at once, but once both have, one copy is kept. The last part of a text is its own."""
        parts = sum(live.has_row and live.computed % self._limits.block_tokens > 0 for live in running)
        return len(self._held) + parts

    def most(self, running: Sequence[Live]) -> int:
        """Blocks that may be held or counted on, nothing shared: what loads may hold a copy's source beside its own."""
        return (
            sum(self.blocks(live.written) + live.loads for live in running)
            + sum(num_blocks for _, num_blocks in self._pinned.values())
            + sum(num_blocks for num_blocks, _ in self._orphans)
        )

    def blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._limits.block_tokens)

    def _hold(self, live: Live) -> None:
        whole = live.computed // self._limits.block_tokens
        if whole > live.num_held:
            self._held.add(live.text, live.num_held, whole)
            live.num_held = whole
