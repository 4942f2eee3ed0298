"""Giving the tail of an arena back to the device, for whoever needs it, and taking it again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tonnage.buffers.arena import VaArena
from tonnage.errors import BufferInUse, BufferOOM, NotMaterialized


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenBack:
    """What became of a request for memory: ``reason`` is empty exactly where all that was asked was given."""

    asked_bytes: int
    given_bytes: int
    reason: str = ""


def give_back(arena: VaArena, num_bytes: int, *, deadline_s: float, vacate: Callable[[int], int]) -> GivenBack:
    """Unmap up to ``num_bytes`` at the end of what ``arena`` has committed, within ``deadline_s`` seconds from now.

    ``vacate(keep_bytes)`` asks the arena's user to move or drop what lies beyond ``keep_bytes``; it returns the leading
    bytes that it still needs, then or after. Nothing is half done: memory that is still in use when the time is over,
    or that a graph or registration holds, stays as it is. What the user vacated and was not given stays committed.
    """
    until = time.monotonic() + deadline_s
    if num_bytes < 0:
        raise ValueError(f"{num_bytes:,} bytes cannot be given back")
    if arena.path == "static":
        return _given(num_bytes, 0, "it is one plain allocation: this device has no virtual memory")
    if arena.is_asleep:
        return _given(num_bytes, 0, "it sleeps: its memory is given back already")
    before = arena.committed_bytes
    target = max(0, before - num_bytes)
    keep, reasons = _least_to_keep(arena, target, vacate)
    if num_bytes > before:
        reasons.append(f"it has {before:,} bytes")
    left_s = until - time.monotonic()
    if left_s <= 0:
        return _given(num_bytes, 0, f"its user took longer than {deadline_s} s to make room")
    try:
        given = arena.decommit(keep, timeout_s=left_s)
    except BufferInUse:
        return _given(num_bytes, 0, f"work was still running after {deadline_s} s")
    if given < num_bytes and before - given > keep:
        reasons.append("the rest belongs to a larger handle, or the driver kept it")
    return _given(num_bytes, given, "; ".join(reasons))


def take_back(arena: VaArena, num_bytes: int, *, margin_bytes: int = 0, timeout_s: float | None = None) -> int:
    """Commit ``num_bytes`` more, leaving ``margin_bytes`` of the device free; returns ``committed_bytes``.

    Looks before it asks, so that a refusal is clear and costs nothing: raises ``BufferOOM`` with what is free now.
    Somebody may be faster between the look and the commit: then ``BufferOOM`` too, and nothing has changed.
    """
    if arena.is_asleep:
        raise NotMaterialized(f"{arena!r} cannot grow while it sleeps: materialise it first")
    wanted = min(arena.committed_bytes + num_bytes, arena.size_bytes)
    need = wanted - arena.committed_bytes
    free, total = arena.stream.driver.mem_info()
    if need + margin_bytes > free:
        raise BufferOOM(
            size_bytes=need,
            used_bytes=total - free,
            capacity_bytes=total,
            owner=arena.owner,
            stream=arena.stream.bare_handle,
            detail=f"{free:,} bytes are free and {margin_bytes:,} of them are to stay so: others hold what was given "
            "back. Try again when they let go, or ask them to",
        )
    return arena.commit(wanted, timeout_s=timeout_s)


def _least_to_keep(arena: VaArena, target: int, vacate: Callable[[int], int]) -> tuple[int, list[str]]:
    """Leading bytes that cannot go, and why where that is more than ``target``."""
    reasons = []
    needed = vacate(target)
    if needed > target:
        reasons.append(f"its user still needs {needed:,} bytes")
    held = arena.stream.device.graphs.referenced_bytes(arena.address, arena.committed_bytes)
    if held > max(target, needed):
        what = arena.stream.device.graphs.referenced(arena.address + held - 1, 1)
        reasons.append(f"{what}")
    return max(target, needed, held), reasons


def _given(asked_bytes: int, given_bytes: int, reason: str) -> GivenBack:
    return GivenBack(
        asked_bytes=asked_bytes, given_bytes=given_bytes, reason=reason if given_bytes < asked_bytes else ""
    )
