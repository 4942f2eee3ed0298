"""Any driver, with failures on demand: how the tests show that nothing is lost when an allocation fails."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tonnage.device.driver import Driver
from tonnage.errors import DriverError, DriverOOM

#: The calls that may fail for want of something.
ALLOCATING = frozenset(
    ("va_reserve", "phys_create", "map", "set_access", "pool_create", "pool_alloc", "mem_alloc", "host_alloc",
     "managed_alloc", "stream_create", "event_create")
)  # fmt: skip
#: The calls that give things back; they fail only when a test says so.
RELEASING = frozenset(("va_free", "phys_release", "unmap", "pool_destroy", "pool_free", "mem_free", "host_free"))


class FaultDriver:
    """Fails call number ``nth`` (from 1) among ``calls``: that one alone, or with ``forever`` it and all after it.

    It has every method of the driver it wraps and passes all other calls on; ``num_calls`` counts those that could
    have failed, ``num_injected`` those that did, ``by_call`` both by name. A failing call does not reach the driver.
    ``arm`` sets it again and starts the counts anew; ``nth=None`` fails nothing.
    """

    num_calls: int
    num_injected: int
    by_call: Counter[str]

    def __init__(
        self,
        driver: Driver,
        nth: int | None = None,
        *,
        forever: bool = False,
        calls: frozenset[str] = ALLOCATING,
        error: type[DriverError] = DriverOOM,
    ) -> None:
        self.wrapped, self._error = driver, error
        self.arm(nth, forever=forever, calls=calls)

    def arm(self, nth: int | None, *, forever: bool = False, calls: frozenset[str] = ALLOCATING) -> None:
        self._nth, self._forever, self._calls = nth, forever, calls
        self.num_calls, self.num_injected, self.by_call = 0, 0, Counter()

    def __getattr__(self, name: str) -> Any:
        # Every method is the wrapped driver's: a driver may have more than the protocol asks for.
        found = getattr(self.wrapped, name)
        if name not in self._calls:
            return found

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._count(name)
            return found(*args, **kwargs)

        return counted

    def _count(self, call: str) -> None:
        self.num_calls += 1
        self.by_call[call] += 1
        if self._nth is None or self.num_calls < self._nth:
            return
        if self.num_calls == self._nth or self._forever:
            self.num_injected += 1
            raise self._error(call, "INJECTED", f"call {self.num_calls} of those that can fail")
