"""The shim for tests, and a stand-in that calls it as torch's allocator does."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import pytest

from tonnage.buffers.shim_build import build_shim
from tonnage.buffers.shim_heaps import Shim, ShimHeap

#: A heap is arithmetic: where nobody looks at the bytes, any address will do.
BASE, PAGE = 2**40, 2**21


@cache
def _built() -> Shim | str:
    built = build_shim()
    return built.reason if built.path is None else Shim(built.path)


def shim_or_skip() -> Shim:
    found = _built()
    if isinstance(found, str):
        pytest.skip(f"no shim: {found}")
    return found


class Torch:
    """What torch does with the two functions of a pool: through pointers, with its signatures."""

    def __init__(self, heap: ShimHeap) -> None:
        library = ctypes.CDLL(str(heap.shim.path))
        alloc, free = (
            ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in (heap.alloc_name, heap.free_name)
        )
        self._alloc: Any = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(alloc)
        self._free: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(free)

    def alloc(self, size: int, *, device: int = 0, stream: int = 0) -> int:
        """The address, or 0 for a refusal."""
        return self._alloc(size, device, stream) or 0

    def free(self, address: int, *, size: int = 0, device: int = 0, stream: int = 0) -> None:
        self._free(address, size, device, stream)
