"""The price of a pool that holds N units of tokens, with everything that grows with it, and the most a budget pays for.

The pool is one array of equal slabs; a block of any group of layers fills one. How many blocks a group needs for T
cached tokens depends on what its layers keep:

full, latent   every token:                     ceil(T / block)
window         no more than the windows show:   min(ceil(T / block), sequences * (ceil((window - 1) / block) + 1)
                                                     + ceil(tokens of a step / block))
state          one state a sequence, and a spare one for padded rows: sequences + 1
cross          the encoder's tokens:            sequences * ceil(encoder tokens / block)

The last term of a window are the tokens that a step adds before those that fell out of the window are given back; all
sequences share it, because one step computes no more tokens than that. ``T`` tokens in any number of sequences hold
no more than this, so a pool of that size needs no other rule for admission than a count of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tonnage.budget.charges import Charges
from tonnage.budget.search import largest
from tonnage.budget.split import Demand, split
from tonnage.config import Limits
from tonnage.layout import KVGroup, KVGroupKind, KVLayout, blocks_per_sequence, group_families, window_blocks
from tonnage.units import ceil_div, round_up

#: Caps that limit the pool itself; the others limit everything the engine takes.
POOL_CAPS = ("kv_bytes", "kv_tokens", "limits", "ranks")

#: One state more than there are sequences: a captured batch is padded with rows that must write somewhere.
SPARE_STATES = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPrice:
    """What groups of layers that are alike take: ``most_blocks`` each; None: they grow with the tokens without bound.

    Groups of ``block_tokens`` 0 do not grow at all: they have ``most_blocks`` from the start.
    """

    name: str
    groups: tuple[KVGroup, ...]
    most_blocks: int | None

    @classmethod
    def of(cls, *groups: KVGroup, limits: Limits, name: str = "") -> GroupPrice:
        """By what the layers of the groups keep; see the module."""
        return cls(name=name or groups[0].name, groups=groups, most_blocks=_most_blocks(groups[0], limits))

    @property
    def kind(self) -> KVGroupKind:
        return self.groups[0].kind

    @property
    def window(self) -> int | None:
        return self.groups[0].window

    @property
    def block_tokens(self) -> int:
        return self.groups[0].block_tokens

    @property
    def is_fixed(self) -> bool:
        return self.kind in (KVGroupKind.STATE, KVGroupKind.CROSS)

    def blocks(self, tokens: int) -> int:
        """Blocks that ``tokens`` cached tokens need, however they are spread over sequences that fill their blocks."""
        return len(self.groups) * self._blocks_of_one(tokens)

    def used_bytes(self, tokens: int) -> int:
        """Bytes in use in those blocks."""
        return self._blocks_of_one(tokens) * sum(group.block_bytes for group in self.groups)

    def _blocks_of_one(self, tokens: int) -> int:
        if self.is_fixed:
            return self.most_blocks or 0
        grown = ceil_div(tokens, self.block_tokens)
        return grown if self.most_blocks is None else min(grown, self.most_blocks)


def _most_blocks(group: KVGroup, limits: Limits) -> int | None:
    rows, block = limits.max_batch_size, group.block_tokens
    if group.kind == KVGroupKind.STATE:
        return rows + SPARE_STATES
    if group.kind == KVGroupKind.CROSS:
        return rows * ceil_div(limits.max_encoder_tokens, block)
    if group.window is None:
        return None
    return rows * window_blocks(group.window, block) + ceil_div(limits.max_num_tokens, block)


@dataclass(frozen=True, kw_only=True)
class PoolPrice:
    """What N units cost: the blocks of every group, their bookkeeping, the scratch that grows with the tokens, pages.

    A unit is ``block_tokens`` tokens, one block of the group that grows without bound (for a model that has none, of
    the group that grows longest). Under context parallelism every cp-th block of a sequence lies on this rank, so one
    block here stands for ``cp`` of them: ``local_tokens`` are here. ``demands`` are scratch, per unit. The pool and
    the growing scratch are arenas, committed in pages of ``page_bytes``. ``most_units`` hold every sequence at its
    full length at once.
    """

    groups: tuple[GroupPrice, ...]
    slab_bytes: int
    block_tokens: int
    local_tokens: int
    table_bytes: int
    demands: tuple[Demand, ...]
    page_bytes: int
    most_units: int

    @classmethod
    def of(cls, layout: KVLayout, charges: Charges, *, limits: Limits, page_bytes: int, cp: int = 1) -> PoolPrice:
        """The price list for one layout at the limits."""
        groups = tuple(
            GroupPrice.of(*alike, limits=limits, name=name) for name, alike in group_families(layout).items()
        )
        local_tokens = _unit_tokens(groups)
        block_tokens = local_tokens * cp
        return cls(
            groups=groups,
            slab_bytes=layout.slab_bytes,
            block_tokens=block_tokens,
            local_tokens=local_tokens,
            table_bytes=sum(each for _, each in charges.per_block),
            demands=tuple(
                Demand(
                    name=rated.claim.name,
                    rate_bytes=rated.bytes_per_token * local_tokens,
                    ceiling_bytes=rated.bytes_per_token * ceil_div(rated.most_tokens, cp),
                )
                for rated in charges.rated
            ),
            page_bytes=page_bytes,
            most_units=limits.max_batch_size
            * blocks_per_sequence(limits.max_seq_len, block_tokens, extra_tokens=limits.extra_tokens),
        )

    @property
    def block_bytes(self) -> int:
        """A slab with its bookkeeping."""
        return self.slab_bytes + self.table_bytes

    @cached_property
    def fixed_slabs(self) -> int:
        """Slabs that are there whatever the number of tokens: recurrent states, and what an encoder leaves."""
        return sum(group.blocks(0) for group in self.groups if group.is_fixed)

    @property
    def fixed_bytes(self) -> int:
        return self.fixed_slabs * self.block_bytes

    @property
    def grows(self) -> bool:
        """Whether more tokens always cost more; a model with states or windows alone reaches an end."""
        return any(group.most_blocks is None for group in self.groups)

    def num_slabs(self, units: int) -> int:
        """Slabs of a pool for so many units, the fixed ones included."""
        tokens = units * self.local_tokens
        return self.fixed_slabs + sum(group.blocks(tokens) for group in self.groups if not group.is_fixed)

    def kv_bytes(self, units: int) -> int:
        return self.slab_bytes * self.num_slabs(units)

    def group_bytes(self, group: GroupPrice, units: int) -> int:
        """Bytes in use in the blocks of one group."""
        return group.used_bytes(units * self.local_tokens)

    def padding_bytes(self, units: int) -> int:
        """What the slabs have beyond the blocks that lie in them."""
        return self.kv_bytes(units) - sum(self.group_bytes(group, units) for group in self.groups)

    def kv_page_loss(self, units: int) -> int:
        return _page_loss(self.kv_bytes(units), self.page_bytes)

    def granted_bytes(self, units: int) -> tuple[int, ...]:
        """What each growing scratch gets beside a pool of that size."""
        return tuple(demand.at(units) for demand in self.demands)

    def scratch_page_loss(self, units: int) -> int:
        return _page_loss(sum(self.granted_bytes(units)), self.page_bytes)

    def total_bytes(self, units: int) -> int:
        """All of it beside ``fixed_bytes``. Never decreases with the number of units."""
        return (
            self.block_bytes * (self.num_slabs(units) - self.fixed_slabs)
            + sum(self.granted_bytes(units))
            + self.kv_page_loss(units)
            + self.scratch_page_loss(units)
        )

    def blocks_within(self, budget_bytes: int) -> int:
        """The most units whose price is within the budget; 0 where it pays for none.

        Where nothing grows without bound no budget is the limit, and the answer stops at ``most_units``.
        """
        if budget_bytes <= 0:
            return 0
        ceiling = self.most_units
        if self.grows:
            # Without page rounding the split is exact; rounding can only take blocks away again.
            ceiling = split(budget_bytes, rate_bytes=self._rate_bytes(), demands=self._bounded()).units
        return largest(lambda n: self.total_bytes(n) <= budget_bytes, low=0, high=ceiling) or 0

    def kv_blocks_within(self, kv_bytes: int) -> int:
        """The most units whose slabs, the fixed ones included, are within ``kv_bytes``."""
        ceiling = kv_bytes // self.slab_bytes if self.grows else self.most_units
        return largest(lambda n: self.kv_bytes(n) <= kv_bytes, low=0, high=ceiling) or 0

    def _rate_bytes(self) -> int:
        """Bytes of a unit in the groups that grow without bound; whole blocks can only make it more."""
        return sum(self._unit_bytes(group) for group in self.groups if group.most_blocks is None)

    def _bounded(self) -> tuple[Demand, ...]:
        """Windows end growing as scratch does, so one split serves both; rounding may only make it pay for more."""
        windows = tuple(
            Demand(
                name=group.name,
                rate_bytes=self._unit_bytes(group),
                ceiling_bytes=(group.most_blocks or 0) * len(group.groups) * self.block_bytes,
            )
            for group in self.groups
            if not group.is_fixed and group.most_blocks is not None
        )
        return (*self.demands, *windows)

    def _unit_bytes(self, group: GroupPrice) -> int:
        return len(group.groups) * self.block_bytes * self.local_tokens // group.block_tokens


def _unit_tokens(groups: Sequence[GroupPrice]) -> int:
    growing = [group.block_tokens for group in groups if group.most_blocks is None]
    bounded = [group.block_tokens for group in groups if not group.is_fixed]
    return min(growing or bounded, default=1)


def _page_loss(num_bytes: int, page_bytes: int) -> int:
    return round_up(num_bytes, page_bytes) - num_bytes
