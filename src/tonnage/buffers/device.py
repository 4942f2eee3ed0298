"""What all buffers of one device share: its driver, the fences over its streams, and the pools behind them."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from tonnage.buffers.fences import Fences
from tonnage.device.driver import Driver

if TYPE_CHECKING:
    from tonnage.buffers.pinned_pool import PinnedPool
    from tonnage.buffers.pool import DevicePool
    from tonnage.buffers.pressure import Pressure
    from tonnage.buffers.virtual import VirtualMemory


class Device:
    """One per driver, made by whoever opens the device and passed on through ``Stream``; there is no global one.

    Parts are made when first asked for: a program that never uses pinned memory pays nothing for it.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.fences = Fences(driver)

    def __repr__(self) -> str:
        return f"<Device {self.driver.uuid}>"

    @cached_property
    def pool(self) -> DevicePool:
        """The private stream-ordered pool, or what stands in for one where the device has none."""
        from tonnage.buffers.pool import DevicePool

        return DevicePool(self.driver)

    @cached_property
    def pinned(self) -> PinnedPool:
        """Pinned host memory, kept and handed out again."""
        from tonnage.buffers.pinned_pool import PinnedPool

        return PinnedPool(self)

    @cached_property
    def pressure(self) -> Pressure:
        """Who can give memory back when it runs out."""
        from tonnage.buffers.pressure import Pressure

        return Pressure()

    @cached_property
    def virtual(self) -> VirtualMemory:
        """Memory with tags that can be released and materialised at the same addresses."""
        from tonnage.buffers.virtual import VirtualMemory

        return VirtualMemory(self)
