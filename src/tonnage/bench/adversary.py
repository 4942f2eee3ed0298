"""A storm, what it does to an engine beside asking for things (sleep, another process), and who watches meanwhile."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from tonnage.bench import inside
from tonnage.bench.breaches import Breaches
from tonnage.bench.naps import Naps
from tonnage.bench.neighbour import Neighbour
from tonnage.bench.probes import Probes
from tonnage.bench.storm import Storm
from tonnage.bench.verdict import Adversities
from tonnage.bench.watch import FreeWatch, free_watch
from tonnage.config import DEFAULT_KEEP_FREE_BYTES
from tonnage.units import MiB, format_bytes, round_down

if TYPE_CHECKING:
    from tonnage.engine import Engine

#: What must be free on a card at any moment, the other process included; half of ``keep_free_bytes`` if that is less.
FLOOR_BYTES = 128 * MiB
#: The other process leaves this much of what it might take: free memory moves in pages of 2 MiB, and by a few of them.
MARGIN_BYTES = 16 * MiB
#: What a card gives at the least.
PAGE_BYTES = 2 * MiB

RULES = {
    "probes": "greedy probes are answered as they are alone, in float32 up to a gap of 1e-3",
    "free": "the card always has its floor of free memory, and gives others what keep_free leaves",
    "allocator": "torch's allocator never runs out, nor has to try again",
    "sleep": "asleep it refuses steps, keeps its requests and gives its memory back",
}


class Adversary:
    """A ``storm`` for the engine, and all that belongs to it; ``breaches`` of ``RULES``.

    Use as a context manager around the run; ``figures`` after it. ``neighbour`` was started before the engine, so that
    its context is in the plan; it is the caller's to close.
    """

    def __init__(
        self,
        engine: Engine,
        seed: int,
        *,
        has_sampler: bool,
        neighbour: Neighbour | None = None,
    ) -> None:
        plan, self._neighbour, self._engine = engine.plan, neighbour, engine
        self.breaches = Breaches(RULES)
        self._tell = self.breaches.note
        keep_free = plan.knobs.keep_free_bytes.or_else(DEFAULT_KEEP_FREE_BYTES)
        self._floor_bytes = min(FLOOR_BYTES, keep_free // 2)
        self._most_lent_bytes = max(0, round_down(keep_free - self._floor_bytes - MARGIN_BYTES, PAGE_BYTES))
        block_tokens = plan.kv.layout.groups[0].block_tokens
        sizes = {
            "seed": seed,
            "vocab_size": engine.vocab_size,
            "max_seq_len": plan.limits.max_seq_len,
            "block_tokens": block_tokens,
        }
        is_exact = not has_sampler or inside.computes_in(engine) == "float32"
        self.probes = Probes(**sizes, is_exact=is_exact, tell=self._tell)
        self.naps, self._can_sleep = Naps(engine, self._tell), inside.can_sleep(engine)
        self.storm = Storm(
            **sizes,
            max_batch_size=plan.limits.max_batch_size,
            pool_tokens=plan.kv.tokens,
            probes=self.probes,
            can_sleep=self._can_sleep,
            has_neighbour=neighbour is not None and self._most_lent_bytes >= PAGE_BYTES,
        )
        self._watch: FreeWatch | None = None
        self._open = ExitStack()
        self._before = inside.allocator_counts(engine)

    def __enter__(self) -> Adversary:
        self._watch = free_watch(self._engine)
        if self._watch is not None:
            self._open.enter_context(self._watch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        if self._neighbour is not None:
            self._neighbour.give()

    @property
    def lent_bytes(self) -> int:
        """What the other process holds now."""
        return 0 if self._neighbour is None else self._neighbour.num_bytes

    def take(self, hundredths: int) -> None:
        """The other process takes this share of what it may have, or gives all back."""
        if self._neighbour is None:
            return
        if not hundredths:
            self._neighbour.give()
            return
        wanted = round_down(self._most_lent_bytes * hundredths // 100, PAGE_BYTES)
        wanted = min(wanted, self._most_lent_bytes - self._neighbour.num_bytes)
        if wanted > 0 and not self._neighbour.take(wanted) and not self._neighbour.is_silent:
            held = format_bytes(self._neighbour.num_bytes)
            self._tell("free", f"another process holds {held} and is refused {format_bytes(wanted)} within keep_free")

    def figures(self) -> Adversities:
        """What came of it; broken rules are told now."""
        after = inside.allocator_counts(self._engine)
        grown = {name: after[name] - self._before.get(name, 0) for name in after}
        for name, count in grown.items():
            for _ in range(count):
                self._tell("allocator", f"{name} went up by {count}")
        free = None if self._watch is None else self._watch.figures()
        if self._watch is not None and self._watch.failure is not None:
            self._tell("free", f"nobody watched from some moment on: {self._watch.failure}")
        if free is not None and free.lowest_bytes < self._floor_bytes:
            lowest, floor = format_bytes(free.lowest_bytes), format_bytes(self._floor_bytes)
            self._tell("free", f"{lowest} were free after {free.lowest_at_s} s, {floor} must be")
        return Adversities(
            floor_bytes=None if free is None else self._floor_bytes,
            free=free,
            allocator=grown,
            naps=dict(self.naps.counts),
            can_sleep=self._can_sleep,
            freed_bytes=self.naps.most_freed_bytes,
            neighbour_takes=None if self._neighbour is None else self._neighbour.num_taken,
            neighbour_bytes=0 if self._neighbour is None else self._neighbour.most_bytes,
            probes=dict(self.probes.compared),
            is_exact=self.probes.is_exact,
        )
