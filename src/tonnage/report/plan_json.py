"""A ``MemoryPlan`` as canonical JSON, schema ``tonnage.plan/1``, and back.

The object under ``kv`` also carries what readers want ready-made (``blocks``, ``block_bytes``, ``block_tokens``,
``bytes_per_token``). These follow from the layout: a file in which they disagree with it is refused. ``equivalent``
follows from the whole plan and is made anew whenever the plan is written: what a file holds there is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from tonnage.layout import KVGroup, KVGroupKind
from tonnage.report import codec
from tonnage.report.checks import check_plan
from tonnage.report.flags import equivalent_document
from tonnage.terms import PLAN_SCHEMA, KVPool, MemoryPlan

#: Flags of other engines, for readers alone.
EQUIVALENT = "equivalent"


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan as it was read; ``extra`` holds, by path, the keys that this release does not know."""

    plan: MemoryPlan
    extra: Mapping[codec.Path, object] = field(default_factory=dict)

    def text(self) -> str:
        """The file again, unknown keys included."""
        return codec.dumps(codec.overlay(plan_document(self.plan), dict(self.extra)))


def plan_text(plan: MemoryPlan) -> str:
    """Canonical JSON text of a plan."""
    return codec.dumps(plan_document(plan))


def plan_document(plan: MemoryPlan) -> dict[str, Any]:
    """The plan as plain JSON values."""
    document: dict[str, Any] = codec.to_json(plan)
    document["kv"] |= derived(plan.kv)
    document[EQUIVALENT] = equivalent_document(plan)
    return document


def bytes_per_token(kv: KVPool) -> Fraction:
    """Bytes that one more token costs in the pool where windows are full: groups that grow with every token."""
    return sum((Fraction(group.block_bytes, group.block_tokens) for group in _growing(kv)), Fraction(0))


def _growing(kv: KVPool) -> list[KVGroup]:
    kinds = (KVGroupKind.FULL, KVGroupKind.LATENT)
    return [group for group in kv.layout.groups if group.kind in kinds and group.window is None]


def derived(kv: KVPool) -> dict[str, Any]:
    """What the file repeats for its readers' convenience; ``bytes_per_token`` is text ("a/b") where it is not whole."""
    each = bytes_per_token(kv)
    return {
        "blocks": kv.num_slabs,
        "block_bytes": kv.layout.slab_bytes,
        "block_tokens": min((g.block_tokens for g in _growing(kv) or kv.layout.groups), default=0),
        "bytes_per_token": int(each) if each.denominator == 1 else str(each),
    }


def parse_plan(text: str, *, file: str) -> PlanFile:
    """Raises ``InputError`` for text that is not JSON, a schema this release does not read, or a wrong value."""
    return plan_from(codec.loads(text, file=file), file=file)


def plan_from(document: Mapping[str, Any], *, file: str, at: codec.Path = ()) -> PlanFile:
    """A plan from JSON values; ``at`` is its place inside a larger file. Raises ``InputError``."""
    codec.check_schema(document, expected=PLAN_SCHEMA, file=file)
    reader = codec.Reader(file)
    bare, repeated = _without_derived(document)
    plan = reader.read(MemoryPlan, bare, at)
    check_plan(plan, reader, at)
    for name, value in derived(plan.kv).items():
        if repeated.get(name, value) != value:
            reader.fail((*at, "kv", name), f"is {repeated[name]!r}, but the layout makes it {value!r}")
    return PlanFile(plan, {path[len(at) :]: value for path, value in reader.unknown.items()})


def _without_derived(document: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    document = {key: value for key, value in document.items() if key != EQUIVALENT}
    kv = document.get("kv")
    if not isinstance(kv, dict):
        return document, {}
    names = ("blocks", "block_bytes", "block_tokens", "bytes_per_token")
    bare = {key: value for key, value in kv.items() if key not in names}
    return {**document, "kv": bare}, {name: kv[name] for name in names if name in kv}
