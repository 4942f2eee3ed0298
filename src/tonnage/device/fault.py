"""Any driver, with failures on demand: how the tests show that nothing is lost when a call fails."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from tonnage.device.decorator import CALLS, Call, DriverDecorator
from tonnage.device.driver import Driver
from tonnage.errors import DriverError, DriverOOM

#: The calls that may fail for want of something.
ALLOCATING = frozenset(
    ("va_reserve", "phys_create", "map", "set_access", "pool_create", "pool_alloc", "mem_alloc", "host_alloc",
     "managed_alloc", "stream_create", "event_create", "phys_export", "phys_import", "multicast_create",
     "multicast_add_device", "multicast_bind")
)  # fmt: skip
#: The calls that give things back; they fail only when a test says so.
RELEASING = frozenset(
    ("va_free", "phys_release", "unmap", "pool_destroy", "pool_free", "mem_free", "host_free", "multicast_unbind")
)
#: The calls that wait for the device, and so hear of what went wrong on it since the last one.
WAITING = frozenset(("stream_sync", "event_sync", "device_sync"))


class FaultDriver(DriverDecorator):
    """Fails call number ``nth`` (from 1) among ``calls``, and what else ``arm`` is told.

    ``num_calls`` counts the calls that could have failed, ``num_injected`` those that did, ``by_call`` the former by
    name. A failing call does not reach the wrapped driver.
    """

    _first: int | None
    _owed: str
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
        code: str = "INJECTED",
    ) -> None:
        super().__init__(driver)
        self._default_error, self._default_code = error, code
        self.arm(nth, forever=forever, calls=calls)

    def arm(
        self,
        nth: int | None,
        *,
        forever: bool = False,
        times: int = 1,
        calls: frozenset[str] = ALLOCATING,
        error: type[DriverError] | None = None,
        code: str | None = None,
        in_rollback: bool = False,
        late: bool = False,
    ) -> None:
        """Set it again and start the counts anew; ``nth=None`` fails nothing.

        forever      call ``nth`` fails and all after it; otherwise it and the ``times`` - 1 that follow it
        error, code  what is raised; None for what the driver was made with
        in_rollback  the first call that gives something back after the failure fails too, once
        late         the call is done, and the next one that waits for the device fails in its place
        """
        self._set(calls, error, code)
        self._first = nth
        self._last = float("inf") if forever or nth is None else nth + times - 1
        self._rollback, self._late = "armed" if in_rollback else "", late

    def arm_random(
        self,
        probability: float,
        *,
        seed: int,
        calls: frozenset[str] = ALLOCATING,
        error: type[DriverError] | None = None,
        code: str | None = None,
    ) -> None:
        """Each of ``calls`` fails with ``probability``; the same seed fails the same ones."""
        self._set(calls, error, code)
        self._probability, self._random = probability, random.Random(seed)

    def count(self, call: str) -> None:
        """One more call that could fail; raises when it is its turn."""
        if self._owed and call in WAITING:
            which, self._owed = self._owed, ""
            self._inject(call, which, self._error)
        if call not in self._calls:
            if self._rollback == "due" and call in RELEASING:
                self._rollback = "spent"
                self._inject(call, "the first call of the roll-back", DriverError)
            return
        self.num_calls += 1
        self.by_call[call] += 1
        if self._is_due():
            self._rollback = self._rollback and "due"
            if self._late:
                self._owed = f"{call}, call {self.num_calls} of those that can fail, failed on the device"
            else:
                self._inject(call, f"call {self.num_calls} of those that can fail", self._error)

    def _around(self, call: str) -> Call | None:
        watched = self._calls | (RELEASING if self._rollback else set()) | (WAITING if self._late else set())
        if call not in watched:
            return None

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count(call)
            return getattr(self.wrapped, call)(*args, **kwargs)

        return counted

    def _set(self, calls: frozenset[str], error: type[DriverError] | None, code: str | None) -> None:
        if unknown := calls - CALLS:
            raise ValueError(f"no driver has the calls {sorted(unknown)}")
        self._calls, self._error, self._code = calls, error or self._default_error, code or self._default_code
        self._first, self._last, self._probability = None, 0.0, 0.0
        self._rollback = ""  # then armed, due (the call before it failed) and spent
        self._late, self._owed = False, ""
        self.num_calls, self.num_injected, self.by_call = 0, 0, Counter()
        self._forget()

    def _is_due(self) -> bool:
        if self._first is not None:
            return self._first <= self.num_calls <= self._last
        return self._probability > 0 and self._random.random() < self._probability

    def _inject(self, call: str, which: str, error: type[DriverError]) -> None:
        self.num_injected += 1
        raise error(call, self._code, which)
