"""A CUDA device through ``cuda.bindings.driver``.

Importing this works on any machine; making a ``CudaDriver`` where there is none says why there is none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NoReturn

from tonnage.device.copies import Copy, copies
from tonnage.device.cuda_devices import CudaDevice, CudaDevices, cuda_devices
from tonnage.device.cuda_memory import CudaMemory
from tonnage.device.nvml import Nvml
from tonnage.errors import DeviceLost, DriverError, DriverUnsupported

__all__ = ["CudaDevice", "CudaDevices", "CudaDriver", "cuda_devices"]

#: The default stream and its other name: a batch of copies is not taken there.
_LEGACY_STREAMS = (0, 1)

_NO_MULTICAST = (
    "multicast objects are never created on a GPU: on a shared machine one can put the GPUs of the whole host out of "
    "service; only a simulated device makes them"
)


class CudaDriver(CudaMemory):
    """Implements ``Driver`` for device ``ordinal`` of those that this process sees.

    Raises ``DriverUnsupported`` where it cannot be opened: no package, no driver, no such device, or the driver's
    code. ``api`` stands in for the module ``cuda.bindings.driver`` in tests.

    The device's primary context is retained until ``close`` and made current on every thread that calls; it stays
    current there, so a program with several devices sets its own again where it needs it (torch: ``with
    torch.cuda.device``). Copies and fills are checked for their sizes only: on a GPU, touching what is not mapped ends
    the context, after which every call raises ``DeviceLost``. So does every call in a process forked from this one.
    """

    def __init__(self, ordinal: int = 0, *, api: Any = None) -> None:
        super().__init__(ordinal, api=api)

    def __repr__(self) -> str:
        return f"<CudaDriver {self.ordinal}: {self.name}, {self.uuid}>"

    @cached_property
    def nvml(self) -> Nvml:
        """The card's own figures: this process's bytes, and who else is on it."""
        return Nvml(self.uuid)

    def own_bytes(self) -> int | None:
        """By NVML: all memory of this process on the device, torch's and the context's too. None where NVML does not
        tell; ``nvml.reason`` then says why."""
        return self.nvml.own_bytes()

    # data

    def copy(self, dst: int, src: int, size: int, *, stream: int) -> None:
        """Any direction; between host and device asynchronous only where the host memory is pinned."""
        self._check("copy")
        if self._has_bytes("copy", size):
            self._call("cuMemcpyAsync", dst, src, size, self._streams[stream])

    def copy_many(self, dsts: Sequence[int], srcs: Sequence[int], sizes: Sequence[int], *, stream: int) -> None:
        """One call of the driver's where it has one for batches, which takes no legacy stream and no capture; else a
        call for each copy."""
        self._check("copy_many")
        on, batch = self._streams[stream], copies(dsts, srcs, sizes)
        may_be_one = len(batch) > 1 and self._takes_batches and stream not in _LEGACY_STREAMS
        if may_be_one and not self.stream_capturing(stream):
            self.batch_refusal = self._copy_batch(batch, on)
            if not self.batch_refusal:
                return
        for dst, src, size in batch:
            self._call("cuMemcpyAsync", dst, src, size, on)

    #: Why the last batch of copies went one by one although it was tried as one; "" where it was taken.
    batch_refusal = ""

    @cached_property
    def _takes_batches(self) -> bool:
        return hasattr(self._api.module, "cuMemcpyBatchAsync")

    def _copy_batch(self, batch: list[Copy], on: Any) -> str:
        """ "" where the driver took all as one; else why it did not. One that has no such call is not asked again."""
        cuda = self._api.module
        attributes = cuda.CUmemcpyAttributes()
        attributes.srcAccessOrder = cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        dsts, srcs = ([cuda.CUdeviceptr(copy[side]) for copy in batch] for side in (0, 1))
        sizes = [copy[2] for copy in batch]
        try:
            self._call("cuMemcpyBatchAsync", dsts, srcs, sizes, len(batch), [attributes], [0], 1, on)
        except (DriverUnsupported, RuntimeError) as error:  # the bindings raise the latter for what the library lacks
            self._takes_batches = False
            return str(error)
        except DriverError as error:
            if error.code != "INVALID_VALUE":
                raise
            return str(error)  # single copies say which of them is wrong, or do what a batch cannot
        return ""

    def fill(self, dst: int, byte: int, size: int, *, stream: int) -> None:
        """For memory of the device and managed memory."""
        self._check("fill")
        if self._has_bytes("fill", size):
            self._call("cuMemsetD8Async", dst, byte & 0xFF, size, self._streams[stream])

    # multicast

    def multicast_create(self, size: int, *, num_devices: int) -> int:  # noqa: ARG002
        """Raises ``DriverUnsupported``, as its companions do: on a shared machine such an object can put the GPUs of
        the whole host out of service, so only a simulated device makes them."""
        self._no_multicast("multicast_create")

    def multicast_add_device(self, multicast: int) -> None:  # noqa: ARG002
        self._no_multicast("multicast_add_device")

    def multicast_bind(self, multicast: int, handle: int, size: int) -> None:  # noqa: ARG002
        self._no_multicast("multicast_bind")

    def multicast_unbind(self, multicast: int, size: int) -> None:  # noqa: ARG002
        self._no_multicast("multicast_unbind")

    # the end

    def leaks(self) -> tuple[str, ...]:
        """What is alive now, one sentence each: allocations, host memory, handles, reservations."""
        with self._lock:
            return (*self._leaked_memory(), *self._leaked_pages())

    def close(self) -> tuple[str, ...]:
        """Give everything back; returns what was still alive, one sentence each. Closing again does nothing.

        Waits for the device first. A lost device and one whose process is ending are left alone: the driver gives
        back by itself, and asking it then can hang or crash. What cannot be given back is told as well.
        """
        if self._is_closed:
            return ()
        self._is_closed = True
        if self.is_lost or sys.is_finalizing():
            # Without the lock: at a fork or at the end another thread may have died with it.
            leaks = (*self._leaked_memory(), *self._leaked_pages())
            self._close_context()
            return leaks
        with self._lock:
            leaks = self.leaks()
            failed = self._give_everything_back()
            return (*leaks, *failed)

    _is_closed = False

    def _give_everything_back(self) -> list[str]:
        """One attempt at each; the sentences of those that failed. After the device is lost nothing more is asked."""
        failed = []
        for release in self._releases():
            try:
                release()
            except DeviceLost as error:
                failed.append(f"the device was lost while it was closed: {error}")
                break
            except DriverError as error:
                failed.append(f"not given back: {error}")
        try:
            self._close_context()
        except DriverError as error:
            failed.append(f"not given back: {error}")
        return failed

    def _releases(self) -> list[Callable[[], object]]:
        """In an order that works: what is queued is done before anything goes, and nothing goes before its users."""
        call = self._call
        frees = [lambda a=addr: self.pool_free(a, stream=0) for addr in self._pooled]
        return [
            self.device_sync,
            *frees,
            *([self.device_sync] if frees else []),
            *(lambda p=pool: self.pool_destroy(p) for pool in self._pools),
            *(lambda a=addr: self.mem_free(a) for addr in self._plain),
            *(lambda a=addr: self.host_free(a) for addr in self._host),
            *(lambda m=one: self.unmap(m.start, m.size) for one in self._mapped),
            *(lambda r=one: self.va_free(r.start, r.size) for one in self._reserved),
            *(lambda h=h: self.phys_release(h) for h, one in self._handles.items() for _ in range(one.num_references)),
            *(lambda e=event: self.event_destroy(e) for event in self._events),
            *(lambda s=stream: call("cuStreamDestroy", s) for stream in self._own_streams),
        ]

    @staticmethod
    def _has_bytes(call: str, size: int) -> bool:
        if size < 0:
            raise DriverError(call, "INVALID_VALUE", f"{size:,} bytes")
        return size > 0

    def _no_multicast(self, call: str) -> NoReturn:
        self._check(call)
        raise DriverUnsupported(call, "NOT_PERMITTED", _NO_MULTICAST)
