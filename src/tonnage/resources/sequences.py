"""What the KV manager knows of its sequences, as arrays over the rows of the page table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tonnage.errors import ResourceError
from tonnage.resources.base import RequestView
from tonnage.step import Flags, Ints, StepPlan
from tonnage.units import round_down

#: ``stored`` of a sequence that stores nothing: no border is ever crossed.
NEVER = 2**40
#: ``parent`` of a sequence that has stored nothing yet: the root of the prefix tree.
ROOT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermarks:
    """How far a sequence is, in tokens: ``scheduled`` >= ``computed`` >= ``committed``.

    scheduled  prepared steps write up to here; computed: finished steps wrote up to here;
    committed  whole blocks that nothing writes any more, the only ones a cache may share
    """

    scheduled: int
    computed: int
    committed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A step between ``prepare`` and ``update``: its rows, whose they were, and the blocks they held before."""

    rows: Ints
    epochs: Ints
    held: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a sequence begins: ``cached_tokens`` of its text are in the cache, the whole blocks of them ``held``.

    fronts    for each group of layers, the first position whose block is held; those before are out of the window
    num_shared  of the held blocks, those of layers with a window that others hold too
    parent    node of the last held block; stores: whether what it computes goes into the tree
    """

    cached_tokens: int = 0
    held: int = 0
    fronts: tuple[int, ...] | int = 0
    num_shared: int = 0
    parent: int = ROOT
    stores: bool = False


class Sequences:
    """The live sequences by row, int64 ``[num_rows]`` each; a row without a sequence is all 0. Blocks are counted by
    position: block i of a text holds its tokens [i * block_tokens, (i + 1) * block_tokens), once in each group.

    prompt, most          tokens of the prompt, and the most that may be generated
    returned              tokens generated before it was admitted: it was suspended and came back
    known                 tokens known when it was admitted
    lifetime, held        positions of its whole life, and the end of those it has blocks for
    scheduled, computed   watermarks, in tokens
    matched, stored       blocks found in the tree when it was admitted, and those that are in it by now
    due                   with so many computed blocks the next are stored
    parent                node of the last stored one
    front                 [num_groups, num_rows]: the first position with a block
    epoch                 how many sequences have left the row: tells its owner from those before
    """

    def __init__(self, num_rows: int, num_groups: int = 1) -> None:
        self._all = np.zeros((12, num_rows), np.int64)
        self.prompt, self.most, self.returned, self.known, self.lifetime, self.held = self._all[:6]
        self.scheduled, self.computed, self.matched, self.stored, self.due, self.parent = self._all[6:]
        self.front: Ints = np.zeros((num_groups, num_rows), np.int64)
        self.epoch = np.zeros(num_rows, np.int64)

    def enter(self, row: int, request: RequestView, *, lifetime: int, start: Start) -> None:
        known = len(request.token_ids)
        self.prompt[row] = request.num_prompt_tokens
        self.most[row] = request.max_total_tokens - request.num_prompt_tokens
        self.returned[row] = known - request.num_prompt_tokens
        self.known[row] = known
        self.lifetime[row] = lifetime
        self.scheduled[row] = self.computed[row] = request.num_computed_tokens + start.cached_tokens
        self.held[row] = self.matched[row] = start.held
        self.stored[row], self.parent[row] = start.held if start.stores else NEVER, start.parent
        self.front[:, row] = start.fronts

    def leave(self, row: int) -> None:
        self._all[:, row] = 0
        self.front[:, row] = 0
        self.epoch[row] += 1

    def check(self, plan: StepPlan, rows: Ints, ends: Ints) -> None:
        """Each row of the plan goes on where its sequence stands, ends within its life (``ends``: in positions), and
        is there once. Raises ``ResourceError``."""
        scheduled, lifetime = self.scheduled[rows], self.lifetime[rows]
        wrong = (plan.starts != scheduled) | (plan.counts < 1) | (ends > lifetime)
        if wrong.any():
            at = int(wrong.argmax())
            raise ResourceError(
                f"request {plan.request_ids[at]!r}: tokens [{plan.starts[at]}, {plan.ends[at]}) after {scheduled[at]} "
                f"scheduled, in a life of {lifetime[at]} blocks"
            )
        if rows.size and np.bincount(rows).max() > 1:
            raise ResourceError(f"a request is in a step twice: {', '.join(plan.request_ids)}")

    def still_has(self, prepared: Prepared) -> Flags:
        """Which rows of that step belong to the same sequence as when it was prepared."""
        return self.epoch[prepared.rows] == prepared.epochs

    def watermarks(self, row: int, *, block_tokens: int) -> Watermarks:
        computed = int(self.computed[row])
        committed = round_down(computed, block_tokens)
        return Watermarks(scheduled=int(self.scheduled[row]), computed=computed, committed=committed)


def rows_of(row_of: Mapping[str, int], request_ids: Sequence[str]) -> Ints:
    """The row of each. Raises ``ResourceError`` for a request that has none."""
    try:
        return np.fromiter(map(row_of.__getitem__, request_ids), np.int64, len(request_ids))
    except KeyError as unknown:
        raise ResourceError(f"request {unknown.args[0]!r} holds no KV blocks") from None
