"""What the KV manager says of itself before it exists: the memory its bookkeeping takes, and stand-ins for probes."""

from __future__ import annotations

from collections.abc import Sequence

from tonnage.config import Limits
from tonnage.layout import metadata_bytes_per_block, table_bytes
from tonnage.resources.base import ProbeRequest
from tonnage.terms import Claim, Fixed, Lifetime, LineKind, Maker, PerBlock, Source


def kv_claims(
    limits: Limits, *, owner: str, num_groups: int, block_tokens: int, extra_tokens: int
) -> tuple[Claim, Claim]:
    """The page tables and the bookkeeping of blocks, by the formulas of ``layout``."""
    table = table_bytes(
        max_batch_size=limits.max_batch_size,
        max_seq_len=limits.max_seq_len,
        block_tokens=block_tokens,
        extra_tokens=extra_tokens,
    )
    return (
        _claim(
            owner,
            "page table",
            Fixed(bytes=2 * num_groups * table),
            "which block, and which slot, holds which tokens of each running sequence",
        ),
        _claim(
            owner,
            "block metadata",
            PerBlock(
                bytes_per_block=metadata_bytes_per_block(
                    block_tokens=block_tokens, prefix_caching=limits.prefix_caching
                )
            ),
            "place, holders and node of each block, and stacks of the free ones",
        ),
    )


def kv_probe(stage: str, limits: Limits) -> Sequence[ProbeRequest]:
    """Requests of one full step of prefill or of decode."""
    if stage == "prefill":
        return _prefill_probe(limits)
    if stage == "decode":
        return tuple(
            ProbeRequest(id=f"probe-{i}", num_prompt_tokens=1, num_computed_tokens=1, max_total_tokens=3)
            for i in range(limits.max_batch_size)
        )
    return ()


def _prefill_probe(limits: Limits) -> tuple[ProbeRequest, ...]:
    """Prompts that fill ``max_num_tokens``, one token short of the longest so that each may sample; the last is
    shorter. No more of them than sequences run at once."""
    longest = max(1, min(limits.max_num_tokens, limits.max_seq_len - 1))
    total = min(limits.max_num_tokens, limits.max_batch_size * longest)
    lengths = [min(longest, total - start) for start in range(0, total, longest)]
    return tuple(
        ProbeRequest(id=f"probe-{i}", num_prompt_tokens=length, max_total_tokens=length + 1)
        for i, length in enumerate(lengths)
    )


def _claim(owner: str, name: str, cost: Fixed | PerBlock, reason: str) -> Claim:
    return Claim(
        name=name,
        owner=owner,
        line=LineKind.TABLES,
        cost=cost,
        lifetime=Lifetime.RESIDENT,
        maker=Maker.LIBRARY,
        source=Source.DERIVED,
        reason=reason,
        ref="tonnage.layout",
    )
