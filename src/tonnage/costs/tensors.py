"""One tensor of a model as the price sees it, and how one rank's share of it is cut."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tonnage.costs.ranks import attention_ranks
from tonnage.terms import Rank
from tonnage.units import ceil_div


class Component(StrEnum):
    """What a tensor belongs to; the price is told component by component."""

    EMBEDDINGS = "embeddings"
    HEAD = "head"
    ATTENTION = "attention"
    FEED_FORWARD = "feed-forward"
    EXPERTS = "experts"
    SHARED_EXPERTS = "shared experts"
    ROUTER = "router"
    RECURRENT = "recurrent"
    NORMS = "norms"
    TOWERS = "towers"
    MTP = "mtp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """``count`` equal tensors of ``rows`` outputs and ``columns`` inputs each, on one rank.

    module     the name its module has in checkpoints, inside its layer: what quantisation's exceptions are named by
    can_pack   a quantised checkpoint may pack it
    is_buffer  float32 whatever the model's dtype is
    counts     a parameter of the class
    """

    component: Component
    module: str
    rows: int
    columns: int = 1
    count: int = 1
    can_pack: bool = False
    is_buffer: bool = False
    counts: bool = True

    @property
    def num_elements(self) -> int:
        return self.rows * self.columns * self.count


def matrix(component: Component, module: str, rows: int, columns: int, *, count: int = 1) -> Tensor:
    """A projection: packed where the checkpoint packs."""
    return Tensor(component=component, module=module, rows=rows, columns=columns, count=count, can_pack=True)


def vector(component: Component, module: str, size: int, *, count: int = 1) -> Tensor:
    """A bias, a norm, a gate: always in the model's dtype."""
    return Tensor(component=component, module=module, rows=size, count=count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """In how many parts one rank's share is cut.

    attention  heads; 1 where attention is data-parallel
    inner      feed-forward parts and shared experts
    experts    ranks that the routed experts are dealt out over; ``expert_inner`` ranks share each one
    """

    attention: int
    inner: int
    experts: int
    expert_inner: int

    @classmethod
    def of(cls, rank: Rank) -> Cut:
        return cls(
            attention=attention_ranks(rank),
            inner=rank.tp,
            experts=rank.ep,
            expert_inner=max(1, rank.tp // rank.ep),
        )

    def heads(self, num_heads: int) -> int:
        """Whole heads of one rank; with fewer heads than ranks each is replicated."""
        return ceil_div(num_heads, self.attention)
