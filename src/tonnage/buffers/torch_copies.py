"""Small arrays to a device and back without waiting for it: what a step is told, and what it tells.

A card copies while the host goes on only from and to pinned memory. It comes from torch's own host allocator, which
hands a piece out again only when the copy from it is done, so the next step may be written at once while this one is
still on its way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from tonnage.units import round_up

Array: TypeAlias = npt.NDArray[Any]

#: Each array begins at such an address: Triton compiles a kernel anew for a pointer that is not aligned so.
ALIGNMENT = 16
_DTYPES = {
    np.dtype(array): tensor
    for array, tensor in (
        (np.int32, torch.int32),
        (np.int64, torch.int64),
        (np.float64, torch.float64),
        (np.bool_, torch.bool),
    )
}


def upload(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """The arrays (int32, int64, float64, bool) as tensors of ``device``, side by side in one memory and by one copy."""
    offsets = np.cumsum([0, *(round_up(array.nbytes, ALIGNMENT) for array in arrays)]).tolist()
    staged = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    places = staged.numpy()
    for array, offset in zip(arrays, offsets, strict=False):
        places[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = staged.to(device, non_blocking=True)
    return [
        there[offset : offset + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
        for array, offset in zip(arrays, offsets, strict=False)
    ]


def upload_one(array: Array, device: torch.device) -> torch.Tensor:
    """As ``upload``, of one array."""
    if device.type == "cpu":
        return torch.from_numpy(np.ascontiguousarray(array))
    return upload([array], device)[0]


class Download:
    """Tensors on their way to the host, in the order of the current stream: what they hold when it gets there."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._done: torch.cuda.Event | None = None
        if not any(tensor.is_cuda for tensor in tensors):
            self._host = list(tensors)
            return
        self._host = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in tensors]
        for here, there in zip(self._host, tensors, strict=True):
            here.copy_(there, non_blocking=True)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record()

    def read(self) -> list[Array]:
        """Waits until they are here."""
        if self._done is not None:
            self._done.synchronize()
        return [tensor.numpy() for tensor in self._host]
