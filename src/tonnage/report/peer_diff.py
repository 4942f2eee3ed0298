"""Two starts compared: by how much an upgrade, or another engine, moves the pool, and which rules move it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tonnage.peers.start import Rule, Start, Term
from tonnage.report import codec
from tonnage.report.draw import grid, hanging, show, signed_bytes
from tonnage.report.peer_start import dotted, is_free, is_pool
from tonnage.units import GiB, format_bytes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

START_DIFF_SCHEMA = "tonnage.engine-diff/1"
#: Defaults that are the engine's share of a device: the pool follows them.
SHARES = ("mem_fraction_static", "gpu_memory_utilization", "free_gpu_memory_fraction")
#: Terms named in the headline at most, and the share of the pool below which a move is not worth a word.
MOST_REASONS, LEAST_SHARE = 3, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class TermChange:
    """One term in both starts, in bytes; 0 where one of them lacks it. ``on_pool``: what the move does to the pool."""

    name: str
    before_bytes: int
    after_bytes: int
    delta_bytes: int
    on_pool_bytes: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultChange:
    """A default that another release, or engine, takes otherwise."""

    name: str
    before: str
    after: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartDiff:
    """``before`` and ``after`` name engine and release; ``terms`` are sorted by how far they moved."""

    before: str
    after: str
    headline: str
    before_pool_bytes: int
    after_pool_bytes: int
    before_tokens: int
    after_tokens: int
    terms: tuple[TermChange, ...]
    defaults: tuple[DefaultChange, ...]
    checks: tuple[str, ...]
    schema: str = START_DIFF_SCHEMA


def diff_starts(before: Start, after: Start, *, names: tuple[str, str]) -> StartDiff:
    """Term by term. Raises nothing: starts that their engines would refuse are compared too."""
    terms = tuple(sorted(_terms(before, after), key=lambda change: -abs(change.delta_bytes)))
    defaults = tuple(_defaults(before, after))
    return StartDiff(
        before=names[0],
        after=names[1],
        headline=_headline(before, after, terms, defaults, names),
        before_pool_bytes=before.pool.bytes,
        after_pool_bytes=after.pool.bytes,
        before_tokens=0 if before.tokens is None else before.tokens.best,
        after_tokens=0 if after.tokens is None else after.tokens.best,
        terms=terms,
        defaults=defaults,
        checks=tuple(_checks(before, after)),
    )


def start_diff_text(made: StartDiff) -> str:
    """Canonical JSON text."""
    return codec.dumps(codec.to_json(made))


def show_start_diff(made: StartDiff, console: Console) -> None:
    """Print the headline and what moved."""
    from rich.text import Text

    parts: list[RenderableType] = [Text(hanging(made.headline, "", console.width), "bold")]
    rows = [
        (each.name, format_bytes(each.before_bytes), format_bytes(each.after_bytes), signed_bytes(each.delta_bytes),
         each.why)
        for each in made.terms
        if each.delta_bytes
    ]  # fmt: skip
    if rows:
        parts.append(grid(["term", "before>", "after>", "change>", "why"], rows, title="Terms that moved"))
    if still := [each.name for each in made.terms if not each.delta_bytes]:
        parts.append(Text(hanging(", ".join(still), "same    ", console.width), "dim"))
    if made.defaults:
        cells = [(each.name, each.before, each.after, each.why) for each in made.defaults]
        parts.append(grid(["default", "before", "after", "why"], cells, title="Defaults that differ"))
    if made.checks:
        parts.append(Text("\n".join(hanging(check, "check   ", console.width) for check in made.checks)))
    show(parts, console)


def _terms(before: Start, after: Start) -> list[TermChange]:
    first, second = ({term.name: term for term in start.terms} for start in (before, after))
    found = []
    for name in dict.fromkeys([*first, *second]):
        old, new = first.get(name), second.get(name)
        was, now = (0 if term is None else term.bytes.bytes for term in (old, new))
        found.append(
            TermChange(
                name=name, before_bytes=was, after_bytes=now, delta_bytes=now - was,
                on_pool_bytes=_charged(old) - _charged(new), why=_why(old, new),
            )
        )  # fmt: skip
    return found


def _charged(term: Term | None) -> int:
    """What the term takes from the pool: nothing where it is the pool, or lies outside the budget."""
    return 0 if term is None or not term.is_budgeted or is_pool(term) or is_free(term) else term.bytes.bytes


def _why(old: Term | None, new: Term | None) -> str:
    """The rule that is behind the move, in its own words; nothing is guessed."""
    if new is None:
        assert old is not None
        return f"gone: {old.rule.says}"
    if old is None:
        return f"new: {new.rule.says}"
    if old.is_budgeted != new.is_budgeted:
        where = "deducted before the pool now" if new.is_budgeted else "no longer deducted before the pool"
        return f"{where}: {new.rule.says}"
    return new.rule.says if old.rule.says != new.rule.says else "the same rule"


def _defaults(before: Start, after: Start) -> list[DefaultChange]:
    first = {name: (value, why) for name, value, why in before.defaults}
    second = {name: (value, why) for name, value, why in after.defaults}
    return [
        DefaultChange(name=name, before=first[name][0], after=second[name][0], why=second[name][1])
        for name in first
        if name in second and first[name][0] != second[name][0]
    ]


def _headline(
    before: Start, after: Start, terms: tuple[TermChange, ...], defaults: tuple[DefaultChange, ...],
    names: tuple[str, str],
) -> str:  # fmt: skip
    """One sentence: by how much, from what to what, because of which rules."""
    was, now = before.pool.bytes, after.pool.bytes
    is_upgrade = before.launch.engine == after.launch.engine
    subject = f"Going from {names[0]} to {names[1]}" if is_upgrade else f"{names[1]} in the place of {names[0]}"
    if was == now:
        return f"{subject} leaves your pool as it is ({format_bytes(now)})."
    share = f"{100 * (now - was) / was:+.0f} % " if was else ""
    moved = f"{subject} moves your pool by {share}({was / GiB:.1f} -> {now / GiB:.1f} GiB)"
    pushing, against = _reasons(before, after, terms, defaults)
    if pushing:
        moved += f", because of {'; and of '.join(pushing[:MOST_REASONS])}"
    return f"{moved}; against it, {'; '.join(against[:MOST_REASONS])}." if against else f"{moved}."


def _reasons(
    before: Start, after: Start, terms: tuple[TermChange, ...], defaults: tuple[DefaultChange, ...]
) -> tuple[list[str], list[str]]:
    """What pushes the pool the way that it went, and what pushes against it, the furthest first."""
    moved = after.pool.bytes - before.pool.bytes
    least = max(before.pool.bytes, after.pool.bytes) // LEAST_SHARE
    rules = {term.name: term.rule for start in (before, after) for term in start.terms}
    found = [(each.on_pool_bytes, _reason(each, rules[each.name])) for each in terms]
    rest = moved - sum(each.on_pool_bytes for each in terms)
    found.append((rest, _share_reason(rest, after, defaults)))
    found = sorted((each for each in found if abs(each[0]) >= least and each[1]), key=lambda each: -abs(each[0]))
    return [told for size, told in found if size * moved > 0], [told for size, told in found if size * moved < 0]


def _share_reason(rest: int, after: Start, defaults: tuple[DefaultChange, ...]) -> str:
    """What no term explains: another share of the device, else another way to size the pool."""
    for each in defaults:
        if each.name in SHARES:
            why = each.why.rstrip(".")
            return f"{each.name}, {each.after} where it was {each.before} ({signed_bytes(rest)}: {why})"
    pool = next((term for term in after.terms if is_pool(term)), None)
    return "" if pool is None else f"how it is sized ({signed_bytes(rest)}: {pool.rule.says.rstrip('.')})"


def _reason(change: TermChange, rule: Rule) -> str:
    says = (change.why if change.why != "the same rule" else rule.says).rstrip(".")
    since = f", since {dotted(rule.since)}" if rule.since is not None else ""
    return f"{change.name} ({signed_bytes(change.on_pool_bytes)}: {says}{since})"


def _checks(before: Start, after: Start) -> list[str]:
    first = {check.name: check.passes for check in before.checks}
    words = {True: "passes", False: "fails", None: "depends"}
    found = []
    for check in after.checks:
        if check.name in first and first[check.name] is not check.passes:
            found.append(f"{check.name} {words[check.passes]}, before it {words[first[check.name]]}: {check.says}")
    return found
