"""The price of a pool that holds N units of tokens, with everything that grows with it, and the most a budget pays for.

The pool is one array of equal slabs; a block of any group of layers fills one. Its tokens are counted as the longest
sequences hold them: as many whole ones of max_seq_len as there are, and a part of one more. What a group needs for T
of them depends on what its layers keep; with S the blocks of one whole sequence there:

full, latent   every token:                  S for each whole sequence, and what the part has
window         what the windows show:        the same, of what they show; and ceil(tokens of a step / block) once, for
                                             what a step adds before anything falls out of a window
state          one a sequence, and a spare:  max_batch_size + 1, whatever T is
snapshots      a state every so many tokens: as layers that see everything, in blocks of that many tokens
cross          the encoder's tokens:         max_batch_size * ceil(encoder tokens / block), whatever T is

Shorter sequences show more windows for as many tokens, and a step that computes pieces of many sequences may touch a
block more of each, so a pool holds fewer such tokens than it is named after; who admits them counts blocks. A window
never takes more than it would if it saw everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    """What groups of layers that are alike take; each of them as many blocks.

    fixed_blocks      of a group that does not depend on the tokens; None: it does
    sequence_tokens   of the longest sequence, as far as they lie on this rank, in whole units of the pool
    sequence_blocks   that see every one of them
    window_blocks     the most that a window can show, wherever it starts, and with tokens that may be rejected; None:
                      the layers see every token
    snapshot_tokens   of states that are kept for prefixes, one for so many tokens; 0: these are no snapshots
    step_blocks       what a step adds to windows before anything falls out of them
    cp                ranks that share a sequence's blocks in turn
    """

    name: str
    groups: tuple[KVGroup, ...]
    fixed_blocks: int | None = None
    sequence_tokens: int = 1
    sequence_blocks: int = 1
    window_blocks: int | None = None
    step_blocks: int = 0
    snapshot_tokens: int = 0
    cp: int = 1

    @classmethod
    def of(cls, *groups: KVGroup, limits: Limits, unit: int, name: str = "", cp: int = 1) -> GroupPrice:
        """By what the layers of the groups keep; see the module. ``unit``: tokens of the pool's unit on this rank, on
        which every cp-th block of a sequence is."""
        first, name = groups[0], name or groups[0].name
        tokens = ceil_div(limits.max_seq_len + limits.extra_tokens, cp)
        fixed = _fixed_blocks(first, limits)
        priced = cls(
            name=name,
            groups=groups,
            fixed_blocks=fixed,
            sequence_tokens=round_up(tokens, unit),
            sequence_blocks=0 if fixed is not None else ceil_div(tokens, first.block_tokens),
            cp=cp,
        )
        if first.window is None or priced.is_fixed:
            return priced
        shown = window_blocks(first.window, first.block_tokens, extra_tokens=limits.extra_tokens)
        return replace(priced, window_blocks=shown, step_blocks=ceil_div(limits.max_num_tokens, first.block_tokens))

    @property
    def kind(self) -> KVGroupKind:
        return self.groups[0].kind

    @property
    def window(self) -> int | None:
        return self.groups[0].window

    @property
    def block_tokens(self) -> int:
        """Tokens of this rank. A state has seen all of them, so every rank keeps every snapshot of its layers."""
        if self.snapshot_tokens:
            return max(1, self.snapshot_tokens // self.cp)
        return self.groups[0].block_tokens

    @property
    def is_fixed(self) -> bool:
        return self.fixed_blocks is not None

    def blocks(self, tokens: int) -> int:
        """Blocks that ``tokens`` tokens of this rank need, in sequences of full length and a part of one."""
        return len(self.groups) * self._blocks_of_one(tokens)

    def blocks_of_sequences(self, num_sequences: int) -> int:
        """Blocks that so many sequences of full length need, each in blocks of its own."""
        if self.fixed_blocks is not None:
            return len(self.groups) * self.fixed_blocks
        return len(self.groups) * self._held(num_sequences, 0)

    def used_bytes(self, tokens: int) -> int:
        """Bytes in use in those blocks."""
        return self._blocks_of_one(tokens) * sum(group.block_bytes for group in self.groups)

    def _blocks_of_one(self, tokens: int) -> int:
        if self.fixed_blocks is not None:
            return self.fixed_blocks
        whole, part = divmod(tokens, self.sequence_tokens)
        return self._held(whole, min(ceil_div(part, self.block_tokens), self.sequence_blocks))

    def _held(self, whole: int, part_blocks: int) -> int:
        """Blocks of one group for so many whole sequences, and a part of one that would have ``part_blocks``."""
        every = whole * self.sequence_blocks + part_blocks
        if self.window_blocks is None:
            return every
        shown = ceil_div(self.window_blocks, self.cp)
        held = whole * min(self.sequence_blocks, shown) + min(part_blocks, shown)
        return min(every, held + ceil_div(self.step_blocks, self.cp))


def group_prices(layout: KVLayout, *, limits: Limits, unit: int, cp: int = 1) -> tuple[GroupPrice, ...]:
    """One price for all groups that are alike, and one for the snapshots of states where they are kept."""
    families = group_families(layout).items()
    prices = tuple(GroupPrice.of(*alike, limits=limits, unit=unit, name=name, cp=cp) for name, alike in families)
    if not limits.snapshot_tokens:
        return prices
    return prices + tuple(_snapshots(price, limits) for price in prices if price.kind == KVGroupKind.STATE)


def _snapshots(states: GroupPrice, limits: Limits) -> GroupPrice:
    """The states of prefixes, which grow with the tokens and not with the sequences."""
    return replace(
        states,
        name=f"{states.name} snapshots",
        fixed_blocks=None,
        snapshot_tokens=limits.snapshot_tokens,
        sequence_blocks=ceil_div(limits.max_seq_len, limits.snapshot_tokens),
    )


def _fixed_blocks(group: KVGroup, limits: Limits) -> int | None:
    rows = limits.max_batch_size
    if group.kind == KVGroupKind.STATE:
        return rows + SPARE_STATES
    if group.kind == KVGroupKind.CROSS:
        return rows * ceil_div(limits.max_encoder_tokens, group.block_tokens)
    return None


@dataclass(frozen=True, kw_only=True)
class PoolPrice:
    """What N units cost: the blocks of every group, their bookkeeping, the scratch that grows with the tokens, pages.

    A unit is ``block_tokens`` tokens: one block of what sees every token, else of windows, else one whole sequence.
    Under context parallelism every cp-th block of a sequence lies on this rank, so one block here stands for ``cp`` of
    them: ``local_tokens`` are here. ``demands`` are scratch, per unit. The pool and the growing scratch are arenas,
    committed in pages of ``page_bytes``. ``most_units`` hold every sequence at its full length at once.
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
        unit = unit_tokens(layout) or ceil_div(limits.max_seq_len + limits.extra_tokens, cp)
        block_tokens = unit * cp
        return cls(
            groups=group_prices(layout, limits=limits, unit=unit, cp=cp),
            slab_bytes=layout.slab_bytes,
            block_tokens=block_tokens,
            local_tokens=unit,
            table_bytes=sum(each for _, each in charges.per_block),
            demands=tuple(
                Demand(
                    name=rated.claim.name,
                    rate_bytes=rated.bytes_per_token * unit,
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
        """Whether more tokens cost more; a model of states alone costs what its sequences cost."""
        return not all(group.is_fixed for group in self.groups)

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

        Where nothing grows no budget is the limit, and the answer stops at ``most_units``.
        """
        if budget_bytes <= 0:
            return 0
        high = self._ceiling(budget_bytes, self.demands)
        return largest(lambda n: self.total_bytes(n) <= budget_bytes, low=0, high=high) or 0

    def kv_blocks_within(self, kv_bytes: int) -> int:
        """The most units whose slabs, the fixed ones included, are within ``kv_bytes``."""
        return largest(lambda n: self.kv_bytes(n) <= kv_bytes, low=0, high=self._ceiling(kv_bytes, ())) or 0

    def _ceiling(self, budget_bytes: int, demands: Sequence[Demand]) -> int:
        """No fewer units than the budget can pay for: what the split says, which windows and pages only lower."""
        rate = sum(self._unit_bytes(group) for group in self.groups if not group.is_fixed and group.window is None)
        if rate:
            return split(budget_bytes, rate_bytes=rate, demands=demands).units
        if not self.grows:
            return self.most_units
        units = 1
        while self.kv_bytes(units) - self.kv_bytes(0) <= budget_bytes:
            units *= 2
        return units

    def _unit_bytes(self, group: GroupPrice) -> int:
        """No more than a unit takes on average: a whole sequence may fill its last block better than its units say."""
        slabs = len(group.groups) * self.slab_bytes * self.local_tokens
        return min(slabs // group.block_tokens, slabs * group.sequence_blocks // group.sequence_tokens)


def unit_tokens(layout: KVLayout) -> int:
    """Tokens of one unit of a pool of this layout, on one rank; 0 for a layout that no token makes larger."""
    kept = [group for group in layout.groups if group.kind not in (KVGroupKind.STATE, KVGroupKind.CROSS)]
    every = [group.block_tokens for group in kept if group.window is None]
    return min(every or [group.block_tokens for group in kept], default=0)


def _page_loss(num_bytes: int, page_bytes: int) -> int:
    return round_up(num_bytes, page_bytes) - num_bytes
