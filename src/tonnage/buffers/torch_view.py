"""Torch tensors over our own memory, host's or card's, without a copy. The only file of this room that needs torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tonnage.buffers import dlpack
from tonnage.buffers.memory import Memory, require_usable
from tonnage.layout import DTYPE_BYTES

if TYPE_CHECKING:
    import torch


def as_tensor(memory: Memory) -> torch.Tensor:
    """A uint8 tensor over all of a buffer, or over all addresses an arena reserved: the same one while it lives.

    Its ``data_ptr`` never changes, so it is made once and stays valid while the arena grows and shrinks; only the
    first ``usable_bytes`` may be touched: more ends the process, or the context of the card. Closing the memory is
    refused until the tensor and all its views are gone; putting it to sleep is not, and nothing can stop a view from
    being touched meanwhile: that too ends the process or the context. Its storage reports the reservation, not the
    memory behind it, and torch's own statistics do not see it. The caller orders torch's stream behind the memory's.
    Raises ``NotMaterialized`` for memory that sleeps now, ``ValueError`` for memory that is closed.
    """
    import torch

    require_usable(memory)
    found: torch.Tensor | None = memory.exports.view(memory.address, memory.size_bytes)
    if found is None:
        found = torch.utils.dlpack.from_dlpack(dlpack.capsule(memory, shape=(memory.size_bytes,)))
        memory.exports.remember(found, memory.address, memory.size_bytes)
    return found


def typed_view(tensor_u8: torch.Tensor, offset_bytes: int, shape: tuple[int, ...], dtype_name: str) -> torch.Tensor:
    """``shape`` elements of ``dtype_name`` (a name of ``DTYPE_BYTES``) at ``offset_bytes`` of a flat uint8 tensor.

    Shares its memory. Raises ``ValueError`` for an offset that is not a whole element or a range beyond the tensor.
    """
    import torch

    element_bytes = DTYPE_BYTES[dtype_name]
    num_bytes = math.prod(shape) * element_bytes
    if offset_bytes < 0 or offset_bytes % element_bytes or offset_bytes + num_bytes > tensor_u8.numel():
        raise ValueError(
            f"{num_bytes:,} bytes of {dtype_name} at offset {offset_bytes:,} do not lie in {tensor_u8.numel():,} bytes"
        )
    flat = tensor_u8[offset_bytes : offset_bytes + num_bytes]
    return flat.view(getattr(torch, dtype_name)).view(shape)
