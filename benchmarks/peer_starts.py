"""Predicted starts of vLLM against logged ones, each with its source left out of the fit: `python benchmarks/peer_starts.py`.

Prints the figures per release and every row; ``--write`` puts the tables into docs/peer-starts.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))

import peer_fit  # noqa: E402
import peer_rows  # noqa: E402

from tonnage.peers.start import Start  # noqa: E402
from tonnage.peers.vllm.facts import Fact  # noqa: E402
from tonnage.peers.vllm.setup import Setup, resolve  # noqa: E402
from tonnage.peers.vllm.start import predict  # noqa: E402
from tonnage.units import GiB  # noqa: E402


def by_source(record: dict) -> str:
    return record["source"]


def by_team(record: dict) -> str:
    """The project of a source: sweeps of one team are one cluster."""
    return record["source"].split("#")[0].split(" ")[0] if "/" in record["source"] else record["source"]


@cache
def facts_without(source: str, group: Callable[[dict], str]) -> dict[str, Fact]:
    return peer_fit.fit(record for record in peer_rows.records().values() if group(record) != source)


@cache
def predicted(name: str, group: Callable[[dict], str] = by_source) -> Start:
    """The start of one record by coefficients that none of its source's records had a part in."""
    record = peer_rows.records()[name]
    return predict(peer_rows.launch_of(record), facts=facts_without(group(record), group))


@dataclass(frozen=True, slots=True)
class PoolRow:
    """One start whose pool was logged; GiB."""

    id: str
    era: str
    logged: float
    best: float
    low: float
    high: float

    @property
    def error(self) -> float:
        return abs(self.best / self.logged - 1)

    @property
    def is_covered(self) -> bool:
        """Within the interval, to the two digits of a log."""
        return self.low - 0.005 <= self.logged <= self.high + 0.005


def era_of(setup: Setup) -> str:
    if not setup.is_v1:
        return "V0"
    version = setup.launch.version
    return "V1 to 0.16" if version.is_surely(before=(0, 17)) else "0.17 to 0.20" if version.is_surely(before=(0, 21)) else "0.21 on"


def pool_rows(names: Iterable[str], group: Callable[[dict], str] = by_source) -> list[PoolRow]:
    found = []
    for name in names:
        start = predicted(name, group)
        found.append(PoolRow(name, era_of(resolve(start.launch)), logged_pool(name, start),
                             *(value / GiB for value in (start.pool.bytes, start.pool.low, start.pool.high))))
    return found


def logged_pool(name: str, start: Start) -> float:
    """GiB as logged, or blocks of a uniform cache times their bytes."""
    logged = peer_rows.records()[name]["logged"]
    if "kv_cache_gib" in logged:
        return logged["kv_cache_gib"]
    assert start.bytes_per_token is not None
    return float(logged["num_gpu_blocks"] * 16 * start.bytes_per_token / GiB)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of them lie, between neighbours in proportion."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(rows: Sequence[PoolRow]) -> str:
    if not rows:
        return "n 0"
    errors = [row.error for row in rows]
    covered = sum(row.is_covered for row in rows)
    width = median((row.high - row.low) / 2 / row.logged for row in rows)
    return (f"n {len(rows)}  median {median(errors):.2%}  p90 {percentile(errors, 0.9):.2%}  "
            f"worst {max(errors):.1%}  covered {covered}/{len(rows)} = {covered / len(rows):.0%}  half-width {width:.1%}")


def main() -> None:
    lists = peer_rows.eligible()
    for label, group in (("source left out", by_source), ("team left out", by_team)):
        print("==", label)
        rows = pool_rows(lists["pool"], group)
        for era in sorted({row.era for row in rows}):
            print(f"{era:14s}", summary([row for row in rows if row.era == era]))
        print(f"{'all':14s}", summary(rows))
        print(f"{'at default':14s}", summary(pool_rows(lists["pool_at_default"], group)))
        for row in sorted(rows, key=lambda row: -row.error):
            start = predicted(row.id, group)
            print(f"  {row.id[:54]:54s} {row.era:12s} logged {row.logged:7.2f} best {row.best:7.2f} [{row.low:.2f},{row.high:.2f}] {'' if row.is_covered else 'OUT'} {row.error:7.2%}",
                  " ".join(f"{term.name.split()[0]}={term.bytes.bytes / GiB:.2f}" for term in start.terms[:5] if term.name != 'weights'))


if __name__ == "__main__":
    main()
