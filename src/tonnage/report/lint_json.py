"""Lint findings as JSON, and as the annotations that GitHub's checks show beside a file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tonnage.peers.lint import Finding, Linted, Severity
from tonnage.peers.start import Count, Start
from tonnage.report import codec
from tonnage.terms import Quantity

LINT_SCHEMA = "tonnage.lint/1"


def lint_text(found: Sequence[Linted]) -> str:
    """Canonical JSON text of every launch with its prediction and its findings."""
    counts = {each.value: sum(f.severity is each for one in found for f in one.findings) for each in Severity}
    return codec.dumps({"schema": LINT_SCHEMA, "counts": counts, "launches": [_launch(each) for each in found]})


def _launch(linted: Linted) -> dict[str, Any]:
    command = linted.command
    return {
        "file": linted.file,
        "where": command.where,
        "engine": command.engine,
        "version": linted.version,
        "model": command.model,
        "card": linted.card,
        "start": None if linted.start is None else start_document(linted.start),
        "findings": [_finding(finding) for finding in linted.findings],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "code": finding.code,
        "severity": finding.severity.value,
        "what": finding.what,
        "why": finding.why,
        "change": list(finding.change),
    }


def start_document(start: Start) -> dict[str, Any]:
    """A prediction: terms with intervals, checks, and what the cache holds. Concurrency is in thousandths."""
    rank = start.launch.rank
    return {
        "starts": start.starts,
        "rank": {"index": rank.index, "tp": rank.tp, "pp": rank.pp},
        "terms": [
            {"name": term.name, "is_budgeted": term.is_budgeted, "rule": term.rule.name, **_bytes(term.bytes)}
            for term in start.terms
        ],
        "pool": _bytes(start.pool),
        "tokens": _count(start.tokens),
        "concurrency": _count(start.concurrency),
        "max_model_len": start.max_model_len,
        "defaults": [{"name": name, "value": value, "why": why} for name, value, why in start.defaults],
        "checks": [
            {"name": check.name, "passes": check.passes, "need": check.need, "have": check.have, "says": check.says}
            for check in start.checks
        ],
        "notes": list(start.notes),
    }


def _bytes(quantity: Quantity) -> dict[str, Any]:
    return {
        "bytes": quantity.bytes,
        "low_bytes": quantity.low,
        "high_bytes": quantity.high,
        "source": quantity.source.value,
        "ref": quantity.ref,
    }


def _count(count: Count | None) -> dict[str, int] | None:
    return None if count is None else {"best": count.best, "low": count.low, "high": count.high}


def github_text(found: Sequence[Linted]) -> str:
    """One workflow command a finding; the line is that of the launch where its file has lines."""
    kinds = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}
    rows = []
    for linted in found:
        line = re.fullmatch(r"line (\d+)", linted.command.where)
        place = f"file={_property(linted.file)}" + (f",line={line[1]}" if line else "")
        for finding in linted.findings:
            told = ". ".join(part for part in (finding.what, finding.why, _changes(finding)) if part)
            rows.append(f"::{kinds[finding.severity]} {place},title={finding.code}::{_data(told)}\n")
    return "".join(rows)


def _changes(finding: Finding) -> str:
    return f"To change: {'; or '.join(finding.change)}" if finding.change else ""


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
