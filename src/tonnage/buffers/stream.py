"""A stream: the order in which a device does what it is asked, and the way to its device and driver."""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.buffers.device import Device
from tonnage.device.driver import Driver


@dataclass(frozen=True, slots=True)
class Stream:
    """Stream ``handle`` of ``device``; handle 0 always exists. Its work is seen by the device's fences."""

    device: Device
    handle: int = 0

    def __post_init__(self) -> None:
        self.device.fences.register(self.handle)

    @classmethod
    def create(cls, device: Device, *, priority: int = 0) -> Stream:
        return cls(device, device.driver.stream_create(priority=priority))

    @property
    def driver(self) -> Driver:
        return self.device.driver

    def sync(self) -> None:
        """Wait until everything asked for on this stream is done."""
        self.driver.stream_sync(self.handle)

    def close(self) -> None:
        """Destroy the stream; not for handle 0."""
        self.device.fences.forget(self.handle)
        self.driver.stream_destroy(self.handle)

    def __repr__(self) -> str:
        return f"<Stream {self.handle:#x} of {self.driver.uuid}>"
