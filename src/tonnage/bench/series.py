"""Several workloads on one engine, each some times: medians beside what the card allows (``tonnage.benches/1``)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tonnage.bench.limits import Limits
from tonnage.bench.measure import Measurement
from tonnage.bench.report import (
    Document,
    decode_tokens_per_second,
    engine_part,
    figures,
    run_document,
    setting,
    workload_document,
)
from tonnage.bench.workloads import Workload

if TYPE_CHECKING:
    from rich.console import Console

    from tonnage.report import RunResult

SERIES_SCHEMA = "tonnage.benches/1"
#: Quantities in a second: of a whole run, but for ``decode_tokens``, which are those of one sequence alone.
RATES = ("output_tokens", "input_tokens", "decode_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Runs of one workload, their lengths, arrivals and prompts drawn from seeds that follow each other."""

    runs: tuple[Measurement, ...]
    limits: Limits | None = None

    @property
    def workload(self) -> Workload:
        """The first of them as it was drawn."""
        return self.runs[0].workload

    @property
    def num_failed(self) -> int:
        return sum(run.num_failed for run in self.runs)

    def medians(self) -> dict[str, float | None]:
        """Of ``RATES``; None where a workload has no such quantity."""
        found: dict[str, list[float | None]] = {
            "output_tokens": [figures(run).output_tokens for run in self.runs],
            "input_tokens": [figures(run).input_tokens for run in self.runs],
            "decode_tokens": [decode_tokens_per_second(run) for run in self.runs],
        }
        return {name: _median(values) for name, values in found.items()}

    def percentiles_us(self) -> dict[str, dict[str, int] | None]:
        """The median over the runs of each percentile."""
        found: dict[str, dict[str, int] | None] = {}
        runs = [figures(run).percentiles_us for run in self.runs]
        for name, first in runs[0].items():
            each = [told for run in runs if (told := run.get(name)) is not None]
            percents = [] if first is None else list(first)
            found[name] = {one: int(statistics.median(told[one] for told in each)) for one in percents} or None
        return found

    def of_limit(self) -> dict[str, float]:
        """The medians as shares of what the card allows, where that is known."""
        if self.limits is None:
            return {}
        limits = asdict(self.limits)
        return {name: value / limits[name] for name, value in self.medians().items() if value is not None}


def _median(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def series_document(all_series: Sequence[Series], result: RunResult, *, command: Sequence[str]) -> Document:
    """Schema ``tonnage.benches/1``: for each workload its medians, limits, and every run with its samples."""
    return {
        "schema": SERIES_SCHEMA,
        **setting(command),
        **engine_part(result),
        "stages_ms": {stage.name: stage.elapsed_ms for stage in result.stages},
        "audit": [
            {"line": str(row.line), "planned_bytes": row.planned_bytes, "actual_bytes": row.actual_bytes}
            for row in result.audit
        ],
        "warnings": list(result.plan.warnings),
        "series": [_one(series) for series in all_series],
    }


def _one(series: Series) -> Document:
    return {
        "workload": workload_document(series.workload),
        "median_per_second": _rounded(series.medians(), 1),
        "median_percentiles_us": series.percentiles_us(),
        "limit_per_second": None if series.limits is None else _rounded(asdict(series.limits), 1),
        "of_limit": _rounded(series.of_limit(), 3),
        "runs": [run_document(run) for run in series.runs],
    }


def _rounded(numbers: Mapping[str, float | None], digits: int) -> dict[str, float | None]:
    return {name: None if number is None else round(number, digits) for name, number in numbers.items()}


def show_series(all_series: Sequence[Series], result: RunResult, console: Console) -> None:
    """A line for each workload."""
    from rich.text import Text

    from tonnage.report.draw import grid, plural, show

    plan = result.plan
    head = Text.assemble((plan.model_name, "bold"), " on ", (plan.device_name, "bold"))
    head.append(f": medians of {plural(max(len(series.runs) for series in all_series), 'run')}")
    titles = ["workload", "output/s>", "input/s>", "decode/s>", "limit>", "first>", "p99>", "gap>", "p99>"]
    told = "Tokens a second, and the share of the card's limit; ms to the first token and between tokens, p50 and p99"
    parts: list[Any] = [
        head,
        grid(titles, [_row(series) for series in all_series], title=told),
    ]
    failed = sum(series.num_failed for series in all_series)
    if failed:
        parts.append(Text(f"{plural(failed, 'request')} failed", style="bold red"))
    show(parts, console)


def _row(series: Series) -> list[str]:
    medians, shares, times = series.medians(), series.of_limit(), series.percentiles_us()
    numbers = ["–" if medians[name] is None else f"{medians[name]:,.0f}" for name in RATES]
    share = f"{100 * max(shares.values()):.0f} %" if shares else "–"
    first, between = times["time_to_first_token"], times["time_between_tokens"]
    told = [
        "–" if found is None else f"{found[name] / 1000:,.1f}"
        for found, name in ((first, "p50"), (first, "p99"), (between, "p50"), (between, "p99"))
    ]
    return [series.workload.name, *numbers, share, *told]
