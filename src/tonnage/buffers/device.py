"""What all buffers of one device share: its driver, the fences over its streams, and the pools behind them."""

from __future__ import annotations

import threading
from collections import deque
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from tonnage.buffers.fences import Fences
from tonnage.buffers.graph_ranges import GraphRanges
from tonnage.device.driver import Driver

if TYPE_CHECKING:
    from tonnage.buffers.buffer import Buffer
    from tonnage.buffers.pinned_pool import PinnedPool
    from tonnage.buffers.pool import DevicePool
    from tonnage.buffers.pressure import Pressure
    from tonnage.buffers.virtual import VirtualMemory


T = TypeVar("T")


class _once(cached_property[T]):
    """Made by the first thread that asks, and by it alone; Python's own takes no lock from 3.12 on.

    A finaliser that asks while it is being made makes one too: the first that is there is everybody's.
    """

    def __get__(self, device: Any, owner: type | None = None) -> T:  # type: ignore[override]
        with device._lock:
            parts = vars(device)
            if self.attrname not in parts:
                made = self.func(device)
                parts.setdefault(self.attrname, made)
            found: T = parts[self.attrname]
            return found


class Device:
    """One per driver, made by whoever opens the device and passed on through ``Stream``; there is no global one.

    Parts are made when first asked for: a program that never uses pinned memory pays nothing for it. ``graphs`` knows
    what captured graphs replay over and what is registered by physical page; what is captured there, the fences heed.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._lock = threading.RLock()
        self.graphs = GraphRanges()
        self.fences = Fences(driver, self.graphs)
        self.orphans: deque[Buffer] = deque()  # dropped and never closed: whoever asks for memory next closes them

    def __repr__(self) -> str:
        return f"<Device {self.driver.uuid}>"

    @_once
    def pool(self) -> DevicePool:
        """The private stream-ordered pool, or what stands in for one where the device has none."""
        from tonnage.buffers.pool import DevicePool

        return DevicePool(self.driver)

    @_once
    def pinned(self) -> PinnedPool:
        """Pinned host memory, kept and handed out again."""
        from tonnage.buffers.pinned_pool import PinnedPool

        return PinnedPool(self)

    @_once
    def pressure(self) -> Pressure:
        """Who can give memory back when it runs out."""
        from tonnage.buffers.pressure import Pressure

        return Pressure()

    @_once
    def virtual(self) -> VirtualMemory:
        """Memory with tags that can be released and materialised at the same addresses."""
        from tonnage.buffers.virtual import VirtualMemory

        return VirtualMemory(self)
