"""What this process holds of the machine's memory, how to keep its heap small, and how to fence it in.

All figures come from the kernel's own files; no third-party package. Where there is no /proc (macOS, some
sandboxes) ``ProcessMemory.supported`` is False with a reason and every figure is unknown, never a guess.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tonnage.device import _libc
from tonnage.errors import DriverUnsupported

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """One look at this process, in bytes; 0 throughout where ``supported`` is False.

    anon_bytes      private memory: heap, stacks, private copies
    file_bytes      resident pages of mapped files (libraries, memory-mapped weights): the page cache's, not ours
    shmem_bytes     shared memory that is mapped and touched, the host device's pages among it
    resident_bytes  the three together; peak_bytes is its highest since the start or the last ``reset_peak``
    data_bytes      private writable address space, touched or not: what ``fence`` limits

    The kernel keeps these counters per processor and adds them up roughly: expect an error of 128 KiB a processor.
    """

    supported: bool
    reason: str = ""
    anon_bytes: int = 0
    file_bytes: int = 0
    shmem_bytes: int = 0
    resident_bytes: int = 0
    peak_bytes: int = 0
    data_bytes: int = 0

    @property
    def own_bytes(self) -> int | None:
        """Anonymous plus shared memory, or None where it cannot be known."""
        return self.anon_bytes + self.shmem_bytes if self.supported else None

    @property
    def peak_own_bytes(self) -> int | None:
        """The peak without file pages. These are taken as they stand now: too high by what was dropped since."""
        return self.peak_bytes - self.file_bytes if self.supported else None


_FIELDS = {
    "RssAnon": "anon_bytes",
    "RssFile": "file_bytes",
    "RssShmem": "shmem_bytes",
    "VmRSS": "resident_bytes",
    "VmHWM": "peak_bytes",
    "VmData": "data_bytes",
}


def process_memory(*, proc: Path = Path("/proc")) -> ProcessMemory:
    """Read ``proc``/self/status. Never raises."""
    path = proc / "self" / "status"
    try:
        text = path.read_text()
    except OSError as error:
        return ProcessMemory(supported=False, reason=f"{path} cannot be read: {error.strerror}")
    found: dict[str, Any] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name in _FIELDS:
            found[_FIELDS[name]] = int(rest.split()[0]) * 1024
    missing = sorted(name for name, ours in _FIELDS.items() if ours not in found)
    if missing:
        return ProcessMemory(supported=False, reason=f"{path} lacks {', '.join(missing)}")
    return ProcessMemory(supported=True, **found)


def reset_peak(*, proc: Path = Path("/proc")) -> bool:
    """Start ``peak_bytes`` again from what is resident now.

    False: this system does not allow it, and the peak stays the highest since the process started.
    """
    try:
        (proc / "self" / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def trim_heap() -> bool:
    """Give free heap pages back to the system; False where the C library cannot (musl, macOS) or had none."""
    return _libc.malloc_trim()


def settle_heap(threshold_bytes: int) -> bool:
    """Blocks of at least ``threshold_bytes`` come straight from the system and go straight back when freed.

    Without this glibc raises its own threshold up to 32 MiB as blocks are freed, and then keeps and fragments what
    a large step left behind, so that memory measured after it says nothing. The price is a page fault for every
    page of every such block. False where the C library has no such setting; it then behaves as it likes.
    """
    # Both are needed: setting either one stops glibc from moving the thresholds by itself.
    mapped = _libc.mallopt(_M_MMAP_THRESHOLD, threshold_bytes)
    return _libc.mallopt(_M_TRIM_THRESHOLD, threshold_bytes) and mapped


def fence(max_data_bytes: int) -> int:
    """Let private writable memory (``data_bytes``) not pass ``max_data_bytes``; returns the limit before.

    An allocation beyond it fails with an error instead of growing the process: ``MemoryError`` from Python,
    ``RuntimeError`` from torch. The host device's pages are shared memory and do not count; thread stacks do, and
    whole, touched or not. Raises ``DriverUnsupported`` where the kernel does not enforce such a limit, or where the
    hard limit is lower.
    """
    if not sys.platform.startswith("linux"):
        raise DriverUnsupported("fence", "NOT_SUPPORTED", f"{sys.platform} does not limit private memory")
    import resource

    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (max_data_bytes, hard))
    except (ValueError, OSError) as error:
        raise DriverUnsupported("fence", "NOT_SUPPORTED", f"hard limit {hard:,} bytes: {error}") from error
    return before


def unfence(before: int | None = None) -> None:
    """Put back the limit that ``fence`` returned, or raise it as far as the hard limit allows."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard if before is None else before, hard))
