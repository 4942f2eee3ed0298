"""One look at a device, always in the same order, and a thread that goes on looking."""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Protocol

from tonnage.device.driver import Driver, PoolStats
from tonnage.ledger import Ledger
from tonnage.terms import How, LineKind, MemoryKind, Reading
from tonnage.units import MiB

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

    Where the device cannot tell what this process holds (a container, MIG, WSL), ``own_bytes`` is inferred, and
    ``own_source`` says so. While an engine starts: what was free before the device was opened
    (``ledger.free_before_bytes``; where nobody looked, what is free at the first reading, the accounts, and a context
    of the usual size) less what is free now. What other processes take or give back meanwhile then counts as our own,
    and what they held before stays as it was. Once ``ledger.own_is_known`` was told that nothing unseen is ours any
    more: the accounts, and what they left unexplained then. Whatever moves beside them is others'.

    ``torch``: read its statistics, if it is imported and has initialised CUDA; it is never imported here.

    Two SAMPLED accounts keep out of ``unattributed`` what is known though nobody counts it. ``TORCH``: what torch has
    reserved beyond ``torch_counted_bytes``, the segments that other accounts hold (0: none; None: leave it alone).
    ``POOL_SLACK``: what ``pool`` has reserved and nobody uses. Raises what the driver raises.
    """
    free, total, own = _look(driver)
    source = HOST_SOURCE if driver.kind == "host" else NVML
    statistics = _torch_statistics(driver) if torch else {}
    torch_reserved = statistics.get("reserved_bytes.all.current", 0)
    if torch_counted_bytes is not None:
        _book(ledger, TORCH, torch_reserved - torch_counted_bytes)
    pool_reserved = 0
    if pool is not None:
        stats = pool.stats()
        pool_reserved = stats.reserved_bytes
        _book(ledger, POOL_SLACK, pool_reserved - stats.used_bytes)
    if own is None:
        own, source = _inferred(driver, ledger, free)  # from the accounts as they stand with all that was booked
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
    to ``tell``, by default the ledger's ``sample``, which notes what others hold at its least, at its most, and when
    it changed. ``ledger.see_others`` notes that and nothing else: for readings in the middle of steps. ``free`` asks
    for the free bytes, by default the driver's.

    Use as a context manager, or call ``start`` and ``stop``. The thread keeps neither the process nor this alive.
    """

    def __init__(
        self,
        driver: Driver,
        ledger: Ledger,
        *,
        interval_s: float = 0.1,
        full_every: int = 10,
        read: Callable[[], Reading] | None = None,
        tell: Callable[[Reading], None] | None = None,
        free: Callable[[], int] | None = None,
    ) -> None:
        self._ledger = ledger
        self._interval_s, self._full_every = interval_s, full_every
        self._free = free or (lambda: driver.mem_info()[0])
        self._read = read or (lambda: take_reading(driver, phase="sampled", ledger=ledger))
        self._tell = tell or ledger.sample
        self._explained: int | None = None  # free plus accounts: constant as long as only our accounts move memory
        self._asked = threading.Event()
        self._thread: threading.Thread | None = None
        self._at_exit: Callable[[], None] = lambda: None
        self._lowest = threading.Lock()
        #: What ended the thread before it was stopped.
        self.failure: Exception | None = None
        self.lowest_free_bytes: int | None = None
        self.num_looks = self.num_readings = 0

    def start(self) -> None:
        """Begin, if it is not running. The first look is taken before this returns, and may raise."""
        if self._thread is not None:
            return
        # Its own: a thread of before that has not seen the old one yet ends all the same.
        self._asked = threading.Event()
        self.failure = None
        self.look()
        arguments = (weakref.ref(self), self._asked, self._interval_s)
        self._thread = threading.Thread(target=_keep_looking, args=arguments, name="tonnage sampler", daemon=True)
        # A look that is under way while the interpreter ends would ask a driver that ends with it.
        self._at_exit = partial(_end, self._asked, weakref.ref(self._thread))
        atexit.register(self._at_exit)
        self._thread.start()

    def stop(self) -> None:
        """Take a last look and end; does nothing where it is not running. Raises what ended the thread early, if so."""
        if self._thread is None:
            return
        self.end()
        if self.failure is not None:
            raise self.failure
        self.look()

    def end(self) -> None:
        """End without a look, and raise nothing; does nothing where it is not running."""
        if self._thread is not None:
            self._asked.set()
            self._thread.join()
            self._thread = None
            atexit.unregister(self._at_exit)

    def restart(self) -> None:
        """The lowest figure begins anew with what is free now."""
        with self._lowest:
            self.lowest_free_bytes = self._free()

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
        with self._lowest:
            free, lowest = self._free(), self.lowest_free_bytes
            self.lowest_free_bytes = free if lowest is None else min(free, lowest)
        explained = free + self._ledger.accounted_bytes
        if explained != self._explained or self.num_looks % self._full_every == 0:
            self._tell(self._read())
            self.num_readings += 1
        self._explained = explained
        self.num_looks += 1


def wait_until_stable(
    free_bytes: Callable[[], int | None], *, num_looks: int = 3, interval_s: float = 0.05, timeout_s: float = 5.0
) -> tuple[int | None, bool]:
    """Wait until ``free_bytes()`` was the same, to a MiB, at ``num_looks`` looks in a row; returns what it was last,
    and whether it stands still. Not longer than ``timeout_s``: others may go on taking and giving for ever; and not at
    all where it is None, as nobody tells."""
    until, num_same, free = time.monotonic() + timeout_s, 1, free_bytes()
    while free is not None and num_same < num_looks:
        if time.monotonic() >= until:
            return free, False
        time.sleep(interval_s)
        before, free = free, free_bytes()
        num_same = num_same + 1 if free is not None and abs(free - before) <= MiB else 1
    return free, True


def _keep_looking(sampler: weakref.ref[Sampler], asked: threading.Event, interval_s: float) -> None:
    """The thread of a ``Sampler``; between two looks it holds nothing of it."""
    while not asked.wait(interval_s):
        found = sampler()
        if found is None:
            return
        try:
            found.look()
        except Exception as error:  # noqa: BLE001 - told by stop: a thread has nobody to tell
            found.failure = error
            return
        del found


def _end(asked: threading.Event, thread: weakref.ref[threading.Thread]) -> None:
    """At the interpreter's end: a look is not waited for for ever."""
    asked.set()
    found = thread()
    if found is not None:
        found.join(1.0)


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
    if ledger.beyond_accounts_bytes is not None:
        return ledger.accounted_bytes + ledger.beyond_accounts_bytes, INFERRED
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
