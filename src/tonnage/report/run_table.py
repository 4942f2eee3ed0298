"""A run for a person: what was served, and the ledger, planned against actual."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tonnage.ledger import AuditRow
from tonnage.report.draw import grid, maybe_bytes, plural, show, signed_bytes
from tonnage.report.run import RunResult, WatchRecord
from tonnage.report.table import plan_parts
from tonnage.terms import IDLE_TIER, LineKind, MemoryPlan, Snapshot
from tonnage.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

#: Stages of start-up that end before there is a plan.
BEFORE_PLAN = frozenset({"skeleton", "weights", "probe"})


def show_run(result: RunResult, console: Console, *, with_plan: bool) -> None:
    """Print the run; ``with_plan`` adds the whole plan that it was built from."""
    parts: list[RenderableType] = [served_text(result)]
    if result.stages:
        parts.append(stages_table(result))
    if result.plan_file:
        parts.append(plan_file_text(result))
    parts += [ledger_table(result), memory_text(result)]
    if with_plan:
        parts += plan_parts(result.plan, console)
    show(parts, console)


def served_text(result: RunResult) -> Text:
    """Requests and tokens."""
    from rich.text import Text

    plan = result.plan
    text = Text.assemble((plan.model_name, "bold"), " on ", (plan.device_name, "bold"))
    text.append(f": {format_bytes(plan.device_bytes)}, KV for {plural(plan.kv.tokens, 'token')}")
    text.append("\nrequests  ", "dim")
    text.append(f"{result.finished:,} finished", "bold green")
    for count, word, style in ((result.failed, "failed", "bold red"), (result.cancelled, "cancelled", "yellow")):
        text.append(f", {count:,} {word}", style if count else "dim")
    text.append(f"; {result.waited:,} had to wait for memory")
    if result.suspensions:
        text.append(f", {plural(result.suspensions, 'suspension')}")
    text.append("\ntokens    ", "dim")
    text.append(f"{result.generated_tokens:,} generated from {result.prompt_tokens:,} of prompt in {_time(result)}, ")
    text.append(f"{result.tokens_per_second} a second", "bold")
    text.append(_cache_text(result))
    if result.retried_steps:
        # A plan that holds leaves every step its memory: that one did not is worth a word of its own.
        told = f"{plural(len(result.retried_steps), 'step')} ran out of memory and had to be tried again smaller: "
        text.append("\ndefects   ", "bold red")
        text.append(told + "; ".join(sorted(set(result.retried_steps))))
    return text


def _cache_text(result: RunResult) -> Text:
    """What the prefix cache saved, how large the host tier is, and what went there and came back; a row each, none
    where there is nothing to tell."""
    from rich.text import Text

    text = Text()
    if result.cached_prompt_tokens:
        share = _percent(result.cached_prompt_tokens, result.prompt_tokens)
        text.append("\ncached    ", "dim")
        text.append(f"{plural(result.cached_prompt_tokens, 'prompt token')} ({share} %) found in the KV cache")
    told = [_tier_text(result.plan)] if result.plan.host.kv_bytes else []
    if result.offloaded_blocks or result.loaded_blocks:
        out, back = (_blocks(number, result) for number in (result.offloaded_blocks, result.loaded_blocks))
        told.append(f"{out} to host memory, {back} back")
    if told:
        text.append("\nhost tier ", "dim")
        text.append("; ".join(told))
    return text


def _tier_text(plan: MemoryPlan) -> str:
    """What is taken, in whole blocks, and what was asked."""
    host, asked = plan.host, f"{format_bytes(plan.host.kv_bytes)} asked"
    if not plan.limits.prefix_caching:
        return f"none ({asked}): {IDLE_TIER}"
    if not host.taken_bytes:
        return asked  # all that older files say of it
    blocks = plural(host.taken_bytes // plan.kv.layout.slab_bytes, "block")
    return f"{blocks}, {format_bytes(host.taken_bytes)} ({asked})"


def _percent(part: int, whole: int) -> int:
    """Rounded, a half upwards."""
    return (200 * part + whole) // (2 * whole) if whole else 0


def _blocks(number: int, result: RunResult) -> str:
    return f"{plural(number, 'block')} ({format_bytes(number * result.plan.kv.layout.slab_bytes)})"


def stages_table(result: RunResult) -> Table:
    """Start-up: what this process held after each stage, what was free then, and what others took meanwhile, if they
    did."""
    others_moved = any(stage.foreign_before_bytes != stage.foreign_after_bytes for stage in result.stages)
    columns = ["stage", "time>", "held after>", "change>", "free after>", *["others"] * others_moved]
    rows: list[list[str]] = []
    for stage in result.stages:
        own = stage.own_before_bytes, stage.own_after_bytes
        row = [stage.name, f"{stage.elapsed_ms:,} ms", maybe_bytes(own[1]), _change(*own)]
        row.append(maybe_bytes(stage.free_after_bytes))
        if others_moved:
            row.append(_change(stage.foreign_before_bytes, stage.foreign_after_bytes))
        rows.append(row)
    return grid(columns, rows, title="Start-up")


def plan_file_text(result: RunResult) -> Text:
    """Whether the plan file spared the probes."""
    from rich.text import Text

    return Text.assemble(("plan file ", "dim"), result.plan_file)


def ledger_table(result: RunResult) -> Table:
    """Every line planned against actual, ``unattributed`` among them, and the sum."""
    order = [line.kind for line in result.plan.lines]
    audit = sorted(result.audit, key=lambda row: order.index(row.line) if row.line in order else len(order))
    rows = [_audit_cells(row, result.snapshot) for row in audit if _is_told(row, result.snapshot)]
    snapshot, planned = result.snapshot, planned_own_bytes(result)
    most = result.peak_own_bytes if result.peak_own_bytes is not None else snapshot.own
    total = ("this engine", format_bytes(planned), maybe_bytes(snapshot.own), maybe_bytes(result.peak_own_bytes))
    rows.append((*total, _verdict(most, planned), snapshot.own_source))
    columns = ["line", "planned>", "now>", "most>", "against plan>", "known how"]
    table = grid(columns, rows, title="Ledger, planned against actual")
    table.rows[-1].style = "bold"
    return table


def _is_told(row: AuditRow, snapshot: Snapshot) -> bool:
    """A line that nobody planned, took or counts says nothing."""
    return bool(row.planned_bytes or row.actual_bytes or row.high_water_bytes or _ways(row.line, snapshot))


def _audit_cells(row: AuditRow, snapshot: Snapshot) -> tuple[str, ...]:
    ways, planned = _ways(row.line, snapshot), format_bytes(row.planned_bytes)
    if not ways:
        why = "left free" if row.line == LineKind.KEEP_FREE else "nobody counts it"
        return row.line.value, planned, "–", "–", "–", why
    most = max((value for value in (row.actual_bytes, row.high_water_bytes) if value is not None), default=None)
    numbers = (planned, maybe_bytes(row.actual_bytes), maybe_bytes(row.high_water_bytes))
    verdict = _verdict(most, row.planned_bytes)
    stage = _stage_of_most(row, snapshot)
    if stage:
        numbers = (*numbers[:2], f"{numbers[2]} in {stage}")
        verdict = f"{_verdict(row.actual_bytes, row.planned_bytes)} now"
    if row.line == LineKind.UNATTRIBUTED and most:
        verdict = "unexplained"  # no plan has a byte of it
    return row.line.value, *numbers, verdict, ways


def _stage_of_most(row: AuditRow, snapshot: Snapshot) -> str:
    """The stage before the plan in which a line held more than the plan gave it then; empty where there was none.

    Probes run beside a pool of their own, of which the plan knows nothing: that it was larger breaks no plan.
    """
    if row.actual_bytes is None or row.high_water_bytes is None or row.high_water_bytes <= row.planned_bytes:
        return ""
    # An account counts whole pages and a line what was asked, so that of their levels only the stages can be compared;
    # accounts without a plan lie beside the device.
    entries = [entry for entry in snapshot.entries if entry.line == row.line and entry.planned_bytes is not None]
    stages = {entry.high_water_phase.split("/")[0] for entry in entries}
    return next(iter(stages)) if len(stages) == 1 and stages <= BEFORE_PLAN else ""


def _ways(kind: LineKind, snapshot: Snapshot) -> str:
    """How the ledger knows a line; empty where it has no account of it."""
    computed = {LineKind.UNATTRIBUTED: "own less accounts", LineKind.ROUNDING: "pages less what was asked"}
    if kind in computed:
        return computed[kind]
    ways = [entry.how.value for entry in snapshot.entries if entry.line == kind]
    if kind == LineKind.FOREIGN:
        ways.append("device less own")
    return ", ".join(dict.fromkeys(ways))


def _verdict(most: int | None, planned: int) -> str:
    if most is None:
        return "–"
    return f"over by {format_bytes(most - planned)}" if most > planned else "within"


def memory_text(result: RunResult) -> Text:
    """What else is on the device, and who allocated for the first time after start-up had closed."""
    from rich.text import Text

    snapshot = result.snapshot
    text = Text.assemble(("memory    ", "dim"), f"{format_bytes(snapshot.free)} free on the device, ")
    text.append(f"{format_bytes(snapshot.foreign)} held by others")
    if snapshot.foreign_high is not None and snapshot.foreign_high > snapshot.foreign:
        text.append(f" ({format_bytes(snapshot.foreign_high)} at most)")
    if snapshot.host:
        text.append(f"; {format_bytes(snapshot.host)} of host memory beside it")
    if result.watch is not None:
        text.append("\nwatch     ", "dim")
        text.append(_watch_text(result.watch))
    for event in snapshot.first_uses:
        text.append(f"\n! {event.owner} allocated for the first time after start-up: ", "yellow")
        text.append(f"{signed_bytes(event.delta)} in step {event.step} ({event.phase})", "yellow")
    return text


def _watch_text(watch: WatchRecord) -> str:
    free, others = maybe_bytes(watch.lowest_free_bytes), maybe_bytes(watch.highest_foreign_bytes)
    looks = f"{plural(watch.num_looks, 'look')}, one every {watch.interval_ms} ms while it served"
    told = f"{looks}: at least {free} free, others held {others} at most"
    return f"{told}; they ended early: {watch.problem}" if watch.problem else told


def planned_own_bytes(result: RunResult) -> int:
    """What the plan lets this engine hold: the device less what is left alone, held by others, or left by a cap."""
    plan = result.plan
    others = (LineKind.KEEP_FREE, LineKind.FOREIGN, LineKind.SLACK)
    return plan.device_bytes - sum(plan.bytes_of(kind) for kind in others)


def _change(before: int | None, after: int | None) -> str:
    return "–" if before is None or after is None else signed_bytes(after - before)


def _time(result: RunResult) -> str:
    seconds, ms = divmod(result.elapsed_ms, 1000)
    return f"{seconds}.{ms // 100} s" if seconds < 120 else f"{plural(seconds // 60, 'minute')} {seconds % 60} s"
