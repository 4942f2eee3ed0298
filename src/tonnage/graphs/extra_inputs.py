"""Inputs that a captured forward reads beside token ids and positions, declared by whoever brings the forward.

Each is one tensor with a row for every row of a step, made once for the largest graph there will be (whatever a step
may compute) and never made again: every graph reads its first rows, at the address that was captured. A replay is
preceded by ``load``, which writes the rows in use and makes the rest of the bucket padding, so that nothing of an older
step is left where the graph looks. A step without a graph takes ``eager``: the same checks, tensors of its own.

A host array goes over from pinned memory of torch's own host allocator, which hands a piece out again only when the
copy from it is done: the next step may be written at once, and an array that is not pinned is never what a copy still
reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from tonnage.errors import GraphInputError, InvalidSetting

#: One value for a step, [rows, *row_shape]: of the host (an array, or a tensor) or of the device already.
Value: TypeAlias = "npt.NDArray[Any] | torch.Tensor"
#: What a forward takes anyway.
TAKEN = ("input_ids", "position_ids", "use_cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraInput:
    """One input: the keyword of the forward that takes it, and what it holds for each row.

    row_shape  of one row; the tensor is [rows, *row_shape]
    padding    every element of a row that pads: something the forward can compute with, whatever comes of it

    Raises ``InvalidSetting`` for a name that no keyword could have or that is taken, and for a shape without elements.
    """

    name: str
    dtype: torch.dtype = torch.int64
    row_shape: tuple[int, ...] = ()
    padding: float = 0

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name in TAKEN:
            remedy = f"choose a keyword of the forward other than {', '.join(TAKEN)}"
            raise InvalidSetting("extra input", self.name, "not a keyword that is free", remedy=remedy)
        if any(extent < 1 for extent in self.row_shape):
            what = f"{self.name} has no elements in a row"
            raise InvalidSetting("extra input", self.row_shape, what, remedy="give extents of at least 1")


class ExtraInputs:
    """All that were declared, on ``device``, each for ``max_rows`` rows: the size of the largest graph.

    Raises ``InvalidSetting`` for two of one name.
    """

    def __init__(self, declared: Sequence[ExtraInput], *, max_rows: int, device: torch.device) -> None:
        names = [each.name for each in declared]
        if len(set(names)) < len(names):
            raise InvalidSetting("extra inputs", ", ".join(names), "two have one name", remedy="name each once")
        assert max_rows >= 1
        self.max_rows, self._device = max_rows, device
        self._declared = {each.name: each for each in declared}
        #: By name; to be read. ``load`` is what writes them.
        self.tensors: Mapping[str, torch.Tensor] = MappingProxyType(
            {
                each.name: torch.full((max_rows, *each.row_shape), each.padding, dtype=each.dtype, device=device)
                for each in declared
            }
        )
        self._places = self._where()

    @property
    def num_bytes(self) -> int:
        """On the device, for all of them."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def views(self, num_rows: int) -> dict[str, torch.Tensor]:
        """The first rows of each, as keywords of the forward that is captured for so many."""
        assert 1 <= num_rows <= self.max_rows
        return {name: tensor[:num_rows] for name, tensor in self.tensors.items()}

    def load(self, values: Mapping[str, Value], *, num_rows: int, size: int) -> None:
        """Write a step of ``num_rows`` rows for a replay of the graph of ``size``. Does not wait for the device.

        ``values`` has every input that was declared, [num_rows, *row_shape] in its very dtype. Raises
        ``GraphInputError`` for anything else, before a row is written, and where a tensor is no longer where the graphs
        look.
        """
        assert 0 <= num_rows <= size <= self.max_rows
        checked = self._checked(values, num_rows)
        self.check()
        for name, value in checked.items():
            tensor, padding = self.tensors[name], self._declared[name].padding
            if value.device == tensor.device:
                tensor[:num_rows].copy_(value)
            else:
                tensor[:num_rows].copy_(self._staged(value), non_blocking=True)
            tensor[num_rows:size].fill_(padding)

    def eager(self, values: Mapping[str, Value], *, num_rows: int) -> dict[str, torch.Tensor]:
        """The same values as keywords of a forward without a graph, on the device. Raises as ``load``."""
        found = {}
        for name, value in self._checked(values, num_rows).items():
            device = self.tensors[name].device
            found[name] = value if value.device == device else self._staged(value).to(device, non_blocking=True)
        return found

    def check(self) -> None:
        """Raise ``GraphInputError`` if a tensor was given other memory than what the graphs have captured."""
        moved = [name for name, place in self._where().items() if place != self._places[name]]
        if moved:
            raise GraphInputError(
                f"extra input {', '.join(moved)}: its tensor was replaced, and captured graphs read the old one; write "
                "in place"
            )

    def _where(self) -> dict[str, tuple[int, torch.Size, tuple[int, ...]]]:
        return {name: (tensor.data_ptr(), tensor.shape, tensor.stride()) for name, tensor in self.tensors.items()}

    def _checked(self, values: Mapping[str, Value], num_rows: int) -> dict[str, torch.Tensor]:
        if values.keys() != self._declared.keys():
            missing, unknown = self._declared.keys() - values.keys(), values.keys() - self._declared.keys()
            told = [*(f"{name} is missing" for name in missing), *(f"{name} was not declared" for name in unknown)]
            raise GraphInputError(f"extra inputs of a step: {', '.join(sorted(told))}")
        return {name: _matching(self._declared[name], value, num_rows) for name, value in values.items()}

    def _staged(self, value: torch.Tensor) -> torch.Tensor:
        """In memory that an asynchronous copy may read for as long as it takes; whoever gave the value may write to
        theirs at once, pinned or not."""
        if self._device.type != "cuda":
            return value.clone()
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value)


def _matching(declared: ExtraInput, value: Value, num_rows: int) -> torch.Tensor:
    """The value as a tensor. Raises ``GraphInputError`` if it is not what was declared: nothing is cast or repeated."""
    tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.require(value, requirements=["C", "W"]))
    wanted = (num_rows, *declared.row_shape)
    if tuple(tensor.shape) != wanted or tensor.dtype != declared.dtype:
        raise GraphInputError(
            f"extra input {declared.name}: {list(tensor.shape)} of {tensor.dtype}, and the step takes {list(wanted)} "
            f"of {declared.dtype}"
        )
    return tensor
