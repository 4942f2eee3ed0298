"""The primary context of a device: current on every thread that calls, lost for good once it is lost.

What is guaranteed about the current context: every call makes ours current first and leaves it so, whatever others
have made current on the thread before. The exception are allocating from a pool and freeing to it on a stream that was
created: a pool and a stream carry their context with them, so these two leave the current one alone, and only where
the driver wants one all the same do they make ours current and ask again.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from tonnage.device.cuda_api import attribute, device_name, device_uuid, load_api, visible_devices
from tonnage.device.machine import host_memory
from tonnage.errors import DeviceLost, DriverError, DriverOOM, DriverUnsupported
from tonnage.units import format_bytes

T = TypeVar("T")

#: Calls that end, or may end, a capture of mode "global" (torch's) with an error when another thread makes them, as it
#: might wait for the capture. Ours never do, and say so; allocating from pools is not among them.
BREAK_CAPTURES = frozenset(
    ("cuMemAlloc", "cuMemAllocManaged", "cuMemFree", "cuMemHostAlloc", "cuMemFreeHost", "cuMemPoolTrimTo",
     "cuMemPoolDestroy", "cuMemPoolGetAttribute", "cuStreamSynchronize", "cuEventSynchronize", "cuEventQuery")
)  # fmt: skip

_alive: weakref.WeakSet[CudaContext] = weakref.WeakSet()


class CudaContext:
    """Retains the primary context of device ``ordinal``; base of ``CudaDriver``."""

    def __init__(self, ordinal: int, *, api: Any = None) -> None:
        self._api = load_api(api)
        self._ordinal = ordinal
        try:
            self._require_ordinal()
            self._device = self._api.call("cuDeviceGet", ordinal)
            self._name, self._uuid = device_name(self._api, self._device), device_uuid(self._api, self._device)
            self._shares_host = bool(attribute(self._api, self._device, "INTEGRATED"))
            self._context = self._api.call("cuDevicePrimaryCtxRetain", self._device)
        except DriverOOM:
            raise
        except DriverError as error:
            # Whatever it is, this device cannot be had now; the code says why.
            raise DriverUnsupported(
                error.call, error.code, error.detail or f"while opening device {ordinal}"
            ) from error
        self._set_current = self._api.module.cuCtxSetCurrent
        self._refusal: DriverError | None = None
        self._lock = threading.RLock()
        _alive.add(self)

    @property
    def ordinal(self) -> int:
        return self._ordinal

    @property
    def uuid(self) -> str:
        """ "GPU-..." or "MIG-...", as NVML and CUDA_VISIBLE_DEVICES write it."""
        return self._uuid

    @property
    def kind(self) -> str:
        return "cuda"

    @property
    def name(self) -> str:
        return self._name

    @property
    def is_lost(self) -> bool:
        """Whether the context is dead, or belongs to the process that we were forked from."""
        return isinstance(self._refusal, DeviceLost)

    def activate(self) -> None:
        """Make the device's primary context current on the calling thread; it stays so."""
        self._enter("activate")

    def mem_info(self) -> tuple[int, int]:
        """(free, total). On a device that shares the host's memory, free is what the system calls available: the driver
        counts page cache as used, which the system gives up when memory is wanted."""
        free, total = (int(each) for each in self._call("cuMemGetInfo"))
        if self._shares_host:
            free = min(total, max(free, host_memory().available_bytes or 0))
        return free, total

    def device_sync(self) -> None:
        self._call("cuCtxSynchronize")

    def _check(self, call: str) -> None:
        """Raise if the device is lost or closed: before any lock, which another thread may have held at a fork."""
        why = self._refusal
        if isinstance(why, DeviceLost):
            raise DeviceLost(call, why.code, f"the device was lost in {why.call}: {why.detail}")
        if why is not None:
            raise DriverError(call, why.code, why.detail)

    def _enter(self, call: str) -> None:
        """Make our context current here, unless the device is lost or closed."""
        if self._refusal is not None:
            self._check(call)
        (status,) = self._set_current(self._context)
        if status:
            raise self._failed("cuCtxSetCurrent", status)

    def _call(self, name: str, *args: Any) -> Any:
        """A function of the driver with our context current; what it returns behind its status."""
        self._enter(name)
        if name in BREAK_CAPTURES:
            return self._guarded(self._relaxed, self._api.call, name, *args)
        return self._guarded(self._api.call, name, *args)

    def _relaxed(self, function: Callable[..., T], *args: Any) -> T:
        """Call it so that it breaks nobody's capture; afterwards the thread is as careful as it was."""
        exchange = self._api.function("cuThreadExchangeStreamCaptureMode")
        status, before = exchange(self._api.module.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        try:
            return function(*args)
        finally:
            if not status:
                exchange(before)

    def _guarded(self, function: Callable[..., T], *args: Any) -> T:
        """Call it; a device that is lost meanwhile is remembered as lost."""
        try:
            return function(*args)
        except DeviceLost as error:
            self._lose(error)
            raise

    def _call_for(self, asked: str, name: str, *args: Any) -> Any:
        """``_call``; running out of memory then says what was asked, what is free, and the total."""
        try:
            return self._call(name, *args)
        except DriverOOM as error:
            raise self._out_of_memory(name, error.code, asked) from error

    def _failed(self, name: str, status: Any, asked: str = "") -> DriverError:
        """The exception for a status that came past ``_call``; a lost device is remembered."""
        error = self._api.error(name, status)
        if isinstance(error, DriverOOM):
            return self._out_of_memory(name, error.code, asked)
        if isinstance(error, DeviceLost):
            self._lose(error)
        return error

    def _out_of_memory(self, name: str, code: str, asked: str) -> DriverOOM:
        try:
            free, total = self.mem_info()
        except DriverError as error:
            return DriverOOM(name, code, f"asked for {asked}; what is free cannot be told: {error}")
        return DriverOOM(name, code, f"asked for {asked}; {free:,} of {total:,} bytes are free on {self._name}")

    def _require_ordinal(self) -> None:
        num_devices = int(self._api.call("cuDeviceGetCount"))
        if not 0 <= self._ordinal < num_devices:
            seen = {0: "none", 1: "one, number 0"}.get(num_devices, f"{num_devices}, numbered from 0")
            raise DriverUnsupported(
                "open",
                "INVALID_DEVICE",
                f"there is no device {self._ordinal}: this process sees {seen}{visible_devices()}",
            )

    def _lose(self, error: DeviceLost) -> None:
        """From now on every call raises ``DeviceLost`` and none reaches the driver."""
        self._set_refusal(
            DeviceLost(error.call, error.code, error.detail or "the context is dead: only a new process can go on")
        )

    def _set_refusal(self, error: DriverError) -> None:
        if not self.is_lost:
            self._refusal = error

    def _forked(self) -> None:
        self._set_refusal(
            DeviceLost(
                "fork", "FORKED", "a CUDA context does not survive a fork: start worker processes with the spawn method"
            )
        )

    def _close_context(self) -> None:
        """Give the context back; every later call raises ``DriverError``. The driver is left alone if that is lost."""
        was_open = self._refusal is None
        self._set_refusal(DriverError("close", "DEINITIALIZED", "the device is closed"))
        if was_open and not sys.is_finalizing():
            self._api.call("cuDevicePrimaryCtxRelease", self._device)


def describe(size: int, what: str = "device memory") -> str:
    """ "5,242,880 bytes (5 MiB) of device memory"."""
    return f"{size:,} bytes ({format_bytes(size)}) of {what}"


def _after_fork() -> None:
    for context in list(_alive):
        context._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
