"""What a start measured, kept with the plan that came of it: a ``tonnage.plan/1`` file with one part more, ``start``.

Whoever reads plans reads it as a plan. The part holds the figures, what they depend on (``key``), and a SHA-256 over
both in canonical JSON, so that a file that was edited or cut is not taken for a measurement.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tonnage.errors import InputError
from tonnage.report import codec
from tonnage.report.plan_json import plan_document, plan_from
from tonnage.terms import Measured, MemoryPlan

#: The part of the file that plans without a device do not have.
START = "start"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFigures:
    """``measured`` at a start, and all that it depends on by name, as text: with an equal ``key`` it would be measured
    again."""

    key: Mapping[str, str]
    measured: Measured

    @property
    def fingerprint(self) -> str:
        """SHA-256 over canonical JSON of both."""
        text = json.dumps(self._document(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def document(self) -> dict[str, Any]:
        return {**self._document(), "fingerprint": self.fingerprint}

    def _document(self) -> dict[str, Any]:
        return {"key": dict(self.key), "measured": codec.to_json(self.measured)}


def start_text(plan: MemoryPlan, figures: StartFigures) -> str:
    """Canonical JSON text of the file."""
    return codec.dumps({**plan_document(plan), START: figures.document()})


def parse_start(text: str, *, file: str) -> tuple[MemoryPlan, StartFigures]:
    """Raises ``InputError`` for text that is no plan file of this release, has no figures of a start, or was changed
    since it was written."""
    document = codec.loads(text, file=file)
    plan = plan_from(document, file=file).plan
    part = document.get(START)
    if part is None:
        raise InputError(
            f"{file} is a plan that no start has measured: it has no part {START!r}",
            value=file,
            remedy="name another file: the first start makes it",
        )
    return plan, _figures(part, file)


def _figures(part: object, file: str) -> StartFigures:
    reader = codec.Reader(file)
    if not isinstance(part, dict):
        reader.fail((START,), "expected an object")
    key = part.get("key")
    if not isinstance(key, dict) or not all(isinstance(value, str) for value in key.values()):
        reader.fail((START, "key"), "expected an object of texts")
    found = StartFigures(key=key, measured=reader.read(Measured, part.get("measured"), (START, "measured")))
    if part.get("fingerprint") != found.fingerprint:
        raise InputError(
            f"{file} was changed since a start wrote it: its figures do not have the fingerprint that it names",
            value=file,
            remedy="delete it: the next start measures again and writes it anew",
        )
    return found
