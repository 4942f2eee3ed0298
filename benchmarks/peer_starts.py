"""Predicted starts of vLLM against logged ones: `python benchmarks/peer_starts.py [--write]`.

Each start is predicted by coefficients that no record of its source had a part in. Prints the figures per release and
the rows; ``--write`` puts both into docs/peer-starts.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))
sys.path.insert(0, str(Path(__file__).parent))

import peer_rows

import peer_fit
from tonnage.peers.start import Check, Start
from tonnage.peers.vllm.facts import Fact
from tonnage.peers.vllm.pages import concurrency, logged_tokens, pages_of
from tonnage.peers.vllm.setup import Setup, resolve
from tonnage.peers.vllm.start import predict
from tonnage.units import GiB

ROOT = Path(__file__).parents[1]
Grouping = Callable[[dict], str]
ERAS = ("V0", "V1 to 0.16", "0.17 to 0.20", "0.21 on")


def by_source(record: dict) -> str:
    return str(record["source"])


def by_team(record: dict) -> str:
    """The project of a source: sweeps of one team are one cluster."""
    source = str(record["source"])
    return source.split("#")[0].split(" ")[0] if "/" in source else source


@cache
def facts_without(source: str, group: Grouping, instead: str = "") -> dict[str, Fact]:
    """``instead``: the one of ``peer_fit.EARLIER`` that is in the place of a figure from elsewhere."""
    records = (record for record in peer_rows.records().values() if group(record) != source)
    return peer_fit.fit(records, instead=peer_fit.EARLIER[instead]) if instead else peer_fit.fit(records)


@cache
def predicted(name: str, group: Grouping = by_source, instead: str = "") -> Start:
    """The start of one record by coefficients that none of its source's records had a part in."""
    record = peer_rows.records()[name]
    return predict(peer_rows.launch_of(record), facts=facts_without(group(record), group, instead))


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
    version = setup.launch.version
    if not setup.is_v1:
        return ERAS[0]
    if version.is_surely(before=(0, 17)):
        return ERAS[1]
    return ERAS[2] if version.is_surely(before=(0, 21)) else ERAS[3]


def pool_rows(names: Iterable[str], group: Grouping = by_source, instead: str = "") -> list[PoolRow]:
    found = []
    for name in names:
        start = predicted(name, group, instead)
        best, low, high = (value / GiB for value in (start.pool.bytes, start.pool.low, start.pool.high))
        logged = logged_pool(peer_rows.records()[name]["logged"], start)
        found.append(PoolRow(name, era_of(resolve(start.launch)), logged, best, low, high))
    return found


def later_rows() -> list[PoolRow]:
    """Starts that were found after the rules had been written, by the coefficients of the package."""
    found = []
    for name, record in peer_rows.later().items():
        start = predict(peer_rows.launch_of(record))
        best, low, high = (value / GiB for value in (start.pool.bytes, start.pool.low, start.pool.high))
        logged = logged_pool(record["logged"], start)
        found.append(PoolRow(name, era_of(resolve(start.launch)), logged, best, low, high))
    return found


def logged_pool(logged: dict, start: Start) -> float:
    """GiB as logged, or blocks of a uniform cache times their bytes."""
    if "kv_cache_gib" in logged:
        return float(logged["kv_cache_gib"])
    assert start.bytes_per_token is not None
    return float(logged["num_gpu_blocks"] * 16 * start.bytes_per_token / GiB)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of them lie, between neighbours in proportion."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of several rows: errors are shares of the logged pool."""

    num: int
    median: float
    p90: float
    worst: float
    num_covered: int
    half_width: float

    @classmethod
    def of(cls, rows: Sequence[PoolRow]) -> Figures:
        errors = [row.error for row in rows]
        widths = [(row.high - row.low) / 2 / row.logged for row in rows]
        covered = sum(row.is_covered for row in rows)
        return cls(len(rows), median(errors), percentile(errors, 0.9), max(errors), covered, median(widths))

    @property
    def covered(self) -> float:
        return self.num_covered / self.num


@dataclass(frozen=True, slots=True)
class TokenRow:
    """Tokens of the log against those that its own pool gives by the rules of pages."""

    id: str
    logged: float
    best: float

    @property
    def error(self) -> float:
        return abs(self.best / self.logged - 1)


def token_rows(names: Iterable[str]) -> list[TokenRow]:
    found = []
    for name in names:
        record = peer_rows.records()[name]
        logged = record["logged"]
        setup = resolve(peer_rows.launch_of(record))
        pages = pages_of(setup)
        assert pages is not None
        blocks = int(logged["kv_cache_gib"] * GiB) // pages.block_bytes
        length = setup.max_model_len
        if "kv_cache_tokens" in logged:
            told, best = logged["kv_cache_tokens"], logged_tokens(pages, setup, blocks, length)
        elif "num_gpu_blocks" in logged:
            told, best = logged["num_gpu_blocks"] * pages.block_tokens, blocks * pages.block_tokens
        else:
            told, best = logged["max_concurrency"], float(concurrency(pages, setup, blocks, length))
        found.append(TokenRow(name, told, best))
    return found


#: The names of checks, by the reason that tests/data/shapes/eligible.json gives.
REASONS = {
    "one request of max_model_len does not fit the pool": "longest request",
    "nothing is left for the pool": "cache blocks",
    "out of memory before the pool is sized": "load and dry run",
}


@dataclass(frozen=True, slots=True)
class FailedRow:
    """One start that was refused: ``found`` is the first check that fails, for sure or by best guess."""

    id: str
    why: str
    found: Check | None

    @property
    def is_right(self) -> bool:
        return self.found is not None and self.found.name == REASONS[self.why]

    @property
    def is_sure(self) -> bool:
        return self.found is not None and self.found.passes is False


def failed_rows() -> list[FailedRow]:
    return [
        FailedRow(name, why, _first_failing(predicted(name))) for name, why in peer_rows.eligible()["failed"].items()
    ]


def _first_failing(start: Start) -> Check | None:
    return next((check for check in start.checks if check.passes is False or _fails_by_best(check)), None)


def _fails_by_best(check: Check) -> bool:
    """Of a check that its interval leaves open: whether what is needed is more than what there is, by best guess."""
    need, have = (float(re.findall(r"-?[\d.]+", text.replace(",", ""))[0]) for text in (check.need, check.have))
    return check.passes is None and need >= have


def main(arguments: Sequence[str]) -> None:
    from peer_tables import page, report

    print(report())
    if "--write" in arguments:
        path = ROOT / "docs" / "peer-starts.md"
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
