"""Several copies asked for at once: what a batch must be like, whatever the device."""

from __future__ import annotations

from collections.abc import Sequence

from tonnage.errors import DriverError

#: (destination, source, bytes)
Copy = tuple[int, int, int]


def copies(dsts: Sequence[int], srcs: Sequence[int], sizes: Sequence[int]) -> list[Copy]:
    """The copies of a batch that copy anything. Raises ``DriverError`` where they are no batch."""
    if not len(dsts) == len(srcs) == len(sizes):
        told = f"{len(dsts)} destinations, {len(srcs)} sources, {len(sizes)} sizes"
        raise DriverError("copy_many", "INVALID_VALUE", told)
    if any(size < 0 for size in sizes):
        raise DriverError("copy_many", "INVALID_VALUE", f"{min(sizes):,} bytes")
    return [one for one in zip(dsts, srcs, sizes, strict=True) if one[2]]


def clash(batch: Sequence[Copy]) -> int | None:
    """An address that one copy writes and another reads or writes too, so that their order would show; None if none."""
    spans = sorted(
        [(dst, dst + size, True) for dst, _, size in batch] + [(src, src + size, False) for _, src, size in batch]
    )
    written_to = touched_to = 0
    for start, end, is_write in spans:
        if start < (touched_to if is_write else written_to):
            return start
        touched_to = max(touched_to, end)
        if is_write:
            written_to = max(written_to, end)
    return None
