"""Page tables and static inputs: who has which block, and what a step is told.

Trigger: always (step inputs: not on a host; the pool's books: only there). Formula: int32 for every block of every
running sequence, in a table for each group of layers (a state has none: it is one block, found by its seat; under
context parallelism a rank lists its own blocks); three int64 for every token and three for every row of a step; the
books of every block, those of the host tier too, and a slot of the id that stands for no block. Lifetime: resident, at
fixed addresses. Reason: they grow with the limits, and captured steps read them where they are. The reference makes its
own before its probe, so they are in its measured peak and have no side here.
"""

from __future__ import annotations

from tonnage.config import Limits
from tonnage.layout import DTYPE_BYTES, KVGroup, KVGroupKind, metadata_bytes_per_block, table_bytes
from tonnage.reserves.base import Reserve, ReserveInputs, only_if
from tonnage.terms import Claim, Fixed, Lifetime, LineKind, Maker, PerBlock, Source
from tonnage.units import ceil_div

#: What finds the blocks of the host tier.
HOST_BOOKS = "host block metadata"


def step_input_bytes(limits: Limits) -> int:
    """Token id, position and cache slot of every token (int64), then start, length and logits row of every row."""
    return (3 * limits.max_num_tokens + 3 * (limits.max_batch_size + 1)) * DTYPE_BYTES["int64"]


def page_table_bytes(inputs: ReserveInputs) -> int:
    """All page tables of one rank: one for each group of layers, as wide as its longest sequence has blocks."""
    if inputs.layout is None:
        return _one_table(inputs, inputs.block_tokens)
    return sum(_group_table(inputs, group) for group in inputs.layout.groups if group.kind is not KVGroupKind.STATE)


def _group_table(inputs: ReserveInputs, group: KVGroup) -> int:
    """Windows have a full row too: entries of blocks that were given back stay in place, empty."""
    if group.kind is KVGroupKind.CROSS:
        encoder = inputs.limits.max_encoder_tokens
        return table_bytes(
            max_batch_size=inputs.limits.max_batch_size, max_seq_len=encoder, block_tokens=group.block_tokens
        )
    return _one_table(inputs, group.block_tokens)


def _one_table(inputs: ReserveInputs, block_tokens: int) -> int:
    limits = inputs.limits
    return table_bytes(
        max_batch_size=limits.max_batch_size,
        # Of a sequence's blocks every cp-th lies on this rank.
        max_seq_len=ceil_div(limits.max_seq_len + limits.extra_tokens, inputs.rank.cp),
        block_tokens=block_tokens,
    )


def claims(inputs: ReserveInputs) -> tuple[Claim, ...]:
    limits, on_host = inputs.limits, inputs.on_host
    # Kernels read slots; beside them the host keeps the ids of blocks, in the same memory where it is the device.
    table = page_table_bytes(inputs) * (2 if on_host else 1)
    pages = _claim(
        "page table",
        Fixed(bytes=table),
        "int32, one row a sequence, one entry a block; full size from the start, since a sequence whose row were too "
        "short could not grow",
    )
    steps = _claim(
        "step inputs",
        Fixed(bytes=step_input_bytes(limits)),
        "ids, positions, slots and row bounds of the largest step; kept, so that captured steps find them in place",
    )
    each = metadata_bytes_per_block(block_tokens=inputs.block_tokens, prefix_caching=limits.prefix_caching)
    books = _claim(
        "block metadata",
        PerBlock(bytes_per_block=each),
        "holders, place and node of each block, and what finds it again; they grow with the pool, so the pool pays",
    )
    return (
        only_if(pages, table, "no layer keeps its past in pages"),
        only_if(steps, not on_host, "made anew in each step, part of the transient"),
        only_if(books, on_host, "kept in host memory"),
        *_no_block(inputs),
        *_host_books(inputs, each),
    )


def _no_block(inputs: ReserveInputs) -> tuple[Claim, ...]:
    """Where the books are priced at all they are priced to the byte."""
    if not inputs.on_host:
        return ()
    cost = Fixed(bytes=DTYPE_BYTES["int32"])
    return (_claim("slot of no block", cost, "rows of page tables name it where they end, so it has a slot as well"),)


def _host_books(inputs: ReserveInputs, each_bytes: int) -> tuple[Claim, ...]:
    """Blocks of the host tier lie beside the device, and what finds them where the engine's objects lie."""
    if not inputs.num_host_blocks:
        return ()
    books = _claim(
        HOST_BOOKS,
        Fixed(bytes=each_bytes * inputs.num_host_blocks),
        "the same for each block of the host tier, which has its full size from the start",
    )
    return (only_if(books, inputs.on_host, "kept in host memory"),)


def _claim(name: str, cost: Fixed | PerBlock, reason: str) -> Claim:
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


RESERVE = Reserve(
    name="tables",
    trigger="always",
    formula="4 * max_batch_size * blocks of one, by group (twice on a host); "
    "24 * (max_num_tokens + max_batch_size + 1); 26 a block and its node, and 4 once",
    lifetime=Lifetime.RESIDENT,
    reference_side=None,
    claims=claims,
)
