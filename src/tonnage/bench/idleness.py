"""Whether a step left somebody out whom it had tokens, sequences and blocks for."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence, Set
from dataclasses import dataclass

from tonnage.bench.holding import Holding, Live
from tonnage.bench.rules import Limits


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a step: so many tokens of a request."""

    live: Live
    count: int
    is_decode: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A step whose rows are complete, and what stood around it.

    new           ids of those who were admitted in it
    room          tokens that the step had left, prefill_room: those of them that prefill could have
    """

    number: int
    rows: Mapping[str, Row]
    running: Sequence[Live]
    waiting: Sequence[Live]
    new: Set[str]
    room: int
    prefill_room: int
    had_suspension: bool


class Idleness:
    """``step`` at each call, ``check`` every step that nothing disturbed. ``tell(rule, text)`` of violations.

    Where steps overlap, a step that is tried a second time comes after one that has landed, by which somebody may have
    ended who is told to have in the end of the call: a decode that was left out must be one of those.
    """

    def __init__(self, limits: Limits, holding: Holding, tell: Callable[[str, str], None]) -> None:
        self._limits, self._holding, self._tell = limits, holding, tell
        self._must_have_ended: dict[str, str] = {}

    def step(self, live: Container[str]) -> None:
        """A call begins; these have not ended."""
        for name, told in self._must_have_ended.items():
            if name in live:
                self._tell("idleness", told)
        self._must_have_ended.clear()

    def check(self, step: Told) -> None:
        """With tokens to spare: was a running request left out, or the head of the queue that surely had its blocks?

        Whoever's turn it is, it is the oldest or the first by priority and age; only if both surely fit, none may wait.
        """
        left_out = [live for live in step.running if live.id not in step.rows and not live.is_complete]
        self._check_loads([live for live in left_out if live.loads and live.id not in step.new], step)
        left_out = [live for live in left_out if not live.loads]
        for live in left_out:
            if live.decodes and step.room > 0:
                told = f"step {step.number} leaves the decode of {live.id} out and has {step.room} tokens to spare"
                if self._limits.steps_ahead:
                    self._must_have_ended[live.id] = told
                else:
                    self._tell("idleness", told)
        prefills = [live for live in left_out if not live.decodes]
        if prefills and all(self._has_tokens(live, step) for live in prefills):
            name, room = prefills[0].id, step.prefill_room
            self._tell("idleness", f"step {step.number} leaves {name} out, {room} tokens to spare")
        if not prefills:
            self._check_waiting(step)

    def _check_waiting(self, step: Told) -> None:
        running, waiting = step.running, step.waiting
        # Who was asked before somebody else was suspended is not asked again in that step.
        if not waiting or step.had_suspension or len(running) >= self._limits.max_batch_size:
            return
        # Whoever came in this step may hold the block that it was to copy from until the step was final.
        num_sources = sum(live.id in step.new and not live.loads for live in running)
        room_blocks = self._limits.num_blocks - self._holding.most(running) - num_sources
        heads = (
            min(waiting, key=lambda live: live.order),
            min(waiting, key=lambda live: (-live.priority, live.order)),
        )
        surely_fit = all(
            self._holding.blocks(head.written) <= room_blocks and self._has_tokens(head, step) for head in heads
        )
        if surely_fit and not max([self._waits_for_neighbour(head, step) for head in set(heads)]):
            self._tell("idleness", f"step {step.number} lets {heads[1].id} wait, which surely fits")

    def _check_loads(self, loading: list[Live], step: Told) -> None:
        """Whoever loads comes in the end: a step that had tokens for it may leave it out only so often."""
        for live in loading:
            live.spared += step.room > 0 if live.decodes else self._has_tokens(live, step)
            if live.spared > self._limits.max_load_steps:
                self._tell("waiting", f"{live.id} still loads after {live.spared} steps with room for it")

    def _waits_for_neighbour(self, head: Live, step: Told) -> bool:
        """Somebody who runs was, when the step began, about to compute a block that the head begins with as well.

        That one must have moved since the head waited for it last. What it waits for may change with each of its
        blocks, and then it may come back to one that stood still meanwhile: no more often than it has blocks.
        """
        if not (self._limits.shares and head.text.may_match):
            return False
        block_tokens, moves, found = self._limits.block_tokens, False, False
        for other in step.running:
            start = other.landed
            if other.text.shares and (
                head.text.num_common(other.text, (head.known - 1) // block_tokens) > start // block_tokens
            ):
                found = True
                moves |= head.neighbours.get(other.id) != start
                head.neighbours[other.id] = start
        head.num_stuck += found and not moves
        if head.num_stuck > self._holding.blocks(head.known):
            self._tell("waiting", f"{head.id} waits for neighbours that do not move")
        return found

    def _has_tokens(self, live: Live, step: Told) -> bool:
        """A whole block always holds a chunk that ends on a border."""
        if self._limits.is_link_slow and any(not row.is_decode for row in step.rows.values()):
            return False
        needed = self._limits.block_tokens if self._limits.cuts_prompts else live.known - live.computed
        return step.prefill_room >= needed
