"""Requests as the oracle knows them, and what of the pool they hold: at least, and at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tonnage.bench.rules import Limits
from tonnage.bench.texts import Held, Past, Text


@dataclass(slots=True, eq=False, kw_only=True)
class Live:
    """A request between arrival and end. ``state`` "left": it holds nothing, and its end is still to be told.

    is_cancelled, has_left  somebody asked for it, from when on its state is "left"; the engine has said that it is
    computed    tokens, by launched steps; under_way, landed: those when the last call began, and those looked at then
    has_row     since it was admitted; before, it loads
    num_held    whole blocks that are counted as held
    is_sure     it shares as it was asked to: False once a load has failed, after which it may or may not
    spared      steps that had room for it while it loaded
    neighbours  whom it waited for, and how far they were; num_stuck: so often nobody had moved
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
    under_way: int = 0
    landed: int = 0
    passed: int = 0
    has_row: bool = True
    num_held: int = 0
    is_sure: bool = True
    spared: int = 0
    neighbours: dict[str, int] = field(default_factory=dict)
    num_stuck: int = 0
    is_cancelled: bool = False
    has_left: bool = False
    state: Literal["waiting", "running", "left"] = "waiting"

    @property
    def decodes(self) -> bool:
        return self.computed > 0 and self.known - self.computed == 1

    @property
    def is_complete(self) -> bool:
        """Its last token is drawn, and it ends when somebody looks."""
        return self.known >= self.prompt + self.most

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
        self._pinned: dict[str, tuple[Text, int, int]] = {}  # of each the fewest and the most blocks
        self._orphans: list[list[int]] = []  # blocks of loads that nobody waits for any more, and steps that they take

    def step(self) -> None:
        self._orphans = [[num, steps - 1] for num, steps in self._orphans if steps]

    def enter(self, live: Live, cached: int) -> None:
        """It runs, and begins with what it has found."""
        live.state, live.has_row, live.computed = "running", False, cached
        live.spared = live.num_stuck = 0
        live.landed = live.under_way = cached
        live.neighbours.clear()
        self._hold(live)

    def land(self, live: Live) -> None:
        """A step begins: what the one before it launched is under way where steps overlap, and landed where not."""
        live.landed = live.under_way if self._limits.steps_ahead else live.computed
        live.under_way = live.computed

    def compute(self, live: Live, end: int) -> None:
        """It is computed that far: others can find its whole blocks, once its tokens are told."""
        live.computed, live.has_row = end, True
        self._note(live)

    def leave(self, live: Live) -> None:
        """It runs no more. All that it computed can be found, and what it was loading still comes."""
        if live.state != "running":
            return
        if live.loads:
            self._orphans.append([live.num_held + 1, self._limits.max_load_steps])
        if live.text.shares:
            self._note(live)
            # A row too many, of a text that turned out to have ended, was computed for nobody.
            self._past.add_part(live.text, min(live.computed, len(live.text.tokens)))
        self.let_go(live)

    def let_go(self, live: Live) -> None:
        self._held.drop(live.text, live.num_held)
        live.num_held = 0

    def pin(self, live: Live) -> None:
        """What is computed, but perhaps for a step that is under way."""
        computed = live.under_way if self._limits.steps_ahead else live.computed
        least, most = computed // self._limits.block_tokens, live.computed // self._limits.block_tokens
        self._pinned[live.id] = live.text, least, most
        self._held.add(live.text, 0, least)

    def unpin(self, request_id: str) -> None:
        text, least, _ = self._pinned.pop(request_id)
        self._held.drop(text, least)

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
                found = max(found, live.text.num_common(other.text, min(most, other.landed // limits.block_tokens)))
        return found * limits.block_tokens

    def least(self, running: Sequence[Live]) -> int:
        """The fewest blocks that can hold what is computed. Whole ones that are alike are one block: two sequences may
        compute it at once, but once both have, one copy is kept. The last part of a text is its own. Of layers with a
        window only that part is sure."""
        windows = self._limits.windows
        parts = sum(live.has_row and live.computed % self._limits.block_tokens > 0 for live in running)
        return windows.count(None) * len(self._held) + len(windows) * parts

    def most(self, running: Sequence[Live]) -> int:
        """Blocks that may be held or counted on, nothing shared: what loads may hold a copy's source beside its own."""
        num_groups, pins = len(self._limits.windows), self._pinned.values()
        return sum(self.blocks(live.written) + num_groups * live.loads for live in running) + num_groups * (
            sum(most for _, _, most in pins) + sum(num_blocks for num_blocks, _ in self._orphans)
        )

    def blocks(self, num_tokens: int) -> int:
        """The most that one sequence of so many tokens holds."""
        return self._limits.most_blocks(num_tokens)

    def note_told(self, running: Sequence[Live]) -> None:
        """Tokens of what was computed may have been told since."""
        for live in running:
            self._note(live)

    def _note(self, live: Live) -> None:
        first = live.num_held
        self._hold(live)
        if live.text.shares:
            for index in range(first, live.num_held):
                self._past.add(live.text, index + 1)

    def _hold(self, live: Live) -> None:
        told = len(live.text.tokens) if self._limits.steps_ahead else live.computed
        whole = min(live.computed, told) // self._limits.block_tokens
        if whole > live.num_held:
            self._held.add(live.text, live.num_held, whole)
            live.num_held = whole
