"""Findings about buffers that a flag asks for, used or not."""

from __future__ import annotations

from collections.abc import Iterator

from tonnage.peers.lint.case import Case, held
from tonnage.peers.lint.finding import Finding, Severity
from tonnage.peers.lint.remedies import flags_text
from tonnage.peers.lint.starting import source
from tonnage.peers.start import Start, Term
from tonnage.units import format_bytes

#: Shares of the cache, in hundredths, below which nobody minds.
_LEAST_SHARE = 2


def adapters(case: Case, start: Start) -> Iterator[Finding]:
    """What vLLM keeps for adapters on each rank from its start on, and what it would hold without."""
    term = next((term for term in start.terms if term.name == "adapters"), None)
    if case.engine != "vllm" or term is None or not term.bytes.bytes:
        return
    tried = case.tried({"enable_lora": None}) if start.starts is not False else None
    gain = 0 if tried is None else tried.pool.bytes - start.pool.bytes
    is_much = gain * 100 >= _LEAST_SHARE * start.pool.bytes
    more = "" if tried is None else f"without them the cache holds {held(tried) - held(start):,} tokens more; "
    yield Finding(
        code="TN046",
        severity=Severity.WARNING if is_much else Severity.NOTE,
        what=f"--enable-lora keeps {format_bytes(term.bytes.bytes)} on each rank for {term.bytes.ref}, loaded or not",
        why=f"{more}{source(term.rule)}",
        change=tuple(_smaller(case, term)) if is_much else (),
    )


def _smaller(case: Case, term: Term) -> Iterator[str]:
    """Splitting both factors over the tensor-parallel ranks, where that is not done yet and makes them smaller."""
    name = "fully_sharded_loras"
    if case.settings.get(name) or case.parallel().tp == 1:
        return
    tried = case.tried({name: True})
    now = None if tried is None else next((each for each in tried.terms if each.name == term.name), None)
    if now is not None and now.bytes.bytes < term.bytes.bytes:
        yield flags_text(case, {name: True})
