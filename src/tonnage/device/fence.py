"""Fences of several engines in one process: the limit is the process's, so the lowest one standing holds."""

from __future__ import annotations

import threading

from tonnage.device.process import fence, process_memory, unfence

_lock = threading.Lock()
_standing: dict[int, int] = {}  # fence -> bytes of private writable memory
_before: list[int] = []  # the limit as it was before the first fence
_names = iter(range(2**62))


def raise_fence(room_bytes: int, *, least_bytes: int) -> int:
    """Let this process's private memory grow by ``room_bytes`` from now; returns the fence's name for ``lift_fence``.

    The system limits address space, touched or not. What is mapped but not resident now (stacks, trimmed heap) could
    be touched without passing the limit, so it is taken off the room; but ``least_bytes`` are always granted, or the
    process could not do what it is meant to. Raises ``DriverUnsupported`` where there is no such limit.
    """
    memory = process_memory()
    untouched = max(0, memory.data_bytes - memory.anon_bytes)
    limit = memory.data_bytes + max(least_bytes, room_bytes - untouched)
    with _lock:
        before = fence(min([limit, *_standing.values()]))
        if not _standing:
            _before[:] = [before]
        _standing[name := next(_names)] = limit
    return name


def is_fenced() -> bool:
    """Whether a fence stands in this process: all that is taken from now on must fit inside it."""
    return bool(_standing)


def lift_fence(name: int) -> None:
    """Take one fence down, in any order; the last one gives back the limit that was there before the first."""
    with _lock:
        if _standing.pop(name, None) is None:
            return
        if _standing:
            fence(min(_standing.values()))
        else:
            unfence(_before[0])
