"""One look at a device, always in the same order, and a thread that goes on looking."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from tonnage.device.driver import Driver, PoolStats
from tonnage.ledger import Ledger
from tonnage.terms import How, LineKind, MemoryKind, Reading

#: Looks that must agree before they are given up: memory may move between two calls.
MAX_LOOKS = 3
#: The owner of what a pool has taken from the device and nobody has asked for.
POOL_SLACK = "pool slack"
#: The owner of torch's segments that are not ours: its default pool, and pools that others made.
TORCH = "torch"

HOST_SOURCE = "anonymous + shared memory since the imports"
INFERRED, NVML, UNKNOWN = "inferred", "nvml", "unknown"


class Pool(Protocol):
    """Whatever has the statistics of a pool."""

    def stats(self) -> PoolStats: ...


def take_reading(
    driver: Driver,
    *,
    phase: str,
    ledger: Ledger,
    torch: bool = True,
    torch_counted_bytes: int | None = None,
    pool: Pool | None = None,
) -> Reading:
    """Look at the device: free and total, our own bytes, torch's statistics, our accounts, our pool.

    Where the device cannot tell what this process holds (a container, MIG, WSL), ``own_bytes`` is inferred: what was
    free before the device was opened (``ledger.free_before_bytes``; where nobody looked, what is free at the first
    reading, the accounts, and a context of the usual size) less what is free now. What other processes take or give
    back meanwhile then counts as our own, and what they held before stays as it was; ``own_source`` says "inferred".

    ``torch``: read its statistics, if it is imported and has initialised CUDA; it is never imported here.

    Two SAMPLED accounts keep out of ``unattributed`` what is known though nobody counts it. ``TORCH``: what torch has
    reserved beyond ``torch_counted_bytes``, the segments that other accounts hold (0: none; None: leave it alone).
    ``POOL_SLACK``: what ``pool`` has reserved and nobody uses. Raises what the driver raises.
    """
    free, total, own = _look(driver)
    source = HOST_SOURCE if driver.kind == "host" else NVML
    if own is None:
        own, source = _inferred(driver, ledger, free)
    statistics = _torch_statistics(driver) if torch else {}
    torch_reserved = statistics.get("reserved_bytes.all.current", 0)
    if torch_counted_bytes is not None:
        _book(ledger, TORCH, torch_reserved - torch_counted_bytes)
    pool_reserved = 0
    if pool is not None:
        stats = pool.stats()
        pool_reserved = stats.reserved_bytes
        _book(ledger, POOL_SLACK, pool_reserved - stats.used_bytes)
    return Reading(
        phase=phase,
        at_ns=time.monotonic_ns(),
        total_bytes=total,
        free_bytes=free,
        own_bytes=own,
        own_source=source,
        torch_allocated=statistics.get("allocated_bytes.all.current", 0),
        torch_reserved=torch_reserved,
        torch_peak_allocated=statistics.get("allocated_bytes.all.peak", 0),
        torch_peak_reserved=statistics.get("reserved_bytes.all.peak", 0),
        arena_bytes=ledger.accounted_bytes,
        pool_reserved_bytes=pool_reserved,
    )


class Sampler:
    """A thread that looks at a device every ``interval_s`` seconds and tells its ledger when something moved.

    A look asks for free memory alone, some microseconds. Only when that changed and the accounts do not explain it,
    and once in ``full_every`` looks anyway, a whole reading is taken (``read``, by default ``take_reading``) and given
    to the ledger, which notes what others hold at its least, at its most, and when it changed.

    Use as a context manager, or call ``start`` and ``stop``.
    """

    def __init__(
        self,
        driver: Driver,
        ledger: Ledger,
        *,
        interval_s: float = 0.1,
        full_every: int = 10,
        read: Callable[[], Reading] | None = None,
    ) -> None:
        self._driver, self._ledger = driver, ledger
        self._interval_s, self._full_every = interval_s, full_every
        self._read = read or (lambda: take_reading(driver, phase="sampled", ledger=ledger))
        self._explained: int | None = None  # free plus accounts: constant as long as only our accounts move memory
        self._asked = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self.lowest_free_bytes: int | None = None
        self.num_looks = self.num_readings = 0

    def start(self) -> None:
        """Begin, if it is not running. The first look is taken before this returns, and may raise."""
        if self._thread is not None:
            return
        self._asked.clear()
        self._failure = None
        self.look()
        self._thread = threading.Thread(target=self._run, name="tonnage sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take a last look and end; does nothing where it is not running. Raises what ended the thread early, if so."""
        if self._thread is None:
            return
        self._asked.set()
        self._thread.join()
        self._thread = None
        if self._failure is not None:
            raise self._failure
        self.look()

    def __enter__(self) -> Sampler:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        try:
            self.stop()
        except Exception:
            # What went wrong inside is the cause, and already on its way.
            if error is None:
                raise

    def look(self) -> None:
        """One look, as the thread does it; not while the thread runs."""
        free, _ = self._driver.mem_info()
        self.lowest_free_bytes = free if self.lowest_free_bytes is None else min(free, self.lowest_free_bytes)
        explained = free + self._ledger.accounted_bytes
        if explained != self._explained or self.num_looks % self._full_every == 0:
            self._ledger.sample(self._read())
            self.num_readings += 1
        self._explained = explained
        self.num_looks += 1

    def _run(self) -> None:
        while not self._asked.wait(self._interval_s):
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 - told by stop: a thread has nobody to tell
                self._failure = error
                return


def _look(driver: Driver) -> tuple[int, int, int | None]:
    """(free, total, own) of one moment: memory that moved between the calls would count as somebody else's."""
    free, total = driver.mem_info()
    for _ in range(MAX_LOOKS - 1):
        own = driver.own_bytes()
        again, _ = driver.mem_info()
        if again == free:
            return free, total, own
        free = again
    return free, total, driver.own_bytes()


def _inferred(driver: Driver, ledger: Ledger, free: int) -> tuple[int | None, str]:
    if driver.kind == "host":
        return None, UNKNOWN
    if ledger.free_before_bytes is None:
        from tonnage.costs.context import context_bytes

        ledger.free_before_bytes = free + context_bytes(driver.kind).bytes + ledger.accounted_bytes
    return max(0, ledger.free_before_bytes - free), INFERRED


def _torch_statistics(driver: Driver) -> dict[str, int]:
    """What torch's allocator says of the device; empty where torch has nothing there yet."""
    torch: Any = sys.modules.get("torch")
    if driver.kind != "cuda" or torch is None or not torch.cuda.is_initialized():
        return {}
    statistics: dict[str, int] = torch.cuda.memory_stats(driver.ordinal)
    return statistics


def _book(ledger: Ledger, owner: str, num_bytes: int) -> None:
    """What an allocator holds beyond what was asked of it, on the line that a plan has for that."""
    account = ledger.open(owner=owner, line=LineKind.TRANSIENT, memory=MemoryKind.GPU, how=How.SAMPLED, declared=True)
    # The two figures are asked one after the other and may be of different moments.
    account.sampled(max(0, num_bytes))
