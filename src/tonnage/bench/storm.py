"""The adversarial load: phases that are each hard on an engine, overlapping, in an order drawn by seed.

Rounds follow each other. In each every phase comes twice, up to three at a time, while the batch is kept full and as
many wait; then nothing more is asked, all ends, everything must be back where it was, and for a moment nobody asks for
anything. What the phases do is in ``phases``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from tonnage.bench.mix import MAX_WAITING_BATCHES, Mix
from tonnage.bench.moves import Ask, Move, Phase, Rest, Settle, Step, View
from tonnage.bench.phases import PHASES, Sky
from tonnage.bench.probes import Probes

#: Phases at the same time, and how likely in a step the next one begins beside others.
MAX_AT_ONCE, BEGINS = 3, 0.05
#: Seconds for which nobody asks for anything, between two rounds.
IDLE_S = (0.2, 1.0)
#: What keeps the batch full between the phases' own requests.
FILLER = "filler"
#: The phase whose requests take longest, once a round; the others so many times.
LONGEST, TIMES_A_ROUND = "lengths", 2


class Storm:
    """A ``Load`` for an engine of these sizes. The same ``seed`` gives the same one where it sees the same.

    pool_tokens     of the KV cache: as many come between two uses of a prefix, so that it is evicted
    can_sleep       the engine can be sent to sleep; has_neighbour: another process can take memory
    """

    def __init__(
        self,
        *,
        seed: int,
        vocab_size: int,
        max_seq_len: int,
        max_batch_size: int,
        block_tokens: int,
        pool_tokens: int,
        probes: Probes,
        can_sleep: bool = False,
        has_neighbour: bool = False,
    ) -> None:
        self.seed = seed
        self._rng = random.Random(seed ^ 0x5708)
        self._mix = Mix(
            seed=seed,
            vocab_size=vocab_size,
            max_seq_len=max_seq_len,
            max_batch_size=max_batch_size,
            block_tokens=block_tokens,
        )
        self._sky = Sky(
            rng=self._rng,
            vocab_size=vocab_size,
            max_seq_len=max_seq_len,
            max_batch_size=max_batch_size,
            pool_tokens=pool_tokens,
            mix=self._mix,
            probes=probes,
        )
        possible = {"nap": can_sleep, "neighbour": has_neighbour}
        self._names = [name for name in PHASES if possible.get(name, True)]

    def moves(self, view: View) -> Iterator[Move]:
        self._sky.view = view
        while True:
            yield from self._round(view)
            while view.has_work:
                yield Step()
            yield Settle()
            yield Rest(self._rng.uniform(*IDLE_S))

    def heard(self, ask: Ask, generated: Sequence[int]) -> None:
        self._mix.heard(ask, generated)

    def _round(self, view: View) -> Iterator[Move]:
        coming = self._order()
        active: list[tuple[str, Iterator[list[Move]]]] = []
        while coming or active:
            if coming and len(active) < MAX_AT_ONCE and (not active or self._rng.random() < BEGINS):
                name = coming.pop()
                active.append((name, PHASES[name].script(self._sky)))
                yield Phase(name, begins=True)
            is_crowded = view.num_waiting > MAX_WAITING_BATCHES * self._sky.max_batch_size
            for phase in [] if is_crowded else list(active):
                moves = next(phase[1], None)
                if moves is None:
                    active.remove(phase)
                    yield Phase(phase[0], begins=False)
                else:
                    yield from moves
            if view.num_waiting < self._sky.max_batch_size:
                yield from self._filler()
            yield Step()

    def _order(self) -> list[str]:
        """From the last to the first. What is longest comes first, so that it does not run on alone at the end."""
        others = [name for name in self._names if name != LONGEST] * TIMES_A_ROUND
        return [*self._rng.sample(others, len(others)), LONGEST]

    def _filler(self) -> Iterator[Move]:
        for _ in range(max(1, self._sky.max_batch_size // 4)):
            yield self._sky.plain(FILLER)
