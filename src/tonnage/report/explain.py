"""The path of the number in sentences: what was asked, what was taken and why, how bytes became tokens, what binds.

Every word that is not plain English is in docs/glossary.md, and a test holds this page to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tonnage.layout import KVGroup, KVGroupKind, group_families
from tonnage.report.draw import hanging, plural, spread
from tonnage.report.plan_json import bytes_per_token
from tonnage.report.table import asked_settings, origin_text
from tonnage.terms import Cap, KVPool, Lifetime, Line, LineKind, MemoryPlan, Source, Step
from tonnage.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

KNOWN = {
    Source.MEASURED: "measured by a probe on this device",
    Source.COUNTED: "counted by the engine's own allocator",
    Source.DECLARED: "declared by the code that will take it",
    Source.DERIVED: "computed from shapes and limits",
    Source.CATALOGUE: "from the table of cards",
    Source.PREDICTED: "predicted by a formula, not measured",
    Source.SIMULATED: "counted on a forward of fake tensors, with no weights and no device",
    Source.ASKED: "as asked for",
    Source.ASSUMED: "assumed, for want of a measurement",
}
KEPT_BY_LAYERS = {
    KVGroupKind.FULL: "keys and values of every token",
    KVGroupKind.WINDOW: "keys and values of the last tokens only",
    KVGroupKind.LATENT: "one compressed vector for every token",
    KVGroupKind.STATE: "one state for each sequence, however long it is",
    KVGroupKind.CROSS: "keys and values of what an encoder read",
}
#: Why each line must be there at all, beside what the plan says it is.
PURPOSE = {
    "weights": "every step reads them, so they stay for as long as the engine runs",
    "scratch": "attention keeps there what it needs for a moment; with too little a step would fail half-way",
    "graphs": "a captured step keeps its memory, so that it can be launched as one; without room capturing would fail "
    "at start-up, and without graphs small batches are slower",
    "context": "the driver takes it before anything else and keeps it until the process ends",
    "libraries": "they take it at their first use; without room the first step would fail",
    "tables": "they say which block and which token belongs to whom; without them no step could be told what to do",
    "transient": "the largest step must find room at any time, for it cannot wait half-way",
    "fragmentation": "an allocator takes memory in pieces that do not always fit the next need; without this room it "
    "would fail although the bytes alive would fit",
    "keep_free": "other programs and the driver take memory without asking; with nothing left for them, they or the "
    "engine would fail; keep_free_bytes 0 gives it to the cache",
    "foreign": "it is counted so that the cache is not built on memory that is not there",
}
#: The step by which the reference policy takes everything beside the cache at once.
REFERENCE = "reference"
#: Lines that have paragraphs of their own.
TOLD_BEFORE = (LineKind.KV, LineKind.FOREIGN, LineKind.KEEP_FREE)
#: Where a cap is no matter of memory: what to change instead.
NO_MEMORY_HELPS = {
    "kv_tokens": "raise kv_tokens",
    "limits": "raise max_batch_size or max_seq_len",
    "ranks": "give the smallest rank more",
    "max_tokens": "raise max_tokens",
    "max_gpu_total_bytes": "raise max_gpu_total_bytes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Paragraph:
    """Sentences, and details set off below them."""

    text: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading and its paragraphs."""

    title: str
    paragraphs: tuple[Paragraph, ...]


def explanation(plan: MemoryPlan, *, more: tuple[str, MemoryPlan] | None = None) -> list[Section]:
    """The sections in order; empty ones are left out. ``more``: what got one GiB more, and the plan that it gave."""
    found: tuple[tuple[str, Iterable[Paragraph]], ...] = (
        ("What was asked", _asked(plan)),
        ("What is paid before the cache", _paid(plan)),
        ("How bytes became tokens", _became(plan)),
        ("What limits the cache", (_cap(cap) for cap in sorted(plan.caps, key=lambda cap: not cap.binding))),
        ("What one more GiB would give", _more(plan, more)),
        ("What costs nothing here", _not_charged(plan)),
        ("What to keep in mind", (_told(warning) for warning in plan.warnings)),
    )
    return [Section(title=title, paragraphs=told) for title, each in found if (told := tuple(each))]


def show_explanation(plan: MemoryPlan, console: Console, *, more: tuple[str, MemoryPlan] | None = None) -> None:
    """Print it, wrapped to the console."""
    from rich.text import Text

    for place, section in enumerate(explanation(plan, more=more)):
        if place:
            console.print()
        console.print(Text(section.title, style="bold"))
        for paragraph in section.paragraphs:
            console.print(Text(hanging(paragraph.text, "  ", console.width)))
            for detail in paragraph.details:
                console.print(Text(hanging(detail, "    - ", console.width)))


def _told(*sentences: str, details: Iterable[str] = ()) -> Paragraph:
    """Sentences in a row: each ends in a full stop, and all but the first begin with a capital."""
    first, *others = (each if each.endswith(".") else each + "." for each in sentences if each)
    return Paragraph(text=" ".join([first, *map(_capital, others)]), details=tuple(f"{each}." for each in details))


def _capital(text: str) -> str:
    """A capital at the start, unless the first word is a setting's name."""
    return text if "_" in text.split(maxsplit=1)[0] else text[:1].upper() + text[1:]


def _asked(plan: MemoryPlan) -> Iterator[Paragraph]:
    rank = f", rank {plan.rank.index} of {plan.rank.size}" if plan.rank.size > 1 else ""
    yield _told(
        f"{plan.model_name} on {plan.device_name}{rank}: the device has {format_bytes(plan.device_bytes)} "
        f"({plan.device_bytes:,} bytes), and every one of them is in a line of the plan"
    )
    limits = plan.limits
    for name, told in (
        ("max_seq_len", f"a sequence has at most {plural(limits.max_seq_len, 'token')}, prompt and output"),
        ("max_batch_size", f"at most {plural(limits.max_batch_size, 'sequence')} run at once"),
        ("max_num_tokens", f"a step computes at most {plural(limits.max_num_tokens, 'token')}"),
    ):
        yield _told(f"{name}: {told} ({origin_text(getattr(plan.limit_knobs, name))})")
    given = asked_settings(plan)
    for name, setting in given:
        yield _told(f"{name} = {setting.text or setting.value} ({origin_text(setting)})")
    if plan.policy == REFERENCE:
        yield _told(
            "the reference policy: everything beside the cache is one measured peak, and a fraction of the rest"
        )
    elif not given:
        yield _told("Nothing else was named, so the cache gets all that the other lines leave")
    for name in sorted(plan.knobs.disabled_claims):
        yield _told(f"{name}: switched off")


def _paid(plan: MemoryPlan) -> Iterator[Paragraph]:
    """One paragraph for each step in bytes, with the details of its line."""
    lines = {line.name: line for line in plan.lines}
    for step in plan.steps:
        left = f"{format_bytes(step.after)} are left"
        if "tokens" in step.op or (step.op in ("-", "min") and step.before == step.after):
            continue
        if step.name == "kv_fraction":
            yield _told(f"{format_bytes(step.before - step.after)} stay outside the cache: {step.reason}", left)
        elif step.op == "-":
            yield _subtraction(step, lines.get(step.name), left)
        else:
            yield _told(f"{step.name} {format_bytes(step.operand)}: {step.reason}", left)


def _subtraction(step: Step, line: Line | None, left: str) -> Paragraph:
    taken = f"{format_bytes(step.operand)} for {step.name}: {step.reason}"
    if line is None:
        return _told(taken, left)
    # A line that has grown with the cache shows its details where that is told.
    details = _details(line) if line.bytes == step.operand else ()
    return _told(taken, PURPOSE.get(line.name, ""), _known(line), left, details=details)


def _details(line: Line) -> Iterator[str]:
    """What a line is made of; stages of the transient do not add up, the largest counts."""
    for child in line.children:
        if child.lifetime == Lifetime.STEP:
            yield f"stage {child.name}: {format_bytes(child.bytes)}" + (" (the largest counts)" * _sets(child, line))
        elif child.bytes:
            yield f"{format_bytes(child.bytes)} for {child.name}: {child.reason}"


def _sets(child: Line, line: Line) -> bool:
    return child.bytes == line.bytes


def _known(line: Line) -> str:
    around = spread(line.low, line.high)
    return KNOWN[line.source] + (f"; it may be {around}" if around else "")


def _became(plan: MemoryPlan) -> Iterator[Paragraph]:
    kv = plan.kv
    pieces = "slabs" if len(kv.layout.groups) > 1 else "blocks"
    yield _told(f"The cache is cut into {pieces} of {format_bytes(kv.layout.slab_bytes)}" + _per_token(kv))
    details = {child.name: child for line in plan.lines if line.kind == LineKind.KV for child in line.children}
    for name, groups in group_families(kv.layout).items():
        yield _group(name, groups, details.get(name), told={step.reason for step in plan.steps})
    for step in plan.steps:
        if step.op == "tokens for":
            yield _told(f"{format_bytes(step.before)} pay for {plural(step.after, 'token')}: {step.reason}")
        elif step.op == "min tokens":
            yield _told(f"{step.name} allows {plural(step.operand, 'token')}: {step.reason}")
    yield from _grown(plan)
    yield _told(
        f"The result: {plural(kv.tokens, 'token')} in {plural(kv.num_slabs, pieces[:-1])}, room for "
        f"{plural(plan.max_concurrency, 'sequence')} of full length at once"
    )
    if plan.attended_cap is not None:
        yield _told(
            f"One step may attend to at most {plural(plan.attended_cap, 'token')}: beyond that the scratch of "
            "attention would be too small, so a step that would need more is split, or requests wait"
        )


def _grown(plan: MemoryPlan) -> Iterator[Paragraph]:
    """Lines that the number of tokens decides, beside the cache itself: wholly, or in part."""
    paid = {step.name: step.operand for step in plan.steps if step.op == "-"}
    if plan.policy == REFERENCE:
        beside = [line for line in plan.lines if line.bytes and line.kind != LineKind.KV]
        told = (f"{format_bytes(line.bytes)} for {line.name}: {line.reason}" for line in beside)
        yield _told("line by line, what lies beside the cache", details=told)
        return
    for line in plan.lines:
        if line.kind in TOLD_BEFORE or line.name == "left by kv_fraction" or line.bytes == paid.get(line.name, 0):
            continue
        size = format_bytes(line.bytes)
        if line.name in paid or line.kind in (LineKind.SCRATCH, LineKind.TABLES):
            yield _told(
                f"{line.name}, with the part that grows with the cache, {size}: {line.reason}", details=_details(line)
            )
        else:
            yield _told(f"{line.name}, {size}: {line.reason}")


def _per_token(kv: KVPool) -> str:
    """Where every group grows with the tokens, what one costs."""
    if any(not group.block_tokens or group.window is not None for group in kv.layout.groups):
        return ""
    each = bytes_per_token(kv)
    return f", {each.numerator // each.denominator:,} bytes a token"


def _group(name: str, alike: tuple[KVGroup, ...], line: Line | None, *, told: set[str]) -> Paragraph:
    """Groups that keep the same for as long, in one paragraph; reasons that steps have ``told`` are not repeated."""
    layers, first = plural(sum(len(group.layers) for group in alike), "layer"), alike[0]
    held = f" of {plural(first.block_tokens, 'token')}" if first.block_tokens else ""
    size = f"a block{held} takes {format_bytes(first.block_bytes)}"
    if len(alike) > 1:
        size = f"in {len(alike)} groups, so that their blocks fill the slabs; {size}"
    kept = f"{layers} ({name}): {KEPT_BY_LAYERS[first.kind]}; {size}"
    if line is None:
        return _told(kept)
    why = "" if line.reason in told else f": {line.reason}"
    return _told(kept, f"{format_bytes(line.bytes)} in all{why}")


def _cap(cap: Cap) -> Paragraph:
    verdict = "and that binds: the cache has no more" if cap.binding else "and does not bind"
    return _told(f"{cap.setting}: allows {format_bytes(cap.kv_bytes)}, {verdict}", cap.reason)


def _more(plan: MemoryPlan, more: tuple[str, MemoryPlan] | None) -> Iterator[Paragraph]:
    binding = next((cap for cap in plan.caps if cap.binding), None)
    if more is not None:
        what, again = more
        gained = plural(again.kv.tokens - plan.kv.tokens, "token")
        now = plural(again.kv.tokens, "token")
        yield _told(
            f"With one GiB more of {what} the cache would hold {now}, {gained} more",
            "this was planned again, at the same limits",
        )
    elif binding is not None and binding.name in NO_MEMORY_HELPS:
        helps = NO_MEMORY_HELPS[binding.name]
        yield _told(f"Nothing: {binding.setting} holds the cache back, not memory; for more, {helps}")


def _not_charged(plan: MemoryPlan) -> Iterator[Paragraph]:
    for claim in plan.not_charged:
        cost = f" (it would take {format_bytes(claim.bytes)})" if claim.bytes else ""
        why = f"switched off. {claim.reason}" if claim.switched_off else claim.because
        yield _told(f"{claim.name}{cost}: {why}")
