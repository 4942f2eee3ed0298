"""The devices every contract suite runs over, and how a test reads and writes their bytes.

Sizes in suites are counted in ``page_bytes`` of the device, so that one test serves a small host and a large card.
"""

from __future__ import annotations

import ctypes

import pytest

from tonnage.device.driver import Driver
from tonnage.device.fault import FaultDriver
from tonnage.device.host import HostDriver

PAGE = 64 * 1024
HOST_PAGES = 64
CAPACITY = HOST_PAGES * PAGE


def host(**arguments: object) -> HostDriver:
    return HostDriver(CAPACITY, page_bytes=PAGE, **arguments)  # type: ignore[arg-type]


def cuda() -> Driver:
    from tonnage.device.cuda import CudaDriver

    return CudaDriver(0)


DEVICES = [
    pytest.param(host, id="host"),
    pytest.param(lambda: FaultDriver(host()), id="host under a fault driver that fails nothing"),
    pytest.param(lambda: host(without=frozenset({"pools"})), id="host without pools"),
    pytest.param(lambda: host(without=frozenset({"vmm"})), id="host without virtual memory"),
    pytest.param(lambda: host(without=frozenset({"pools", "vmm", "managed"})), id="host with plain memory only"),
    pytest.param(cuda, id="cuda", marks=pytest.mark.gpu),
]


def read(driver: Driver, addr: int, size: int) -> bytes:
    """The bytes at ``addr``, once all work of the device is done."""
    driver.device_sync()
    staging = driver.host_alloc(size, flags=0)
    try:
        driver.copy(staging, addr, size, stream=0)
        driver.device_sync()
        return ctypes.string_at(staging, size)
    finally:
        driver.host_free(staging)


def write(driver: Driver, addr: int, data: bytes) -> None:
    """``data`` at ``addr``, done when the call returns."""
    staging = driver.host_alloc(len(data), flags=0)
    try:
        ctypes.memmove(staging, data, len(data))
        driver.copy(addr, staging, len(data), stream=0)
        driver.device_sync()
    finally:
        driver.host_free(staging)
