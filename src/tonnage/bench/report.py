"""What a benchmark gave, as JSON (``tonnage.bench/1``) and as tables."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from tonnage.bench.measure import Measurement, Sample
from tonnage.report.run_table import planned_own_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from tonnage.bench.limits import Limits
    from tonnage.bench.workloads import Workload
    from tonnage.report import RunResult

BENCH_SCHEMA = "tonnage.bench/1"
PERCENTS = (50, 90, 99)
#: Packages whose version a measurement depends on.
PACKAGES = ("tonnage", "torch", "transformers", "numpy")

Document = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Throughput per second, and percentiles in microseconds by name of the quantity; None: nothing to count."""

    output_tokens: float
    input_tokens: float
    total_tokens: float
    requests: float
    percentiles_us: Mapping[str, Mapping[str, int] | None]


def percentile(ordered: Sequence[int], percent: int) -> int:
    """The nearest rank: the smallest of the ``ordered`` values that at least ``percent`` % of them do not exceed."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def figures(measured: Measurement) -> Figures:
    """The workload's own requests; prompts that came between count for nothing but their time to first token."""
    own = [sample for sample in measured.requests if sample.error is None]
    ended = [sample for sample in own if sample.finish != "cancelled"]  # all, unless the run was stopped
    seconds = max(measured.elapsed_us, 1) / 10**6
    output, prompt = sum(s.num_output_tokens for s in own), sum(s.num_input_tokens for s in own)
    between = [gap for sample in own for gap in sample.gaps_us]
    interrupted = [gap for sample in own for gap in sample.interrupted_gaps_us]
    quantities = {
        "time_to_first_token": _first_tokens(own),
        "time_between_tokens": between + interrupted,
        "end_to_end": [sample.end_us - sample.arrival_us for sample in ended],
    }
    if interrupted:
        quantities |= {
            "time_between_tokens, uninterrupted": between,
            "time_between_tokens, interrupted": interrupted,
            "time_to_first_token, interrupting": _first_tokens([s for s in measured.samples if s.is_interrupting]),
        }
    return Figures(
        output_tokens=output / seconds,
        input_tokens=prompt / seconds,
        total_tokens=(output + prompt) / seconds,
        requests=len(ended) / seconds,
        percentiles_us={name: _percentiles(values) for name, values in quantities.items()},
    )


def decode_tokens_per_second(measured: Measurement) -> float | None:
    """Of a request alone, from its first token on; None where there were several, or there is no second token."""
    samples = measured.requests
    if len(samples) != 1 or samples[0].first_token_us is None or not samples[0].gaps_us:
        return None
    took = samples[0].last_token_us - samples[0].first_token_us
    return len(samples[0].gaps_us) * 10**6 / max(1, took)


def _first_tokens(samples: Sequence[Sample]) -> list[int]:
    return [s.first_token_us - s.arrival_us for s in samples if s.first_token_us is not None]


def _percentiles(values: Sequence[int]) -> dict[str, int] | None:
    ordered = sorted(values)
    return {f"p{percent}": percentile(ordered, percent) for percent in PERCENTS} if ordered else None


# -- JSON ----------------------------------------------------------------------------------------------------------


def setting(command: Sequence[str]) -> Document:
    """When, by which command, with what, on what: the part that every measurement's file begins with."""
    torch = sys.modules.get("torch")
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": " ".join(command),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads() if torch is not None else None,
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def bench_document(
    measured: Measurement, result: RunResult, *, command: Sequence[str], limits: Limits | None = None
) -> Document:
    """Schema ``tonnage.bench/1``: what was asked, where, the figures, and the raw samples that they come from.

    ``limits``: what the card allows, where that is known.
    """
    return {
        "schema": BENCH_SCHEMA,
        **setting(command),
        **engine_part(result),
        "workload": workload_document(measured.workload),
        "limit_per_second": limits and {name: round(value, 1) for name, value in asdict(limits).items()},
        **run_document(measured),
    }


def workload_document(drawn: Workload) -> Document:
    shape = drawn.shape
    return {
        "name": drawn.name,
        "requests": shape.num_requests,
        "input_tokens": [shape.input_tokens.low, shape.input_tokens.high],
        "output_tokens": [shape.output_tokens.low, shape.output_tokens.high],
        "interrupting_tokens": shape.interrupting and [shape.interrupting.low, shape.interrupting.high],
        "rate_per_second": drawn.rate_per_second and str(drawn.rate_per_second),
        "seed": drawn.seed,
    }


def run_document(measured: Measurement) -> Document:
    """One run: its figures and its samples."""
    found = figures(measured)
    return {
        "elapsed_us": measured.elapsed_us,
        "failed": measured.num_failed,
        "suspensions": measured.num_suspensions,
        "waited": sum(sample.waited for sample in measured.samples),
        "per_second": {
            "output_tokens": round(found.output_tokens, 3),
            "input_tokens": round(found.input_tokens, 3),
            "total_tokens": round(found.total_tokens, 3),
            "requests": round(found.requests, 3),
        },
        "percentiles_us": dict(found.percentiles_us),
        "samples": [asdict(sample) for sample in measured.samples],
    }


def engine_part(result: RunResult) -> Document:
    plan = result.plan
    return {
        "model": plan.model_name,
        "device": plan.device_name,
        "limits": {
            "max_seq_len": plan.limits.max_seq_len,
            "max_batch_size": plan.limits.max_batch_size,
            "max_num_tokens": plan.limits.max_num_tokens,
            "kv_tokens": plan.kv.tokens,
            "admission": plan.knobs.admission.value,
        },
        "memory": {
            "device_bytes": plan.device_bytes,
            "planned_bytes": planned_own_bytes(result),
            "peak_bytes": result.peak_own_bytes,
            "unattributed_bytes": result.snapshot.unattributed,
            "watch": None if result.watch is None else asdict(result.watch),
        },
    }


def text_of(document: Document) -> str:
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


# -- tables --------------------------------------------------------------------------------------------------------


def show_bench(measured: Measurement, result: RunResult, console: Console, *, limits: Limits | None = None) -> None:
    """Throughput, latencies, and memory against the plan; beside the first what the card allows, where it is known."""
    from tonnage.report.draw import show

    found = figures(measured)
    show(
        [_what_ran(measured, result), _throughput(found, limits), _latencies(found), _memory(measured, result)], console
    )


def _what_ran(measured: Measurement, result: RunResult) -> Text:
    from rich.text import Text

    from tonnage.report.draw import plural

    plan, shape = result.plan, measured.workload.shape
    text = Text.assemble((plan.model_name, "bold"), " on ", (plan.device_name, "bold"))
    text.append(f": workload {measured.workload.name}, {plural(shape.num_requests, 'request')}, ")
    text.append(f"{shape.input_tokens} tokens in, {shape.output_tokens} out")
    if shape.interrupting is not None:
        count = sum(sample.is_interrupting for sample in measured.samples)
        text.append(f", interrupted by {plural(count, 'prompt')} of {shape.interrupting}")
    rate = measured.workload.rate_per_second
    text.append(", all at once" if rate is None else f", {float(rate):g} arrivals a second")
    text.append(f"; {measured.elapsed_us / 10**6:.2f} s")
    return text


def _throughput(found: Figures, limits: Limits | None) -> Table:
    from tonnage.report.draw import grid

    rows = [
        ("output tokens", f"{found.output_tokens:,.1f}", "" if limits is None else f"{limits.output_tokens:,.0f}"),
        ("input tokens", f"{found.input_tokens:,.1f}", "" if limits is None else f"{limits.input_tokens:,.0f}"),
        ("total tokens", f"{found.total_tokens:,.1f}", ""),
        ("requests", f"{found.requests:,.2f}", ""),
    ]
    heads = ["", "a second>", "" if limits is None else "the card's limit", ""]
    return grid(heads, [(*row, "") for row in rows], title="Throughput")


def _latencies(found: Figures) -> Table:
    from tonnage.report.draw import grid

    rows = [
        (name.replace("_", " "), *(_milliseconds(values, percent) for percent in PERCENTS), "")
        for name, values in found.percentiles_us.items()
    ]
    return grid(["", *(f"p{percent}>" for percent in PERCENTS), ""], rows, title="Latency")


def _memory(measured: Measurement, result: RunResult) -> Text:
    from rich.text import Text

    from tonnage.report.draw import maybe_bytes, plural
    from tonnage.units import format_bytes

    samples = measured.requests
    text = Text.assemble(("requests  ", "dim"), f"{len(samples) - measured.num_failed:,} finished")
    if measured.num_failed:
        text.append(f", {measured.num_failed:,} failed", "bold red")
    text.append(f"; {sum(sample.waited for sample in samples):,} waited for memory, ")
    text.append(plural(measured.num_suspensions, "suspension"))
    text.append("\nmemory    ", "dim")
    text.append(f"peak {maybe_bytes(result.peak_own_bytes)} of {format_bytes(planned_own_bytes(result))} planned, ")
    text.append(f"KV for {result.plan.kv.tokens:,} tokens")
    return text


def _milliseconds(percentiles: Mapping[str, int] | None, percent: int) -> str:
    return "–" if percentiles is None else f"{percentiles[f'p{percent}'] / 1000:,.1f} ms"
