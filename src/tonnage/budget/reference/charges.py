"""The reference's reserves by formula: bytes that its probe cannot see.

On the peak's side: encoder, fixed workspace, penalty tables. On the pool's: indexer logits, and the latent workspace
of ``mla``. Outside both: the private arena of a DFlash drafter.
"""

from __future__ import annotations

from tonnage.budget.reference.environment import DEFAULT_INDEXER_ELEMENTS
from tonnage.errors import DoesNotFit
from tonnage.units import format_bytes


def encoder_reserve(
    *, output_budget_bytes: int, profiled_output_bytes: int, is_cache_active: bool, cache_bytes: int
) -> int:
    """What the encoder's output may take beyond the probe's, and its cache, which fills only under traffic."""
    return max(0, output_budget_bytes - profiled_output_bytes) + (cache_bytes if is_cache_active else 0)


def fixed_workspace_reserve(declared_bytes: int) -> int:
    """The full size of arenas that attention first needs after the probe; a backend that declares none says 0."""
    return max(0, declared_bytes)


def penalty_reserve(*, num_sequences: int, num_base_sequences: int, beam_width: int, vocab_size: int | None) -> int:
    """Tables of the extra seats alone: an int32 count for each beam and a bool, per token of the vocabulary.

    The base seats live off the slack. Ours charges every seat, since a fraction of 1 leaves none.
    """
    extra = num_sequences - num_base_sequences
    if extra <= 0 or not vocab_size:
        return 0
    return extra * beam_width * vocab_size * 4 + extra * vocab_size


def indexer_reserve(
    *, max_num_tokens: int | None, max_seq_len: int | None, max_elements: int = DEFAULT_INDEXER_ELEMENTS
) -> int:
    """fp32 logits of a tile of queries against the compressed context; the whole tile where the shape is not known."""
    if max_num_tokens is None or max_seq_len is None:
        return 4 * max_elements
    return 4 * min(max_elements, max_num_tokens * max_seq_len)


def dflash_arena(
    *,
    max_batch_size: int,
    num_layers: int,
    max_seq_len: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    element_bytes: int,
) -> int:
    """Context buffer of a DFlash drafter: keys and values of every slot and one spare, outside the pool."""
    per_slot = 2 * num_layers * (max_seq_len + block_size) * num_kv_heads * head_dim * element_bytes
    return (max_batch_size + 1) * per_slot


def check_dflash_arena(arena_bytes: int, *, max_batch_size: int, free_bytes: int) -> None:
    """Raises ``DoesNotFit`` with the largest batch that fits, since the arena is linear in the slots."""
    if arena_bytes <= free_bytes:
        return
    batch = free_bytes // (arena_bytes // (max_batch_size + 1)) - 1
    remedy = (f"max_batch_size {batch:,}",) if batch >= 1 else ()
    raise DoesNotFit(
        f"the drafter's context buffer for {max_batch_size:,} sequences does not fit",
        need_bytes=arena_bytes,
        have_bytes=free_bytes,
        need=f"{format_bytes(arena_bytes)} ({arena_bytes:,} bytes)",
        have=f"{format_bytes(free_bytes)} ({free_bytes:,} bytes)",
        remedies=remedy,
    )
