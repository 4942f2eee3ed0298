"""One buffer: a range of one kind of memory, with a size that may change and a single owner."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Any, Self

from tonnage.buffers import dlpack
from tonnage.buffers.memory import Exports
from tonnage.buffers.stream import Stream
from tonnage.layout import DTYPE_BYTES
from tonnage.ledger import Account
from tonnage.terms import MemoryKind

if TYPE_CHECKING:
    from tonnage.buffers.kinds import Source

_log = logging.getLogger(__name__)


def num_bytes_of(shape: int | Sequence[int], dtype: str) -> tuple[int, tuple[int, ...] | None]:
    """Bytes, and the shape where one was given. Raises ``ValueError`` for negative sizes and unknown types."""
    element_bytes = DTYPE_BYTES.get(dtype)
    if element_bytes is None:
        raise ValueError(f"no dtype {dtype!r}: one of {', '.join(DTYPE_BYTES)}")
    try:
        sizes, is_shape = _sizes_of(shape)
    except TypeError:
        raise ValueError(f"a buffer of {shape!r} elements: sizes are integers, a shape is a sequence of them") from None
    if min(sizes, default=0) < 0:
        raise ValueError(f"a buffer of {shape} elements")
    return math.prod(sizes) * element_bytes, sizes if is_shape else None


def _sizes_of(shape: int | Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """The sizes, and whether they are a shape. Integers of others (numpy) are made Python's, which never overflow."""
    if hasattr(shape, "__index__"):
        try:
            return (index(shape),), False
        except TypeError:  # an array of numpy has the method, and refuses unless it is a single number
            pass
    return tuple(map(index, shape)), True  # type: ignore[arg-type]


class Buffer:
    """``size_bytes`` at ``address``, out of ``capacity_bytes`` of memory. Made by a ``BufferManager``; close it once.

    ``address`` is 0 while the size is 0, whatever the capacity. ``dtype`` is a name of ``DTYPE_BYTES``; ``shape`` and
    ``num_elements`` count elements of it. Not thread-safe. ``with`` it to have it closed. One that is dropped without
    ``close`` is closed when memory of its device is next asked for, by whichever manager, with a warning in the log.

    ``account``, ``base``, ``held``, ``physical_bytes`` and ``used_on`` are for the room's own use.
    """

    __slots__ = (
        "_exports", "_shape", "_source", "account", "base", "capacity_bytes", "dtype", "held", "physical_bytes",
        "size_bytes", "used_on",
    )  # fmt: skip

    _exports: Exports | None
    _shape: tuple[int, ...] | None
    _source: Source
    account: Account
    base: int
    capacity_bytes: int
    dtype: str
    held: Any
    physical_bytes: int
    size_bytes: int
    used_on: tuple[int, ...]

    @classmethod
    def made(cls, source: Source, account: Account, size_bytes: int, dtype: str, shape: tuple[int, ...] | None) -> Self:
        """One with memory from ``source``; raises what ``Source.fill`` does. (An ``__init__`` would cost more.)"""
        buffer = cls()
        buffer.base = buffer.size_bytes = buffer.capacity_bytes = 0
        buffer._source, buffer.account, buffer.dtype, buffer._shape = source, account, dtype, shape
        buffer.used_on, buffer._exports = (), None
        if size_bytes:
            source.fill(buffer, size_bytes)
        return buffer

    def __repr__(self) -> str:
        return f"<Buffer {self.kind} {self.size_bytes:,} bytes ({self.path}) at {self.address:#x} on {self.stream!r}>"

    @property
    def address(self) -> int:
        return self.base if self.size_bytes else 0

    @property
    def stream(self) -> Stream:
        return self._source.stream

    @property
    def kind(self) -> MemoryKind:
        return self._source.kind

    @property
    def path(self) -> str:
        """How the memory is got: "virtual", "pool", "graph", "synchronous", "managed", "host" or "host pool"."""
        return self._source.path

    @property
    def num_elements(self) -> int:
        return self.size_bytes // DTYPE_BYTES[self.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_elements,) if self._shape is None else self._shape

    @property
    def usable_bytes(self) -> int:
        return self.size_bytes

    @property
    def exports(self) -> Exports:
        if self._exports is None:
            self._exports = Exports(on_host=self._source.on_host)
        return self._exports

    @property
    def was_exported(self) -> bool:
        return self._exports is not None

    @property
    def is_host_side(self) -> bool:
        """Whether the host may touch it here and now: host memory, and managed memory that no stream ever used."""
        if self.kind is MemoryKind.MANAGED:
            return not self.used_on and self._exports is None
        return self._source.on_host

    def require_usable(self) -> None:
        """Raise ``NotMaterialized`` while the memory sleeps."""
        if self.base:
            self._source.require_usable(self)

    def resize(self, num_elements: int) -> None:
        """``num_elements`` of ``dtype``. Within the capacity only the size changes. Beyond it the contents are lost.

        The new memory comes from where the old one came, and may lie elsewhere. When it cannot be had
        (``BufferOOM``), the buffer is empty and may be resized again. Raises ``BufferInUse`` while a tensor looks.
        """
        self._resize(num_elements, keeps_shape=False)

    def reshape(self, shape: Sequence[int]) -> None:
        """Resize to the elements of ``shape``. Raises as ``resize`` does."""
        self._resize(shape, keeps_shape=True)

    def record_stream(self, stream: Stream | int) -> None:
        """Work on ``stream`` uses the memory: a later free or reuse waits for what it has been asked until then."""
        handle = stream if isinstance(stream, int) else stream.bare_handle
        self.stream.device.fences.register(handle)
        if handle not in self.used_on:
            self.used_on = (*self.used_on, handle)

    def note_stream_use(self, stream: Stream) -> None:
        """A copy on ``stream`` touches it: the memory must outlive that, as it does by itself where the free is work of
        that same stream."""
        handle = stream.bare_handle
        is_in_order = self._source.in_order and handle == self._source.handle
        if not is_in_order and handle not in self.used_on:
            self.used_on = (*self.used_on, handle)

    def close(self) -> None:
        """Give the memory back. Closing again does nothing.

        Raises ``BufferInUse`` while a tensor over it is alive, ``CaptureError`` during a capture, and ``DriverError``
        where the driver keeps it; the buffer is then as before.
        """
        if self.base:
            if self._exports is not None:
                self._exports.require_none(self)
            self._source.give(self)
            if self.used_on:
                self.used_on = ()
        self.size_bytes = self.capacity_bytes = 0
        if self._shape is not None:
            self._shape = None

    release = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close_orphan(self) -> bool:
        """Close without raising; whether that worked. A failed free is logged and the memory stays booked."""
        _log.warning("%r was never closed", self)
        try:
            self.close()
        except Exception:  # noqa: BLE001 - nobody is there to be told
            _log.exception("%r could not be closed", self)
            return False
        return True

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.device_of(self)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """For ``from_dlpack`` of torch, numpy, cupy: the memory itself, with ``shape`` and ``dtype``."""
        self.require_usable()
        return dlpack.exported(
            self,
            shape=self.shape,
            dtype=self.dtype,
            stream=stream,
            max_version=max_version,
            dl_device=dl_device,
            copy=copy,
        )

    def __del__(self) -> None:
        # May run anywhere, inside the driver too: leave the work to the manager, and nothing to a dying interpreter.
        if self.base and not sys.is_finalizing():
            self._source.orphans.append(self)

    def _resize(self, wanted: int | Sequence[int], *, keeps_shape: bool) -> None:
        size_bytes, sizes = num_bytes_of(wanted, self.dtype)
        if size_bytes > self.capacity_bytes:
            self.close()
            self._source.fill(self, size_bytes)
        self.size_bytes, self._shape = size_bytes, sizes if keeps_shape else None
