"""The claims of this path: what attention, page and penalty tables, step inputs and the pool's books will take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tonnage.config import DEFAULT_BLOCK_TOKENS, Limits
from tonnage.costs.config import ModelConfig
from tonnage.costs.context import collective_bytes
from tonnage.costs.dtypes import parse_dtype
from tonnage.costs.ranks import rank_shape
from tonnage.declarations import declare
from tonnage.errors import InvalidSetting
from tonnage.layout import DTYPE_BYTES, PENALTY_TABLES, metadata_bytes_per_block, penalty_table_bytes, table_bytes
from tonnage.terms import Claim, Fixed, Lifetime, LineKind, Maker, PerBlock, Rank, Source


def claims_for(
    config: ModelConfig,
    limits: Limits,
    *,
    backend: str = "sdpa",
    kv_dtype: str | None = None,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    rank: Rank | None = None,
    device_kind: str = "cuda",
) -> tuple[Claim, ...]:
    """Everything that will be allocated beside weights, cache and what a probe sees, for one rank.

    ``kv_dtype`` defaults to the dtype of the weights. ``device_kind`` is "cuda" or "host"; on a host the pool's
    bookkeeping lies on the device too. Raises ``InvalidSetting`` for an unknown backend or dtype.
    """
    rank = rank or Rank()
    element = parse_dtype(kv_dtype or config.dtype, knob="kv_dtype")
    return (
        *_scratch(config, backend=backend, kv_dtype=element, block_tokens=block_tokens, rank=rank),
        *_tables(limits, block_tokens=block_tokens, device_kind=device_kind),
        *_sampling_tables(config, limits, rank=rank),
        *_collectives(rank),
    )


def unlisted(listed: Sequence[Claim], extra: Sequence[Claim]) -> tuple[Claim, ...]:
    """Those of ``extra`` whose names are not in ``listed``: a claim counts once, whoever says it and how often.

    Raises ``ValueError`` where two claims of one name differ in what they cost: that is a defect of ours.
    """
    known = {claim.name: claim for claim in listed}
    found = []
    for claim in extra:
        same = known.setdefault(claim.name, claim)
        if (same.cost, same.applies) != (claim.cost, claim.applies):
            raise ValueError(
                f"two claims are named {claim.name!r}, of {same.owner} and {claim.owner}, and cost unalike"
            )
        if same is claim:
            found.append(claim)
    return tuple(found)


def without(claims: Sequence[Claim], disabled: frozenset[str]) -> tuple[Claim, ...]:
    """The claims with some switched off by name. Raises ``InvalidSetting`` for one that cannot be."""
    optional = {claim.name for claim in claims if claim.can_disable}
    for name in sorted(disabled - optional):
        known = f"claims that can be switched off: {', '.join(sorted(optional))}" if optional else "none can be here"
        raise InvalidSetting("disabled_claims", name, "no claim of that name can be switched off", remedy=known)
    return tuple(
        replace(claim, applies=False, because="switched off") if claim.name in disabled else claim for claim in claims
    )


def _scratch(config: ModelConfig, *, backend: str, kv_dtype: str, block_tokens: int, rank: Rank) -> tuple[Claim, ...]:
    kv_heads = rank_shape(config, rank).num_kv_heads
    declared = declare(
        backend, kv_heads=kv_heads, head_dim=config.head_dim, kv_dtype=kv_dtype, block_tokens=block_tokens
    )
    return tuple(
        Claim(
            name=f"{scratch.backend}: {scratch.name}",
            owner=f"attention.{scratch.backend}",
            line=LineKind.SCRATCH,
            cost=scratch,
            lifetime=Lifetime.RESIDENT,
            maker=Maker.ARENA,
            source=Source.DECLARED,
            ref=scratch.source,
            share=scratch.share,
            lendable=not scratch.keeps_state,
            reason="what the attention backend declares at the limits",
        )
        for scratch in declared
    )


def _tables(limits: Limits, *, block_tokens: int, device_kind: str) -> tuple[Claim, ...]:
    table = table_bytes(
        max_batch_size=limits.max_batch_size,
        max_seq_len=limits.max_seq_len,
        block_tokens=block_tokens,
        extra_tokens=limits.extra_tokens,
    )
    on_host = device_kind == "host"
    metadata = _table_claim(
        "block metadata", PerBlock(bytes_per_block=metadata_bytes_per_block()), "free stack and reference counts"
    )
    return (
        _table_claim("page table", Fixed(bytes=table), "int32, one row a sequence, one entry a block"),
        replace(
            _table_claim(
                "step inputs", Fixed(bytes=step_input_bytes(limits)), "ids, positions, slots and row bounds of a step"
            ),
            applies=not on_host,
            because="made anew in each step, part of the transient" if on_host else "",
        ),
        replace(metadata, applies=on_host, because="" if on_host else "kept in host memory"),
    )


def _sampling_tables(config: ModelConfig, limits: Limits, *, rank: Rank) -> tuple[Claim, ...]:
    if not rank_shape(config, rank).has_head:
        return ()  # only the last pipeline stage samples
    size = penalty_table_bytes(max_batch_size=limits.max_batch_size, vocab_size=config.vocab_size)
    claim = _table_claim(
        PENALTY_TABLES, Fixed(bytes=size), "token counts, allocated by the first request with penalties"
    )
    return (replace(claim, owner="resources.penalties", lifetime=Lifetime.LAZY, maker=Maker.DRIVER, can_disable=True),)


def step_input_bytes(limits: Limits) -> int:
    """Token id, position and cache slot of every token (int64), then start, length and logits row of every row."""
    return (3 * limits.max_num_tokens + 3 * (limits.max_batch_size + 1)) * DTYPE_BYTES["int64"]


def _table_claim(name: str, cost: Fixed | PerBlock, reason: str) -> Claim:
    return Claim(
        name=name,
        owner="resources.kv",
        line=LineKind.TABLES,
        cost=cost,
        lifetime=Lifetime.RESIDENT,
        maker=Maker.TORCH,
        source=Source.DERIVED,
        ref="shapes at the limits",
        reason=reason,
    )


def _collectives(rank: Rank) -> tuple[Claim, ...]:
    size = collective_bytes(rank)
    if size.bytes == 0:
        return ()
    return (
        Claim(
            name="collectives",
            owner="collectives",
            line=LineKind.LIBRARIES,
            cost=Fixed(bytes=size.bytes),
            lifetime=Lifetime.RESIDENT,
            maker=Maker.LIBRARY,
            source=size.source,
            ref=size.ref,
            reason="communicators and their buffers",
            low=size.low,
            high=size.high,
        ),
    )
