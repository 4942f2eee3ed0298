"""Starts of several engines and our own plan side by side: pool, tokens, what each leaves, what gives way first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tonnage.peers.start import Start
from tonnage.report import codec
from tonnage.report.draw import grid, hanging, show, signed_bytes
from tonnage.report.peer_start import free_of, start_document, times_text
from tonnage.terms import LineKind, MemoryPlan
from tonnage.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

COMPARE_SCHEMA = "tonnage.engine-compare/1"
OURS = "Tonnage"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One row. ``concurrency`` in thousandths of sequences of ``seq_len`` tokens; None where there is no pool.

    told          engine and release
    free_bytes    what nobody takes
    first         what gives way first
    is_context    the pool is one context as long as asked, not what the device has room for
    """

    told: str
    pool_bytes: int
    low_bytes: int
    high_bytes: int
    tokens: int
    concurrency: int | None
    seq_len: int
    free_bytes: int
    starts: bool | None
    first: str
    is_context: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All rows; ours last, where it could be planned. ``refused``: why it could not."""

    model: str
    device: str
    device_bytes: int
    starts: tuple[tuple[str, Start], ...]
    plan: MemoryPlan | None
    refused: str = ""
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[Compared, ...]:
        made = [of_start(told, start) for told, start in self.starts]
        return tuple(made) if self.plan is None else (*made, of_plan(self.plan))


def of_start(told: str, start: Start) -> Compared:
    return Compared(
        told=told, pool_bytes=start.pool.bytes, low_bytes=start.pool.low, high_bytes=start.pool.high,
        tokens=0 if start.tokens is None else start.tokens.best,
        concurrency=None if start.concurrency is None else start.concurrency.best, seq_len=start.max_model_len,
        free_bytes=free_of(start).bytes, starts=start.starts, first=first_to_go(start),
        is_context=start.launch.engine == "llamacpp",
    )  # fmt: skip


def of_plan(plan: MemoryPlan) -> Compared:
    kv = plan.line(LineKind.KV)
    rest = 0 if kv is None else plan.kv.bytes - kv.bytes
    low, high = (plan.kv.bytes, plan.kv.bytes) if kv is None else (kv.low + rest, kv.high + rest)
    whole = plan.max_concurrency * 1000
    share = plan.kv.tokens * 1000 // plan.limits.max_seq_len  # as the engines count; windows and states share otherwise
    return Compared(
        told=OURS, pool_bytes=plan.kv.bytes, low_bytes=low, high_bytes=high, tokens=plan.kv.tokens,
        concurrency=share if whole <= share < whole + 1000 else whole, seq_len=plan.limits.max_seq_len,
        free_bytes=plan.bytes_of(LineKind.KEEP_FREE) + plan.bytes_of(LineKind.SLACK), starts=True,
        first="nothing: what is not in a line is refused on arrival",
    )  # fmt: skip


def first_to_go(start: Start) -> str:
    """The first check that fails, else the first that may, else what is to spare."""
    for verdict, told in ((False, "fails"), (None, "may fail")):
        for check in start.checks:
            if check.passes is verdict:
                return f"{check.name} {told}: need {check.need}, have {check.have}"
    return f"nothing that is known; {format_bytes(free_of(start).low)} to spare at the least"


def compare_text(made: Comparison) -> str:
    """Canonical JSON text."""
    document: dict[str, Any] = {
        "schema": COMPARE_SCHEMA, "model": made.model, "device": made.device, "device_bytes": made.device_bytes,
        "rows": [codec.to_json(row) for row in made.rows], "refused": made.refused or None, "notes": list(made.notes),
        "starts": [start_document(start) for _, start in made.starts],
    }  # fmt: skip
    return codec.dumps(document)


def show_comparison(made: Comparison, console: Console) -> None:
    """Print the table and a sentence for each engine against ours."""
    show(compare_parts(made, console.width), console)


def compare_parts(made: Comparison, width: int) -> list[RenderableType]:
    from rich.text import Text

    head = Text.assemble((made.model, "bold"), " on ", (made.device, "bold"), f", {format_bytes(made.device_bytes)}")
    cells = [
        (
            row.told, format_bytes(row.pool_bytes), f"{row.tokens:,}",
            "–" if row.concurrency is None else f"{times_text(row.concurrency)} x {row.seq_len:,}",
            format_bytes(row.free_bytes), {True: "yes", False: "no", None: "depends"}[row.starts], row.first,
        )
        for row in made.rows
    ]  # fmt: skip
    columns = ["engine", "pool>", "tokens>", "sequences>", "left free>", "starts", "what gives way first"]
    parts: list[RenderableType] = [head, grid(columns, cells)]
    told = [f"{OURS} has no plan: {made.refused}"] if made.refused else against_ours(made.rows)
    if told := [*told, *made.notes]:
        parts.append(Text("\n".join(hanging(line, "", width) for line in told)))
    return parts


def against_ours(rows: Sequence[Compared]) -> list[str]:
    """What our own budget would hold beside each engine's."""
    ours = next((row for row in rows if row.told == OURS), None)
    if ours is None:
        return []
    found = []
    for row in rows:
        if row is ours:
            continue
        if row.is_context:
            found.append(f"{row.told} allocates one context of {row.tokens:,} tokens, and no pool beyond it.")
            continue
        delta = ours.pool_bytes - row.pool_bytes
        share = f" ({100 * delta / row.pool_bytes:+.1f} %)" if row.pool_bytes else ""
        found.append(
            f"{OURS}'s own budget would hold {format_bytes(ours.pool_bytes)}: {signed_bytes(delta)}{share} beside "
            f"{row.told}, which leaves {format_bytes(row.free_bytes)} unused where ours keeps "
            f"{format_bytes(ours.free_bytes)}."
        )
    return found
