"""What the bookkeeping of a stub takes on the host, by arithmetic, and the refusal of one that the host cannot hold.

A stub computes nothing, so its sizes cost no device memory, and a typing error of a few zeros would only show when the
host runs out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tonnage.errors import DoesNotFit, InvalidSetting
from tonnage.layout import metadata_bytes_per_block, penalty_table_bytes, table_bytes
from tonnage.units import GiB, ceil_div, check_whole, format_bytes, round_down

#: Longest sequence: what a ``config.json`` may say. Tokens of a block: what the planner takes. Blocks: ids are int32,
#: and one of them stands for none.
MOST_SEQ_LEN, MOST_BLOCK_TOKENS, MOST_BLOCKS = 2**31, 2**16, 2**31 - 2
#: Of the host memory that is available, bookkeeping may take one part in so many: the log and the oracle take more.
PARTS_OF_HOST = 2
#: What is taken as available where the host does not tell.
UNTOLD_BYTES = 16 * GiB
#: The queue of what is evicted next: three int64 a block.
_QUEUE_BYTES = 24
#: A row of the batch, of its sampling parameters and of what its sequence holds; measured with tracemalloc on 100,000
#: rows: 330.
_ROW_BYTES = 360
#: KV of a token in the plan: a layer, keys and values, 64 numbers of 4 bytes each.
_KV_TOKEN_BYTES = 512
#: An entry of the shadow, and its two powers and its position, which all rows share: uint64 and int64.
_ENTRY_BYTES, _POSITION_BYTES = 8, 24


@dataclass(frozen=True, slots=True, kw_only=True)
class StubSizes:
    """Sizes that a stub is asked for, in tokens and sequences. ``is_cached``: blocks are found again by their text.
    ``is_shadowed``: the contents of blocks are kept as a number a token."""

    kv_tokens: int
    head_tokens: int
    host_kv_tokens: int
    block_tokens: int
    max_seq_len: int
    max_batch_size: int
    vocab_size: int
    is_cached: bool
    is_shadowed: bool

    @property
    def num_bytes(self) -> int:
        """Bytes on the host once its cache is full."""
        return self.pool_bytes + self.batch_bytes

    @property
    def planned_bytes(self) -> int:
        """Of a device on which no other size than those asked for binds, with room beside them."""
        return 2 * (self.kv_tokens * _KV_TOKEN_BYTES + self.batch_bytes)

    @property
    def num_blocks(self) -> int:
        parts = (self.kv_tokens, self.head_tokens, self.host_kv_tokens)
        return sum(ceil_div(tokens, self.block_tokens) for tokens in parts)

    @property
    def pool_bytes(self) -> int:
        """Of the blocks: the pool's own, those of its head and those of the host tier."""
        each = metadata_bytes_per_block(block_tokens=self.block_tokens, prefix_caching=self.is_cached) + _QUEUE_BYTES
        return self.num_blocks * (each + self.is_shadowed * self.block_tokens * _ENTRY_BYTES)

    @property
    def batch_bytes(self) -> int:
        """Of the running sequences: their rows, two page tables (ids and slots), their penalties, and the
        entries that each wrote."""
        tables = 2 * table_bytes(
            max_batch_size=self.max_batch_size, max_seq_len=self.max_seq_len, block_tokens=self.block_tokens
        )
        width = ceil_div(self.max_seq_len, self.block_tokens) * self.block_tokens
        shadow = self.is_shadowed * width * (self.max_batch_size * _ENTRY_BYTES + _POSITION_BYTES)
        penalties = penalty_table_bytes(max_batch_size=self.max_batch_size, vocab_size=self.vocab_size)
        return self.max_batch_size * _ROW_BYTES + tables + shadow + penalties

    def with_pool(self, kv_tokens: int) -> StubSizes:
        """Another pool, its head and host tier in the same measure."""
        return replace(
            self,
            kv_tokens=kv_tokens,
            head_tokens=self.head_tokens * kv_tokens // self.kv_tokens,
            host_kv_tokens=self.host_kv_tokens * kv_tokens // self.kv_tokens,
        )


def check_sizes(sizes: StubSizes) -> None:
    """Raises ``InvalidSetting`` for sizes that none of the sums take: no whole number, or out of its range."""
    check_whole("kv_tokens", sizes.kv_tokens, 1)
    check_whole("head_tokens", sizes.head_tokens, 0)
    check_whole("host_kv_tokens", sizes.host_kv_tokens, 0)
    check_whole("block_tokens", sizes.block_tokens, 1, MOST_BLOCK_TOKENS)
    check_whole("max_seq_len", sizes.max_seq_len, 1, MOST_SEQ_LEN)
    check_whole("max_batch_size", sizes.max_batch_size, 1)


def check_fits(sizes: StubSizes, *, available_bytes: int | None) -> None:
    """Before anything is allocated: raise ``DoesNotFit`` with what would fit, and ``InvalidSetting`` for more blocks
    than can be numbered. ``available_bytes`` of the host; None where it does not tell."""
    need, have = sizes.num_bytes, (UNTOLD_BYTES if available_bytes is None else available_bytes) // PARTS_OF_HOST
    if need > have:
        whose = "of what this host has available" if available_bytes is not None else "of a host that does not tell"
        raise DoesNotFit(
            f"a stub of {_told(sizes)} does not fit",
            need_bytes=need,
            have_bytes=have,
            need=f"{format_bytes(need)} of host memory for bookkeeping once its cache is full "
            f"({format_bytes(sizes.pool_bytes)} for blocks, {format_bytes(sizes.batch_bytes)} for running sequences)",
            have=f"{format_bytes(have)}, 1/{PARTS_OF_HOST} {whose}",
            remedies=(_remedy(sizes, have),),
            where="host",
        )
    if sizes.num_blocks > MOST_BLOCKS:
        raise InvalidSetting(
            "kv_tokens",
            sizes.kv_tokens,
            f"{sizes.num_blocks:,} blocks, and {MOST_BLOCKS:,} can be numbered",
            remedy="lower kv_tokens, or raise block_tokens",
        )


def _told(sizes: StubSizes) -> str:
    beside = [
        f"{tokens:,} {where}"
        for tokens, where in ((sizes.head_tokens, "in its head"), (sizes.host_kv_tokens, "in its host tier"))
        if tokens
    ]
    pool = f"{sizes.kv_tokens:,} KV tokens" + (f" (and {', '.join(beside)})" if beside else "")
    return f"{pool}, max_seq_len = {sizes.max_seq_len:,} and max_batch_size = {sizes.max_batch_size:,}"


def _remedy(sizes: StubSizes, have: int) -> str:
    """The least change that fits, summed again: a smaller pool where that is enough, else half of the memory for a
    smaller batch, or for shorter sequences too, and the rest for the pool. No sequence is longer than the pool."""
    made = sizes
    if sizes.with_pool(1).num_bytes > have:
        rows = _largest(sizes.max_batch_size, lambda n: replace(sizes, max_batch_size=n).batch_bytes <= have // 2)
        made = replace(sizes, max_batch_size=max(rows, 1))
        if not rows:
            length = _largest(sizes.max_seq_len, lambda n: replace(made, max_seq_len=n).batch_bytes <= have // 2)
            made = replace(made, max_seq_len=length)
    tokens = _largest(sizes.kv_tokens, lambda n: made.with_pool(n).num_bytes <= have)
    if tokens < sizes.kv_tokens:
        tokens = round_down(tokens, sizes.block_tokens)
    if not tokens:
        beside = sizes.head_tokens + sizes.host_kv_tokens
        kept = _largest(beside, lambda n: replace(sizes, head_tokens=0, host_kv_tokens=n).num_bytes <= have)
        return (
            f"lower head_tokens and host_kv_tokens to {kept} together" if kept else "run it where more memory is free"
        )
    made = replace(made.with_pool(tokens), max_seq_len=min(made.max_seq_len, tokens))
    changed = [
        f"{name} to {getattr(made, name)}"
        for name in ("max_batch_size", "max_seq_len", "kv_tokens")
        if getattr(made, name) < getattr(sizes, name)
    ]
    beside = tokens < sizes.kv_tokens and (sizes.head_tokens or sizes.host_kv_tokens)
    return f"lower {', '.join(changed)}" + (", its head and its host tier with it" if beside else "")


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number of at least 1 and at most ``most`` that fits, to two digits below ``most``; 0: none does."""
    if most >= 1 and fits(most):
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return round_down(low, 10 ** max(0, len(str(low)) - 2))
