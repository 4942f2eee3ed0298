"""How many blocks sequences need, over all groups of layers and all rows at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tonnage.errors import ResourceError
from tonnage.layout import KVGroup, KVGroupKind, window_blocks
from tonnage.resources.admission import Admission
from tonnage.resources.base import RequestView
from tonnage.resources.sequences import Sequences, Start
from tonnage.step import Ints
from tonnage.units import ceil_div


def token_groups(groups: Sequence[KVGroup], block_tokens: int) -> tuple[int, ...]:
    """Indices of the groups whose blocks hold tokens of the text; states are another manager's.

    Raises ``ResourceError`` for a group that cannot be served.
    """
    found = []
    for index, group in enumerate(groups):
        if group.kind is KVGroupKind.CROSS:
            raise ResourceError(
                f"group {group.name!r} holds an encoder's tokens: a manager of cross-attention blocks is missing"
            )
        if group.kind is KVGroupKind.STATE:
            continue
        if group.block_tokens != block_tokens:
            raise ResourceError(f"group {group.name!r} has {group.block_tokens} tokens a block, not {block_tokens}")
        found.append(index)
    if not found:
        raise ResourceError("no group of layers keeps tokens")
    return tuple(found)


def why_no_reuse(groups: Sequence[KVGroup], block_tokens: int) -> str | None:
    """Why blocks of such layers are not shared between sequences; None: they are."""
    for group in groups:
        if group.kind is KVGroupKind.STATE:
            return f"{group.name}: a recurrent state is that of one whole text, and no snapshots of it are kept"
        if group.window is not None and group.window <= block_tokens:
            return f"{group.name}: a window of {group.window} tokens is no longer than a block of {block_tokens}"
    return None


class Needs:
    """Needs of sequences in the ``groups`` (those that hold tokens, in the order of the rows of ``Sequences.front``).

    A layer that sees everything keeps a block for every position. A layer with a window keeps those that its window
    touches and those that are written and not yet computed, ``max_pending_tokens`` of one sequence at most (under
    overlap those of two steps); None: a whole text may be written at once.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        *,
        block_tokens: int,
        extra_tokens: int,
        max_pending_tokens: int | None,
        admission: Admission,
    ) -> None:
        self.windows = tuple((i, group.window) for i, group in enumerate(groups) if group.window is not None)
        self._num_groups, self._num_full = len(groups), len(groups) - len(self.windows)
        self._block_tokens, self._extra_tokens = block_tokens, extra_tokens
        # A sequence that decodes has two steps under way at most, each with all its drafts.
        self._min_pending = 2 * (1 + extra_tokens)
        self._max_pending = max(max_pending_tokens or 2**40, self._min_pending)
        self._admission = admission

    def blocks(self, num_tokens: Ints) -> Ints:
        """Positions that so many tokens fill, one entry a row."""
        return (num_tokens + (self._block_tokens - 1)) // self._block_tokens

    def tokens(self, request: RequestView) -> int:
        """Tokens whose entries are ever written, extra ones included."""
        return int(self._written(request.num_prompt_tokens, request.max_total_tokens - request.num_prompt_tokens))

    def positions(self, request: RequestView) -> int:
        return ceil_div(self.tokens(request), self._block_tokens)

    def whole_life(self, request: RequestView) -> int:
        """Blocks that it may hold at once, all groups together."""
        positions = self.positions(request)
        pending = min(self._max_pending, positions * self._block_tokens)
        shown = (window_blocks(window, self._block_tokens, extra_tokens=pending - 1) for _, window in self.windows)
        return self._num_full * positions + sum(min(positions, blocks) for blocks in shown)

    def at_admission(self, request: RequestView, start: Start) -> int:
        """Blocks that the policy expects it to take beyond those it starts with.

        Of these ``start.num_shared`` do not come back to the pool when it moves on, so that it, or who holds them now,
        takes so many more; but never more than one for each position to come and group.
        """
        alone = Sequences(1, self._num_groups)
        alone.enter(0, request, lifetime=self.positions(request), start=start)
        end = self._end(alone)
        most = self._num_groups * max(0, int(end[0]) - start.held)
        return min(most, int(self.to_take(alone, end)[0]) + start.num_shared)

    def expected(self, sequences: Sequences) -> Ints:
        """Blocks that each sequence is expected to take beyond those it holds; 0 for a row without one."""
        return self.to_take(sequences, self._end(sequences))

    def _end(self, sequences: Sequences) -> Ints:
        """The end of the positions that each is expected to fill.

        A token is drawn by each step that reaches past the prompt, so a sequence scheduled up to s has generated
        s + 1 - prompt by then; one that came back and computes its output again knew more than that.
        """
        drawn = np.maximum(sequences.returned, sequences.scheduled + 1 - sequences.prompt)
        new = self._admission.expected_new_tokens(np.minimum(drawn, sequences.most), sequences.most)
        return np.minimum(self.blocks(self._written(sequences.prompt, new)), sequences.lifetime)

    def to_take(self, sequences: Sequences, end: Ints) -> Ints:
        """Blocks to take until each sequence has had those of positions up to ``end``: what it holds at once at most,
        less what it holds."""
        take = self._num_full * np.maximum(end - sequences.held, 0)
        for group, window in self.windows:
            front = sequences.front[group]
            pending = np.clip(sequences.known - sequences.computed, self._min_pending, self._max_pending)
            # As ``window_blocks`` has it, with all but one of the pending tokens as extra ones; and what has left the
            # window of a sequence that begins in a block of its own, which is given up when its first step lands.
            left = np.maximum((sequences.computed - window + 1) // self._block_tokens - front, 0)
            shown = self.blocks(window - 2 + pending) + 1 + left
            most = np.minimum(end - front, shown)
            take += np.maximum(most - (sequences.held - front), 0)
        return take

    def has_left(self, front: Ints, starts: Ints) -> bool:
        """Whether a block is given up (``front`` [groups, rows]) that a token at one of ``starts`` [rows] sees."""
        return any(
            bool((front[group] > np.maximum(starts - window + 1, 0) // self._block_tokens).any())
            for group, window in self.windows
        )

    def _written(self, prompt: Ints | int, new: Ints | int) -> Ints:
        """Tokens whose entries are written for ``new`` generated ones: the last is sampled and never fed back."""
        return prompt + np.maximum(np.subtract(new, 1), 0) + self._extra_tokens
