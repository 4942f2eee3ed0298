"""A plan for a person: where every byte goes, how the pool was found, what limited it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tonnage.config import Origin, Setting
from tonnage.layout import KVGroupKind, group_families
from tonnage.report.draw import COLOURS, PIPED_WIDTH, grid, hanging, plural, share, show, slice_bar, spread
from tonnage.report.flags import flags_text
from tonnage.report.peaks import peaks_parts
from tonnage.report.plan_json import bytes_per_token
from tonnage.terms import KVPool, Line, MemoryPlan, Step
from tonnage.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

#: The limits that every plan shows.
SHAPES = ("max_seq_len", "max_batch_size", "max_num_tokens")
#: From this width on, reasons stand beside their lines; below it, under them.
WIDE = 128
#: Cells between and in the columns of numbers of the partition.
NUMBERS = 24
#: Below this width the steps' reasons stand under them too.
NARROW_STEPS = 88


def show_plan(plan: MemoryPlan, console: Console) -> None:
    """Print the whole plan."""
    show(plan_parts(plan, console), console)


def plan_parts(plan: MemoryPlan, console: Console) -> list[RenderableType]:
    """The pieces of the view, top to bottom; empty ones are left out."""
    parts: list[RenderableType] = [
        header(plan, console.width),
        pool_text(plan, console.width),
        lines_text(plan, console),
    ]
    if plan.steps:
        parts.append(steps_table(plan) if console.width >= NARROW_STEPS else steps_text(plan, console.width))
    if plan.caps:
        parts.append(caps_table(plan))
    if any(claim.switched_off for claim in plan.not_charged):
        parts.append(switched_off_text(plan, console.width))
    if plan.warnings:
        parts.append(warnings_text(plan, console.width))
    parts.append(flags_text(plan, console.width))
    return [*parts, *peaks_parts(plan, console.width)]


def header(plan: MemoryPlan, width: int) -> Text:
    """Model, device, and every limit and knob with where it came from."""
    from rich.text import Text

    text = Text.assemble((plan.model_name, "bold"), " on ", (plan.device_name, "bold"))
    text.append(f": {format_bytes(plan.device_bytes)} ({plan.device_bytes:,} bytes)")
    if plan.rank.size > 1:
        text.append(f", rank {plan.rank.index} of {plan.rank.size}")
    for label, told in (("limits", _limits(plan)), ("asked", _asked(plan))):
        if told:
            text.append("\n" + hanging(", ".join(told), f"{label:<8}", width))
    return text


def origin_text(setting: Setting[Any]) -> str:
    """Where a setting came from, in the user's own words: the flag, the file, or what chose it."""
    if setting.origin == Origin.FIT:
        return setting.where or "the largest that fits"
    return setting.where or setting.origin.value


def asked_settings(plan: MemoryPlan) -> list[tuple[str, Setting[Any]]]:
    """The knobs that were asked for, and the limits beside those that every plan shows."""
    features = [(name, setting) for name, setting in plan.limit_knobs.items() if name not in SHAPES]
    return [(name, setting) for name, setting in (*plan.knobs.items(), *features) if setting.is_set]


@dataclass(frozen=True, slots=True)
class _Widths:
    """Columns of the partition, in cells; ``beside`` says whether reasons stand beside their lines.

    ``known`` is 0 where the console has no room for that column: then it stands under the line, before the reason.
    """

    name: int
    bar: int
    known: int
    whole: int
    beside: bool

    @classmethod
    def of(cls, plan: MemoryPlan, width: int) -> _Widths:
        known = max([len(_known(line)) for line, _ in _walk(plan.lines)] + [len("known how")])
        name = max([len(line.name) for line in plan.lines] + [len("device")])
        # what the other columns leave, reasons beside the lines left out
        bar = max(6, min(24, width - name - known - NUMBERS))
        details = [len(line.name) + 2 * depth for line, depth in _walk(plan.lines) if depth]
        name = max([name, *(needed - bar - 2 for needed in details)])
        has_room = name + bar + known + NUMBERS <= width
        return cls(name, bar if has_room else 6, known if has_room else 0, width, width >= WIDE)

    @property
    def reason_at(self) -> int:
        return self.name + self.bar + self.known + 26


def lines_text(plan: MemoryPlan, console: Console) -> Text:
    """The partition: one row a line, its slice of the device, and under or beside it the reason."""
    from rich.text import Text

    widths, start = _Widths.of(plan, console.width), 0
    known = "known how" if widths.known else ""
    title = f"{'line':<{widths.name}}  {'':<{widths.bar}}  {'bytes':>10}  {'share':>6}  {known:<{widths.known}}"
    text = Text.assemble(((title + ("  why" if widths.beside else "")).rstrip(), "dim"))
    shown = [(line, depth) for line, depth in _walk(plan.lines) if line.bytes]
    for place, (line, depth) in enumerate(shown):
        size = line.bytes if depth == 0 else 0
        bar = slice_bar(start, size, plan.device_bytes, width=widths.bar, ascii_only=console.options.ascii_only)
        text.append_text(_row(line, depth, bar, plan.device_bytes, widths))
        after = shown[place + 1][0].reason if place + 1 < len(shown) else ""
        told = line.reason if line.reason != after or widths.beside else ""  # neighbours with one reason share it
        if not widths.known:
            told = ": ".join(each for each in (_known(line), told) if each)
        if told:
            text.append(_reason(told, depth, widths), "dim italic")
        start += size
    total = f"{format_bytes(plan.device_bytes):>10}  {share(start, plan.device_bytes):>6}"
    text.append(f"\n{'device':<{widths.name + widths.bar + 2}}  {total}", "bold")
    if nothing := [line.name for line in plan.lines if not line.bytes]:
        text.append("\n" + hanging(", ".join(nothing), "no bytes for ", widths.whole), "dim")
    return text


def _row(line: Line, depth: int, bar: str, device_bytes: int, widths: _Widths) -> Text:
    """A detail has no slice of its own, so that its name may run on into the bar's column."""
    from rich.text import Text

    dim = "dim" if depth else ""
    name_width = widths.name + (widths.bar + 2 if depth else 0)
    text = Text.assemble((f"\n{'  ' * depth + line.name:<{name_width}}  ", dim))
    if not depth:
        text.append(bar + "  ", COLOURS.get(line.kind, "dim"))
    text.append(f"{format_bytes(line.bytes):>10}  {share(line.bytes, device_bytes):>6}  ", dim)
    known = _known(line) if widths.known else ""
    return text.append(known.ljust(widths.known if widths.beside and line.reason else 0), "dim")


def _reason(reason: str, depth: int, widths: _Widths) -> str:
    """The reason, wrapped; beside the line it starts on the same row."""
    at = widths.reason_at if widths.beside else 2 + 2 * depth
    told = textwrap.wrap(reason, max(20, widths.whole - at))
    return ("  " if widths.beside else "\n" + " " * at) + ("\n" + " " * at).join(told)


def pool_text(plan: MemoryPlan, width: int = PIPED_WIDTH) -> Text:
    """The pool in blocks, tokens and full-length sequences."""
    from rich.text import Text

    kv = plan.kv
    text = Text.assemble(("KV cache  ", "bold"), (plural(kv.tokens, "token"), "bold green"))
    text.append(_pool_pieces(kv))
    if plan.rank.cp > 1:
        text.append(f", spread over {plan.rank.cp} ranks of context parallelism")
    text.append("\n          room for ")
    sequences = plural(plan.max_concurrency, "full-length sequence")
    of_tokens = f" of {plan.limits.max_seq_len:,} tokens"
    fits = len(f"          room for {sequences}{of_tokens} at once") <= width
    text.append(sequences, "bold")
    text.append(of_tokens + (" at once" if fits else "\n          at once"))
    if kv.guaranteed_tokens != kv.reachable_tokens:
        text.append(f"\n          {kv.guaranteed_tokens:,} tokens guaranteed, ")
        text.append(f"{kv.reachable_tokens:,} while scratch is lent")
    if plan.attended_cap is not None:
        text.append(f"\n          at most {plan.attended_cap:,} attended tokens in one step")
    return text


def _pool_pieces(kv: KVPool) -> str:
    """What the pool is made of, and what a token costs in it."""
    each, slab, groups = bytes_per_token(kv), format_bytes(kv.layout.slab_bytes), kv.layout.groups
    per_token = f"{int(each):,}" if each.denominator == 1 else f"{float(each):,.1f}"
    under = "\n          "
    if len(groups) > 1:
        kinds = len(group_families(kv.layout))
        costs = f"{per_token} bytes a token beyond the windows, {kinds} kinds of layers"
        return f" in {plural(kv.num_slabs, 'slab')} of {slab}{under}{costs}"
    only = groups[0] if groups else None
    if only is not None and only.kind == KVGroupKind.STATE:
        return f": {plural(kv.num_slabs, 'state')} of {slab}{under}nothing a token, whatever its sequence's length"
    blocks = f" in {plural(kv.num_slabs, 'block')} of {only.block_tokens if only else ''} tokens{under}"
    if only is not None and only.window is not None:
        return f"{blocks}{slab} a block, nothing a token beyond the window of {only.window:,}"
    return f"{blocks}{per_token} bytes a token, {slab} a block"


def steps_table(plan: MemoryPlan) -> Table:
    """The derivation, one operation a row."""
    rows = [(step.name, step.op, amount_text(step), left_text(step), step.reason) for step in plan.steps]
    return grid(["step", "op", "amount>", "leaves>", "why"], rows, title="How the pool was found")


def steps_text(plan: MemoryPlan, width: int) -> Text:
    """The derivation for a narrow console: reasons under their steps."""
    from rich.text import Text

    name = max(len(step.name) for step in plan.steps)
    op = max(len(step.op) for step in plan.steps)
    text = Text.assemble(("How the pool was found", "bold"))
    for step in plan.steps:
        text.append(f"\n{step.name:<{name}}  {step.op:<{op}}  {amount_text(step):>10}  {left_text(step):>10}")
        text.append("\n" + hanging(step.reason, "  ", width), "dim italic")
    return text


def caps_table(plan: MemoryPlan) -> Table:
    """Every limit on the pool; the one that binds is marked."""
    from rich.text import Text

    rows = [
        (
            Text(("> " if cap.binding else "  ") + cap.name, style="bold" if cap.binding else ""),
            format_bytes(cap.kv_bytes),
            cap.setting + (" (binds)" if cap.binding else ""),
        )
        for cap in plan.caps
    ]
    return grid(["  limit", "pool>", "set by"], rows, title="What limits the pool")


def switched_off_text(plan: MemoryPlan, width: int) -> Text:
    """Claims that the user switched off: what that saves, and what is lost without them."""
    from rich.text import Text

    told = [
        claim.name + (f" would take {format_bytes(claim.bytes)}" if claim.bytes else "") + f": {claim.reason}"
        for claim in plan.not_charged
        if claim.switched_off
    ]
    return Text("\n".join(hanging(line, "switched off: ", width) for line in told))


def warnings_text(plan: MemoryPlan, width: int) -> Text:
    """One paragraph a warning."""
    from rich.text import Text

    return Text("\n".join(hanging(warning, "! ", width) for warning in plan.warnings), style="yellow")


def _limits(plan: MemoryPlan) -> list[str]:
    asked = plan.limit_knobs
    return [f"{name} {getattr(plan.limits, name):,} ({origin_text(getattr(asked, name))})" for name in SHAPES]


def _asked(plan: MemoryPlan) -> list[str]:
    given = asked_settings(plan)
    told = [f"{name} {setting.text or setting.value} ({origin_text(setting)})" for name, setting in given]
    return told + [f"without claim {name}" for name in sorted(plan.knobs.disabled_claims)]


def _walk(lines: tuple[Line, ...], depth: int = 0) -> Iterator[tuple[Line, int]]:
    for line in lines:
        yield line, depth
        yield from _walk(line.children, depth + 1)


def _known(line: Line) -> str:
    around = spread(line.low, line.high)
    return f"{line.source.value}, {around}" if around else line.source.value


def amount_text(step: Step) -> str:
    """The operand: bytes, unless two numbers of tokens are compared. "tokens for" divides bytes by bytes."""
    return f"{step.operand:,}" if step.op.endswith("tokens") else format_bytes(step.operand)


def left_text(step: Step) -> str:
    return f"{step.after:,} tokens" if "tokens" in step.op else format_bytes(step.after)
