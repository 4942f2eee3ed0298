"""The price of a pool of N blocks, with everything that grows with it, and the most blocks a budget pays for."""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.budget.charges import Charges
from tonnage.budget.search import largest
from tonnage.budget.split import Demand, split
from tonnage.layout import KVLayout
from tonnage.units import round_up

#: Caps that limit the pool itself; the others limit everything the engine takes.
POOL_CAPS = ("kv_bytes", "kv_tokens", "limits")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPrice:
    """What N blocks cost: the blocks, their bookkeeping, the scratch that grows with their tokens, whole pages.

    ``demands`` are per block. The pool and the growing scratch are arenas, committed in pages of ``page_bytes``.
    """

    slab_bytes: int
    block_tokens: int
    table_bytes: int
    demands: tuple[Demand, ...]
    page_bytes: int

    @classmethod
    def of(cls, layout: KVLayout, charges: Charges, *, page_bytes: int) -> PoolPrice:
        """The price list for one layout. A block holds ``block_tokens`` tokens of every group."""
        block_tokens = layout.groups[0].block_tokens
        return cls(
            slab_bytes=layout.slab_bytes,
            block_tokens=block_tokens,
            table_bytes=sum(each for _, each in charges.per_block),
            demands=tuple(
                Demand(
                    name=rated.claim.name,
                    rate_bytes=rated.bytes_per_token * block_tokens,
                    ceiling_bytes=rated.bytes_per_token * rated.most_tokens,
                )
                for rated in charges.rated
            ),
            page_bytes=page_bytes,
        )

    @property
    def block_bytes(self) -> int:
        """A block with its bookkeeping."""
        return self.slab_bytes + self.table_bytes

    def kv_bytes(self, num_blocks: int) -> int:
        return self.slab_bytes * num_blocks

    def kv_page_loss(self, num_blocks: int) -> int:
        return _page_loss(self.kv_bytes(num_blocks), self.page_bytes)

    def granted_bytes(self, num_blocks: int) -> tuple[int, ...]:
        """What each growing demand gets beside a pool of that size."""
        return tuple(demand.at(num_blocks) for demand in self.demands)

    def scratch_page_loss(self, num_blocks: int) -> int:
        return _page_loss(sum(self.granted_bytes(num_blocks)), self.page_bytes)

    def total_bytes(self, num_blocks: int) -> int:
        """Never decreases with the number of blocks."""
        return (
            self.block_bytes * num_blocks
            + sum(self.granted_bytes(num_blocks))
            + self.kv_page_loss(num_blocks)
            + self.scratch_page_loss(num_blocks)
        )

    def blocks_within(self, budget_bytes: int) -> int:
        """The most blocks whose total price is within the budget; 0 where it pays for none."""
        if budget_bytes <= 0:
            return 0
        # Without page rounding the split is exact; rounding can only take blocks away again.
        ceiling = split(budget_bytes, rate_bytes=self.block_bytes, demands=self.demands).units
        return largest(lambda n: self.total_bytes(n) <= budget_bytes, low=0, high=ceiling) or 0


def _page_loss(num_bytes: int, page_bytes: int) -> int:
    return round_up(num_bytes, page_bytes) - num_bytes
