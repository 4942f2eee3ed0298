"""``tonnage bench``: a named workload on an engine, timed token by token."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any

from tonnage.cli import options as opt
from tonnage.cli.card import CardOptions, card_ordinal
from tonnage.cli.groups import grouped
from tonnage.cli.interrupt import Stop, noted_interrupts
from tonnage.cli.rooms import engine_room
from tonnage.cli.sampling import ChoiceOptions
from tonnage.errors import InvalidSetting, UserError
from tonnage.units import exact

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from tonnage.bench.limits import Limits
    from tonnage.bench.measure import Measurement
    from tonnage.bench.series import Series
    from tonnage.bench.workloads import Workload
    from tonnage.cli.display import Display
    from tonnage.report import RunResult
    from tonnage.terms import MemoryPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """Which workload, and what of it is changed."""

    workload: Annotated[
        opt.Text,
        opt.option("--workload", "NAME", "A name of docs/bench-and-soak.md, several between commas, or bars."),
    ] = None
    requests: Annotated[opt.Text, opt.option("--requests", "N", "So many requests.")] = None
    input_tokens: Annotated[opt.Text, opt.option("--input-tokens", "N", "Prompt tokens: N, or LOW-HIGH.")] = None
    output_tokens: Annotated[opt.Text, opt.option("--output-tokens", "N", "Tokens to generate: N, or LOW-HIGH.")] = None
    scale: Annotated[opt.Text, opt.option("--scale", "SHARE", "All lengths times this, such as 1/8.")] = None
    rate: Annotated[opt.Text, opt.option("--rate", "R", "Poisson arrivals a second (default: all at once).")] = None
    seed: Annotated[opt.Text, opt.option("--seed", "N", "Of lengths, arrivals and prompts (default 0).")] = None
    runs: Annotated[opt.Text, opt.option("--runs", "N", "Measure each N times, from --seed on; tell medians.")] = None
    warmup: Annotated[opt.Text, opt.option("--warmup", "N", "Requests served before, untimed (default 1).")] = None

    def drawn(self) -> list[list[Workload]]:
        """For each workload one for each run. Raises ``UserError`` without a name, ``InvalidSetting`` for what cannot
        be read."""
        from tonnage.bench.workloads import WORKLOADS, Span, workload, workload_names

        if self.workload is None:
            raise UserError(
                "tonnage bench does not know the workload",
                need=f"--workload, one of {', '.join(WORKLOADS)}",
                remedy="add --workload batch32",
            )
        spans = {
            name: None if text is None else Span.parse(text, knob=f"--{name.replace('_', '-')}")
            for name, text in (("input_tokens", self.input_tokens), ("output_tokens", self.output_tokens))
        }
        how: dict[str, Any] = {
            "num_requests": None if self.requests is None else _at_most(self.requests, "--requests", MOST),
            "scale": _positive(self.scale, "--scale") or Fraction(1),
            "rate_per_second": _positive(self.rate, "--rate"),
            **spans,
        }
        seed = opt.read_count(self.seed, "--seed", 0, allow_zero=True)
        num_runs = _at_most(self.runs, "--runs", MOST_RUNS)
        names = workload_names(self.workload)
        return [[workload(name, seed=seed + run, **how) for run in range(num_runs)] for name in names]


#: Of rates, scales and numbers of requests: beyond these a run neither ends nor means anything.
LEAST, MOST = Fraction(1, 1000), 1_000_000
#: Runs of one workload.
MOST_RUNS = 1000


@grouped
def bench(
    *,
    model: opt.Model,
    load: WorkloadOptions,
    choice: ChoiceOptions,
    memory: opt.Memory = None,
    pool: opt.PoolOptions,
    serving: opt.ServingOptions,
    card: CardOptions,
    as_json: opt.AsJson = False,
    output: Annotated[opt.Text, opt.option("--output", "FILE", "Keep everything measured as JSON.")] = None,
    force: opt.Force = False,
) -> int:
    """Time a named workload: throughput, latencies, memory.

    Prompts are random token ids, nothing ends before its length, decoding is greedy unless a flag says otherwise.

    MODEL is a folder, smollm2, or a hub id. Example: tonnage bench smollm2 --workload batch32 --scale 1/8
    """
    settings = card.onto(opt.engine_settings(model, memory, pool, serving))
    drawn, given = load.drawn(), choice.values()
    num_warmup = _at_most(load.warmup, "--warmup", MOST, allow_zero=True)

    from tonnage.report import check_writable, write_file

    if output is not None:
        check_writable(output, force=force, flag="--output")
    all_series, result, stop = _measured(settings, drawn, given, num_warmup)
    text, show = _told(all_series, result, is_one=len(drawn) == len(drawn[0]) == 1)
    if output is not None:
        write_file(output, text, force=force, flag="--output")
    if as_json:
        print(text, end="")
    else:
        from tonnage.report.draw import console_for

        show(console_for(sys.stdout))
    if stop:
        measured = [run for series in all_series for run in series.runs]
        num_ended = sum(sample.finish not in (None, "cancelled") for run in measured for sample in run.requests)
        num_jobs = sum(len(one.jobs) for runs in drawn for one in runs)
        print(f"interrupted: {num_ended} of {num_jobs} requests had finished", file=sys.stderr)
        return stop.exit_code
    return int(any(series.num_failed for series in all_series))


def _told(all_series: list[Series], result: RunResult, *, is_one: bool) -> tuple[str, Callable[[Console], None]]:
    """What is kept, and what shows it: a run alone in full, several by their medians."""
    from tonnage.bench.report import bench_document, show_bench, text_of
    from tonnage.bench.series import series_document, show_series

    command = ["tonnage", *sys.argv[1:]]
    if is_one:
        (measured,) = all_series[0].runs
        limits = all_series[0].limits
        document = bench_document(measured, result, command=command, limits=limits)
        return text_of(document), lambda console: show_bench(measured, result, console, limits=limits)
    document = series_document(all_series, result, command=command)
    return text_of(document), lambda console: show_series(all_series, result, console)


def _measured(
    settings: dict[str, Any], drawn: list[list[Workload]], given: dict[str, Any], num_warmup: int
) -> tuple[list[Series], RunResult, Stop]:
    """Each workload's runs one after the other on one engine; those that an interrupt left time for."""
    from tonnage.bench.series import Series
    from tonnage.cli.display import make_display

    with closing(make_display(sys.stderr)) as display:
        display.stage("import")
        start, options = engine_room("bench")
        with closing(start(options(**settings), on_stage=display.stage)) as engine:
            found: list[Series] = []
            with noted_interrupts() as stop:
                for workloads in drawn:
                    limits = _limits(settings, workloads[0], engine.plan)
                    runs: list[Measurement] = []
                    for one in workloads:
                        if stop and (found or runs):  # of an interrupted one there is always the first
                            break
                        runs.append(_run(engine, one, given, num_warmup, display, stop))
                    if runs:
                        found.append(Series(runs=tuple(runs), limits=limits))
            return found, engine.result(), stop


def _run(
    engine: Any, workload: Workload, given: dict[str, Any], num_warmup: int, display: Display, stop: Stop
) -> Measurement:
    from tonnage.bench.measure import GREEDY, measure

    display.begin(len(workload.jobs))
    return measure(
        engine,
        workload,
        params=replace(GREEDY, **given),
        num_warmup=num_warmup,
        on_step=lambda done: display.step(engine.progress(), done=done),
        is_stopped=lambda: bool(stop),
    )


def _limits(settings: dict[str, Any], workload: Workload, plan: MemoryPlan) -> Limits | None:
    """What the card allows, where that is known; at a fixed rate of arrivals nothing is to be reached."""
    if card_ordinal(settings) is None or workload.rate_per_second is not None:
        return None
    from tonnage.bench.limits import limits_of
    from tonnage.costs.config import ModelConfig
    from tonnage.engine.models import model_folder

    config = ModelConfig.read(model_folder(settings["model"], needs_weights=False))
    dtype = plan.kv.layout.groups[0].parts[0].dtype
    return limits_of(
        workload, config, card=plan.device_name, dtype=dtype, max_batch_size=plan.limits.max_batch_size
    )  # fmt: skip


def _at_most(text: opt.Text, flag: str, most: int, *, allow_zero: bool = False) -> int:
    """A whole number, 1 where the flag was not given."""
    count = opt.read_count(text, flag, 1, allow_zero=allow_zero)
    if count > most:
        raise InvalidSetting(flag, text, f"more than {most:,}", remedy=f"write at most {most}")
    return count


def _positive(text: opt.Text, flag: str) -> Fraction | None:
    """An exact number above 0, such as 0.5, 1/8 or 25%."""
    if text is None:
        return None
    remedy = "write a number above 0, such as 0.5 or 1/8"
    try:
        value = exact(text.strip()[:-1]) / 100 if text.strip().endswith("%") else exact(text)
    except (ValueError, ZeroDivisionError):
        raise InvalidSetting(flag, text, "not a number", remedy=remedy) from None
    if value <= 0:
        raise InvalidSetting(flag, text, "not above 0", remedy=remedy)
    if not LEAST <= value <= MOST:
        raise InvalidSetting(flag, text, f"outside {float(LEAST):g} to {MOST:,}", remedy=remedy)
    return value
