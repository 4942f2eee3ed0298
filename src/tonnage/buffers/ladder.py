"""What is tried when there is no memory, one rung after the other, and what is said when nothing helped."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tonnage.device.machine import host_memory
from tonnage.errors import BufferOOM, CaptureError, DriverOOM
from tonnage.terms import MemoryKind

if TYPE_CHECKING:
    from tonnage.buffers.buffer import Buffer
    from tonnage.buffers.device import Device
    from tonnage.buffers.kinds import Source
    from tonnage.ledger import Ledger

NUM_TOP_OWNERS = 5
#: Bytes that no address space has; asked for so many, calls of the system or a driver fail in ways of their own.
TOO_MANY = 2**57
_ON_HOST = frozenset((MemoryKind.CPU, MemoryKind.PINNED, MemoryKind.PINNED_POOL))


def climb(source: Source, buffer: Buffer, size_bytes: int, error: DriverOOM | BufferOOM) -> None:
    """Free what can be freed, then try once more. Raises ``BufferOOM``, which tells of every rung."""
    told = [str(error), *(_host_rungs(source) if source.on_host else _device_rungs(source, size_bytes))]
    try:
        source.obtain(buffer, size_bytes)
    except (DriverOOM, BufferOOM) as last:
        told.append(f"the retry failed: {last}")
        raise refusal(source, size_bytes, owner=buffer.account.owner, told=told) from last


def require_possible(source: Source, size_bytes: int, *, owner: str) -> None:
    """Raise ``BufferOOM`` for more than anything could have, without a look at what there is."""
    if size_bytes >= TOO_MANY:
        told = [f"nothing was tried: no address space has {TOO_MANY:,} bytes"]
        raise refusal(source, size_bytes, owner=owner, told=told)


def refusal(source: Source, size_bytes: int, *, owner: str, told: list[str]) -> BufferOOM:
    """Who asked for how much, how full it is and of what, and what was tried."""
    used, capacity, reserved = _fill_of(source)
    return BufferOOM(
        size_bytes=size_bytes,
        used_bytes=used,
        capacity_bytes=capacity,
        owner=owner,
        detail="; ".join(told),
        reserved_bytes=reserved,
        stream=source.handle,
        top_owners=top_owners(source.ledger, on_host=source.on_host),
    )


def top_owners(ledger: Ledger, *, on_host: bool) -> tuple[tuple[str, int], ...]:
    """(owner, bytes) of the largest holders on that side, largest first."""
    held: Counter[str] = Counter()
    for entry in ledger.snapshot().entries:
        if (entry.memory in _ON_HOST) == on_host and entry.physical_bytes > 0:
            held[entry.owner] += entry.physical_bytes
    return tuple(held.most_common(NUM_TOP_OWNERS))


def sweep(device: Device) -> int:
    """Close buffers that nobody closed; returns how many. What fails is logged by them and tried again next time.

    During a capture they wait until it is over: no free must become part of it.
    """
    num_closed, orphans = 0, device.orphans
    if orphans:
        try:
            device.fences.require_no_capture("forgotten buffers are closed")
        except CaptureError:
            return 0
    for _ in range(len(orphans)):
        try:
            buffer = orphans.popleft()
        except IndexError:  # another thread was faster
            break
        if buffer.close_orphan():
            num_closed += 1
        else:
            orphans.append(buffer)  # its finaliser has run and runs no second time
    return num_closed


def relieve(device: Device, size_bytes: int) -> Iterator[str]:
    """What may bring ``size_bytes`` of device memory back whoever wants them, one rung a step."""
    if device.orphans:
        yield f"{sweep(device)} forgotten buffers closed"
    yield f"our pool gave {device.pool.trim(0):,} bytes"
    yield f"{device.fences.reap()} waiting frees done"
    relief = device.pressure.relieve(size_bytes)
    yield from relief.told or ("nobody registered to give memory back",)


def _device_rungs(source: Source, size_bytes: int) -> Iterator[str]:
    yield f"{sweep(source.stream.device)} forgotten buffers closed"
    source.stream.sync()
    yield f"stream {source.handle:#x} synchronised"
    yield from relieve(source.stream.device, size_bytes)


def _host_rungs(source: Source) -> Iterator[str]:
    pinned = source.stream.device.pinned
    yield f"{sweep(source.stream.device)} forgotten buffers closed"
    source.stream.sync()
    yield f"stream {source.handle:#x} synchronised"
    yield f"the pinned pool gave {pinned.trim():,} bytes"
    if source.kind is not MemoryKind.CPU:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        yield f"locked memory is limited to {limit:,} bytes" if limit >= 0 else "locked memory has no limit here"


def _fill_of(source: Source) -> tuple[int, int, int | None]:
    """Used, capacity and reserved by our pool, in bytes, of the side the memory is on."""
    device = source.stream.device
    if not source.on_host:
        free, total = device.driver.mem_info()
        reserved = None if device.pool.handle is None else device.pool.stats().reserved_bytes
        return total - free, total, reserved
    host = host_memory()
    total, free = host.total_bytes or 0, host.available_bytes or 0
    return max(0, total - free), total, device.pinned.stats().reserved_bytes
