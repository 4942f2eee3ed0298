"""Another engine's start for a person: where every byte goes by its rules, what its log would say, what stops it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tonnage.peers.log_lines import log_lines
from tonnage.report.draw import grid, hanging, plural, share, show, slice_bar, spread
from tonnage.report.peer_start import is_free, is_pool, rule_text, times_text
from tonnage.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

    from tonnage.peers.start import Check, Count, Start, Term

#: Cells of the bar beside the terms.
BAR = 16
VERDICTS = {True: "yes", False: "no", None: "depends"}


def show_start(start: Start, console: Console, *, told: str, note: str = "") -> None:
    """Print all of it. ``told``: the engine and its release; ``note``: how the release was chosen."""
    show(start_parts(start, console, told=told, note=note), console)


def start_parts(start: Start, console: Console, *, told: str, note: str = "") -> list[RenderableType]:
    """The pieces, top to bottom; empty ones are left out."""
    from rich.text import Text

    width = console.width
    parts: list[RenderableType] = [header(start, width, told=told, note=note), summary(start, width)]
    parts.append(terms_table(start, ascii_only=console.options.ascii_only))
    if lines := log_lines(start):
        parts.append(_titled("Its log would say", [f"  {line}" for line in lines]))
    if start.defaults:
        parts.append(grid(["left out", "value", "why"], start.defaults, title="Defaults taken"))
    if start.checks:
        parts.append(checks_text(start.checks, width))
    parts.append(rules_text(start, width))
    if start.notes:
        parts.append(Text("\n".join(hanging(note, "note    ", width) for note in start.notes)))
    return parts


def header(start: Start, width: int, *, told: str, note: str) -> Text:
    """Engine, model, device, rank, and what was asked in the engine's own words."""
    from rich.text import Text

    launch = start.launch
    text = Text.assemble((told, "bold"), ": ", (launch.config.name, "bold"), " on ", (launch.card.name, "bold"))
    text.append(f", {format_bytes(launch.card.total_bytes)}")
    if launch.rank.size > 1:
        text.append(f", rank {launch.rank.index} of {launch.rank.size}")
    asked = [f"{name} = {_shown(value)}" for name, value in sorted(launch.settings.items())]
    asked += [f"kv_cache_dtype = {launch.kv_dtype}"] if launch.kv_dtype else []
    asked += [f"dtype = {launch.dtype}"] if launch.dtype else []
    if asked:
        text.append("\n" + hanging(", ".join(asked), "asked   ", width))
    if note:
        text.append("\n" + hanging(note, "release ", width))
    return text


def summary(start: Start, width: int) -> Text:
    """The pool, its tokens, and whether it starts."""
    from rich.text import Text

    pool = f"{format_bytes(start.pool.bytes)}{_range(spread(start.pool.low, start.pool.high))}"
    text = Text(f"pool    {pool}, {share(start.pool.bytes, start.launch.card.total_bytes)} of the device", "bold")
    if start.tokens is not None:
        text.append("\n" + hanging(f"{tokens_text(start.tokens)}{_each(start)}", "tokens  ", width))
    if start.concurrency is not None:
        ends = start.concurrency
        low, high = times_text(ends.low), times_text(ends.high)
        told = f"{times_text(ends.best)}{_range(f'{low} – {high}' if low != high else '')}"
        text.append(f"\nholds   {told} sequences of {start.max_model_len:,} tokens")
    starts = {True: "yes", False: "no: see the checks", None: "it depends: see the checks"}[start.starts]
    return text.append(f"\nstarts  {starts}")


def tokens_text(count: Count) -> str:
    span = "" if count.low == count.high else _range(f"{count.low:,} – {count.high:,}")
    return f"{count.best:,}{span}"


def terms_table(start: Start, *, ascii_only: bool = False) -> Table:
    """A row for each term with its slice of the device; what lies outside the engine's budget says so."""
    from rich.text import Text

    total, at = start.launch.card.total_bytes, 0
    rows: list[tuple[str | Text, ...]] = []
    for term in start.terms:
        size = term.bytes.bytes
        bar = slice_bar(at, size, total, width=BAR, ascii_only=ascii_only)
        at += size
        rows.append((
            term.name, Text(bar, style=_style(term)), format_bytes(size), share(size, total),
            spread(term.bytes.low, term.bytes.high), _side(term),
        ))  # fmt: skip
    rows.append(("device", "", format_bytes(total), share(at, total), "", ""))
    columns = ["term", "", "bytes>", "share>", "low – high>", ""]
    return grid(columns, rows, title="Where the device goes, in the engine's order")


def checks_text(checks: tuple[Check, ...], width: int) -> Text:
    """Each check with need, have and what can be changed."""
    from rich.text import Text

    text = Text("Checks", style="bold")
    for check in checks:
        head = f"{check.name}: {VERDICTS[check.passes]}"
        text.append(f"\n  {head}", {True: "green", False: "red", None: "yellow"}[check.passes])
        text.append(f" (need {check.need}, have {check.have})")
        text.append("\n" + hanging(check.says, "    ", width), "dim")
        if check.remedy:
            text.append("\n" + hanging(check.remedy, "    to change: ", width))
    return text


def rules_text(start: Start, width: int) -> Text:
    """The rule behind each term, and the others, each told once, with its date, its logs and its source."""
    from rich.text import Text

    text, told = Text("Rules", style="bold"), set[str]()
    for name, rule in (*((term.name, term.rule) for term in start.terms), *((rule.name, rule) for rule in start.rules)):
        if rule.says in told:
            continue
        told.add(rule.says)
        behind = rule_text(rule)
        text.append("\n" + hanging(f"{rule.says}" + (f" [{behind}]" if behind else ""), f"  {name}: ", width), "dim")
    return text


def _titled(title: str, lines: list[str]) -> Text:
    from rich.text import Text

    text = Text.assemble((title, "bold"), "\n" + "\n".join(lines))
    text.no_wrap, text.overflow = True, "ignore"  # as one line, it can be searched for in a log
    return text


def _style(term: Term) -> str:
    if is_pool(term):
        return "green"
    return {"weights": "blue", "context": "magenta"}.get(term.name, "dim" if is_free(term) else "yellow")


def _side(term: Term) -> str:
    return "" if term.is_budgeted or is_free(term) else "outside its budget"


def _range(told: str) -> str:
    return f" ({told})" if told else ""


def _each(start: Start) -> str:
    rate = start.bytes_per_token
    return "" if rate is None else f", {plural_bytes(int(rate))} each"


def plural_bytes(count: int) -> str:
    return plural(count, "byte")


def _shown(value: object) -> str:
    from fractions import Fraction

    if isinstance(value, Fraction):
        return f"{float(value):g}"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(str(each) for each in value)
    return f"{value:,}" if isinstance(value, int) else str(value)
