"""Lists of decode batch sizes by name, and how they are cut and looked up (spec/runtime.md 6.1).

A step of ``b`` sequences replays the graph of a size that is at least ``b``, padded. Which sizes there are decides how
much is padded, and what the graphs take.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

#: What every padded list of the reference begins with: 1, 2, 4, and every eighth up to here.
EIGHTHS_END = 128
#: Sizes behind the eighths that a list has at most, up to 65,000 sequences and more: the list of a slip of the finger
#: would have no end.
MOST_SIZES = 4096
#: The list that engines commonly capture goes on in eighths up to here, and then in sixteenths.
COMMON_EIGHTHS_END = 256


def default_sizes(max_batch_size: int) -> tuple[int, ...]:
    """The common list, which is ours where nobody chose: 1, 2, 4, every eighth up to 256, then every sixteenth."""
    tail = range(COMMON_EIGHTHS_END + 16, max_batch_size + 1, 16)
    return _closed(_head(COMMON_EIGHTHS_END), tail, max_batch_size)


def doubling(max_batch_size: int) -> tuple[int, ...]:
    """The reference's ``x2``: every eighth up to 128, then powers of two, then ``max_batch_size`` itself."""
    tail, size = [], 2 * EIGHTHS_END
    while size <= max_batch_size:
        tail.append(size)
        size *= 2
    return _closed(_head(EIGHTHS_END), tail, max_batch_size)


def every(step: int, max_batch_size: int) -> tuple[int, ...]:
    """The reference's ``+64`` and ``+8``: every eighth up to 128, then every ``step``, then ``max_batch_size``."""
    assert step >= 1
    return _closed(_head(EIGHTHS_END), range(EIGHTHS_END + step, max_batch_size + 1, step), max_batch_size)


#: The reference's lists by the names that users give them.
GENERATORS: Mapping[str, Callable[[int], tuple[int, ...]]] = MappingProxyType(
    {"x2": doubling, "+64": lambda most: every(64, most), "+8": lambda most: every(8, most)}
)


def filter_sizes(
    sizes: Sequence[int], *, max_batch_size: int, max_num_tokens: int, tokens_per_request: int, is_padded: bool
) -> tuple[int, ...]:
    """Sizes that a step can reach, by the reference's rule at start-up.

    ``sizes`` ascending. The limit is ``min(max_batch_size, max_num_tokens // tokens_per_request)``. Sizes are kept up
    to the first that exceeds it; there the limit itself joins, if steps are padded and it is not there already.
    """
    limit = min(max_batch_size, max_num_tokens // tokens_per_request)
    first_above = next((place for place, size in enumerate(sizes) if size > limit), len(sizes))
    return resolve_sizes(sizes[: first_above + 1], limit=limit, pads_to_limit=is_padded)


def resolve_sizes(sizes: Sequence[int], *, limit: int, pads_to_limit: bool) -> tuple[int, ...]:
    """The same idea for a limit met at run time: sizes up to it, and the limit itself where it cut one off.

    ``sizes`` ascending; the limit joins only if ``pads_to_limit`` and it is above 0.
    """
    kept = tuple(size for size in sizes if size <= limit)
    is_cut = len(kept) < len(sizes)
    return (*kept, limit) if pads_to_limit and is_cut and limit > 0 and kept[-1:] != (limit,) else kept


def round_up(sizes: Sequence[int], batch_size: int) -> int | None:
    """The smallest of the ascending ``sizes`` that is at least ``batch_size``; None beyond the last: eager."""
    place = bisect_left(sizes, batch_size)
    return sizes[place] if place < len(sizes) else None


def _head(eighths_end: int) -> tuple[int, ...]:
    return (1, 2, 4, *range(8, eighths_end + 1, 8))


def _closed(head: Sequence[int], tail: Sequence[int], max_batch_size: int) -> tuple[int, ...]:
    """Both parts up to ``max_batch_size``, which always has a graph itself; of the tail ``MOST_SIZES``."""
    assert max_batch_size >= 1
    return tuple(sorted({size for size in (*head, *tail[:MOST_SIZES], max_batch_size) if size <= max_batch_size}))
