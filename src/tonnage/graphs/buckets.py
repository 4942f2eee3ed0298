"""Lists of decode batch sizes as the reference makes, cuts and rounds them (spec/runtime.md 6.1).

A step of ``b`` sequences replays the graph of a size that is at least ``b``, padded. Which sizes there are decides how
much is padded, and what the graphs take.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from tonnage.errors import InvalidSetting
from tonnage.units import parse_count

#: What every padded list begins with: 1, 2, 4, and every eighth up to here.
EIGHTHS_END = 128
#: More graphs than anybody captures: each costs megabytes and a fraction of a second.
MOST_GRAPHS = 1024


def doubling(max_batch_size: int) -> tuple[int, ...]:
    """The reference's ``x2``: every eighth up to 128, then powers of two, then ``max_batch_size`` itself."""
    return _closed(_head(), _powers(2 * EIGHTHS_END, max_batch_size), max_batch_size)


def every(step: int, max_batch_size: int) -> tuple[int, ...]:
    """The reference's ``+64`` and ``+8``: every eighth up to 128, then every ``step``, then ``max_batch_size``."""
    assert step >= 1
    return _closed(_head(), range(EIGHTHS_END + step, max_batch_size + 1, step), max_batch_size)


def unpadded(max_batch_size: int) -> tuple[int, ...]:
    """The reference's list where steps are not padded, so that only these sizes replay: 1 to 31, then powers of two."""
    return _closed(range(1, 32), _powers(32, max_batch_size), max_batch_size)


#: Lists by the names that users give them.
GENERATORS: Mapping[str, Callable[[int], tuple[int, ...]]] = MappingProxyType(
    {"x2": doubling, "+64": lambda most: every(64, most), "+8": lambda most: every(8, most)}
)
#: Words for no graphs at all.
NONE_WORDS = ("off", "none")


def read_sizes(text: str, *, max_batch_size: int, knob: str) -> tuple[int, ...]:
    """``off``, ``x2``, ``+64``, ``+8``, or numbers between commas, as sizes in ascending order without repeats.

    Raises ``InvalidSetting`` naming ``knob`` for anything else, and for a size that no step could replay.
    """
    word = text.strip().lower()
    if word in NONE_WORDS:
        return ()
    if word in GENERATORS:
        return GENERATORS[word](max_batch_size)
    remedy = f"write {', '.join(GENERATORS)}, off, or sizes such as 1,2,4,8"
    if not word[:1].isdigit():
        raise InvalidSetting(knob, text, "not a list of batch sizes", remedy=remedy)
    sizes = tuple(sorted({parse_count(part, knob=knob) for part in word.split(",")}))
    if sizes[-1] > max_batch_size:
        raise InvalidSetting(
            knob,
            text,
            f"{sizes[-1]} is above max_batch_size = {max_batch_size}, so no step could replay it",
            remedy=f"leave out sizes above {max_batch_size}, or raise max_batch_size",
        )
    if len(sizes) > MOST_GRAPHS:
        raise InvalidSetting(knob, f"{len(sizes)} sizes", f"more than {MOST_GRAPHS}", remedy="name fewer sizes")
    return sizes


def check_largest(sizes: Sequence[int], *, max_batch_size: int, knob: str) -> None:
    """Where a list and a largest size are both given they must agree: raises ``InvalidSetting`` otherwise."""
    if sizes and max(sizes) != max_batch_size:
        raise InvalidSetting(
            knob,
            ",".join(map(str, sizes)),
            f"ends with {max(sizes)}, while the largest is said to be {max_batch_size}",
            remedy="give the list alone, or end it with the largest",
        )


def filter_sizes(
    sizes: Sequence[int], *, max_batch_size: int, max_num_tokens: int, tokens_per_request: int, is_padded: bool
) -> list[int]:
    """Sizes that a step can reach, by the reference's rule at start-up.

    ``sizes`` ascending. The limit is ``min(max_batch_size, max_num_tokens // tokens_per_request)``. Sizes are kept up
    to the first that exceeds it; there the limit itself joins, if steps are padded and it is not there already.
    """
    limit = min(max_batch_size, max_num_tokens // tokens_per_request)
    kept: list[int] = []
    if limit < 1:
        return kept
    for size in sizes:
        if size > limit:
            if is_padded and kept[-1:] != [limit]:
                kept.append(limit)
            break
        kept.append(size)
    return kept


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


def _head() -> tuple[int, ...]:
    return (1, 2, 4, *range(8, EIGHTHS_END + 1, 8))


def _powers(first: int, max_batch_size: int) -> list[int]:
    sizes = []
    while first <= max_batch_size:
        sizes.append(first)
        first *= 2
    return sizes


def _closed(head: Sequence[int], tail: Sequence[int], max_batch_size: int) -> tuple[int, ...]:
    """Both parts up to ``max_batch_size``, which always has a graph itself."""
    assert max_batch_size >= 1
    return tuple(sorted({size for size in (*head, *tail, max_batch_size) if size <= max_batch_size}))
