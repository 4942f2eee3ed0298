"""What simulated devices of one process share: memory that reaches across them, and multicast objects over them.

``HostFabric`` plays the link between GPUs. Devices made with the same fabric import each other's exported memory
through real file descriptors, and a write to the address of a multicast object goes out to all memory bound to it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from tonnage.errors import DriverError


@dataclass(slots=True)
class Physical:
    """``size`` bytes at ``offset`` of file ``fd``; ``free`` gives them back once nobody holds them any more."""

    size: int
    fd: int
    offset: int
    free: Callable[[Physical], None]
    exportable: bool = False
    num_holders: int = 1

    def drop(self) -> None:
        if self.num_holders == 1:
            self.free(self)  # may raise, and is then tried again
        self.num_holders -= 1

    def write(self, data: bytes, at: int) -> None:
        """Into the file itself, so that it is seen wherever the memory is mapped."""
        view = memoryview(data)
        while view:
            num_written = os.pwrite(self.fd, view, self.offset + at)
            view, at = view[num_written:], at + num_written


@dataclass(slots=True)
class Multicast:
    """An address that stands for memory of ``num_devices`` devices at once; it has no bytes of its own.

    ``fd`` names it to the devices that import it. ``bound`` is the memory of each device, by its ordinal.
    """

    size: int
    fd: int
    num_devices: int
    exportable: bool = True
    num_holders: int = 1
    devices: set[int] = field(default_factory=set)
    bound: dict[int, tuple[Physical, int]] = field(default_factory=dict)

    def drop(self) -> None:
        self.num_holders -= 1
        if self.num_holders == 0:
            for memory, _ in self.bound.values():
                memory.drop()
            self.bound.clear()
            os.close(self.fd)

    def add(self, device: int) -> None:
        if device in self.devices or len(self.devices) == self.num_devices:
            raise DriverError(
                "multicast_add_device",
                "INVALID_DEVICE",
                f"device {device} is one of {sorted(self.devices)} already, or they are the {self.num_devices} asked",
            )
        self.devices.add(device)

    def bind(self, device: int, memory: Physical, size: int) -> None:
        if len(self.devices) < self.num_devices:
            raise DriverError(
                "multicast_bind", "ILLEGAL_STATE", f"{len(self.devices)} of {self.num_devices} devices were added"
            )
        if device not in self.devices or device in self.bound:
            raise DriverError("multicast_bind", "INVALID_VALUE", f"device {device} is not added, or bound already")
        if not memory.exportable:
            raise DriverError("multicast_bind", "INVALID_VALUE", "the memory was not created exportable")
        if not 0 < size <= min(self.size, memory.size):
            told = f"{size:,} bytes of {memory.size:,}, into {self.size:,}"
            raise DriverError("multicast_bind", "INVALID_VALUE", told)
        memory.num_holders += 1
        self.bound[device] = memory, size

    def unbind(self, device: int, size: int) -> None:
        found = self.bound.get(device)
        if found is None or found[1] != size:
            raise DriverError("multicast_unbind", "INVALID_VALUE", f"device {device} has no {size:,} bytes bound")
        del self.bound[device]
        found[0].drop()

    def write(self, data: bytes, at: int) -> None:
        """To every device; all must have bound the bytes that are written."""
        reached = [memory for memory, size in self.bound.values() if at + len(data) <= size]
        if len(reached) < self.num_devices:
            raise DriverError(
                "copy", "ILLEGAL_ADDRESS", f"{len(reached)} of {self.num_devices} devices have bound this memory"
            )
        for memory in reached:
            memory.write(data, at)


class HostFabric:
    """One per group of simulated devices; a device that is given none has one to itself, without multicast.

    ``lock`` is the lock of all its devices: memory of one is freed when the last of the others lets go of it.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._exported: dict[tuple[int, int], Physical | Multicast] = {}

    def export(self, memory: Physical | Multicast) -> int:
        """A descriptor of its own for ``memory``; whoever asked closes it."""
        fd = os.dup(memory.fd)
        self._exported = {name: one for name, one in self._exported.items() if one.num_holders}
        self._exported[_identity(fd)] = memory
        return fd

    def find(self, fd: int, size: int) -> Physical | Multicast:
        """What ``fd`` was made for, while somebody still holds it. Raises ``DriverError``."""
        try:
            found = self._exported.get(_identity(fd))
        except OSError as error:
            raise DriverError("phys_import", "INVALID_VALUE", f"descriptor {fd}: {error.strerror}") from error
        # A descriptor does not keep memory alive here as it does on a GPU: nothing tells us when it is closed.
        if found is None or found.num_holders == 0:
            raise DriverError("phys_import", "INVALID_VALUE", f"descriptor {fd} names no memory of this fabric")
        if found.size != size:
            raise DriverError("phys_import", "INVALID_VALUE", f"the memory has {found.size:,} bytes, not {size:,}")
        return found


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
