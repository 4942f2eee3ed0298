"""Two plans or runs compared, line by line and knob by knob: what moved, by how much, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from tonnage.config import Setting
from tonnage.report import codec
from tonnage.report.plan_json import PlanFile, derived
from tonnage.report.run import RunResult
from tonnage.report.run_json import RunFile
from tonnage.terms import Line, LineKind, MemoryPlan

DIFF_SCHEMA = "tonnage.diff/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One value in both files; text or a whole number. ``delta`` is after - before where both are numbers."""

    name: str
    before: str | int | None
    after: str | int | None
    delta: int | None = None

    @classmethod
    def of(cls, name: str, before: str | int | None, after: str | int | None) -> Change:
        numbers = isinstance(before, int) and isinstance(after, int)
        return cls(name=name, before=before, after=after, delta=after - before if numbers else None)  # type: ignore[operator]


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChange:
    """A line in both plans, in bytes; 0 where one of them lacks it. ``top``: part of the partition, not a detail."""

    name: str
    before_bytes: int
    after_bytes: int
    delta_bytes: int
    why: str
    top: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """``before`` and ``after`` are file names. Only what differs is listed, ``lines`` excepted: those that stayed too.

    settings   model, device, limits and knobs
    lines      the partition; the deltas of its top lines sum to the difference of the devices
    pool       blocks, tokens, prices, concurrency, the limit that binds
    run        counts and actual bytes, where both files are runs
    """

    schema: str = DIFF_SCHEMA
    before: str
    after: str
    settings: tuple[Change, ...]
    lines: tuple[LineChange, ...]
    pool: tuple[Change, ...]
    run: tuple[Change, ...] = ()


def diff_text(diff: Diff) -> str:
    """Canonical JSON text of a diff."""
    return codec.dumps(codec.to_json(diff))


def diff_files(before: PlanFile | RunFile, after: PlanFile | RunFile, *, names: tuple[str, str]) -> Diff:
    """Compare two files; a run is compared with a plan by the plan inside it."""
    first, second = _plan(before), _plan(after)
    both_runs = isinstance(before, RunFile) and isinstance(after, RunFile)
    return Diff(
        before=names[0],
        after=names[1],
        settings=_moved(_settings(first), _settings(second)),
        lines=tuple(_lines(first, second)),
        pool=_moved(_pool(first), _pool(second)),
        run=_moved(_run(before.result), _run(after.result)) if both_runs else (),  # type: ignore[union-attr]
    )


def _plan(file: PlanFile | RunFile) -> MemoryPlan:
    return file.plan if isinstance(file, PlanFile) else file.result.plan


def _moved(before: dict[str, Any], after: dict[str, Any]) -> tuple[Change, ...]:
    names = dict.fromkeys([*before, *after])
    return tuple(
        Change.of(name, before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)
    )


def _settings(plan: MemoryPlan) -> dict[str, Any]:
    """What was asked and what came of it, flat. A knob that was not set is None."""
    found: dict[str, Any] = {"model": plan.model_name, "device": plan.device_name, "device_bytes": plan.device_bytes}
    found |= {f"rank.{f.name}": getattr(plan.rank, f.name) for f in fields(plan.rank)}
    found |= {f.name: _plain(getattr(plan.limits, f.name)) for f in fields(plan.limits)}
    found |= {name: _plain(setting.value) for name, setting in plan.knobs.items()}
    found["disabled_claims"] = ", ".join(sorted(plan.knobs.disabled_claims)) or None
    return found


def _plain(value: object) -> str | int | None:
    if value is None or isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if isinstance(value, Setting):
        return _plain(value.value)
    return ("yes" if value else "no") if isinstance(value, bool) else str(codec.to_json(value))


def _pool(plan: MemoryPlan) -> dict[str, Any]:
    kv = plan.kv
    binding = [cap.name for cap in plan.caps if cap.binding]
    return {
        "kv.bytes": kv.bytes,
        "kv.tokens": kv.tokens,
        **{f"kv.{name}": value for name, value in derived(kv).items()},
        "kv.guaranteed_tokens": kv.guaranteed_tokens,
        "kv.reachable_tokens": kv.reachable_tokens,
        "host.taken_bytes": plan.host.taken_bytes or None,
        "max_concurrency": plan.max_concurrency,
        "attended_cap": plan.attended_cap,
        "limited by": ", ".join(binding) or None,
    }


def _run(result: RunResult) -> dict[str, Any]:
    counts = (
        *("finished", "failed", "cancelled", "waited", "suspensions"),
        *("prompt_tokens", "cached_prompt_tokens", "generated_tokens", "elapsed_ms"),
        *("offloaded_blocks", "loaded_blocks"),
    )
    found: dict[str, Any] = {name: getattr(result, name) for name in counts}
    found["tokens_per_second"] = result.tokens_per_second
    found |= {"own_bytes": result.snapshot.own, "peak_own_bytes": result.peak_own_bytes}
    found["unattributed_bytes"] = result.snapshot.unattributed
    found |= {f"actual.{row.line.value}_bytes": row.actual_bytes for row in result.audit}
    return found


def _lines(before: MemoryPlan, after: MemoryPlan) -> Iterator[LineChange]:
    first, second = dict(_named(before.lines)), dict(_named(after.lines))
    for name in dict.fromkeys([*first, *second]):
        old, new = first.get(name), second.get(name)
        was, now = (0 if line is None else line.bytes for line in (old, new))
        yield LineChange(
            name=" / ".join(name),
            before_bytes=was,
            after_bytes=now,
            delta_bytes=now - was,
            why=_why(old, new, before, after) if old != new else "",
            top=len(name) == 1,
        )


def _named(lines: Iterable[Line], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Line]]:
    for line in lines:
        yield (*above, line.name), line
        yield from _named(line.children, (*above, line.name))


def _why(old: Line | None, new: Line | None, before: MemoryPlan, after: MemoryPlan) -> str:
    """What the plans themselves say about the move; nothing is guessed."""
    if old is None or new is None:
        return f"new: {new.reason}" if new is not None else "gone"
    told = []
    if new.kind == LineKind.KV:
        bound, binds = _pool(before)["limited by"], _pool(after)["limited by"]
        told.append(f"limited by {binds}" if bound == binds else f"limited by {binds}, before by {bound}")
    if old.source != new.source:
        told.append(f"{old.source.value} before, {new.source.value} now")
    if old.reason != new.reason:
        told.append(f"{new.reason} (before: {old.reason})")
    return "; ".join(told) or new.reason
