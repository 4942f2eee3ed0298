"""Each attention backend's scratch, in words and numbers, with no torch: one file per backend, one row in ``BACKENDS``.

A row takes the shapes of this rank and returns the backend's declarations; ``attention/NAME.py`` holds the kernel.
"""

from __future__ import annotations

from collections.abc import Callable

from tonnage.declarations.sdpa import SdpaScratch
from tonnage.errors import InvalidSetting
from tonnage.layout import DTYPE_BYTES
from tonnage.terms import Scratch


def _sdpa(*, kv_heads: int, head_dim: int, kv_dtype: str, block_tokens: int) -> tuple[Scratch, ...]:
    return (
        SdpaScratch(
            kv_heads=kv_heads, head_dim=head_dim, element_bytes=DTYPE_BYTES[kv_dtype], block_tokens=block_tokens
        ),
    )


BACKENDS: dict[str, Callable[..., tuple[Scratch, ...]]] = {
    "sdpa": _sdpa,
}


def declare(backend: str, *, kv_heads: int, head_dim: int, kv_dtype: str, block_tokens: int) -> tuple[Scratch, ...]:
    """The scratch of a backend for this rank's shapes. Raises ``InvalidSetting`` for an unknown backend."""
    if backend not in BACKENDS:
        raise InvalidSetting("attention", backend, "no such backend", remedy=f"use one of {', '.join(BACKENDS)}")
    return BACKENDS[backend](kv_heads=kv_heads, head_dim=head_dim, kv_dtype=kv_dtype, block_tokens=block_tokens)
