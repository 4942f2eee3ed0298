"""A refused question, and changes of it that are tried until one works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tonnage.config import Limits, Origin, Setting
from tonnage.planner.limits import resolve_limits
from tonnage.planner.question import Question


@dataclass(frozen=True, slots=True)
class Aim:
    """What a remedy must make work: ``works`` says whether a changed question does. ``asked``: as the user put it,
    where ``question`` says more; a limit that was left open there goes on following the others."""

    question: Question
    works: Callable[[Question], bool]
    asked: Question | None = None

    def limited(self, name: str, value: int) -> Question:
        """The question with one limit changed, and the tokens of a step as they would follow it."""
        changed = limited(self.question, name, value)
        if (
            name not in ("max_batch_size", "max_draft_tokens")
            or self.asked is None
            or self.asked.limit_knobs.max_num_tokens.is_set
        ):
            return changed
        return limited(changed, "max_num_tokens", in_force(limited(self.asked, name, value)).max_num_tokens)

    def with_limit(self, name: str, value: int) -> bool:
        return self.works(self.limited(name, value))

    def with_knob(self, name: str, value: int) -> bool:
        return self.works(priced(self.question, name, value))


Finder = Callable[[Aim], str | None]


def found_by(finders: tuple[Finder, ...], aim: Aim) -> list[str]:
    """What the finders come up with, in their order."""
    return [remedy for find in finders if (remedy := find(aim))]


def limited(question: Question, name: str, value: int) -> Question:
    changed: dict[str, Any] = {name: _set(value)}
    return replace(question, limit_knobs=replace(question.limit_knobs, **changed))


def priced(question: Question, name: str, value: int) -> Question:
    changed: dict[str, Any] = {name: _set(value)}
    return replace(question, knobs=replace(question.knobs, **changed))


def in_force(question: Question) -> Limits:
    """What a limit is lowered from: defaults of the device included."""
    return resolve_limits(
        question.config,
        question.limit_knobs,
        device_kind=question.card.kind,
        disabled_claims=question.knobs.disabled_claims,
        graphs=question.knobs.graphs,
        has_draft=question.draft is not None,
    )[0]


def _set(value: int) -> Setting[int]:
    return Setting(value, str(value), Origin.FIT, None)
