"""How far the estimates were from what was measured, by phase: ``data/coefficients.json``, with what each was seen on.

A record is a measured figure beside the estimate of the same case. An estimate is multiplied by the mean of the ratios
of its kind; its interval spans the smallest and the largest of them, and a margin on either side that depends on where
they were seen. ``benchmarks/exact_peaks.py`` measures; its results are filed where ``result`` says.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path

from tonnage.terms import Quantity, Source

#: On either side of the ratios seen: on a card; in the code that the compiler wrote for a card, which was not run; on a
#: host, where the same compiler writes other code; or nowhere. What runs operation by operation came out to the byte
#: wherever it was compared.
MARGINS = {
    "card": Fraction(25, 1000),
    "code": Fraction(30, 1000),
    "host": Fraction(50, 1000),
    "nowhere": Fraction(70, 1000),
}
EXACT_MARGIN = Fraction(10, 1000)
#: Of reserved bytes, seen on a card: their ratios are of several loads, and lie further apart.
RESERVED_MARGIN = Fraction(20, 1000)
#: Kinds beside those of compiled layers: what runs operation by operation, the sampler, and what the allocator takes
#: for a whole step, where projections are packed as the engine packs them and where they are not.
PLAIN, SAMPLER, RESERVED, RESERVED_APART = "plain", "sampler", "reserved", "reserved, projections apart"
_FILE = Path(__file__).parent / "data" / "coefficients.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One case: the phase that set its peak, what was measured, and what was estimated.

    ``on``: "card", "code" or "host"; ``result`` is the file that holds the measurement.
    """

    kind: str
    on: str
    case: str
    measured_bytes: int
    estimated_bytes: int
    device: str
    date: str
    versions: str
    result: str

    @property
    def ratio(self) -> Fraction:
        return Fraction(self.measured_bytes, self.estimated_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficient:
    """Factors of an estimate; ``told`` says where they come from. ``margin``: what is left open even of the best."""

    low: Fraction
    best: Fraction
    high: Fraction
    margin: Fraction
    told: str

    def of(self, num_bytes: int, *, at_most: int | None, told: str) -> Quantity:
        """``at_most``: what the interval never goes beyond; where it cuts, the margin below it stays."""
        low, best, high = (int(num_bytes * factor) for factor in (self.low, self.best, self.high))
        if at_most is not None:
            best, high = min(best, at_most), min(high, at_most)
            low = min(low, int(best * (1 - self.margin)))
        return Quantity(bytes=best, low=low, high=high, source=Source.SIMULATED, ref=f"{told}; {self.told}")


@cache
def records() -> tuple[Record, ...]:
    return tuple(Record(**each) for each in json.loads(_FILE.read_text())["records"])


def coefficient(kind: str) -> Coefficient:
    """By what was seen on a card, else in code for one, else on a host, else none of it."""
    if kind == PLAIN:
        return _around((Fraction(1),), EXACT_MARGIN, "operation by operation")
    found = [record for record in records() if record.kind == kind]
    on = next((place for place in ("card", "code", "host") if any(record.on == place for record in found)), "nowhere")
    found = [record for record in found if record.on == on]
    if not found:
        return _around((Fraction(1),), MARGINS[on], "no measurement of such a phase is filed")
    seen = sorted({f"{record.device}, {record.date}" for record in found})
    noun = "layer compiled for" if on == "code" else "measurement on"
    count = f"{len(found)} {noun if len(found) == 1 else noun.replace(' ', 's ', 1)}"
    margin = RESERVED_MARGIN if kind == RESERVED else MARGINS[on]
    cases = ", ".join(sorted({record.case.split(", ")[0] for record in found}))
    return _around(tuple(record.ratio for record in found), margin, f"by {count} {' and '.join(seen)} ({cases})")


def _around(ratios: tuple[Fraction, ...], margin: Fraction, told: str) -> Coefficient:
    mean = sum(ratios, Fraction(0)) / len(ratios)
    return Coefficient(
        low=min(ratios) * (1 - margin), best=mean, high=max(ratios) * (1 + margin), margin=margin, told=told
    )
