"""Writing the new keys and values of a layer to their pages, for the backends that run on a card."""

from __future__ import annotations

import torch


def append(slots: torch.Tensor, pages: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Key and value [1, Hkv, T, D] to ``slots`` int64 [T], counted in tokens from the first key of the layer in slab 0;
    a token whose slot is negative goes nowhere.

    ``pages`` [B, Hkv, D] are those keys; values lie behind them. The last dimension of each is contiguous.
    """
    from tonnage.attention.triton_kernels import append_kernel

    block_tokens, kv_heads, head_dim = pages.shape
    append_kernel[(slots.shape[0],)](
        key, value, pages, slots,
        key.stride(1), key.stride(2), value.stride(1), value.stride(2),
        NUM_KV_HEADS=kv_heads, HEAD_DIM=head_dim, PAGE=block_tokens,
        WIDTH=next_power_of_2(kv_heads * head_dim), num_warps=4,
    )  # fmt: skip


def next_power_of_2(number: int) -> int:
    """The least one that is not below ``number``, which is at least 1."""
    return 1 << (number - 1).bit_length()
