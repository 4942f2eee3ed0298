"""A driver whose virtual memory is not used: for devices where it misbehaves, and to see how all goes without it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from tonnage.device.decorator import Call, DriverDecorator
from tonnage.device.driver import Capabilities, Driver
from tonnage.errors import DriverUnsupported

_CALLS = frozenset(("va_reserve", "va_free", "phys_create", "phys_release", "map", "unmap", "set_access"))
#: What falls with it.
_BEHIND = ("vmm", "exportable", "multicast")


class WithoutVirtualMemory(DriverDecorator):
    """Says that the device has none, and refuses its calls; ``reason`` is told with both."""

    _reason: str

    def __init__(self, driver: Driver, reason: str) -> None:
        super().__init__(driver)
        self._reason = reason

    def _around(self, call: str) -> Call | None:
        if call == "capabilities":
            return self._capabilities
        return partial(self._refuse, call) if call in _CALLS else None

    def _capabilities(self) -> Capabilities:
        found = self.wrapped.capabilities()
        reasons = {**found.reasons, **dict.fromkeys(_BEHIND, self._reason)}
        return replace(found, vmm=False, exportable=False, multicast=False, reasons=reasons)

    def _refuse(self, call: str, *_: Any, **__: Any) -> NoReturn:
        raise DriverUnsupported(call, "NOT_SUPPORTED", self._reason)
