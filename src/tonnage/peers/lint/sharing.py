"""Findings about several engines, or other processes, on one GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

from tonnage.hardware import Card
from tonnage.peers.commands.command import Command
from tonnage.peers.commands.values import settings_of
from tonnage.peers.lint.case import Case
from tonnage.peers.lint.finding import Finding, Severity
from tonnage.peers.lint.remedies import flags_text
from tonnage.peers.start import Start
from tonnage.units import MiB, decimal_text, format_bytes

_SHARE = {"vllm": "gpu_memory_utilization", "sglang": "mem_fraction_static"}
#: A first context and its libraries where the card's own were not measured.
_CONTEXT_BYTES = 700 * MiB


def devices_of(command: Command) -> frozenset[str] | None:
    """Ids of the devices that it may use; None: all, or not said."""
    if command.place.devices:
        return frozenset(command.place.devices)
    visible = command.place.variables.get("CUDA_VISIBLE_DEVICES", command.place.variables.get("NVIDIA_VISIBLE_DEVICES"))
    if visible is None or visible in ("all", ""):
        return None
    return frozenset(part.strip() for part in visible.split(",") if part.strip())


def num_gpus_of(command: Command) -> int | None:
    """Devices that it is given; None where nothing says."""
    if command.place.num_gpus is not None:
        return command.place.num_gpus
    ids = devices_of(command)
    return None if ids is None else len(ids)


def too_much(launches: Sequence[tuple[Command, Case | None, Fraction]]) -> dict[int, Finding]:
    """A finding for each place in ``launches`` (command, case, default share) whose share is the one too many.

    Only engines whose devices are named and overlap are compared: others may be alternatives, or run one by one."""
    found: dict[int, Finding] = {}
    taken: dict[str, list[tuple[int, Fraction]]] = {}
    for place, (command, case, default) in enumerate(launches):
        name = _SHARE.get(command.engine)
        share = settings_of(command)[0].get(name, default) if name else None
        ids = devices_of(command)
        if not isinstance(share, Fraction) or ids is None:
            continue
        for each in sorted(ids):
            others = taken.setdefault(each, [])
            together = share + sum((other for _, other in others), Fraction(0))
            if together > 1 and others and place not in found:
                found[place] = _shared(command, case, each, share, together, launches[others[-1][0]][0])
            others.append((place, share))
    return found


def _shared(
    command: Command, case: Case | None, device: str, share: Fraction, together: Fraction, other: Command
) -> Finding:
    """With what the others leave, less two hundredths for contexts, where that was tried and starts."""
    name = _SHARE[command.engine]
    least = Fraction(int((1 - (together - share)) * 100) - 2, 100)
    changes: dict[str, object] = {name: least}
    works = least > 0 and case is not None and case.tried(changes) is not None
    asked = f"on GPU {device} it asks for {decimal_text(share)}"
    return Finding(
        code="TN021",
        severity=Severity.ERROR,
        what=f"{asked}, which makes {decimal_text(together)} together with {other.where}",
        why="each share is one of the whole device, and the engine that comes last finds too little free "
        "(vllm-project/vllm#10533)",
        change=(flags_text(case, changes),) if works and case is not None else (),
    )


def beside_others(case: Case, start: Start) -> Iterator[Finding]:
    """vLLM's check at start-up against what other processes hold: it wants its whole share free."""
    if case.engine != "vllm" or not case.in_use_bytes:
        return
    asked = case.settings.get("gpu_memory_utilization", default_share(start))
    if not isinstance(asked, Fraction) or "kv_cache_memory_bytes" in case.settings:
        return
    free = case.card.total.low - case.in_use_bytes - context_bytes(case.card)
    need = -(-case.card.total_bytes * asked.numerator // asked.denominator)
    if need <= free:
        return
    share = Fraction(max(0, free) * 100 // case.card.total_bytes, 100)
    changes: dict[str, object] = {"gpu_memory_utilization": share}
    works = share > 0 and case.tried(changes) is not None
    yield Finding(
        code="TN022",
        severity=Severity.ERROR,
        what=f"it asks for {decimal_text(asked)} of the device while others hold {format_bytes(case.in_use_bytes)}",
        why=f"need {format_bytes(need)} free at start, have {format_bytes(max(0, free))}",
        change=(flags_text(case, changes),) if works else (),
    )


def context_bytes(card: Card) -> int:
    """What is gone before the engine looks at free memory for the first time, at most."""
    known = [each.high for each in (card.context, card.libraries) if each is not None]
    return sum(known) if known else _CONTEXT_BYTES


def default_share(start: Start) -> Fraction | None:
    """The share that the release takes where none is given."""
    for name, value, _ in start.defaults:
        if name in _SHARE.values():
            try:
                return Fraction(value.split(" ")[0])
            except (ValueError, ZeroDivisionError):
                return None
    return None
