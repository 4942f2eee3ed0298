"""The tiers behind the device: how large V2 makes the one in host memory when nobody said."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

#: Shares of free host memory and of what may be pinned.
HOST_SHARE, PINNED_SHARE = Fraction(1, 2), Fraction(4, 5)


def auto_host_bytes(
    *, device_quota_bytes: int, free_host_bytes: int, num_local_ranks: int, pinnable_bytes: int | None
) -> int:
    """V2's host tier: no more than the device's quota, half of this rank's part of free memory, and most of what may
    be pinned (``RLIMIT_MEMLOCK``; None: no limit)."""
    limits = [device_quota_bytes, int(Fraction(free_host_bytes, num_local_ranks) * HOST_SHARE)]
    if pinnable_bytes is not None:
        limits.append(int(pinnable_bytes * PINNED_SHARE))
    return min(limits)


def agreed_host_bytes(per_rank: Sequence[int]) -> int:
    """The tier of every rank: that of the poorest."""
    return min(per_rank)


def host_blocks(host_bytes: int, *, bytes_per_token: int, block_tokens: int) -> int:
    """V1's blocks on the host."""
    return host_bytes // bytes_per_token // block_tokens
