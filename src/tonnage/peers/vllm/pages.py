"""Pages of equal size, and groups of as many layers: what vLLM cuts its pool into.

One block belongs to one group, and holds one page of each of the group's layers. So all pages have one size, and all
groups as many layers; the last group of a kind is filled up with layers that do not exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd

from tonnage.peers.vllm import eras
from tonnage.peers.vllm.kept import Keeps, Kept, kept_layers
from tonnage.peers.vllm.setup import Setup
from tonnage.peers.vllm.sharing import check_kinds, token_ranks
from tonnage.units import ceil_div, round_up

#: An attention block of a hybrid is a multiple of so many tokens, as its kernels want.
HYBRID_ALIGNMENT_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Groups of one kind: ``num_groups`` of them, whose pages stand for ``block_tokens`` tokens of a sequence: those
    that a layer keeps, times the ranks that divide them."""

    keeps: Keeps
    num_groups: int
    block_tokens: int
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """``block_bytes``: of one block, all layers of its group together. ``padding_layers`` do not exist."""

    block_bytes: int
    groups: tuple[Group, ...]
    padding_layers: int = 0

    @property
    def num_groups(self) -> int:
        return sum(group.num_groups for group in self.groups)

    @property
    def block_tokens(self) -> int:
        """Of the smallest block that holds tokens: what the log multiplies by."""
        return min(group.block_tokens for group in self.groups)

    @property
    def is_uniform(self) -> bool:
        return len(self.groups) == 1 and self.groups[0].keeps is Keeps.ALL

    @property
    def has_states(self) -> bool:
        return any(group.keeps is Keeps.STATE for group in self.groups)

    @property
    def bytes_per_token(self) -> Fraction | None:
        """What a pool is divided by to tell slots; of all groups at full length where there are several."""
        return Fraction(self.block_bytes * self.num_groups, self.block_tokens)


def pages_of(setup: Setup) -> Pages | None:
    """The pages of this rank; None where the cache is of a kind that is not known here."""
    kept = kept_layers(setup)
    if not kept:
        return None
    if not _has_groups(setup):
        kept = tuple(_at_full_length(each) for each in kept)
    ranks = token_ranks(setup)
    if ranks > 1:
        check_kinds(setup, kept)
    if all(each.keeps is Keeps.ALL for each in kept):
        tokens = setup.block_tokens
        block_bytes = tokens * sum(each.num_bytes * each.num_layers for each in kept)
        groups = (Group(keeps=Keeps.ALL, num_groups=1, block_tokens=tokens),)
        return _divided(Pages(block_bytes=block_bytes, groups=groups), ranks)
    return _divided(_grouped(setup, kept), ranks)


def _divided(pages: Pages, ranks: int) -> Pages:
    """Where ranks divide the tokens of a sequence, a block of one stands for those of all; a state is whole on each."""
    if ranks == 1:
        return pages
    groups = tuple(
        group if group.keeps is Keeps.STATE else replace(group, block_tokens=group.block_tokens * ranks)
        for group in pages.groups
    )
    return replace(pages, groups=groups)


def _has_groups(setup: Setup) -> bool:
    is_off = bool(setup.launch.get("disable_hybrid_kv_cache_manager", False))
    return setup.is_v1 and eras.is_from(setup.launch.version, eras.WINDOW_GROUPS) and not is_off


def _at_full_length(kept: Kept) -> Kept:
    if kept.keeps is Keeps.STATE:
        return kept
    return Kept(keeps=Keeps.ALL, num_bytes=kept.num_bytes, window=None, num_layers=kept.num_layers)


def _grouped(setup: Setup, kept: Sequence[Kept]) -> Pages:
    tokens = _block_tokens(setup, kept)
    page_bytes = max(_page_bytes(each, tokens) for each in kept)
    size = group_layers([each.num_layers for each in kept], setup)
    groups = tuple(
        Group(
            keeps=each.keeps,
            num_groups=ceil_div(each.num_layers, size),
            block_tokens=tokens if each.keeps is Keeps.STATE else _tokens_of(each, page_bytes, tokens),
            window=each.window,
        )
        for each in kept
    )
    padding = sum(group.num_groups * size - each.num_layers for group, each in zip(groups, kept, strict=True))
    return Pages(block_bytes=page_bytes * size, groups=groups, padding_layers=padding)


def group_layers(numbers: Sequence[int], setup: Setup) -> int:
    """Layers of one group: as many as the rarest kind has, or as the commonest where it has few more."""
    least, most = min(numbers), max(numbers)
    version = setup.launch.version
    if eras.is_from(version, eras.MORE_PADDED_GROUPS):
        return most if 2 * most < 3 * least else least
    if eras.is_from(version, eras.PADDED_GROUPS):
        return most if 4 * most < 5 * least else least
    return least


def _block_tokens(setup: Setup, kept: Sequence[Kept]) -> int:
    """Of attention: as asked, and where there are states so many that a page holds one."""
    state = max((each.num_bytes for each in kept if each.keeps is Keeps.STATE), default=0)
    rates = [each.num_bytes for each in kept if each.keeps is not Keeps.STATE]
    if not state or not rates:
        return setup.block_tokens
    step = max(HYBRID_ALIGNMENT_TOKENS, setup.block_tokens - setup.block_tokens % HYBRID_ALIGNMENT_TOKENS)
    return max(setup.block_tokens, round_up(ceil_div(state, max(rates)), step))


def _page_bytes(kept: Kept, block_tokens: int) -> int:
    return kept.num_bytes if kept.keeps is Keeps.STATE else kept.num_bytes * block_tokens


def _tokens_of(kept: Kept, page_bytes: int, block_tokens: int) -> int:
    """A smaller page takes more tokens where that makes it as large as the largest, else it is filled up."""
    factor, rest = divmod(page_bytes, kept.num_bytes * block_tokens)
    return block_tokens * factor if not rest else block_tokens * max(1, gcd(factor, 2 ** factor.bit_length()))


def request_blocks(pages: Pages, setup: Setup, num_tokens: int) -> int:
    """Blocks that one sequence of so many tokens holds at most, in all groups."""
    return sum(group.num_groups * _blocks_in(group, setup, num_tokens) for group in pages.groups)


def _blocks_in(group: Group, setup: Setup, num_tokens: int) -> int:
    if group.keeps is Keeps.STATE:
        return 1 + setup.num_drafts + setup.caches_states
    if group.window is None:
        return ceil_div(num_tokens, group.block_tokens)
    if group.keeps is Keeps.CHUNK:
        return ceil_div(min(group.window + setup.batched_tokens, num_tokens), group.block_tokens)
    return ceil_div(min(group.window - 1 + setup.batched_tokens, num_tokens), group.block_tokens) + 1


def longest(pages: Pages, setup: Setup, num_blocks: int) -> int:
    """Tokens of the longest sequence that so many blocks hold: by halving, as the engine does; 0 where none fits."""
    low, high = 0, setup.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if request_blocks(pages, setup, middle) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low


def concurrency(pages: Pages, setup: Setup, num_blocks: int, max_model_len: int) -> Fraction:
    """Sequences of full length that so many blocks hold."""
    return Fraction(max(0, num_blocks), max(1, request_blocks(pages, setup, max_model_len)))


def logged_tokens(pages: Pages, setup: Setup, num_blocks: int, max_model_len: int) -> int:
    """What the log calls the size of the cache: slots (blocks over groups), later concurrency times length."""
    if setup.is_v1 and eras.is_from(setup.launch.version, eras.TOKENS_BY_LENGTH):
        return int(concurrency(pages, setup, num_blocks, max_model_len) * max_model_len)
    return num_blocks // pages.num_groups * pages.block_tokens
