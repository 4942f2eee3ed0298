"""The pieces of the page as markup: the device as a bar, its owners as a table, the derivation, the grid."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from tonnage.report.draw import plural, share, spread
from tonnage.report.page_charts import charts, legend
from tonnage.units import format_bytes

if TYPE_CHECKING:
    from tonnage.report.page import Cell, Page, Segment, Series

#: Fill and ink of each owner: the palettes of Okabe and Ito and of Paul Tol, made to be told apart without full colour
#: vision. The ink has a contrast of at least 4.5 on its fill; beside every colour stands a letter.
COLOURS: dict[str, tuple[str, str]] = {
    "weights": ("#E69F00", "#000"), "kv": ("#0072B2", "#fff"), "scratch": ("#009E73", "#000"),
    "transient": ("#D55E00", "#000"), "graphs": ("#CC79A7", "#000"), "context": ("#56B4E9", "#000"),
    "libraries": ("#F0E442", "#000"), "tables": ("#882255", "#fff"), "foreign": ("#595959", "#fff"),
    "keep_free": ("#BBBBBB", "#000"), "rounding": ("#999933", "#000"), "unattributed": ("#111111", "#fff"),
    "slack": ("#44AA99", "#000"),
}  # fmt: skip
_OTHER = ("#DDDDDD", "#000")
#: What the enlarged bar leaves out, and the share of the device below which the rest is enlarged.
LARGE, ENLARGED_BELOW = ("weights", "kv"), 0.25
#: Shares of the device from which a segment has room for its letter, and for its name, in the bar.
LETTER_SHARE, NAME_SHARE = 0.025, 0.13


def parts(page: Page) -> dict[str, str]:
    """By slot of the template."""
    return {
        "title": escape(f"{page.model} on {page.device}"),
        "headline": escape(page.headline),
        "facts": "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(told)}</dd></div>" for name, told in page.facts),
        "warnings": _warnings(page.warnings),
        "bar": _bar(page),
        "owners": "".join(_owner_rows(page)),
        "steps": "".join(_row(("th", "td", "td n", "td n", "td why"), row) for row in page.steps),
        "caps": "".join(_row(("th", "td n", "td", "td"), row) for row in page.caps),
        "grids": "".join(_series(each, number) for number, each in enumerate(page.series)),
        "version": escape(page.version),
        "device_bytes": escape(format_bytes(page.device_bytes)),
    }


def _warnings(told: tuple[str, ...]) -> str:
    if not told:
        return ""
    return f'<ul class="warnings" aria-label="Warnings">{"".join(f"<li>{escape(each)}</li>" for each in told)}</ul>'


def _row(cells: tuple[str, ...], texts: tuple[str, ...]) -> str:
    """One row of a table; "td n" is a cell of that class."""
    made = []
    for cell, text in zip(cells, texts, strict=True):
        tag, _, kind = cell.partition(" ")
        scope = ' scope="row"' if tag == "th" else f' class="{kind}"' if kind else ""
        made.append(f"<{tag}{scope}>{escape(text)}</{tag}>")
    return f"<tr>{''.join(made)}</tr>"


def colour_of(segment: Segment) -> tuple[str, str]:
    return COLOURS.get(segment.kind, _OTHER)


def _bar(page: Page) -> str:
    """The device, and once more what is neither weights nor cache where that is too thin to be seen."""
    whole = _stack(page, page.segments, page.device_bytes, "Parts of the device")
    small = tuple(each for each in page.segments if each.kind not in LARGE)
    num_bytes = sum(each.bytes for each in small)
    if len(small) < 2 or num_bytes > page.device_bytes * ENLARGED_BELOW:
        return whole
    told = f"Enlarged: what is neither weights nor cache, {format_bytes(num_bytes)} of it"
    return f'{whole}<p class="note">{told}</p>{_stack(page, small, num_bytes, told)}'


def _stack(page: Page, shown: tuple[Segment, ...], whole: int, label: str) -> str:
    """Segments in the plan's order, and under them a line for each whose bytes are not exact, from its own start. What
    would run beyond the end is cut there."""
    segments, lines, start, seen = list[str](), list[str](), 0, set[str]()
    for segment in shown:
        width = segment.bytes / whole
        hatched = " again" if segment.kind in seen else ""
        seen.add(segment.kind)
        fill, ink = colour_of(segment)
        told = f"{segment.name}: {_told(segment)}, {share(segment.bytes, page.device_bytes)}"
        inside = segment.key if width >= LETTER_SHARE else ""
        if width >= NAME_SHARE:
            inside = f"{segment.key} {segment.name}<small>{format_bytes(segment.bytes)}</small>"
        segments.append(
            f'<a class="seg{hatched}" href="#owner-{segment.key}" title="{escape(told)}" aria-label="{escape(told)}" '
            f'style="width:{width:.4%};background-color:{fill};color:{ink}">{_markup(inside)}</a>'
        )
        if segment.low != segment.high:
            left, right = min((start + segment.low) / whole, 1.0), min((start + segment.high) / whole, 1.0)
            lines.append(
                f'<i style="left:{left:.4%};width:{right - left:.4%};top:{0.2 + 0.7 * (len(lines) % 3):.1f}rem;'
                f'border-color:{fill}" title="{escape(told)}"></i>'
            )
        start += segment.bytes
    return (
        f'<nav class="bar" aria-label="{escape(label)}">{"".join(segments)}</nav>'
        f'<div class="spans" aria-hidden="true">{"".join(lines)}</div>'
    )


def _markup(inside: str) -> str:
    """The name of a segment, whose only markup is ours."""
    if not inside:
        return ""  # no box of its own: the padding would be wider than a thin part
    name, mark, size = inside.partition("<small>")
    told = escape(name) + (f"<small>{escape(size.removesuffix('</small>'))}</small>" if mark else "")
    return f"<span>{told}</span>"


def _told(segment: Segment) -> str:
    around = spread(segment.low, segment.high)
    return f"{format_bytes(segment.bytes)}{f' ({around})' if around else ''}, {segment.source}"


def _owner_rows(page: Page) -> Iterator[str]:
    seen: set[str] = set()
    for segment in page.segments:
        hatched = " again" if segment.kind in seen else ""
        seen.add(segment.kind)
        fill, ink = colour_of(segment)
        key = f'<b class="key{hatched}" style="background-color:{fill};color:{ink}">{segment.key}</b>'
        yield (
            f'<tr id="owner-{segment.key}" tabindex="-1"><th scope="row">{key} {escape(segment.name)}</th>'
            f'<td class="n">{format_bytes(segment.bytes)}</td>'
            f'<td class="n">{escape(share(segment.bytes, page.device_bytes))}</td>'
            f'<td class="n">{_interval(segment, fill)}</td>'
            f'<td>{escape(segment.source)}<span class="ref">{escape(segment.ref)}</span></td>'
            f'<td class="why">{escape(segment.reason)}{"".join(_parts(segment))}</td></tr>'
        )


def _parts(segment: Segment) -> Iterator[str]:
    """What a line is made of, folded away."""
    if not segment.parts:
        return
    items = "".join(
        f"<li>{escape(part.name)}: {escape(_told(part))}{'. ' + escape(part.reason) if part.reason else ''}</li>"
        for part in segment.parts
    )
    yield f"<details><summary>{plural(len(segment.parts), 'part')}</summary><ul>{items}</ul></details>"


def _interval(segment: Segment, fill: str) -> str:
    """Least and most in words, and as a line on a scale from nothing to the most."""
    around = spread(segment.low, segment.high)
    if not around:
        return "exact"
    left, best = segment.low / segment.high, segment.bytes / segment.high
    return (
        f'{escape(around)}<span class="span" aria-hidden="true"><i style="left:{left:.2%};right:0;'
        f'background-color:{fill}"></i><b style="left:{best:.2%}"></b></span>'
    )


def _series(series: Series, number: int) -> str:
    """One engine's grid: two charts, the controls that the script wakes up, and the table that needs no script."""
    head = "".join(f'<th scope="col">{batch:,}</th>' for batch in series.batches)
    rows = "".join(
        f'<tr><th scope="row">{length:,}</th>{"".join(_cells(series, number, place))}</tr>'
        for place, length in enumerate(series.lengths)
    )
    name = escape(series.name)
    return (
        f'<section class="series" data-series="{number}" aria-label="{name}"><h3>{name}</h3>'
        f'{legend(series)}<div class="charts">{charts(series)}</div>{_controls(series, number)}'
        f'<p class="note" id="n{number}">Tokens of cache, and full-length sequences at once, by max_seq_len (rows) and '
        f"max_batch_size (columns). The plan's own shape is framed.</p>"
        f'<div class="wide" tabindex="0" role="region" aria-labelledby="n{number}"><table class="grid" '
        f'aria-labelledby="n{number}">'
        f'<thead><tr><th scope="col">max_seq_len</th>{head}</tr></thead><tbody>{rows}</tbody></table></div></section>'
    )


def _cells(series: Series, number: int, place: int) -> Iterator[str]:
    for column, cell in enumerate(series.cells[place]):
        own = " own" if (series.lengths[place], series.batches[column]) == series.own else ""
        yield (
            f'<td class="cell{own}{" no" if cell.refused else ""}" id="c{number}-{place}-{column}" '
            f'data-at="{place},{column}" title="{escape(cell.told)}">{_inside(cell)}</td>'
        )


def _inside(cell: Cell) -> str:
    if cell.refused:
        return f"refused<small>{escape(cell.refused)}</small>"
    return f"{cell.kv_tokens:,}<small>{cell.num_sequences:,} at once</small>"


def _controls(series: Series, number: int) -> str:
    """Hidden until the script is there to serve them."""
    length, batch = series.lengths.index(series.own[0]), series.batches.index(series.own[1])
    told = escape(series.cells[length][batch].told)
    return (
        f'<form class="pick" hidden><label>max_seq_len <output id="l{number}"></output>'
        f'<input type="range" name="length" min="0" max="{len(series.lengths) - 1}" value="{length}"></label>'
        f'<label>max_batch_size <output id="b{number}"></output>'
        f'<input type="range" name="batch" min="0" max="{len(series.batches) - 1}" value="{batch}"></label></form>'
        f'<p class="told" role="status" aria-live="polite" id="t{number}">{told}</p>'
    )
