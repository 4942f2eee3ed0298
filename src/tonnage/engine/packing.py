"""Projections of one input as one matrix: their weights lie one behind the other in the arena, and one product makes
them all.

Why not one forward of our own for each family: transformers' forward is the oracle, and a copy of it would have to
follow every release. Instead the product is made *before* the module is entered, and takes the place of its input;
inside, each projection is replaced by a ``Columns`` that takes its own columns of what it is given. Nothing is kept
between calls, so there is nothing that a captured graph, a compiled layer or an aborted step could leave stale. It
holds where the projections are all that reads the input: true of the modules in ``PACKS`` of every family that names
them (tests/cpu/test_packing.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch

from tonnage.buffers.torch_view import typed_view
from tonnage.costs.weights import TensorSpec, WeightsLayout
from tonnage.engine.family import Pack
from tonnage.units import round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a tensor's pack is: the pack, the path of the module that holds it, and weight or bias."""

    pack: Pack
    parent: str
    kind: str

    def names(self) -> list[str]:
        return [f"{self.parent}.{part}.{self.kind}" for part in self.pack.parts]


def packed_order(layout: WeightsLayout, packs: Sequence[Pack]) -> WeightsLayout:
    """The same tensors, the members of each pack one behind the other with no gap between them.

    Weights of a pack come where its first weight was, biases where its first bias was; every other tensor begins at a
    multiple of the layout's alignment, as before. The size stays what the price says: gaps can only shrink.
    """
    tensors: list[TensorSpec] = []
    end = 0
    for run in _runs(layout, packs):
        offset = round_up(end, layout.alignment_bytes)
        for tensor in run:
            tensors.append(replace(tensor, offset_bytes=offset))
            offset += tensor.num_bytes
        end = offset
    assert round_up(end, layout.alignment_bytes) <= layout.total_bytes
    return replace(layout, tensors=tuple(tensors))


def _runs(layout: WeightsLayout, packs: Sequence[Pack]) -> Iterator[list[TensorSpec]]:
    """The tensors in order, those of one pack together; a pack that lacks one of its parts is no pack."""
    by_name = {tensor.name: tensor for tensor in layout.tensors}
    done: set[str] = set()
    for tensor in layout.tensors:
        if tensor.name in done:
            continue
        place = _place(tensor.name, packs)
        names = place.names() if place else []
        run = [by_name[name] for name in names if name in by_name]
        if len(run) < 2 or len(run) < len(names):
            run = [tensor]
        done.update(member.name for member in run)
        yield run


def _place(name: str, packs: Sequence[Pack]) -> _Place | None:
    """``model.layers.0.self_attn.q_proj.weight`` is in the pack of a module ``self_attn`` with a part ``q_proj``."""
    module, _, kind = name.rpartition(".")
    parent, _, part = module.rpartition(".")
    for pack in packs:
        if parent.rpartition(".")[2] in pack.modules and part in pack.parts:
            return _Place(pack=pack, parent=parent, kind=kind)
    return None


class Columns(torch.nn.Module):
    """In the place of a projection: columns ``[begin, end)`` of the product that the module was entered with."""

    def __init__(self, begin: int, end: int) -> None:
        super().__init__()
        self._take = _taker(begin, end)

    def forward(self, product: torch.Tensor) -> torch.Tensor:
        return self._take(product)


def _taker(first: int, last: int) -> Callable[[torch.Tensor], torch.Tensor]:
    # As default arguments the bounds are constants to torch.compile, whatever it makes of integers: as attributes they
    # would become sizes unknown to the kernels under dynamic=True with allow_unspec_int_on_nn_module.
    def take(product: torch.Tensor, begin: int = first, end: int = last) -> torch.Tensor:
        return product[..., begin:end]

    return take


class Packed(torch.nn.Module):
    """``inner`` entered with the product of all its projections in the place of its input."""

    def __init__(self, inner: torch.nn.Module, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.inner = inner
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        product = torch.nn.functional.linear(hidden_states, self.weight, self.bias)
        return self.inner(product, *args, **kwargs)


def pack(model: torch.nn.Module, layout: WeightsLayout, arena: torch.Tensor, packs: Sequence[Pack]) -> int:
    """Replace what ``packs`` name in ``model`` by packed projections over ``arena`` (uint8). Returns how many.

    ``layout`` is one of ``packed_order``. The tensors' own views stay valid: they look at the same bytes.
    """
    runs = [run for run in _runs(layout, packs) if len(run) > 1]
    whole = {run[0].name: _whole(run, arena) for run in runs}
    count = 0
    for run in runs:
        place = _place(run[0].name, packs)
        assert place is not None
        if place.kind == "weight":
            _replace(model, place, run, whole)
            count += 1
    return count


def _whole(run: Sequence[TensorSpec], arena: torch.Tensor) -> torch.Tensor:
    """One view over tensors that follow each other: alike in dtype and in all but their first dimension."""
    assert all(a.offset_bytes + a.num_bytes == b.offset_bytes and a.dtype == b.dtype for a, b in pairwise(run))
    rows = sum(tensor.shape[0] for tensor in run)
    return typed_view(arena, run[0].offset_bytes, (rows, *run[0].shape[1:]), run[0].dtype)


def _replace(model: torch.nn.Module, place: _Place, run: Sequence[TensorSpec], whole: dict[str, torch.Tensor]) -> None:
    inner = model.get_submodule(place.parent)
    bias = whole.get(replace(place, kind="bias").names()[0])
    assert bias is not None or getattr(inner, place.pack.parts[0]).bias is None
    ends = list(accumulate(tensor.shape[0] for tensor in run))
    for part, tensor, end in zip(place.pack.parts, run, ends, strict=True):
        setattr(inner, part, Columns(end - tensor.shape[0], end))
    parent, _, name = place.parent.rpartition(".")
    setattr(model.get_submodule(parent), name, Packed(inner, whole[run[0].name], bias))
