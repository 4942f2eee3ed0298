"""The C library's memory calls with plain ints: what the standard library does not offer at a chosen address.

Failures raise ``OSError`` with the errno. Calls that a C library lacks (musl has no ``mallopt``) answer False.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

PROT_NONE, PROT_READ_WRITE = 0, 3
MAP_SHARED, MAP_PRIVATE, MAP_FIXED = 0x01, 0x02, 0x10
# The four below have these numbers on x86-64 and AArch64 Linux, the only systems where the host device exists.
MAP_ANONYMOUS, MAP_NORESERVE = 0x20, 0x4000
MADV_POPULATE_WRITE = 23
FALLOC_PUNCH_KEEP_SIZE = 0x03

_FAILED = ctypes.c_void_p(-1).value
_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def mmap(addr: int, size: int, *, prot: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    """The address of a new mapping; ``addr`` counts only with MAP_FIXED."""
    if not 0 < size < 2**63:  # ctypes would take the lowest 64 bits of it
        raise OSError(errno.ENOMEM, f"{size:,} bytes are more than there can be addresses")
    got: int | None = _libc.mmap(addr or None, size, prot, flags, fd, offset)
    if got is None or got == _FAILED:
        raise _error()
    return got


def munmap(addr: int, size: int) -> None:
    _check(_libc.munmap(addr, size))


def mprotect(addr: int, size: int, prot: int) -> None:
    _check(_libc.mprotect(addr, size, prot))


def reserve(size: int, *, align: int) -> int:
    """Address space alone: nothing can be read there. ``size`` and ``align`` are multiples of the system's page."""
    room = size + align
    base = mmap(0, room, prot=PROT_NONE, flags=MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)
    start = (base + align - 1) // align * align
    # Mappings come aligned to a page only, so reserve too much and give both ends back.
    if start > base:
        munmap(base, start - base)
    if base + room > start + size:
        munmap(start + size, base + room - start - size)
    return start


def close_range(addr: int, size: int) -> None:
    """Whatever was mapped there is gone, the reservation stays: a plain munmap would let others move in."""
    flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED
    mmap(addr, size, prot=PROT_NONE, flags=flags)


def populate(addr: int, size: int) -> None:
    """Fault every page in now. Kernels before 5.14 do it at first touch instead."""
    if _libc.madvise(addr, size, MADV_POPULATE_WRITE) != 0:
        error = _error()
        if error.errno != errno.EINVAL:
            raise error


def punch_hole(fd: int, offset: int, size: int) -> None:
    """Give a file's pages back to the system; its size stays and the place reads zero."""
    fallocate = getattr(_libc, "fallocate64", None) or _libc.fallocate
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    _check(fallocate(fd, FALLOC_PUNCH_KEEP_SIZE, offset, size))


def mallopt(parameter: int, value: int) -> bool:
    """Whether the C library knows the parameter and took the value."""
    call = getattr(_libc, "mallopt", None)
    return call is not None and call(parameter, value) == 1


def malloc_trim() -> bool:
    """Give the free top and the free pages of the C heap back; whether anything was given."""
    call = getattr(_libc, "malloc_trim", None)
    return call is not None and call(0) == 1


def _check(result: int) -> None:
    if result != 0:
        raise _error()


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
