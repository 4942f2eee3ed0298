"""Copies and fills between buffers of all kinds.

Where both sides are the host's, it happens here and now, without a look at any stream. Otherwise it is work on the
manager's stream. A copy with pageable memory is waited for: how long the device reads such memory is not told.

A buffer of another manager has its own stream: ours waits for what that was asked until then, and the buffer is noted
as used on ours. What its own stream is asked afterwards waits for nothing: give its manager an event to ``wait`` for.
"""

from __future__ import annotations

import ctypes
from operator import index

from tonnage.buffers.buffer import Buffer
from tonnage.buffers.dlpack import wait_for
from tonnage.buffers.stream import Stream
from tonnage.errors import CaptureError
from tonnage.terms import MemoryKind

_ON_HOST = frozenset((MemoryKind.CPU, MemoryKind.PINNED, MemoryKind.PINNED_POOL))


class Copying:
    """The part of a ``BufferManager`` that moves bytes, on its one ``stream``.

    ``wait`` is an event of the driver that comes first: the host waits for it in a copy between host memories, the
    stream in any other. Without it a pinned buffer that a copy on a stream still fills is read too early.
    """

    stream: Stream

    def copy(self, *, src: Buffer, dst: Buffer, wait: int | None = None) -> None:
        """All of ``src`` to ``dst``, of the same size and dtype (``ValueError``). Zero bytes: nothing is done.

        Raises ``NotMaterialized`` where one of them sleeps, and ``CaptureError`` while the stream of one, not ours, is
        being captured. Where ours is, the copy becomes part of the graph and only what is captured with it is in order.
        """
        if (src.size_bytes, src.dtype) != (dst.size_bytes, dst.dtype):
            raise ValueError(
                f"{src!r} of {src.dtype} is no copy for {dst!r} of {dst.dtype}: sizes and dtypes must match"
            )
        if not src.size_bytes:
            return
        on_host = self._prepare(src, dst)
        self._move(src.address, dst.address, src.size_bytes, on_host=on_host, wait=wait)
        if not on_host and (MemoryKind.CPU in (src.kind, dst.kind) or self._is_elsewhere(src, dst)):
            self.stream.sync()

    def copy_bytes(
        self,
        *,
        src: int,
        dst: int,
        size_bytes: int,
        src_kind: MemoryKind,
        dst_kind: MemoryKind,
        wait: int | None = None,
    ) -> None:
        """Copy between addresses of the given kinds; managed memory goes through the stream. ``ValueError`` for a range
        that cannot be one: a negative size, no address."""
        for address in (src, dst):
            _require_range(address, size_bytes)
        if size_bytes:
            on_host = src_kind in _ON_HOST and dst_kind in _ON_HOST
            self._move(src, dst, size_bytes, on_host=on_host, wait=wait)
            if not on_host and MemoryKind.CPU in (src_kind, dst_kind):
                self.stream.sync()

    def set_zero(self, buffer: Buffer, *, wait: int | None = None) -> None:
        """Every byte 0: at once in host memory, in stream order elsewhere."""
        self.set_mem(buffer, 0, wait=wait)

    def set_mem(self, buffer: Buffer, byte: int, *, wait: int | None = None) -> None:
        """Every byte ``byte`` (0 to 255, else ``ValueError``). Raises ``NotMaterialized`` where the buffer sleeps."""
        _require_byte(byte)
        if buffer.size_bytes:
            self._fill(buffer.address, byte, buffer.size_bytes, on_host=self._prepare(buffer), wait=wait)

    def set_bytes(self, address: int, byte: int, size_bytes: int, *, kind: MemoryKind, wait: int | None = None) -> None:
        """Fill ``size_bytes`` at an address of that kind. Raises ``ValueError`` as ``copy_bytes`` does."""
        _require_byte(byte)
        _require_range(address, size_bytes)
        if size_bytes:
            self._fill(address, byte, size_bytes, on_host=kind in _ON_HOST, wait=wait)

    def _prepare(self, *buffers: Buffer) -> bool:
        """Whether the host may do it; else the host's buffers are noted as used on our stream."""
        for buffer in buffers:
            buffer.require_usable()
        if all(buffer.is_host_side for buffer in buffers):
            return True
        strangers = [buffer for buffer in buffers if buffer.stream != self.stream]
        if strangers:
            self._come_after(strangers)
        for buffer in buffers:
            if not self._is_elsewhere(buffer):
                buffer.note_stream_use(self.stream)
        return False

    def _is_elsewhere(self, *buffers: Buffer) -> bool:
        """On another device, whose streams ours cannot wait for, nor they for it: there the host waits."""
        return any(buffer.stream.driver is not self.stream.driver for buffer in buffers)

    def _come_after(self, buffers: list[Buffer]) -> None:
        """Our stream waits for theirs, all of which are asked first whether they are being captured."""
        driver, own = self.stream.driver, self.stream.bare_handle
        if driver.stream_capturing(own):
            return  # an event from outside the capture would end it
        others: dict[int, Buffer] = {}
        for buffer in buffers:
            if buffer.is_host_side and not buffer.used_on:
                continue  # no stream ever had it
            if self._is_elsewhere(buffer):
                buffer.stream.sync()
            elif buffer.stream.bare_handle != own:
                others[buffer.stream.bare_handle] = buffer
        for other, buffer in others.items():
            if driver.stream_capturing(other):
                raise CaptureError(f"{buffer!r} is copied while its stream is being captured: copy it before or after")
        for other in others:
            wait_for(driver, waiting=self.stream.handle, on=other)

    def _move(self, src: int, dst: int, size_bytes: int, *, on_host: bool, wait: int | None) -> None:
        self._await(wait, on_host=on_host)
        if on_host:
            ctypes.memmove(dst, src, size_bytes)
        else:
            self.stream.driver.copy(dst, src, size_bytes, stream=self.stream.bare_handle)

    def _fill(self, address: int, byte: int, size_bytes: int, *, on_host: bool, wait: int | None) -> None:
        self._await(wait, on_host=on_host)
        if on_host:
            ctypes.memset(address, byte, size_bytes)
        else:
            self.stream.driver.fill(address, byte, size_bytes, stream=self.stream.bare_handle)

    def _await(self, event: int | None, *, on_host: bool) -> None:
        if event is None:
            return
        if on_host:
            self.stream.driver.event_sync(event)
        else:
            self.stream.driver.stream_wait(self.stream.handle, event)


def _require_byte(byte: int) -> None:
    if not 0 <= index(byte) <= 255:
        raise ValueError(f"{byte} is no byte: 0 to 255")


def _require_range(address: int, size_bytes: int) -> None:
    if index(size_bytes) < 0:
        raise ValueError(f"{size_bytes:,} bytes at {address:#x}: a size is not negative")
    if size_bytes and not 0 < address <= 2**64 - size_bytes:
        raise ValueError(f"{size_bytes:,} bytes at {address:#x}: no such range of addresses")
