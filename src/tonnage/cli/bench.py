"""``tonnage bench``: a named workload on an engine, timed token by token."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any

from tonnage.cli import options as opt
from tonnage.cli.groups import grouped
from tonnage.cli.interrupt import Stop, noted_interrupts
from tonnage.cli.rooms import engine_room
from tonnage.cli.sampling import ChoiceOptions
from tonnage.errors import InvalidSetting, UserError
from tonnage.units import parse_count

if TYPE_CHECKING:
    from tonnage.bench.measure import Measurement
    from tonnage.bench.workloads import Workload
    from tonnage.report import RunResult


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """Which workload, and what of it is changed."""

    workload: Annotated[
        opt.Text,
        opt.option("--workload", "NAME", "single, batch32, batch256, prefill, uniform, long or stalls."),
    ] = None
    requests: Annotated[opt.Text, opt.option("--requests", "N", "So many requests.")] = None
    input_tokens: Annotated[opt.Text, opt.option("--input-tokens", "N", "Prompt tokens: N, or LOW-HIGH.")] = None
    output_tokens: Annotated[opt.Text, opt.option("--output-tokens", "N", "Tokens to generate: N, or LOW-HIGH.")] = None
    scale: Annotated[opt.Text, opt.option("--scale", "SHARE", "All lengths times this, such as 1/8.")] = None
    rate: Annotated[opt.Text, opt.option("--rate", "R", "Poisson arrivals a second (default: all at once).")] = None
    seed: Annotated[opt.Text, opt.option("--seed", "N", "Of lengths, arrivals and prompts (default 0).")] = None
    warmup: Annotated[opt.Text, opt.option("--warmup", "N", "Requests served before, untimed (default 1).")] = None

    def drawn(self) -> Workload:
        """Raises ``UserError`` without a name, ``InvalidSetting`` for what cannot be read."""
        from tonnage.bench.workloads import WORKLOADS, Span, workload

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
        return workload(
            self.workload,
            num_requests=None if self.requests is None else _num_requests(self.requests),
            scale=_positive(self.scale, "--scale") or Fraction(1),
            rate_per_second=_positive(self.rate, "--rate"),
            seed=opt.read_count(self.seed, "--seed", 0, allow_zero=True),
            **spans,
        )


#: Of rates, scales and numbers of requests: beyond these a run neither ends nor means anything.
LEAST, MOST = Fraction(1, 1000), 1_000_000


@grouped
def bench(
    *,
    model: opt.Model,
    load: WorkloadOptions,
    choice: ChoiceOptions,
    memory: opt.Memory = None,
    pool: opt.PoolOptions,
    serving: opt.ServingOptions,
    as_json: opt.AsJson = False,
    output: Annotated[opt.Text, opt.option("--output", "FILE", "Keep everything measured as JSON.")] = None,
    force: opt.Force = False,
) -> int:
    """Time a named workload: throughput, latencies, memory.

    Prompts are random token ids, nothing ends before its length, decoding is greedy unless a flag says otherwise.

    MODEL is a folder, smollm2, or a hub id. Example: tonnage bench smollm2 --workload batch32 --scale 1/8
    """
    settings = opt.engine_settings(model, memory, pool, serving)
    drawn, given = load.drawn(), choice.values()
    num_warmup = opt.read_count(load.warmup, "--warmup", 1, allow_zero=True)

    from tonnage.report import check_writable, write_file

    if output is not None:
        check_writable(output, force=force, flag="--output")
    measured, result, stop = _measured(settings, drawn, given, num_warmup)

    from tonnage.bench.report import bench_document, show_bench, text_of
    from tonnage.report.draw import console_for

    text = text_of(bench_document(measured, result, command=["tonnage", *sys.argv[1:]]))
    if output is not None:
        write_file(output, text, force=force, flag="--output")
    if as_json:
        print(text, end="")
    else:
        show_bench(measured, result, console_for(sys.stdout))
    if stop:
        num_ended = sum(sample.finish not in (None, "cancelled") for sample in measured.requests)
        print(f"interrupted: {num_ended} of {len(drawn.jobs)} requests had finished", file=sys.stderr)
        return stop.exit_code
    return int(measured.num_failed > 0)


def _measured(
    settings: dict[str, Any], drawn: Workload, given: dict[str, Any], num_warmup: int
) -> tuple[Measurement, RunResult, Stop]:
    from tonnage.bench.measure import GREEDY, measure
    from tonnage.cli.display import make_display

    with closing(make_display(sys.stderr)) as display:
        display.stage("import")
        start, options = engine_room("bench")
        with closing(start(options(**settings), on_stage=display.stage)) as engine:
            display.begin(len(drawn.jobs))
            with noted_interrupts() as stop:
                measured = measure(
                    engine,
                    drawn,
                    params=replace(GREEDY, **given),
                    num_warmup=num_warmup,
                    on_step=lambda done: display.step(engine.progress(), done=done),
                    is_stopped=lambda: bool(stop),
                )
            return measured, engine.result(), stop


def _num_requests(text: str) -> int:
    count = parse_count(text, knob="--requests")
    if count > MOST:
        raise InvalidSetting("--requests", text, f"more than {MOST:,}", remedy=f"write at most {MOST}")
    return count


def _positive(text: opt.Text, flag: str) -> Fraction | None:
    """An exact number above 0, such as 0.5, 1/8 or 25%."""
    if text is None:
        return None
    remedy = "write a number above 0, such as 0.5 or 1/8"
    try:
        value = Fraction(text.strip()[:-1]) / 100 if text.strip().endswith("%") else Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise InvalidSetting(flag, text, "not a number", remedy=remedy) from None
    if value <= 0:
        raise InvalidSetting(flag, text, "not above 0", remedy=remedy)
    if not LEAST <= value <= MOST:
        raise InvalidSetting(flag, text, f"outside {float(LEAST):g} to {MOST:,}", remedy=remedy)
    return value
