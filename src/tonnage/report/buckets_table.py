"""Lists of graph sizes side by side, drawn for a person: what each pads, takes and costs. And the same as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tonnage.config import BUCKETS_SCHEMA, FITTED_LIST
from tonnage.report import codec
from tonnage.report.curve_draw import Area, Picture, cells, draw
from tonnage.report.draw import grid, hanging, plural, show
from tonnage.report.shell import pasteable
from tonnage.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

#: The name of the list that the chosen one is set beside.
BESIDE = "+64"
#: The character under the curve for each list.
MARKS = {"x2": "2", BESIDE: "6", "+8": "8", FITTED_LIST: "f"}
#: The curve is cut at so many times the excess of the list beside: above, every list is poor.
HIGHEST_TIMES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketList:
    """One list of sizes on the load, times in nanoseconds and shares in millionths.

    excess_ppm   step time above that of un-padded steps
    judged_ppm   the same on each load that nothing was fitted to
    graph_bytes  of all graphs, beside the pool that they share
    kv_tokens    of cache that they take the place of; None where nobody said what a token takes
    whole_ppm    excess and throughput lost to memory together; None without a price
    """

    name: str
    sizes: tuple[int, ...]
    mean_step_ns: int
    tokens_per_second: int
    excess_ppm: int
    judged_ppm: tuple[int, ...]
    graph_bytes: int
    kv_tokens: int | None
    whole_ppm: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """The best list of ``num_graphs`` sizes for the load alone."""

    num_graphs: int
    excess_ppm: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketsView:
    """Everything that is shown. ``steps[b]``: steps of ``b`` sequences in the load; ``judged``: names of other loads.

    price_ppm  throughput that one graph costs, in millionths; None without a price
    """

    load: str
    max_batch_size: int
    step_times: str
    steps: tuple[int, ...]
    judged: tuple[str, ...]
    lists: tuple[BucketList, ...]
    curve: tuple[CurvePoint, ...]
    price_ppm: int | None
    flag: str
    notes: tuple[str, ...] = ()

    def of(self, name: str) -> BucketList:
        return next(each for each in self.lists if each.name == name)


def buckets_text(view: BucketsView) -> str:
    """Canonical JSON: schema ``tonnage.buckets/1``."""
    document: dict[str, Any] = codec.to_json(view)
    return codec.dumps({"schema": BUCKETS_SCHEMA, **document})


def show_buckets(view: BucketsView, console: Console) -> None:
    show(buckets_parts(view, console), console)


def buckets_parts(view: BucketsView, console: Console) -> list[RenderableType]:
    """The pieces of the view, top to bottom."""
    from rich.console import Group
    from rich.text import Text

    plain, width = console.options.ascii_only, cells(console)
    steps = plural(sum(view.steps), "step")
    head = f"{view.load}: {steps}, at most {len(view.steps) - 1:,} of {view.max_batch_size:,} sequences"
    told = (f"step time: {view.step_times}", *view.notes)
    parts: list[RenderableType] = [Text("\n".join(hanging(line, "", console.width) for line in (head, *told)))]
    parts.append(Text("Steps, by sequences in them", style="bold"))
    parts.append(draw(load_picture(view, width), width=width, ascii_only=plain))
    parts.append(Text(f"{'':13}1 to {view.max_batch_size:,} sequences; ^ a size with a graph"))
    if len(view.curve) > 1:
        first, last = view.curve[0].num_graphs, view.curve[-1].num_graphs
        parts.append(Text("Step time above that of un-padded steps, by number of graphs", style="bold"))
        parts.append(draw(curve_picture(view), width=width, ascii_only=plain))
        axis = f"{first:,} to {last:,} graphs at their best for this load; the line is {BESIDE}; "
        parts.append(Text(hanging(axis + _marks_told(view), " " * 13, console.width)))
    parts.append(lists_table(view))
    # One word of numbers may be wider than the console; folded, it could not be pasted. Printed by itself a text
    # forgets that it must not be folded; in a group it does not.
    parts.append(Group(Text(pasteable(view.flag, console.width), no_wrap=True, overflow="ignore")))
    return parts


def lists_table(view: BucketsView) -> Table:
    """A row for each list."""
    columns = ["list", "graphs>", "mean step>", "tokens/s>", "excess>", *(f"{name}>" for name in view.judged), "bytes>"]
    has_tokens, has_price = view.lists[0].kv_tokens is not None, view.price_ppm is not None
    columns += ["KV tokens>"] * has_tokens + ["with memory>"] * has_price
    return grid(columns, [_row(each) for each in view.lists], title="Lists")


def _row(each: BucketList) -> list[str]:
    row = [each.name, f"{len(each.sizes):,}", f"{each.mean_step_ns / 1e6:.3f} ms", f"{each.tokens_per_second:,}"]
    row += [_percent(ppm) for ppm in (each.excess_ppm, *each.judged_ppm)]
    row.append(format_bytes(each.graph_bytes))
    row += [] if each.kv_tokens is None else [f"{each.kv_tokens:,}"]
    return row + ([] if each.whole_ppm is None else [_percent(each.whole_ppm)])


def _percent(ppm: int) -> str:
    return f"{ppm / 10_000:.2f} %"


def _marks_told(view: BucketsView) -> str:
    shown = (name for name in MARKS if _place(view, name) is not None)
    return ", ".join(f"{MARKS[name]} {name}" for name in shown)


def _place(view: BucketsView, name: str) -> int | None:
    """Where a list's number of graphs stands on the axis of the curve."""
    counts = [point.num_graphs for point in view.curve]
    found = [len(each.sizes) for each in view.lists if each.name == name]
    return counts.index(found[0]) if found and found[0] in counts else None


def curve_picture(view: BucketsView) -> Picture:
    """Excess by number of graphs, cut where it leaves what is of interest."""
    beside = view.of(BESIDE).excess_ppm
    highest = max(point.excess_ppm for point in view.curve)
    top = max(1, min(highest, HIGHEST_TIMES * beside) if beside else highest)
    heights = tuple(min(top, point.excess_ppm) for point in view.curve)
    marks = [(place, MARKS[name]) for name in MARKS if (place := _place(view, name)) is not None]
    return Picture(
        areas=(Area(name="excess", heights=heights, style="yellow"),),
        top=top,
        line=beside,
        labels=((0, "0 %"), (top, _percent(top)), (beside, _percent(beside))),
        marks=tuple(marks),
    )


def load_picture(view: BucketsView, width: int) -> Picture:
    """Steps in ``width`` columns of sizes, each a share of the highest, and the fitted sizes under them."""
    heights = [0] * width
    for size, count in enumerate(view.steps):
        heights[_column(size, view.max_batch_size, width)] += count
    top = max(heights)
    return Picture(
        areas=(Area(name="steps", heights=tuple(heights), style="green"),),
        top=top,
        line=-top,  # below the picture: there is no line to draw
        labels=((top, plural(top, "step")),),
        marks=tuple((_column(size, view.max_batch_size, width), "^") for size in view.of(FITTED_LIST).sizes),
    )


def _column(size: int, most: int, width: int) -> int:
    return max(0, size - 1) * width // most
