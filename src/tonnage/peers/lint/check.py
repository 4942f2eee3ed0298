"""Everything that is to be told about one launch, gravest first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tonnage.errors import InvalidSetting, UserError
from tonnage.peers.lint import buffers, layout, sharing, starting
from tonnage.peers.lint.case import Case
from tonnage.peers.lint.finding import Finding, Severity
from tonnage.peers.start import Start


def predicted(case: Case, *, users: int | None) -> tuple[Start | None, list[Finding]]:
    """The prediction and what follows from it. A model that cannot be spread, or a setting that the rules refuse, is
    a finding and no error."""
    case = _beside(case)
    split = list(layout.split(case))
    if split:
        return None, split
    try:
        start = case.predict()
    except InvalidSetting as fault:
        return None, [_refused("TN003", fault)]
    except UserError as fault:
        return None, [_refused("TN008", fault)]
    return start, in_order(_all(case, start, users))


def _refused(code: str, fault: UserError) -> Finding:
    return Finding(code=code, severity=Severity.ERROR, what=str(fault), change=(fault.remedy,) if fault.remedy else ())


def _beside(case: Case) -> Case:
    """SGLang and TensorRT-LLM take shares of what is free: to them the device is smaller."""
    if case.engine == "vllm" or not case.in_use_bytes:
        return case
    return replace(case, card=case.card.with_total(max(1, case.card.total_bytes - case.in_use_bytes)))


def _all(case: Case, start: Start, users: int | None) -> Iterator[Finding]:
    yield from starting.starting(case, start)
    yield from sharing.beside_others(case, start)
    yield from starting.concurrency(case, start, users=users)
    yield from starting.headroom(case, start)
    yield from starting.sequences(case, start)
    yield from buffers.adapters(case, start)
    yield from layout.replicated(case, start)
    yield from layout.eager(case, start)
    yield from layout.in_full(case, start)
    yield from layout.eight_bits(case, start)
    yield from starting.log_probabilities(case, start)


def in_order(findings: Iterator[Finding] | list[Finding]) -> list[Finding]:
    """Gravest first, and by code."""
    order = list(Severity)
    return sorted(findings, key=lambda finding: (order.index(finding.severity), finding.code))
