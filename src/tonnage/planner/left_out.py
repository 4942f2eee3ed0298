"""Remedies for what nobody would ask for: numbers of features that are some zeros too large, and several at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from tonnage.budget.search import largest
from tonnage.config import Setting
from tonnage.planner.aim import Aim, Finder
from tonnage.planner.question import Question

#: Settings that are left out together: more of them are not tried one by one, but all at once.
MOST_TOGETHER = 3
#: Where none of the above helps: what is asked for is too large by itself.
NOTHING_HELPS = "plan a smaller model, or spread it over more devices (--tp, --pp)"
#: The same under the reference policy, whose own knobs are not changed here.
NO_SUCH_KNOBS = "give smaller numbers by --reference, or leave them out; else plan a smaller model or more devices"
#: The same where the steps have been measured: smaller ones are measured anew.
MEASURE_AGAIN = "start it with a smaller max_num_tokens, max_batch_size or max_seq_len"


def lowered(name: str, *, least: int) -> Finder:
    """Lower a limit of a feature that was asked for; ``least`` 0 is to do without it."""

    def find(aim: Aim) -> str | None:
        asked = getattr(aim.question.limit_knobs, name).value
        if not asked or aim.question.measured is not None:
            return None
        found = largest(lambda n: aim.with_limit(name, n), low=least, high=asked - 1)
        if found is None:
            return None
        return f"lower {name} to {found}" if found else f"leave {name} out"

    return find


def without_settings(aim: Aim) -> str | None:
    """The fewest settings that must be left out together: one alone has a remedy of its own, or none."""
    if aim.question.measured is not None:
        return None
    asked = given(aim)
    for count in range(2, len(asked) + 1):
        if MOST_TOGETHER < count < len(asked):
            continue
        for some in combinations(asked, count):
            if aim.works(left_out(aim, some)):
                return told(some)
    return None


def given(aim: Aim) -> list[tuple[str, str]]:
    """Settings that somebody asked for, each with the part of a question that it is in."""
    asked = aim.asked or aim.question
    return [
        (home, name)
        for home in ("limit_knobs", "knobs")
        for name, setting in getattr(asked, home).items()
        if setting.is_set and name != "admission"
    ]


def left_out(aim: Aim, some: Sequence[tuple[str, str]]) -> Question:
    """The question without them. What was pinned because of them is pinned no longer."""
    question, asked = aim.question, aim.asked or aim.question
    pinned = [("limit_knobs", "max_num_tokens")] if not asked.limit_knobs.max_num_tokens.is_set else []
    for home, name in (*some, *pinned):
        changed: dict[str, Any] = {home: replace(getattr(question, home), **{name: Setting()})}
        question = replace(question, **changed)
    return question


def told(some: Sequence[tuple[str, str]]) -> str:
    """As a remedy: ``leave a, b and c out``."""
    *others, last = (name for _, name in some)
    return f"leave {', '.join(others)}{' and ' * bool(others)}{last} out"


def nothing_helps(aim: Aim) -> str:
    """What to do in general: it was not planned."""
    if aim.question.reference is not None:
        return NO_SUCH_KNOBS
    return NOTHING_HELPS if aim.question.measured is None else MEASURE_AGAIN


FEATURES: tuple[Finder, ...] = (
    lowered("max_adapters", least=0),
    lowered("max_adapter_rank", least=1),
    lowered("max_draft_tokens", least=0),
    lowered("lookahead_steps", least=0),
)
