"""The pool as kernels see it: equal slabs, and for each group of layers a view of the blocks that lie in them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from tonnage.layout import KVLayout

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class Pages:
    """One block of any group lies at the beginning of a slab; what the slab has beyond it is padding.

    slabs   [num_slabs, elements of a slab], contiguous; it may grow behind the same address
    shapes  of the blocks of each group: (its layers, 2, B, Hkv, D), K at 0 and V at 1, alike but for the layers
    places  by layer of the model: (its group, its place among the layers of the group)

    The slab of a block is what a page table of its group has for it.
    """

    slabs: torch.Tensor
    shapes: tuple[tuple[int, ...], ...]
    places: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        assert self.slabs.dim() == 2
        assert self.slabs.is_contiguous()
        assert len({shape[1:] for shape in self.shapes}) == 1, "heads of all groups are alike"
        assert self.slab_elements % self.page_elements == 0

    @classmethod
    def of(cls, pool: torch.Tensor | Pages) -> Pages:
        """Of one group, whose blocks fill their slabs: ``pool`` is [num_slabs, layers, 2, B, Hkv, D], contiguous."""
        if isinstance(pool, Pages):
            return pool
        assert pool.dim() == 6
        assert pool.is_contiguous()
        places = tuple((0, layer) for layer in range(pool.shape[1]))
        return cls(slabs=pool.flatten(1), shapes=(tuple(pool.shape[1:]),), places=places)

    @property
    def num_groups(self) -> int:
        return len(self.shapes)

    @property
    def block_tokens(self) -> int:
        return self.shapes[0][2]

    @property
    def kv_heads(self) -> int:
        return self.shapes[0][3]

    @property
    def head_dim(self) -> int:
        return self.shapes[0][4]

    @property
    def token_elements(self) -> int:
        """Of the keys of one token of one layer."""
        return self.kv_heads * self.head_dim

    @property
    def page_elements(self) -> int:
        """Of the keys of one block of one layer: a page."""
        return self.block_tokens * self.token_elements

    @property
    def slab_elements(self) -> int:
        return self.slabs.shape[1]

    @property
    def slab_tokens(self) -> int:
        """The distance between two slabs, in tokens of one layer."""
        return self.slab_elements // self.token_elements

    @property
    def slab_pages(self) -> int:
        return self.slab_elements // self.page_elements

    @cached_property
    def views(self) -> tuple[torch.Tensor, ...]:
        """By group: [num_slabs, layers of the group, 2, B, Hkv, D]; slabs stand apart as far as the pool's do."""
        return tuple(self.slabs[:, : prod(shape)].unflatten(1, shape) for shape in self.shapes)


def page_shapes(layout: KVLayout) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, int], ...]]:
    """``shapes`` and ``places`` of the ``Pages`` of a layout whose layers all keep keys and values side by side: others
    are refused by ``engine.features`` before anybody asks."""
    at: dict[int, tuple[int, int]] = {}
    for number, group in enumerate(layout.groups):
        assert [part.name for part in group.parts] == ["kv"], group.name
        at.update((layer, (number, place)) for place, layer in enumerate(group.layers))
    assert sorted(at) == list(range(len(at))), "every layer keeps something"
    return tuple(group.parts[0].shape for group in layout.groups), tuple(at[layer] for layer in sorted(at))
