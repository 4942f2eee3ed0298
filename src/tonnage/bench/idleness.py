"""Whether a step left somebody out whom it had tokens, sequences and blocks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from tonnage.bench.holding import Holding, Live
from tonnage.bench.rules import Limits


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a step: so many tokens of a request. ``is_unsure``: it counts as a decode or as prefill, depending on
    whether its request had come before the step or with it, which the log does not tell."""

    live: Live
    count: int
    is_decode: bool
    is_unsure: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """A step whose rows are complete, and what stood around it.

    new           ids of those who were admitted and may have had no turn yet
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
    """``check`` every step that nothing disturbed, ``forget`` where something did. ``tell(rule, text)`` of violations.

    Where the engine plans ahead (``Limits.steps_ahead``), a step was planned before the one before it had landed, so
    somebody may be left out whose turn could not be known; the next plan but one knows it. Only who is left out that
    often in a row is told of.
    """

    def __init__(self, limits: Limits, holding: Holding, tell: Callable[[str, str], None]) -> None:
        self._limits, self._holding, self._tell = limits, holding, tell
        self._most_in_a_row = 2 * limits.steps_ahead
        self._before: dict[tuple[str, str], int] = {}
        self._now: dict[tuple[str, str], int] = {}

    def forget(self) -> None:
        self._before = {}

    def check(self, step: Landed) -> None:
        """With tokens to spare: was a running request left out, or the head of the queue that surely had its blocks?

        Whoever's turn it is, it is the oldest or the first by priority and age; only if both surely fit, none may wait.
        """
        self._now = {}
        left_out = [live for live in step.running if live.id not in step.rows]
        self._check_loads([live for live in left_out if live.loads and live.id not in step.new], step)
        left_out = [live for live in left_out if not live.loads]
        for live in left_out:
            if live.decodes and step.room > 0:
                self._left_out(live, f"step {step.number} leaves a decode out and has {step.room} tokens to spare")
        prefills = [live for live in left_out if not live.decodes]
        if prefills and all(self._has_tokens(live, step) for live in prefills):
            name, room = prefills[0].id, step.prefill_room
            self._left_out(prefills[0], f"step {step.number} leaves {name} out, {room} tokens to spare")
        if not prefills:
            self._check_waiting(step)
        self._before = self._now

    def _left_out(self, live: Live, told: str, *, waiting: bool = False) -> None:
        key = "waiting" if waiting else "running", live.id
        self._now[key] = self._before.get(key, 0) + 1
        if self._now[key] > self._most_in_a_row:
            self._tell("idleness", told)

    def _check_waiting(self, step: Landed) -> None:
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
            told = f"step {step.number} lets {heads[1].id} wait, which surely fits"
            self._left_out(heads[1], told, waiting=True)

    def _check_loads(self, loading: list[Live], step: Landed) -> None:
        """Whoever loads comes in the end: a step that had tokens for it may leave it out only so often."""
        for live in loading:
            live.spared += step.room > 0 if live.decodes else self._has_tokens(live, step)
            if live.spared > self._limits.max_load_steps:
                self._tell("waiting", f"{live.id} still loads after {live.spared} steps with room for it")

    def _waits_for_neighbour(self, head: Live, step: Landed) -> bool:
        """Somebody who runs was, when the step began, about to compute a block that the head begins with as well.

        That one must have moved since the head waited for it last. What it waits for may change with each of its
        blocks, and then it may come back to one that stood still meanwhile: no more often than it has blocks.
        """
        if not (self._limits.shares and head.text.may_match):
            return False
        block_tokens, moves, found = self._limits.block_tokens, False, False
        for other in step.running:
            start = other.computed - (step.rows[other.id].count if other.id in step.rows else 0)
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

    def _has_tokens(self, live: Live, step: Landed) -> bool:
        """A whole block always holds a chunk that ends on a border."""
        if self._limits.is_link_slow and any(not row.is_decode for row in step.rows.values()):
            return False
        needed = self._limits.block_tokens if self._limits.cuts_prompts else live.known - live.computed
        return step.prefill_room >= needed
