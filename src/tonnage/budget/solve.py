"""From what is allowed, measured and claimed to a number of blocks; the lines and the derivation are told from it."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from tonnage.budget.charges import Charges, charges
from tonnage.budget.inputs import PlanInputs
from tonnage.budget.money import Budget
from tonnage.budget.pool import PoolPrice
from tonnage.budget.refusal import refuse_beside_pool, refuse_pool
from tonnage.budget.words import WHY_CAP, told
from tonnage.config import DEFAULT_KEEP_FREE_BYTES
from tonnage.layout import blocks_per_sequence
from tonnage.terms import Cap, LineKind
from tonnage.units import ceil_div, round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """One plan's arithmetic, done: ``num_blocks`` units of the pool, and everything they were found from.

    page_losses      what whole pages add to the arenas of fixed size, by the line's name
    sequence_blocks  units that the longest sequence fills
    """

    inputs: PlanInputs
    charged: Charges
    price: PoolPrice
    budget: Budget
    page_losses: dict[str, int]
    caps: tuple[Cap, ...]
    num_blocks: int
    sequence_blocks: int

    @property
    def tokens(self) -> int:
        """Tokens of the pool; no more than the smallest rank's, where its unit is smaller than this one's."""
        tokens, smallest = self.num_blocks * self.price.block_tokens, self.inputs.ranks_tokens
        return tokens if smallest is None else min(tokens, smallest)

    @property
    def num_sequences(self) -> int:
        """Sequences of full length that the pool holds, on every rank."""
        sequences, smallest = self.num_blocks // self.sequence_blocks, self.inputs.ranks_sequences
        return sequences if smallest is None else min(sequences, smallest)

    @property
    def binding(self) -> Cap:
        """The cap that the number of blocks comes from."""
        return next(cap for cap in self.caps if cap.binding)


def solve(inputs: PlanInputs) -> Solved:
    """Raises ``DoesNotFit`` (without remedies) where not one sequence of max_seq_len fits."""
    limits, knobs = inputs.limits, inputs.knobs
    charged = charges(
        inputs.measured,
        inputs.claims,
        limits=limits,
        chip=inputs.chip,
        attended_tokens=knobs.attended_tokens.value,
        reserve_worst=knobs.scratch.value == "reserve",
    )
    price = PoolPrice.of(
        inputs.layout, charged, limits=limits, page_bytes=inputs.page_bytes, cp=inputs.measured.rank.cp
    )
    page_losses = _page_losses(charged, inputs.page_bytes)
    budget = _budget(inputs, fixed=charged.fixed_bytes + sum(page_losses.values()) + price.fixed_bytes)
    sequence_blocks = blocks_per_sequence(limits.max_seq_len, price.block_tokens, extra_tokens=limits.extra_tokens)
    if budget.rest < 0:
        refuse_beside_pool(inputs.model_name, budget, charged, price, sequence_blocks, limits=limits)
    caps, num_blocks = _caps(budget, price, inputs=inputs, sequence_blocks=sequence_blocks)
    if num_blocks < sequence_blocks:
        refuse_pool(inputs.model_name, budget, charged, price, sequence_blocks, caps=caps, limits=limits)
    return Solved(
        inputs=inputs,
        charged=charged,
        price=price,
        budget=budget,
        page_losses=page_losses,
        caps=caps,
        num_blocks=num_blocks,
        sequence_blocks=sequence_blocks,
    )


def _page_losses(charged: Charges, page_bytes: int) -> dict[str, int]:
    """What whole pages add to the arenas of fixed size."""
    kinds = (LineKind.WEIGHTS, LineKind.SCRATCH)
    sizes = {kind.value: charged.line(kind).bytes for kind in kinds}
    return {name: round_up(size, page_bytes) - size for name, size in sizes.items()}


def _budget(inputs: PlanInputs, *, fixed: int) -> Budget:
    knobs = inputs.knobs
    return Budget(
        device=inputs.measured.device_bytes,
        foreign=inputs.measured.foreign_bytes.bytes,
        keep_free=knobs.keep_free_bytes.or_else(DEFAULT_KEEP_FREE_BYTES),
        total_bytes=knobs.total_bytes.value,
        fixed=fixed,
        fraction=knobs.kv_fraction.or_else(Fraction(1)),
    )


def _caps(budget: Budget, price: PoolPrice, *, inputs: PlanInputs, sequence_blocks: int) -> tuple[tuple[Cap, ...], int]:
    """Every limit on the pool in KV bytes of whole blocks, the smallest marked, and its number of blocks.

    Where several are equally small the first of the order below binds.
    """
    knobs, limits = inputs.knobs, inputs.limits
    found = [("budget", price.blocks_within(budget.room - budget.fixed), "what the device leaves")]
    if budget.total_bytes is not None:
        found.append(("total_bytes", price.blocks_within(budget.rest), told("total_bytes", knobs.total_bytes)))
    if budget.fraction < 1:
        found.append(("kv_fraction", price.blocks_within(budget.pool), told("kv_fraction", knobs.kv_fraction)))
    if knobs.kv_bytes.value is not None:
        found.append(("kv_bytes", price.kv_blocks_within(knobs.kv_bytes.value), told("kv_bytes", knobs.kv_bytes)))
    if knobs.kv_tokens.value is not None:
        found.append(("kv_tokens", knobs.kv_tokens.value // price.block_tokens, told("kv_tokens", knobs.kv_tokens)))
    if not limits.prefix_caching:
        # A pool that also caches prefixes has a use for every block; without, more than this is never touched.
        used = f"max_batch_size {limits.max_batch_size:,} x max_seq_len {limits.max_seq_len:,}"
        found.append(("limits", price.most_units, used))
    if inputs.ranks_tokens is not None:
        # Rounded up: the ranks' units differ, and every one of them has room for all these tokens and sequences.
        tokens = ceil_div(inputs.ranks_tokens, price.block_tokens)
        found.append(("ranks", max(tokens, (inputs.ranks_sequences or 0) * sequence_blocks), "the smallest rank"))
    # What does not grow with the tokens is limited by nothing but the limits, whatever the budget would pay for.
    binding = min(range(len(found)), key=lambda i: (found[i][1], not price.grows and found[i][0] != "limits"))
    caps = tuple(
        Cap(
            name=name,
            kv_bytes=price.kv_bytes(blocks),
            setting=setting,
            binding=i == binding,
            reason=WHY_CAP[name],
        )
        for i, (name, blocks, setting) in enumerate(found)
    )
    return caps, found[binding][1]
