"""What one step may take: every reserve that a step draws on, asked through one interface.

A reserve has a limit per step and says what a row costs, and how many tokens of a chunk a rest of it still pays for.
Over any limit a chunk is cut or its request waits for a later step. The first row of a step always moves, and where a
limit is about memory that only chunks need, the first chunk is kept whole: it can be no smaller later. 0 is a limit,
None is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from tonnage.resources.kv import KVManager
from tonnage.step import Ints
from tonnage.terms import MemoryPlan
from tonnage.units import ceil_div

#: One row as numbers, or rows as arrays with one entry each: a cost is the same formula for both.
Number = TypeVar("Number", int, Ints)


@dataclass(frozen=True, slots=True, eq=False)
class Rows(Generic[Number]):
    """Rows of a step: tokens ``[starts, starts + counts)`` are computed.

    samples         1 where a row reaches its last known token and so draws one, else 0
    encoder_tokens  that an encoder computes for the row in this step
    """

    starts: Number
    counts: Number
    samples: Number
    encoder_tokens: Number


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a sequence has to compute: ``rest`` >= 1 tokens from ``start`` on, up to its last known one.

    ``encoder_tokens`` must be computed with the first of them.
    """

    start: int
    rest: int
    encoder_tokens: int = 0

    def cut(self, count: int) -> Rows[int]:
        """The row of its first ``count`` tokens."""
        return Rows(self.start, count, int(count == self.rest), self.encoder_tokens)


#: The first token of a prompt: a step without room for it is full.
_LEAST = Chunk(start=0, rest=2)


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a limit may depend on: how many rows decode, and how many tokens a step may have that is tried again."""

    num_decodes: int = 0
    max_tokens: int | None = None


class StepReserve(Protocol):
    """One thing of which a step may take only so much.

    unit         what it is counted in
    chunks_only  a decode takes nothing of it
    keeps_first  the first chunk of a step is kept whole, even over the limit
    """

    @property
    def name(self) -> str: ...
    @property
    def unit(self) -> str: ...
    @property
    def chunks_only(self) -> bool: ...
    @property
    def keeps_first(self) -> bool: ...

    def limit(self, step: Conditions) -> int | None:
        """Units that one step may take; None: any number."""

    def units(self, rows: Rows[Number]) -> Number:
        """What each row takes; never less for a longer row."""

    def tokens_within(self, units: int, chunk: Chunk) -> int:
        """The longest row that ``chunk`` can be cut to and takes at most ``units`` >= 0; 0: none."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Tokens computed, of prompts and decodes: what the buffers of a step are made for."""

    max_tokens: int
    name, unit, chunks_only, keeps_first = "step tokens", "token", False, False

    def limit(self, step: Conditions) -> int | None:
        return self.max_tokens if step.max_tokens is None else min(self.max_tokens, step.max_tokens)

    def units(self, rows: Rows[Number]) -> Number:
        return rows.counts

    def tokens_within(self, units: int, chunk: Chunk) -> int:
        return min(units, chunk.rest)


@dataclass(frozen=True, slots=True)
class PrefillTokens:
    """Prompt tokens computed beside decodes, so that these are not held up; as many as fit where nothing decodes."""

    beside_decodes: int | None
    name, unit, chunks_only, keeps_first = "prefill tokens", "token", True, False

    def limit(self, step: Conditions) -> int | None:
        return self.beside_decodes if step.num_decodes else None

    def units(self, rows: Rows[Number]) -> Number:
        return rows.counts

    def tokens_within(self, units: int, chunk: Chunk) -> int:
        return min(units, chunk.rest)


@dataclass(frozen=True, slots=True)
class AttendedTokens:
    """Tokens that the chunks of a step attend to, their own included: scratch of attention that grows with them.

    The later chunks of a prompt attend to more than its first, so the first of a step is not cut: it never gets
    cheaper.
    """

    cap: int | None
    name, unit, chunks_only, keeps_first = "attended tokens", "token", True, True

    def limit(self, step: Conditions) -> int | None:  # noqa: ARG002 - the same for every step
        return self.cap

    def units(self, rows: Rows[Number]) -> Number:
        return rows.starts + rows.counts

    def tokens_within(self, units: int, chunk: Chunk) -> int:
        return max(0, min(units - chunk.start, chunk.rest))


@dataclass(frozen=True, slots=True)
class LogitsRows:
    """Rows of the vocabulary projection: one for each row that draws a token."""

    max_rows: int
    name, unit, chunks_only, keeps_first = "logits rows", "row", False, False

    def limit(self, step: Conditions) -> int | None:  # noqa: ARG002 - the same for every step
        return self.max_rows

    def units(self, rows: Rows[Number]) -> Number:
        return rows.samples

    def tokens_within(self, units: int, chunk: Chunk) -> int:
        return chunk.rest if units else chunk.rest - 1


@dataclass(frozen=True, slots=True)
class EncoderTokens:
    """Tokens that the encoder computes for prompts that begin; one prompt's are computed at once."""

    max_tokens: int
    name, unit, chunks_only, keeps_first = "encoder tokens", "token", True, False

    def limit(self, step: Conditions) -> int | None:  # noqa: ARG002 - the same for every step
        return self.max_tokens

    def units(self, rows: Rows[Number]) -> Number:
        return rows.encoder_tokens

    def tokens_within(self, units: int, chunk: Chunk) -> int:
        return chunk.rest if chunk.encoder_tokens <= units else 0


@dataclass(frozen=True, slots=True)
class HostPages:
    """Blocks that chunks begin, where each may push a cached one to the host: as many as the copies of a step take.

    ``allowance``: blocks that are free, or whose bytes fit through the link in this step; None: there is no host tier.
    Decodes are not held up: all of them together begin few blocks in a step.
    """

    allowance: Callable[[], int | None]
    block_tokens: int
    name, unit, chunks_only, keeps_first = "host pages", "block", True, True

    def limit(self, step: Conditions) -> int | None:  # noqa: ARG002 - asked anew for every step all the same
        return self.allowance()

    def units(self, rows: Rows[Number]) -> Number:
        return self._blocks(rows.starts + rows.counts) - self._blocks(rows.starts)

    def tokens_within(self, units: int, chunk: Chunk) -> int:
        end = (ceil_div(chunk.start, self.block_tokens) + units) * self.block_tokens
        return min(end - chunk.start, chunk.rest)

    def _blocks(self, tokens: Number) -> Number:
        return -(-tokens // self.block_tokens)


def step_reserves(
    plan: MemoryPlan,
    *,
    beside_decodes: int | None,
    block_tokens: int,
    host_allowance: Callable[[], int | None],
) -> tuple[StepReserve, ...]:
    """All reserves of a step under ``plan``. One more is a class above and a row here."""
    return (
        StepTokens(plan.limits.max_num_tokens),
        PrefillTokens(beside_decodes),
        AttendedTokens(plan.attended_cap),
        LogitsRows(plan.limits.max_logits_rows),
        EncoderTokens(plan.limits.max_encoder_tokens),
        HostPages(host_allowance, block_tokens),
    )


class Gate:
    """The reserves of a step behind one another: what all of them let through."""

    def __init__(self, reserves: Iterable[StepReserve]) -> None:
        self.reserves = tuple(reserves)

    @classmethod
    def of(cls, plan: MemoryPlan, kv: KVManager, *, beside_decodes: int | None) -> Gate:
        """Of a plan, with prompts that are cut to ``beside_decodes`` tokens in a step that also decodes."""

        def host_allowance() -> int | None:
            cache = kv.cache
            return cache.num_free + cache.room.budget.num_left if cache.num_host_slots else None

        block_tokens = kv.block_tokens
        return cls(
            step_reserves(plan, beside_decodes=beside_decodes, block_tokens=block_tokens, host_allowance=host_allowance)
        )

    def num_within(self, rows: Rows[Ints], *, num_decodes: int = 0, max_tokens: int | None = None) -> int:
        """How many of the rows, from the front, stay in the step; the first ``num_decodes`` of them decode.

        Behind the first one that does not fit nobody is looked at. At least one stays where there is one.
        """
        kept = num_rows = len(rows.counts)
        step = Conditions(num_decodes=num_decodes, max_tokens=max_tokens)
        for reserve in self.reserves:
            if (limit := reserve.limit(step)) is not None:
                kept = min(kept, _within(reserve, limit, rows, num_decodes))
        return max(kept, min(num_rows, 1))

    def room(self, decodes: Rows[Ints], *, max_tokens: int | None = None) -> Room:
        """What is left for chunks beside ``decodes``, in a step of at most ``max_tokens`` where that is given."""
        step = Conditions(num_decodes=len(decodes.counts), max_tokens=max_tokens)
        left: list[tuple[StepReserve, int]] = []
        for reserve in self.reserves:
            if (limit := reserve.limit(step)) is not None:
                left.append((reserve, limit if reserve.chunks_only else limit - int(reserve.units(decodes).sum())))
        return Room(left, is_empty=not step.num_decodes)


def _within(reserve: StepReserve, limit: int, rows: Rows[Ints], num_decodes: int) -> int:
    """Rows from the front that the limit lets through."""
    if reserve.chunks_only and len(rows.counts) == num_decodes:
        return num_decodes
    units = reserve.units(rows)
    if int(units.sum()) <= limit:
        return len(units)
    units = units.copy()
    if reserve.chunks_only:
        units[:num_decodes] = 0
    total = np.cumsum(units)
    if reserve.keeps_first:
        total[num_decodes] = 0
    return int(np.argmax(total > limit)) if (total > limit).any() else len(units)


class Room:
    """What a step that is being put together may still take: chunks are measured and taken one after the other."""

    def __init__(self, left: list[tuple[StepReserve, int]], *, is_empty: bool) -> None:
        self.num_chunks = 0
        self._reserves = [reserve for reserve, _ in left]
        self._left = [units for _, units in left]
        self._is_empty = is_empty

    @property
    def is_full(self) -> bool:
        """Not one token of any chunk fits."""
        return self.tokens_for(_LEAST) < 1

    def tokens_for(self, chunk: Chunk) -> int:
        """How many of the chunk's tokens fit; at least one in a step that has nothing else."""
        count = chunk.rest
        for reserve, left in zip(self._reserves, self._left, strict=True):
            if self.num_chunks or not reserve.keeps_first:
                count = min(count, reserve.tokens_within(max(0, left), chunk))
        return max(count, int(self._is_empty))

    def take(self, chunk: Chunk, count: int) -> None:
        """``count`` tokens of the chunk are in the step."""
        row = chunk.cut(count)
        for i, reserve in enumerate(self._reserves):
            self._left[i] -= reserve.units(row)
        self.num_chunks += 1
        self._is_empty = False
