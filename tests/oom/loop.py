"""The OOM loop: do something again and again, and let call 1 fail, then 2, then 3 ... until there is none left to fail.

``FaultDriver`` fails calls of a device, ``FailTorch`` operations of torch. What they fail for must come out as one of
our exceptions or not at all; what must hold afterwards is for the caller to assert at every point.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from tonnage.device.driver import Driver

#: Every call of a device that does something: those that allocate, that give back, and that run work.
EVERY_CALL = frozenset(
    name for name, member in vars(Driver).items() if callable(member) and not name.startswith("_")
) - {"activate", "capabilities", "mem_info", "own_bytes", "pool_stats", "probe_again", "stream_capturing"}

CPU_REFUSAL = (
    "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."
)


def num_points(attempt: Callable[[int], int]) -> int:
    """The number of points reached by ``attempt(nth)``, which fails call ``nth`` and returns how many it failed."""
    for nth in count(1):
        if attempt(nth) == 0:
            return nth - 1
    raise AssertionError("unreachable")


class FailTorch(TorchDispatchMode):
    """The nth torch operation fails for want of memory, or it and all after it, as torch's own allocator would."""

    def __init__(self, nth: int, *, forever: bool, error: Callable[[], Exception] | None = None) -> None:
        super().__init__()
        self.nth, self.forever, self.num_calls, self.num_injected = nth, forever, 0, 0
        self._error = error or (lambda: RuntimeError(CPU_REFUSAL))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += 1
        if self.num_calls == self.nth or (self.forever and self.num_calls > self.nth):
            self.num_injected += 1
            raise self._error()
        return func(*args, **(kwargs or {}))
