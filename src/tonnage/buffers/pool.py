"""The private stream-ordered pool of a device, or what stands in for one where the device has none."""

from __future__ import annotations

import logging
import threading

from tonnage.device.driver import Driver, PoolStats
from tonnage.errors import DeviceLost, DriverError, DriverOOM

_log = logging.getLogger(__name__)
_NOTHING = PoolStats(used_bytes=0, reserved_bytes=0, used_high_bytes=0, reserved_high_bytes=0)


class DevicePool:
    """Made when first asked for; nobody but our buffers draws from it. It keeps what is freed until it is trimmed.

    Where the device has no pools, or making one failed, that is remembered: statistics are 0, trimming does nothing,
    and buffers take plain memory, whose free waits for the device. ``handle`` is None then, and before the first use.
    """

    __slots__ = ("_absent", "_driver", "_lock", "handle")

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.RLock()  # a finaliser that allocates may come in the middle
        self._absent: str | None = None
        self.handle: int | None = None

    def __repr__(self) -> str:
        return f"<DevicePool of {self._driver.uuid}: {self._absent or self.handle or 'not made yet'}>"

    @property
    def absent(self) -> str | None:
        """Why there is no pool: call and code, or the attribute; None where there is one or nobody asked yet."""
        return self._absent

    def ensure(self) -> int | None:
        """The pool's handle, made now if need be, or None where there is none. Raises ``DeviceLost``.

        A device that cannot have pools is remembered as such; one that is merely full is asked again next time.
        """
        if self.handle is None and self._absent is None:
            with self._lock:
                if self.handle is None and self._absent is None:
                    self._make()
        return self.handle

    def reset_pool_probe(self) -> None:
        """Forget that there is no pool, so that the next allocation tries again; a pool that exists stays."""
        with self._lock:
            if self._absent is not None:
                self._absent = None
                self._driver.probe_again()

    def stats(self) -> PoolStats:
        """What the driver knows without waiting for anything: its used bytes fall when it notices a finished free."""
        return _NOTHING if self.handle is None else self._driver.pool_stats(self.handle)

    def reset_high(self) -> None:
        """The high marks start again from what is held now."""
        if self.handle is not None:
            self._driver.pool_reset_high(self.handle)

    def trim(self, keep_bytes: int) -> int:
        """Give free memory back as long as ``keep_bytes`` stay reserved; returns the bytes given back.

        A hint: what was freed on a stream that has not got there yet still counts as used, so synchronise first.
        """
        if self.handle is None:
            return 0
        before = self.stats().reserved_bytes
        self._driver.pool_trim(self.handle, keep_bytes)
        return max(0, before - self.stats().reserved_bytes)

    def _make(self) -> None:
        capabilities = self._driver.capabilities()
        if not capabilities.pools:
            self._absent = capabilities.reasons.get("pools", "the device has no memory pools")
        else:
            try:
                made = self._driver.pool_create()
                if self.handle is None:
                    self.handle = made
                else:  # a finaliser was quicker
                    self._driver.pool_destroy(made)
            except DeviceLost:
                raise
            except DriverOOM:
                return
            except DriverError as error:
                self._absent = str(error)
        if self._absent is not None:
            _log.warning("no memory pool on %s, plain allocations instead: %s", self._driver.uuid, self._absent)
