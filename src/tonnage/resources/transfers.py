"""How much may go over the link to the host: its measured rate, and the part of it that one step may use.

Transfers run beside the kernels but not for nothing: they take a share of the device's memory bandwidth, and what is
evicted in a step must be out before the step may start. So each step has an allowance, and every block that goes out
or comes in is counted against it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tonnage.errors import ResourceError
from tonnage.resources.mover import DeviceMover

#: Slabs of one trial: enough that the cost of asking does not show, 64 MiB of slabs of 2 MiB.
TRIAL_SLABS = 32


class TransferBudget:
    """``take`` grants blocks of ``slab_bytes`` until a step has used up what a link of ``bytes_per_second`` moves in
    ``slice_s`` seconds, both ways together.

    A step may always move one block, however slow the link, so that whoever waits for one gets it some day. A rate of
    infinity grants everything.
    """

    def __init__(self, *, slab_bytes: int, bytes_per_second: float, slice_s: float) -> None:
        if slab_bytes < 1 or not bytes_per_second > 0 or not slice_s > 0:
            raise ResourceError(f"slabs of {slab_bytes} bytes at {bytes_per_second} bytes/s for {slice_s} s a step")
        self.slab_bytes, self.bytes_per_second, self.slice_s = slab_bytes, bytes_per_second, slice_s
        blocks = bytes_per_second * slice_s / slab_bytes
        self.blocks_per_step = max(1, int(min(blocks, sys.maxsize)))
        self._num_left = self.blocks_per_step

    @property
    def num_left(self) -> int:
        """Blocks that may still go in this step."""
        return self._num_left

    def begin_step(self) -> None:
        """A new step: what the last one did not use is lost, for the link was idle then."""
        self._num_left = self.blocks_per_step

    def take(self, num_blocks: int) -> int:
        """How many of ``num_blocks`` may go now; they are counted as gone."""
        if num_blocks < 0:
            raise ResourceError(f"asked to transfer {num_blocks} blocks")
        granted = min(num_blocks, self._num_left)
        self._num_left -= granted
        return granted


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRate:
    """Bytes per second, as measured: to the host and from it."""

    offload: float
    load: float

    @property
    def least(self) -> float:
        """The slower of the two: an allowance by it holds for both ways."""
        return min(self.offload, self.load)


def measure_rate(
    mover: DeviceMover,
    *,
    num_slabs: int = TRIAL_SLABS,
    num_rounds: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> TransferRate:
    """Time real copies each way, the best of ``num_rounds`` after one that is not counted.

    The first slots go out to the first host slots, each as a copy of its own, and come back: the device's bytes are
    as before, what was in those host slots is gone. At start, with nothing else running; the host waits. Raises
    ``ResourceError`` without a host pool, and what the driver raises.
    """
    num_slabs = min(num_slabs, mover.num_slots, mover.num_host_slots)
    if num_slabs < 1 or num_rounds < 1:
        raise ResourceError(f"a rate cannot be measured with {num_slabs} slabs in {num_rounds} rounds")
    slots = np.arange(num_slabs, dtype=np.int32)
    host_slots = slots[::-1].copy()  # against each other, so that no two of them are one copy

    def offload() -> None:
        mover.offload(slots, host_slots)
        mover.sync()

    def load() -> None:
        mover.load(host_slots, slots).wait()

    seconds = {offload: float("inf"), load: float("inf")}
    for number in range(num_rounds + 1):
        for way in (offload, load):
            began = clock()
            way()
            took = max(clock() - began, 1e-9)
            if number:
                seconds[way] = min(seconds[way], took)
    mover.before_launch()
    mover.reset_stats()
    return TransferRate(
        offload=num_slabs * mover.slab_bytes / seconds[offload], load=num_slabs * mover.slab_bytes / seconds[load]
    )
