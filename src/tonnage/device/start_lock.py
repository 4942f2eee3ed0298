"""One start at a time on a device: two that measure and take what is free at once would count on the same bytes."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tonnage.errors import UserError

#: A first start that compiles takes a minute or two; a few may queue.
TIMEOUT_S = 600.0
_POLL_S = 0.1


@contextmanager
def start_lock(
    device_uuid: str,
    directory: Path,
    *,
    timeout_s: float = TIMEOUT_S,
    on_wait: Callable[[str], None] = lambda _: None,
) -> Iterator[None]:
    """Hold the lock of that device, a file of ``directory``, inside; the kernel gives it back if this process dies.

    ``on_wait`` is told once, in a few words, who holds it when it is not free. Raises ``UserError`` that names the
    holder when it is not free after ``timeout_s``, and ``OSError`` where the file cannot be made.
    """
    path = directory / f"start-{device_uuid}.lock"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _take(handle, device_uuid, timeout_s=timeout_s, on_wait=on_wait)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(handle, 0)
            # Said outright: a process forked meanwhile (a compiler's worker) has the file open as well.
            fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        os.close(handle)


def _take(handle: int, device_uuid: str, *, timeout_s: float, on_wait: Callable[[str], None]) -> None:
    until, has_told = time.monotonic() + timeout_s, False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(handle)
        else:
            return
        if not has_told:
            on_wait(f"wait for {holder}")
            has_told = True
        if time.monotonic() >= until:
            raise UserError(
                f"Another engine is starting on {device_uuid}: {holder} has held its start lock for {timeout_s:g} s",
                need="the device for itself while it measures what is free there",
                remedy="wait until that one serves, or end it",
            )
        time.sleep(_POLL_S)


def _holder(handle: int) -> str:
    """Who wrote his number into the file."""
    told = os.pread(handle, 32, 0).decode(errors="replace").strip()
    return f"process {told}" if told.isdigit() else "another process"
