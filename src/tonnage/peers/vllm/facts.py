"""Coefficients fitted on logged starts: with an interval, and the records that each is from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path

from tonnage.terms import Quantity, Source

FILE = Path(__file__).parent / "facts.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A number per unit: bytes, or bytes for each of what ``unit`` names.

    records        ids of the logged starts that it is fitted on
    borrowed_from  the era whose records these are, where this one has none
    """

    best: Fraction
    low: Fraction
    high: Fraction
    unit: str
    records: tuple[str, ...]
    borrowed_from: str = ""

    def of(self, amount: int | Fraction, *, ref: str) -> Quantity:
        """Bytes for so many units."""
        return Quantity(
            bytes=int(self.best * amount),
            low=int(self.low * amount),
            high=int(self.high * amount),
            source=Source.PREDICTED,
            ref=f"{ref}, {len(self.records)} logged starts",
        )


Facts = Mapping[str, Fact]


def read_facts(text: str) -> dict[str, Fact]:
    """From the JSON that the fit writes: numbers are decimals as text, so that they stay exact."""
    rows: dict[str, dict[str, object]] = json.loads(text)["facts"]
    return {
        name: Fact(
            best=Fraction(str(row["best"])),
            low=Fraction(str(row["low"])),
            high=Fraction(str(row["high"])),
            unit=str(row["unit"]),
            records=tuple(str(row["records"]).split()),
            borrowed_from=str(row.get("borrowed_from", "")),
        )
        for name, row in rows.items()
    }


@cache
def filed() -> Mapping[str, Fact]:
    """Those that come with the package, fitted on all records."""
    return read_facts(FILE.read_text(encoding="utf-8"))
