"""What the KV manager knows of its sequences, as arrays over the rows of the page table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tonnage.resources.base import RequestView
from tonnage.units import round_down


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermarks:
    """How far a sequence is, in tokens: ``scheduled`` >= ``computed`` >= ``committed``.

    scheduled  prepared steps write up to here; computed: finished steps wrote up to here;
    committed  whole blocks that nothing writes any more, the only ones a cache may share
    """

    scheduled: int
    computed: int
    committed: int


class Sequences:
    """The live sequences by row, int64 ``[num_rows]`` each; a row without a sequence is all 0.

    prompt, most          tokens of the prompt, and the most that may be generated
    returned              tokens generated before it was admitted: it was suspended and came back
    lifetime, held        blocks of its whole life, and those it has
    scheduled, computed   watermarks, in tokens
    epoch                 how many sequences have left the row: tells its owner from those before
    """

    def __init__(self, num_rows: int) -> None:
        self._all = np.zeros((7, num_rows), np.int64)
        self.prompt, self.most, self.returned, self.lifetime, self.held, self.scheduled, self.computed = self._all
        self.epoch = np.zeros(num_rows, np.int64)

    def enter(self, row: int, request: RequestView, *, lifetime: int) -> None:
        self.prompt[row] = request.num_prompt_tokens
        self.most[row] = request.max_total_tokens - request.num_prompt_tokens
        self.returned[row] = len(request.token_ids) - request.num_prompt_tokens
        self.lifetime[row] = lifetime
        self.scheduled[row] = self.computed[row] = request.num_computed_tokens

    def leave(self, row: int) -> None:
        self._all[:, row] = 0
        self.epoch[row] += 1

    def watermarks(self, row: int, *, block_tokens: int) -> Watermarks:
        computed = int(self.computed[row])
        committed = round_down(computed, block_tokens)
        return Watermarks(scheduled=int(self.scheduled[row]), computed=computed, committed=committed)
