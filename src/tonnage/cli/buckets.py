"""``tonnage buckets``: which batch sizes get a CUDA graph, chosen for a load and judged on others."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tonnage.cli import options as opt
from tonnage.cli.groups import grouped
from tonnage.config import FITTED_LIST
from tonnage.errors import InvalidSetting, UserError
from tonnage.units import exact, parse_bytes, parse_count, parse_fraction

if TYPE_CHECKING:
    from tonnage.graphs.histogram import Histogram
    from tonnage.graphs.optimise import Choice, Frontier, Rules
    from tonnage.graphs.price import Price
    from tonnage.graphs.step_times import StepTimes
    from tonnage.report.buckets_table import BucketList, BucketsView

#: Of a device without measured step times, in microseconds: a middling model on a large card. Told as assumed.
ASSUMED_BASE_US, ASSUMED_ROW_US = "6000", "6"
#: Sequences above which the guard's blends look at multiples of 8 only, to answer within a second.
FINE_SEQUENCES, COARSE_OF = 256, 8
#: Sequences up to which lists are searched: the time grows with the square of their number.
MOST_SEARCHED = 8192
#: Graphs times sequences, which take seconds; and what --graphs takes.
MOST_CHOICES, MOST_GRAPHS = 2**22, 1024
_ALL_OR_NONE = "--kv-token-bytes, --request-tokens and --running"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """How long a replayed step takes: measured, or a model."""

    step_times: Annotated[
        opt.Text,
        opt.option("--step-times", "FILE", "Measured: rows of batch_size and step_us, or what step_parts.py files."),
    ] = None
    base_us: Annotated[opt.Text, opt.option("--base-us", "T", "Or a model: a step without its rows (6000).")] = None
    row_us: Annotated[opt.Text, opt.option("--row-us", "T", "What each row adds (6).")] = None
    tile_rows: Annotated[opt.Text, opt.option("--tile-rows", "N", "Rows that cost alike, a tile of a kernel (1).")] = (
        None
    )
    eager_us: Annotated[opt.Text, opt.option("--eager-us", "T", "What a step without a graph takes more (0).")] = None

    def read(self, max_batch_size: int) -> StepTimes:
        """Raises ``InvalidSetting``, ``InputError`` and, for a file beside a model, ``UserError``."""
        from tonnage.graphs.load_files import read_step_times
        from tonnage.graphs.step_times import affine, measured

        eager_ns = _nanoseconds("0" if self.eager_us is None else self.eager_us, "--eager-us")
        given = [self.base_us, self.row_us, self.tile_rows]
        if self.step_times is None:
            return affine(
                max_batch_size,
                base_ns=_nanoseconds(self.base_us or ASSUMED_BASE_US, "--base-us", at_least=1),
                row_ns=_nanoseconds(self.row_us or ASSUMED_ROW_US, "--row-us"),
                tile_rows=opt.read_count(self.tile_rows, "--tile-rows", 1),
                eager_extra_ns=eager_ns,
            )
        if any(given):
            raise UserError(
                "--step-times measures what --base-us, --row-us and --tile-rows would model", remedy="keep one of them"
            )
        points = read_step_times(Path(self.step_times))
        return measured(points, max_batch_size, file=self.step_times, eager_extra_ns=eager_ns)

    @property
    def is_assumed(self) -> bool:
        return self.step_times is None and self.base_us is None and self.row_us is None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """What a graph takes, and what that is worth."""

    graph_bytes: Annotated[opt.Text, opt.option("--graph-bytes", "SIZE", "Of one graph (default 1MiB).")] = None
    kv_token_bytes: Annotated[opt.Text, opt.option("--kv-token-bytes", "SIZE", "Of one token in the cache.")] = None
    request_tokens: Annotated[opt.Text, opt.option("--request-tokens", "N", "Set aside for one request.")] = None
    running: Annotated[opt.Text, opt.option("--running", "N", "Requests that run when the cache is full.")] = None

    def each_bytes(self) -> int:
        """Bytes of one graph. Raises ``InvalidSetting``."""
        from tonnage.costs.context import GRAPH_BYTES

        return GRAPH_BYTES[1] if self.graph_bytes is None else parse_bytes(self.graph_bytes, knob="--graph-bytes")

    def price(self, max_batch_size: int) -> Price | None:
        """None where memory was not said to bind. Raises ``UserError`` for a part of what a price takes."""
        from tonnage.graphs.price import Price

        given = (self.kv_token_bytes, self.request_tokens, self.running)
        if not any(given):
            return None
        if not all(given):
            raise UserError(f"a price of memory takes {_ALL_OR_NONE}", remedy="add what is missing, or leave out all")
        num_running = parse_count(self.running or "", knob="--running")
        if num_running > max_batch_size:
            remedy = f"write at most {max_batch_size}, or raise --max-batch-size"
            raise InvalidSetting("--running", self.running, f"above --max-batch-size = {max_batch_size}", remedy=remedy)
        return Price(
            graph_bytes=self.each_bytes(),
            kv_token_bytes=parse_bytes(self.kv_token_bytes or "", knob="--kv-token-bytes"),
            request_tokens=parse_count(self.request_tokens or "", knob="--request-tokens"),
            num_running=num_running,
        )


@grouped
def buckets(
    *,
    load: Annotated[str, opt.argument("LOAD")],
    max_batch_size: Annotated[
        opt.Text, opt.option("--max-batch-size", "N", "Sequences running at once (default 256).")
    ] = None,
    judge: Annotated[
        list[str] | None,
        typer.Option("--judge", metavar="LOAD", help="Another load to judge the lists on; may be repeated."),
    ] = None,
    num_graphs: Annotated[
        opt.Text, opt.option("--num-graphs", "N", "Graphs at most, or auto: by price (default: as many as +64).")
    ] = None,
    always: Annotated[opt.Text, opt.option("--always", "SIZES", "Sizes that must be there, between commas.")] = None,
    most_padding: Annotated[
        opt.Text, opt.option("--most-padding", "SHARE", "Of a batch above 128, or none (default 25%).")
    ] = None,
    guard: Annotated[
        bool,
        typer.Option("--guard/--no-guard", help="No worse than +64 where the load drifts (default yes)."),
    ] = True,
    steps: StepOptions,
    memory: MemoryOptions,
    as_json: opt.AsJson = False,
    output: Annotated[opt.Text, opt.option("--output", "FILE", "Also keep it as JSON, which --graphs takes.")] = None,
    force: opt.Force = False,
) -> None:
    """Choose which decode batch sizes get a CUDA graph.

    LOAD is a histogram, a trace of steps or one of requests (.csv, .jsonl, .json). Example:
    tonnage buckets steps.csv --max-batch-size 512 --judge tuesday.csv --output sizes.json
    """
    _check_output(output, force=force)
    most = _most(max_batch_size)
    price = memory.price(most)
    asked = _Asked(
        load=load,
        judge=tuple(judge or ()),
        num_graphs=num_graphs,
        is_guarded=guard,
        rules=_rules(most, always, most_padding, price),
        times=steps.read(most),
        price=price,
        graph_bytes=memory.each_bytes(),
        notes=("assumed: measure yours and give --step-times",) if steps.is_assumed else (),
    )
    with _spinning():
        view = _view(asked)
    _tell(view, as_json=as_json, output=output, force=force)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """Everything that the flags said."""

    load: str
    judge: tuple[str, ...]
    num_graphs: str | None
    is_guarded: bool
    rules: Rules
    times: StepTimes
    price: Price | None
    graph_bytes: int
    notes: tuple[str, ...]


def _view(asked: _Asked) -> BucketsView:
    from tonnage.graphs.optimise import frontier
    from tonnage.graphs.step_times import unpadded_ns
    from tonnage.planner.buckets import GENERATORS
    from tonnage.report.buckets_table import BESIDE, BucketsView, CurvePoint

    most = asked.rules.max_batch_size
    lists = {name: make(most) for name, make in GENERATORS.items()}
    home = _read(asked.load, asked)
    others = [_read(path, asked) for path in asked.judge]
    beside = lists[BESIDE]
    num = _num_graphs(asked, len(beside))
    best = frontier(home, asked.times, asked.rules, most_graphs=max(num or 0, len(beside)))
    chosen, note = _chosen(asked, best, home, beside, num)
    lists[FITTED_LIST] = chosen.sizes
    floor = unpadded_ns(home, asked.times)
    share = None if asked.price is None else asked.price.share(asked.times)
    return BucketsView(
        load=asked.load,
        max_batch_size=most,
        step_times=asked.times.told,
        steps=home.steps,
        judged=tuple(Path(path).name for path in asked.judge),
        lists=tuple(_list(name, sizes, home, others, asked) for name, sizes in lists.items()),
        curve=tuple(
            CurvePoint(num_graphs=each.num_graphs, excess_ppm=_ppm(Fraction(each.total_ns, floor) - 1))
            for each in best.choices
        ),
        price_ppm=None if share is None else _ppm(share),
        flag=f"tonnage plan MODEL --max-batch-size {most} --graphs {','.join(map(str, chosen.sizes))}",
        notes=(*asked.notes, note),
    )


def _num_graphs(asked: _Asked, num_beside: int) -> int | None:
    """None: by price. Raises ``UserError`` where there is none."""
    if asked.num_graphs is None:
        return num_beside
    if asked.num_graphs.strip().lower() != "auto":
        return _at_most_graphs(asked.num_graphs, asked.rules.max_batch_size)
    if asked.price is None:
        raise UserError("--num-graphs auto weighs graphs against memory", need=_ALL_OR_NONE, remedy="add them")
    return None


def _at_most_graphs(text: str, max_batch_size: int) -> int:
    num, most = parse_count(text, knob="--num-graphs"), min(MOST_GRAPHS, MOST_CHOICES // max_batch_size)
    if num > most:
        what = f"more than are searched among {max_batch_size:,} sequences"
        raise InvalidSetting("--num-graphs", text, what, remedy=f"write at most {most}, or auto")
    return num


def _chosen(
    asked: _Asked, best: Frontier, home: Histogram, beside: Sequence[int], num: int | None
) -> tuple[Choice, str]:
    """The list, and a sentence on how it was chosen. A guard takes as many graphs as the list that it compares with."""
    from dataclasses import replace

    from tonnage.graphs.guard import guarded
    from tonnage.graphs.step_times import unpadded_ns

    if num is None:
        assert asked.price is not None
        price_ns = asked.price.share(asked.times) * unpadded_ns(home, asked.times)
        return best.under(price_ns), "fitted: the least of step time and memory, for this load alone"
    if not asked.is_guarded or num != len(beside):
        return best.of(num), "fitted: the best list for this load alone; another load may find it worse than +64"
    is_coarse = asked.rules.max_batch_size > FINE_SEQUENCES
    rules = replace(asked.rules, candidates_of=COARSE_OF) if is_coarse else asked.rules
    made = guarded(home, asked.times, rules, beside=beside)
    factor = 2**made.octaves
    return made.choice, f"fitted: no worse than +64 while batches stay within 1/{factor} and {factor} times this load's"


def _read(path: str, asked: _Asked) -> Histogram:
    """The batches of a load; of requests, those that they lead to under a list chosen for them."""
    from tonnage.graphs.histogram import Histogram
    from tonnage.graphs.load_files import read_load
    from tonnage.graphs.optimise import frontier
    from tonnage.graphs.traffic import settled
    from tonnage.planner.buckets import GENERATORS

    found, most = read_load(Path(path)), asked.rules.max_batch_size
    if isinstance(found, Histogram):
        if found.largest > most:
            raise InvalidSetting(
                "--max-batch-size",
                most,
                f"{path} has steps of {found.largest} sequences",
                remedy=f"give --max-batch-size {found.largest}",
            )
        return found
    first = GENERATORS["+64"](most)

    def choose(seen: Histogram) -> Sequence[int]:
        return frontier(seen, asked.times, asked.rules, most_graphs=len(first)).of(len(first)).sizes

    return settled(found, choose, asked.times, num_seats=most, first=first)


def _list(name: str, sizes: tuple[int, ...], home: Histogram, others: Sequence[Histogram], asked: _Asked) -> BucketList:
    from tonnage.graphs.step_times import total_ns, unpadded_ns
    from tonnage.report.buckets_table import BucketList

    total = total_ns(home, sizes, asked.times)
    excess, *judged = (
        Fraction(total_ns(load, sizes, asked.times), unpadded_ns(load, asked.times)) - 1 for load in (home, *others)
    )
    price = asked.price
    return BucketList(
        name=name,
        sizes=sizes,
        mean_step_ns=round(Fraction(total, home.num_steps)),
        tokens_per_second=round(Fraction(home.num_tokens * 10**9, total)),
        excess_ppm=_ppm(excess),
        judged_ppm=tuple(map(_ppm, judged)),
        graph_bytes=len(sizes) * asked.graph_bytes,
        kv_tokens=None if price is None else round(len(sizes) * price.kv_tokens),
        whole_ppm=None if price is None else _ppm(excess + len(sizes) * price.share(asked.times)),
    )


def _ppm(share: Fraction) -> int:
    return round(share * 10**6)


def _check_output(output: str | None, *, force: bool) -> None:
    """By its ending ``--graphs`` knows a file from a list. Raises ``InvalidSetting``, and ``UserError`` for a file that
    cannot be written."""
    from tonnage.report import check_writable

    if output is None:
        return
    if not output.lower().endswith(".json"):
        raise InvalidSetting("--output", output, "a file for --graphs ends in .json", remedy=f"write {output}.json")
    check_writable(output, force=force, flag="--output")


def _tell(view: BucketsView, *, as_json: bool, output: str | None, force: bool) -> None:
    from tonnage.report import write_file
    from tonnage.report.buckets_table import buckets_text, show_buckets
    from tonnage.report.draw import console_for

    if output is not None:
        write_file(output, buckets_text(view), force=force, flag="--output")
    if as_json:
        print(buckets_text(view), end="")
    else:
        show_buckets(view, console_for(sys.stdout))


def _most(text: str | None) -> int:
    most = opt.read_count(text, "--max-batch-size", 256)
    if most > MOST_SEARCHED:
        what = f"above {MOST_SEARCHED:,}, the most that a search among all lists takes seconds for"
        raise InvalidSetting("--max-batch-size", text, what, remedy=f"write the real limit, at most {MOST_SEARCHED}")
    return most


def _rules(most: int, always: str | None, most_padding: str | None, price: Price | None) -> Rules:
    """Where memory binds the load sits at the batch that it allows, so that has a graph."""
    from tonnage.graphs.optimise import Rules
    from tonnage.planner.graphs import read_sizes

    sizes = () if always is None else read_sizes(always, max_batch_size=most, knob="--always")
    is_free = most_padding is not None and most_padding.strip().lower() == "none"
    return Rules(
        max_batch_size=most,
        always=sizes if price is None else (*sizes, price.num_running),
        most_padding=None if is_free else parse_fraction(most_padding or "25%", knob="--most-padding"),
    )


def _spinning() -> AbstractContextManager[object]:
    """Something that moves on a terminal: with many sizes to choose among it takes seconds."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status("choosing")


def _nanoseconds(text: str, flag: str, *, at_least: int = 0) -> int:
    """Whole nanoseconds from a number of microseconds. Raises ``InvalidSetting``."""
    try:
        value = exact(text) * 1000
    except (ValueError, ZeroDivisionError):
        value = Fraction(-1)
    if value < at_least or value > 10**15:
        raise InvalidSetting(flag, text, "not a time", remedy="write microseconds, such as 6000 or 4.5")
    return round(value)
