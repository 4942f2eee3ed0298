"""Who holds what of the device, looked at by a thread while an engine starts and serves."""

from __future__ import annotations

from tonnage.device.reading import Sampler
from tonnage.engine.site import Site
from tonnage.report import WatchRecord
from tonnage.terms import Reading


class Watch:
    """Looks at a site every ``interval_s`` seconds, on a thread of its own that no step waits for; 0: never.

    ``lowest_free_bytes`` and ``highest_foreign_bytes`` are of the looks since ``restart``; each change of what others
    hold is an event of the ledger, too. Looks fall into the middle of steps, so that accounts and device may be of
    different moments: nothing else is told to the ledger. Every attribute may be read at any time.
    """

    def __init__(self, site: Site, *, interval_s: float) -> None:
        self.interval_s = interval_s
        self.highest_foreign_bytes: int | None = None
        self._site, self._num_before = site, 0
        self._sampler = Sampler(
            site.driver, site.ledger, interval_s=interval_s, read=self._read, tell=self._tell, free=site.free_bytes
        )

    @property
    def is_on(self) -> bool:
        return self.interval_s > 0

    @property
    def lowest_free_bytes(self) -> int | None:
        """None: nobody has looked."""
        return self._sampler.lowest_free_bytes

    @property
    def num_looks(self) -> int:
        """Since ``restart``."""
        return self._sampler.num_looks - self._num_before

    @property
    def problem(self) -> str:
        """Why nobody looks any more; empty while somebody does."""
        failure = self._sampler.failure
        return "" if failure is None else f"{type(failure).__name__}: {failure}"

    def start(self) -> None:
        """Take the first look, and go on looking. Raises what the driver raises."""
        if self.is_on:
            self._sampler.start()

    def restart(self) -> None:
        """What was seen until now counts no more, only what is there now: the engine serves from here on."""
        if self.is_on:
            self._num_before = self._sampler.num_looks
            self.highest_foreign_bytes = self._site.ledger.snapshot().foreign
            self._sampler.restart()

    def close(self) -> None:
        """End the thread; raises nothing. What it saw stays to be read."""
        self._sampler.end()

    def record(self) -> WatchRecord | None:
        """For the report; None where nobody looked."""
        if not self.num_looks:
            return None
        return WatchRecord(
            interval_ms=round(self.interval_s * 1000),
            num_looks=self.num_looks,
            lowest_free_bytes=self.lowest_free_bytes,
            highest_foreign_bytes=self.highest_foreign_bytes,
            problem=self.problem,
        )

    def _read(self) -> Reading:
        return self._site.read("watch")

    def _tell(self, reading: Reading) -> None:
        ledger = self._site.ledger
        ledger.see_others(reading)
        foreign, highest = ledger.foreign_of(reading), self.highest_foreign_bytes
        self.highest_foreign_bytes = foreign if highest is None else max(foreign, highest)
