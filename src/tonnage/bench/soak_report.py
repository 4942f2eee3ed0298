"""What a soak saw, as JSON (``tonnage.soak/1``) and as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tonnage.bench.phases import PHASES
from tonnage.bench.report import Document, engine_part, setting
from tonnage.bench.timing import THOUSANDTHS, PhaseFigures, percentiles
from tonnage.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from tonnage.bench.verdict import Adversities, SoakReport

SOAK_SCHEMA = "tonnage.soak/1"


def soak_document(report: SoakReport, *, seed: int, command: Sequence[str]) -> Document:
    """Schema ``tonnage.soak/1``."""
    return {
        "schema": SOAK_SCHEMA,
        **setting(command),
        **engine_part(report.result),
        "seed": seed,
        "is_good": report.is_good,
        "rules": {v.rule: {"meaning": v.meaning, "broken": v.num_broken} for v in report.verdicts},
        "told": list(report.told),
        "outcomes": report.outcomes,
        "failures": {one.kind: {"requests": one.num_requests, "feasible": one.num_feasible} for one in report.failures},
        "retried_steps": list(report.result.retried_steps),
        "log": report.counts,
        "generated_tokens": report.num_tokens,
        "longest_wait_steps": report.longest_wait_steps,
        "most_overtaken": report.most_overtaken,
        "cache": report.cache,
        "faults": report.faults,
        "phases": {phase.name: _phase_document(phase) for phase in report.phases},
        "load": asdict(report.load),
        "adversities": None if report.adversities is None else _adversities_document(report.adversities),
        "audit": [
            {"line": str(row.line), "planned_bytes": row.planned_bytes, "actual_bytes": row.actual_bytes}
            for row in report.result.audit
        ],
        "seconds": round(report.seconds, 3),
    }


def _phase_document(phase: PhaseFigures) -> Document:
    return {
        "meaning": PHASES[phase.name].meaning if phase.name in PHASES else None,
        "times": phase.num_times,
        "outcomes": dict(phase.outcomes),
        "output_tokens": phase.num_tokens,
        "active_s": round(phase.active_us / 10**6, 3),
        "output_tokens_per_second": round(phase.tokens_per_second, 1),
        "time_to_first_token_us": percentiles(phase.first_us),
        "time_between_tokens_us": percentiles(phase.gaps_us),
    }


def _adversities_document(found: Adversities) -> Document:
    return asdict(found) | {
        "probes": {
            moment: asdict(compared) | {"same_share": compared.same_share} for moment, compared in found.probes.items()
        }
    }


# -- tables --------------------------------------------------------------------------------------------------------


def show_soak(report: SoakReport, console: Console) -> None:
    """What ran, every rule with its verdict, and the first violations."""
    from rich.text import Text

    from tonnage.report.draw import grid, show

    rows = [
        (verdict.rule, "holds" if not verdict.num_broken else f"broken {verdict.num_broken:,} times", verdict.meaning)
        for verdict in report.verdicts
    ]
    table = grid(["rule", "verdict", "what it says"], rows, title="Rules")
    for row, verdict in zip(table.rows, report.verdicts, strict=True):
        row.style = "bold red" if verdict.num_broken else None
    parts: list[Any] = [_what_soaked(report)]
    if report.phases:
        parts.append(_phases(report.phases))
    parts.append(table)
    if report.told:
        parts.append(Text("\n".join(report.told), style="red"))
    parts.append(Text("The engine holds." if report.is_good else "The engine does not hold.", style="bold"))
    show(parts, console)


def _what_soaked(report: SoakReport) -> Text:
    from rich.text import Text

    text = Text()
    for place, (title, told) in enumerate(_told(report)):
        text.append("\n" * bool(place))
        text.append(f"{title:<10}", "dim")
        text.append(told)
    return text


def _told(report: SoakReport) -> Iterator[tuple[str, str]]:
    """Lines under a title each."""
    from tonnage.report.draw import plural

    ends = ", ".join(f"{count:,} {name}" for name, count in sorted(report.outcomes.items()))
    yield "requests", f"{sum(report.outcomes.values()):,}: {ends or 'none'}"
    counts = report.counts
    told = f"{counts.get('step', 0):,} with {counts.get('computed', 0):,} rows in {report.seconds:.1f} s"
    yield "steps", f"{told}, {report.num_tokens:,} tokens generated"
    if num_steps := report.load.num_steps:
        running, waiting = report.load.running_sum / num_steps, report.load.waiting_sum / num_steps
        full = 100 * report.load.num_full / num_steps
        told = f"{running:,.1f} running and {waiting:,.1f} waiting in the mean"
        yield "load", f"{told}, full or with a queue in {full:.0f} % of the steps"
    told = f"the longest wait was {plural(report.longest_wait_steps, 'step')}"
    told += f", the oldest in the queue was passed {report.most_overtaken:,} times at most"
    yield "waiting", f"{plural(counts.get('suspended', 0), 'suspension')}; {told}"
    for title, found in (("cache", report.cache), ("faults", report.faults)):
        if any(found.values()):
            yield title, ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in found.items() if count)
    for one in report.failures:
        yield "failed", f"{one.num_requests:,} {one.kind}, {one.num_feasible:,} of them feasible"
    if report.adversities is not None:
        yield from _adverse(report.adversities)


def _adverse(found: Adversities) -> Iterator[tuple[str, str]]:
    if found.free is not None and found.floor_bytes is not None:
        lowest, floor = format_bytes(found.free.lowest_bytes), format_bytes(found.floor_bytes)
        told = f"{found.free.num_samples:,} samples, the longest gap {found.free.longest_gap_ms} ms"
        yield "free", f"{lowest} of the card at the lowest, {floor} must be; {told}"
    if found.allocator:
        yield "torch", ", ".join(f"{name} {count:,}" for name, count in found.allocator.items())
    if found.neighbour_takes is not None:
        yield "neighbour", f"took memory {found.neighbour_takes:,} times, {format_bytes(found.neighbour_bytes)} at most"
    if not found.can_sleep:
        yield "naps", "none: its device has no virtual memory to give back"
    elif found.naps:
        freed = "" if found.freed_bytes is None else f", {format_bytes(found.freed_bytes)} given back at most"
        yield "naps", ", ".join(f"{count:,} of {tags}" for tags, count in found.naps.items()) + freed
    for moment, one in found.probes.items():
        share = 100 * (one.same_share or 0)
        told = f"{moment}: {one.num_whole:,} of {one.num_texts:,} as alone, {share:.1f} % of tokens up to a difference"
        parted = "" if one.widest_gap is None else f"; the widest gap where one parted {one.widest_gap:.2g}"
        yield "probes", told + parted


def _phases(phases: Sequence[PhaseFigures]) -> Table:
    from tonnage.report.draw import grid

    titles = [f"first {name}>" for name in ("p50", "p99")] + [f"between {name}>" for name in THOUSANDTHS]
    rows = []
    for phase in phases:
        first, between = percentiles(phase.first_us), percentiles(phase.gaps_us)
        times = [_ms(first, "p50"), _ms(first, "p99"), *(_ms(between, name) for name in THOUSANDTHS)]
        num_requests = sum(phase.outcomes.values())
        rows.append(
            [phase.name, f"{num_requests:,}", f"{phase.num_tokens:,}", f"{phase.tokens_per_second:,.0f}", *times]
        )
    title = "Phases, times in ms"
    return grid(["phase", "requests>", "tokens>", "a second>", *titles, ""], [[*row, ""] for row in rows], title=title)


def _ms(found: Mapping[str, int] | None, name: str) -> str:
    return "–" if found is None else f"{found[name] / 1000:,.1f}"
