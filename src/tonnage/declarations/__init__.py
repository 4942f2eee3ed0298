"""Each attention backend's scratch, in words and numbers, with no torch: one file per backend, one row in ``BACKENDS``.

A row takes one kind of attention layer, as this rank has it, and returns the backend's declarations;
``attention/NAME.py`` holds the kernel, for backends that we run. The others are here so that plans know their price.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tonnage.config import Limits
from tonnage.declarations import fa3, flashinfer, triton_decode, trtllm_mla
from tonnage.declarations.questions import Questions, questions
from tonnage.declarations.sdpa import SdpaScratch
from tonnage.declarations.shape import AttentionShape, attention_shapes, sparse_algorithm
from tonnage.errors import InvalidSetting
from tonnage.terms import Chip, Scratch

__all__ = [
    "BACKENDS",
    "AttentionShape",
    "Backend",
    "Questions",
    "attention_shapes",
    "declare",
    "declare_for",
    "find_backend",
    "questions",
    "sparse_algorithm",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """``declare`` gives the scratch of one kind of layer. ``reads`` is what the backend does with the cached past."""

    declare: Callable[[AttentionShape], tuple[Scratch, ...]]
    reads: str


def _sdpa(shape: AttentionShape) -> tuple[Scratch, ...]:
    return (
        SdpaScratch(
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            v_head_dim=shape.v_head_dim,
            element_bytes=shape.element_bytes,
            block_tokens=shape.block_tokens,
            scored_heads=shape.num_heads if shape.is_scored else 0,
        ),
    )


def _paired(shape: AttentionShape) -> tuple[Scratch, ...]:
    """Both backends' own, of one share: each step is done by one of the two, and what is captured by the first."""
    return (*triton_decode.declare(shape), *(replace(each, captured=False) for each in flashinfer.declare(shape)))


BACKENDS: Mapping[str, Backend] = {
    "sdpa": Backend(declare=_sdpa, reads="copies its pages into a tile of bounded size"),
    "flashinfer": Backend(declare=flashinfer.declare, reads="reads its pages where they lie"),
    "fa3": Backend(declare=fa3.declare, reads="reads its pages where they lie"),
    "triton": Backend(declare=triton_decode.declare, reads="reads its pages where they lie"),
    "paired": Backend(declare=_paired, reads="reads its pages where they lie"),
    "trtllm": Backend(declare=trtllm_mla.declare, reads="expands the past of latent layers and reads other pages"),
}


def declare(backend: str, *, kv_heads: int, head_dim: int, kv_dtype: str, block_tokens: int) -> tuple[Scratch, ...]:
    """The scratch of a backend for plain heads, one query head for each KV head; see ``declare_for``.

    Raises ``InvalidSetting`` for an unknown backend.
    """
    shape = AttentionShape(
        num_heads=kv_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        kv_dtype=kv_dtype,
        block_tokens=block_tokens,
    )
    return declare_for(backend, shape)


def declare_for(
    backend: str, shape: AttentionShape, *, limits: Limits | None = None, chip: Chip | None = None
) -> tuple[Scratch, ...]:
    """The scratch of a backend for one kind of layer of this rank.

    ``limits`` and ``chip`` tell how much of a cached prefix a latent layer expands at once; without them, all of it.
    Raises ``InvalidSetting`` for an unknown backend.
    """
    row = find_backend(backend)
    if backend == "trtllm" and limits is not None:
        return trtllm_mla.declare(shape, prefix_tokens=trtllm_mla.staged_prefix_tokens(shape, limits, chip))
    return row.declare(shape)


def find_backend(name: str) -> Backend:
    """The row of that name. Raises ``InvalidSetting`` where there is none."""
    if name not in BACKENDS:
        raise InvalidSetting("attention", name, "no such backend", remedy=f"use one of {', '.join(BACKENDS)}")
    return BACKENDS[name]
