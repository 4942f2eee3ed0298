"""A stream: the order in which a device does what it is asked, and the way to its device and driver."""

from __future__ import annotations

from tonnage.buffers.device import Device
from tonnage.device.driver import Driver


class Stream:
    """Stream ``handle`` of ``device``; handle 0 always exists. Its work is seen by the device's fences.

    ``bare_handle`` is the handle for calls of the driver that tell nobody about it and wait for no other stream.
    ``may_be_captured`` is whether somebody else may capture it: he knows its handle, or it waited for a stream of
    his and so became part of his capture. Not a stream of ``create`` before its ``handle`` is read. Handle 0 always: it
    counts as captured with any stream that it would wait for.
    """

    __slots__ = ("bare_handle", "device", "may_be_captured")

    def __init__(self, device: Device, handle: int = 0) -> None:
        self.device, self.bare_handle, self.may_be_captured = device, handle, True
        device.fences.register(handle)

    @classmethod
    def create(cls, device: Device, *, priority: int = 0) -> Stream:
        made = cls(device, device.driver.stream_create(priority=priority))
        made.may_be_captured = False
        return made

    @property
    def handle(self) -> int:
        """For anybody: torch, a library. From then on each allocation asks whether the stream is being captured."""
        self.may_be_captured = True
        return self.bare_handle

    @property
    def driver(self) -> Driver:
        return self.device.driver

    def sync(self) -> None:
        """Wait until everything asked for on this stream is done."""
        self.driver.stream_sync(self.bare_handle)

    def close(self) -> None:
        """Wait until everything asked for on this stream is done, and destroy it; only what ``create`` made.

        What was recorded on it may still be freed, and memory that was its own is restored on stream 0 from now on.
        Raises ``CaptureError`` during a capture and ``DriverError`` where the driver keeps it; it is as before then.
        A stream made elsewhere is its owner's: see ``Fences.forget``.
        """
        self.device.fences.require_no_capture(f"{self!r} is closed")
        self.sync()
        self.driver.stream_destroy(self.bare_handle)
        self.device.fences.forget(self.bare_handle)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stream):
            return NotImplemented
        return self.device is other.device and self.bare_handle == other.bare_handle

    def __hash__(self) -> int:
        return hash((id(self.device), self.bare_handle))

    def __repr__(self) -> str:
        return f"<Stream {self.bare_handle:#x} of {self.driver.uuid}>"
