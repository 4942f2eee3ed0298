"""An explained log as JSON."""

from __future__ import annotations

from typing import Any

from tonnage.peers.logs.explanation import Ended, Explanation
from tonnage.peers.logs.rows import Row
from tonnage.report import codec
from tonnage.report.lint_json import start_document

EXPLANATION_SCHEMA = "tonnage.log/1"


def explanation_text(found: Explanation) -> str:
    """Canonical JSON text. Sizes are bytes, concurrency thousandths, shares millionths."""
    correction = found.correction
    return codec.dumps(
        {
            "schema": EXPLANATION_SCHEMA,
            "engine": found.log.engine,
            "version": found.version,
            "model": found.log.model,
            "card": found.card,
            "figures": [
                {"name": f.name, "value": f.value, "unit": f.unit.value, "rank": f.rank, "line": f.line}
                for f in found.log.figures
            ],
            "own": [_row(row) for row in found.own],
            "prediction": None if found.start is None else start_document(found.start),
            "unpredicted": found.unpredicted,
            "rows": [_row(row) for row in found.rows],
            "worst": None if found.worst is None else found.worst.name,
            "why": list(found.why),
            "if_so": list(found.if_so),
            "failures": [_ended(each) for each in found.ended],
            "correction": None if correction is None else {name: correction.terms[name] for name in correction.terms},
        }
    )


def _row(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "unit": row.unit.value,
        "said": row.said,
        "found": row.found,
        "low": row.low,
        "high": row.high,
        "difference": row.difference,
        "agrees": row.agrees,
        "how": row.how,
        "line": row.line,
    }


def _ended(ended: Ended) -> dict[str, Any]:
    return {
        "kind": ended.failure.kind,
        "line": ended.failure.line,
        "text": ended.failure.text,
        "means": ended.means,
        "change": list(ended.change),
    }
