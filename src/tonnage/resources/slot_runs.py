"""The slots of one batch: what they must be like, and the runs of neighbours among them."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tonnage.errors import ResourceError

#: Block ids or slots: int32, one dimension.
Ids: TypeAlias = npt.NDArray[np.int32]


def runs(src: Ids, dst: Ids) -> tuple[Ids, Ids, Ids]:
    """First source, first destination and length of every run whose slots follow each other on both sides."""
    order = np.argsort(src, kind="stable")
    src, dst = src[order], dst[order]
    is_first = np.ones(src.size, bool)
    is_first[1:] = (np.diff(src) != 1) | (np.diff(dst) != 1)
    starts = np.flatnonzero(is_first)
    return src[starts], dst[starts], np.diff(starts, append=src.size).astype(np.int32)


def check_slots(src: Ids, num_src: int | None, dst: Ids, num_dst: int | None) -> None:
    """Raise ``ResourceError`` unless both are slots of their pools, as many as of the other, no destination twice."""
    if src.ndim != 1 or src.shape != dst.shape:
        raise ResourceError(f"slots of shape {src.shape} to slots of shape {dst.shape}")
    if not src.size:
        return
    for slots, num_slots in ((src, num_src), (dst, num_dst)):
        least, largest = int(slots.min()), int(slots.max())
        if least < 0 or (num_slots is not None and largest >= num_slots):
            raise ResourceError(f"slot {least if least < 0 else largest} is not one of {num_slots}")
    ordered = np.sort(dst)
    if (ordered[1:] == ordered[:-1]).any():
        raise ResourceError(f"a slot is written twice in one batch: {dst.tolist()}")


def require_disjoint(src: Ids, dst: Ids) -> None:
    if both := set(src.tolist()) & set(dst.tolist()):
        raise ResourceError(f"slot {min(both)} is read and written in one batch, which has no order")
