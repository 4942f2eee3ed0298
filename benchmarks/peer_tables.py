"""The tables of docs/peer-starts.md, from predictions and logs; a test compares them with the page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import peer_rows

from peer_starts import (
    ERAS,
    ROOT,
    Figures,
    PoolRow,
    by_source,
    by_team,
    failed_rows,
    later_rows,
    percentile,
    pool_rows,
    token_rows,
)

BEGIN, END = "<!-- tables: python benchmarks/peer_starts.py --write -->", "<!-- end of the tables -->"
PLANNERS = ROOT / "benchmarks" / "results" / "2026-11-30-offline-planners.json"


def page(text: str) -> str:
    """The page with fresh tables between its marks."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{report()}\n{END}{rest.split(END)[1]}"


def report() -> str:
    return "\n".join([*_figures(), *_fallbacks(), *_pools(), *_later(), *_tokens(), *_failed()])


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    yield from ("| " + " | ".join(row) + " |" for row in rows)
    yield ""


def _figures() -> Iterator[str]:
    lists = peer_rows.eligible()
    heads = ("rows", "n", "median", "90th percentile", "worst", "in the interval", "half its width")
    for label, group in (("its source", by_source), ("its team", by_team)):
        yield f"### Pool, each start predicted without the records of {label}"
        yield ""
        rows = pool_rows(lists["pool"], group)
        lines = [_line(era, [row for row in rows if row.era == era]) for era in ERAS]
        lines.append(_line("all", rows))
        lines.append(_line("all but llmd-emp-gpt-oss-120b-tp1 (see below)", _without_odd(rows)))
        if group is by_source:
            lines.append(_line("utilisation not told: at the default", pool_rows(lists["pool_at_default"], group)))
            lines += _planner_lines(rows)
        yield from _table(heads, lines)


#: What is taken from earlier releases in place of a figure from elsewhere, in words.
_INSTEAD = {
    "": "as above",
    "collectives linked": "collectives as logged on 0.11, 0.42 GiB, for those of another engine, 1.8 and 2.0",
    "sampler lean": "the sampler of before 0.17, 38 bytes, for the one by arithmetic, 14",
}


def _fallbacks() -> Iterator[str]:
    """How much of the figures rests on what stands in where a source is left out."""
    yield "### All 33 pools, with what earlier releases logged where no record of the release is left"
    yield ""
    names = peer_rows.eligible()["pool"]
    lines = [
        _line(f"{label} left out; {told}", pool_rows(names, group, instead))
        for label, group in (("source", by_source), ("team", by_team))
        for instead, told in _INSTEAD.items()
    ]
    yield from _table(("rows", "n", "median", "90th percentile", "worst", "in the interval", "half its width"), lines)


def _without_odd(rows: Sequence[PoolRow]) -> list[PoolRow]:
    return [row for row in rows if row.id != "llmd-emp-gpt-oss-120b-tp1"]


def _line(label: str, rows: Sequence[PoolRow]) -> list[str]:
    found = Figures.of(rows)
    return [
        label, str(found.num), f"{found.median:.2%}", f"{found.p90:.2%}", f"{found.worst:.1%}",
        f"{found.num_covered} of {found.num} ({found.covered:.0%})", f"{found.half_width:.1%}",
    ]  # fmt: skip


def _planners() -> dict[str, dict[str, dict]]:
    found: dict[str, dict[str, dict]] = json.loads(PLANNERS.read_text(encoding="utf-8"))["rows"]
    return found


def planner_names() -> list[str]:
    return list(next(iter(_planners().values())))


def _planner_lines(rows: Sequence[PoolRow]) -> Iterator[list[str]]:
    """Other planners on the same rows, those that they answer, and under each what is told here of those."""
    for name in planner_names():
        pools = {row.id: _planners()[row.id][name]["pool_gib"] for row in rows}
        answered = [row for row in rows if pools[row.id] is not None]
        errors = [abs(pools[row.id] / row.logged - 1) for row in answered]
        yield [
            name, str(len(errors)), f"{percentile(errors, 0.5):.2%}", f"{percentile(errors, 0.9):.2%}",
            f"{max(errors):.1%}", "-", "-",
        ]  # fmt: skip
        if len(answered) < len(rows):
            yield _line(f"the rows that {name} answers, here", answered)


def _pools() -> Iterator[str]:
    lists = peer_rows.eligible()
    yield "### Every pool, GiB"
    yield ""
    names = planner_names()
    heads = (
        "start",
        "release",
        "model",
        "card",
        "logged",
        "predicted",
        "interval",
        "error",
        "without its team",
        *names,
    )
    rows = []
    for kind in ("pool", "pool_at_default"):
        teams = {row.id: row for row in pool_rows(lists[kind], by_team)}
        for row in sorted(pool_rows(lists[kind]), key=lambda row: (ERAS.index(row.era), row.id)):
            rows.append(_pool_line(row, teams[row.id], names, at_default=kind == "pool_at_default"))
    yield from _table(heads, rows)


def _pool_line(row: PoolRow, team: PoolRow, names: Sequence[str], *, at_default: bool) -> list[str]:
    record = peer_rows.records()[row.id]
    split = f" tp{record['tp']}" * (record["tp"] > 1) + f" pp{record['pp']}" * (record["pp"] > 1)
    others = [_planners()[row.id][name]["pool_gib"] for name in names]
    return [
        row.id + " (default)" * at_default, record["engine_version"], record["model"].split("/")[-1],
        record["gpu"] + split, f"{row.logged:.2f}", f"{row.best:.2f}",
        _interval(row), f"{row.best / row.logged - 1:+.1%}",
        f"{team.best / team.logged - 1:+.1%}",
        *("-" if other is None else f"{other:.2f} ({other / row.logged - 1:+.1%})" for other in others),
    ]  # fmt: skip


def _interval(row: PoolRow) -> str:
    return f"{row.low:.2f} to {row.high:.2f}" + ("" if row.is_covered else " (out)")


def _later() -> Iterator[str]:
    rows = later_rows()
    covered = sum(row.is_covered for row in rows)
    yield f"### Starts found after the rules were written, GiB: {covered} of {len(rows)} in the interval"
    yield ""
    lines = []
    for row in rows:
        record = peer_rows.later()[row.id]
        lines.append([
            row.id, record["engine_version"], record["model"].split("/")[-1], f"{record['gpu']} tp{record['tp']}",
            f"{row.logged:.2f}", f"{row.best:.2f}", _interval(row), f"{row.best / row.logged - 1:+.1%}",
            record["notes"],
        ])  # fmt: skip
    yield from _table(
        ("start", "release", "model", "card", "logged", "predicted", "interval", "error", "remark"), lines
    )


def _tokens() -> Iterator[str]:
    lists = peer_rows.eligible()
    for kind, label in (("tokens_mixed", "hybrids and windows"), ("tokens_dense", "all layers alike")):
        rows = token_rows(lists[kind])
        hits = sum(row.error <= 0.01 for row in rows)
        yield f"### Tokens from the logged pool, {label}: {hits} of {len(rows)} within 1 %"
        yield ""
        lines = [
            [row.id, peer_rows.records()[row.id]["engine_version"], f"{row.logged:,}", _number(row.best),
             f"{row.error:.2%}"]
            for row in rows
        ]  # fmt: skip
        yield from _table(("start", "release", "logged", "by the rules", "error"), lines)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _failed() -> Iterator[str]:
    rows = failed_rows()
    right, sure = sum(row.is_right for row in rows), sum(row.is_right and row.is_sure for row in rows)
    yield f"### Refused starts: {right} of {len(rows)} refused for the logged reason, {sure} of them for sure"
    yield ""
    lines = []
    for row in rows:
        logged = peer_rows.records()[row.id]["logged"]
        figures = [f"{label} {logged[key]:,}" for label, key in _FIGURES if key in logged]
        found = row.found
        lines.append([
            row.id, peer_rows.records()[row.id]["engine_version"], _with(row.why, figures),
            "starts" if found is None else found.says + ("" if row.is_sure else " (by best guess)"),
            "yes" if row.is_right else "no", "-" if found is None or not found.remedy else f"`{found.remedy}`",
        ])  # fmt: skip
    yield from _table(("start", "release", "logged", "predicted", "same reason", "remedy that was tried"), lines)


def _with(text: str, figures: Sequence[str]) -> str:
    return f"{text} ({'; '.join(figures)})" if figures else text


_FIGURES = (
    ("pool", "kv_cache_gib"), ("needs", "kv_needed_gib"), ("longest", "estimated_max_len"),
    ("longest", "estimated_max_model_len"), ("tokens", "kv_cache_tokens"),
)  # fmt: skip
