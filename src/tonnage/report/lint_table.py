"""Lint findings for a person: each launch in three rows, then what is to be told about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tonnage.peers.lint import Finding, Linted, Severity
from tonnage.peers.start import Count, Start
from tonnage.report.draw import hanging, plural, show, spread
from tonnage.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}
_TITLES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}


def show_lint(found: Sequence[Linted], console: Console) -> None:
    """Print all launches, and the sum."""
    parts: list[RenderableType] = [_launch(each, console.width) for each in found]
    show([*parts, _sum(found)], console)


def _launch(linted: Linted, width: int) -> Text:
    from rich.text import Text

    text = Text(no_wrap=True, overflow="ignore")
    command = linted.command
    model = command.model or "no model"
    text.append(f"{linted.file}, {command.where}" if command.where else linted.file, "bold")
    on = f" on {linted.card}" if linted.card else ""
    text.append(f"\n{_TITLES[command.engine]} {linted.version}, {model}{on}")
    if linted.start is not None:
        told = outcome(linted.start)
        if linted.start.starts and linted.worst is Severity.ERROR:
            told = f"but for the errors below it {told}"
        text.append("\n" + hanging(told, "  ", width))
    for finding in linted.findings:
        text.append("\n" + _told(finding, width), _STYLES[finding.severity])
        if finding.change:
            text.append("\n" + hanging("; or ".join(finding.change), "          change: ", width))
    if not linted.findings:
        text.append("\n  nothing to tell", "dim")
    return text


def _told(finding: Finding, width: int) -> str:
    told = finding.what if not finding.why else f"{finding.what}; {finding.why}"
    return hanging(told, f"  {finding.code} {finding.severity.value}: ", width)


def outcome(start: Start) -> str:
    """What it will do, in a sentence."""
    starts = {True: "starts", False: "does not start", None: "may start"}[start.starts]
    pool = f"{format_bytes(start.pool.bytes)}{_around(spread(start.pool.low, start.pool.high))}"
    told = [f"{starts}: {pool} of cache a rank"]
    if start.tokens is not None:
        told.append(f"{start.tokens.best:,} tokens")
    if start.concurrency is not None:
        told.append(f"{_thousandths(start.concurrency)} sequences of {start.max_model_len:,} tokens")
    return ", ".join(told)


def _around(text: str) -> str:
    return f" ({text})" if text else ""


def _thousandths(count: Count) -> str:
    return f"{count.best / 1000:.2f}"


def _sum(found: Sequence[Linted]) -> Text:
    from rich.text import Text

    counts = [(each, sum(f.severity is each for one in found for f in one.findings)) for each in Severity]
    told = ", ".join(plural(count, each.value) for each, count in counts)
    return Text(f"{plural(len(found), 'launch').replace('launchs', 'launches')}: {told}")
