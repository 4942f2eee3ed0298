"""A stream: the order in which a device does what it is asked, and the way to its driver."""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.device.driver import Driver


@dataclass(frozen=True, slots=True)
class Stream:
    """Stream ``handle`` of the device behind ``driver``; handle 0 always exists."""

    driver: Driver
    handle: int = 0

    @classmethod
    def create(cls, driver: Driver, *, priority: int = 0) -> Stream:
        return cls(driver, driver.stream_create(priority=priority))

    def sync(self) -> None:
        """Wait until everything asked for on this stream is done."""
        self.driver.stream_sync(self.handle)

    def close(self) -> None:
        """Destroy the stream; not for handle 0."""
        self.driver.stream_destroy(self.handle)

    def __repr__(self) -> str:
        return f"<Stream {self.handle} of {self.driver.uuid}>"
