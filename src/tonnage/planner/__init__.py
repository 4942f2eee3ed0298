"""Plans for a model on a device: with neither at hand, or from what an engine's probes measured.

After ``Measured`` is filled, by closed forms or by probes, both are one code. A plan that is refused is tried again
with one thing changed at a time, and only changes that really plan are suggested.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Unpack

from tonnage.config import Knobs, LimitKnobs
from tonnage.costs.config import ModelConfig
from tonnage.costs.models import find_config
from tonnage.errors import DoesNotFit
from tonnage.hardware import Card
from tonnage.planner.asked import Asked, question_for
from tonnage.planner.claims import claims_for, unlisted
from tonnage.planner.knobs import check_knobs, refuse_planned_only
from tonnage.planner.limits import resolve_limits
from tonnage.planner.policy import refuse_own_money
from tonnage.planner.question import Question, answer, layout_at, listed_claims, refuse_small_tier
from tonnage.planner.ranks import all_plan, plan_stages, questions_for
from tonnage.planner.remedies import with_remedies
from tonnage.planner.weights import checkpoint_of
from tonnage.terms import Claim, Measured, MemoryPlan, Rank

if TYPE_CHECKING:
    from tonnage.budget.reference.knobs import ReferenceKnobs

__all__ = [
    "check_knobs",
    "checkpoint_of",
    "claims_for",
    "find_config",
    "plan_measured",
    "plan_ranks",
    "plan_without_device",
    "question_for",
    "refuse_own_money",
    "refuse_planned_only",
    "resolve_limits",
]


def plan_without_device(config: ModelConfig, **asked: Unpack[Asked]) -> MemoryPlan:
    """The plan of one rank from config.json and the catalogue alone; ``Asked`` explains the keywords.

    Raises ``UnsupportedModel``, ``InvalidSetting``, or ``DoesNotFit`` with remedies that were each planned.
    """
    return _answer(question_for(config, **asked))


def plan_ranks(config: ModelConfig, **asked: Unpack[Asked]) -> tuple[MemoryPlan, ...]:
    """One plan for each pipeline stage of the engine that ``rank`` belongs to, all with the tokens of the smallest;
    its index is not looked at. Ranks of one stage are alike. Raises as ``plan_without_device``, naming the rank."""
    questions = questions_for(config, **asked)
    check_knobs(questions[0].knobs)
    refuse_small_tier(questions)
    try:
        return plan_stages(questions)
    except DoesNotFit as refusal:
        error = with_remedies(questions[0], refusal, works=partial(all_plan, questions))
    raise error


def plan_measured(
    config: ModelConfig,
    *,
    card: Card,
    measured: Measured,
    knobs: Knobs | None = None,
    limit_knobs: LimitKnobs | None = None,
    rank: Rank | None = None,
    dtype: str | None = None,
    backend: str = "sdpa",
    page_bytes: int | None = None,
    extra_claims: Sequence[Claim] = (),
    versions: Mapping[str, str] | None = None,
    reference: ReferenceKnobs | None = None,
) -> MemoryPlan:
    """The plan of one rank from what its probes measured, by the same arithmetic.

    The device's size is ``measured.device_bytes``, whatever the card says. ``page_bytes`` defaults to the card's.
    ``extra_claims`` come beside those of ``claims_for``; one of a name that is already there counts once and must
    cost the same at the limits that come out of ``limit_knobs``, else ``ValueError``. The probes must have run at
    those limits. ``versions`` (torch, driver ...) enter the fingerprint. Raises as ``plan_without_device``.
    """
    question = question_for(
        config,
        card=card.with_total(measured.device_bytes),
        knobs=knobs,
        limit_knobs=limit_knobs,
        rank=rank or measured.rank,
        dtype=dtype,
        backend=backend,
        reference=reference,
    )
    return _answer(
        replace(
            question,
            measured=measured,
            weights=measured.weights,
            page_bytes=page_bytes or card.page_bytes,
            extra_claims=_unlisted(question, extra_claims),
            versions=tuple(sorted((versions or {}).items())),
        )
    )


def _unlisted(question: Question, extra: Sequence[Claim]) -> tuple[Claim, ...]:
    """Compared once, at the limits asked for: a search for other limits changes the listed claims and not these."""
    if not extra:
        return ()
    check_knobs(question.knobs)
    limits, _ = resolve_limits(question.config, question.limit_knobs, device_kind=question.card.kind)
    return unlisted(listed_claims(question, limits, layout_at(question, limits)), extra)


def _answer(question: Question) -> MemoryPlan:
    check_knobs(question.knobs)
    refuse_small_tier([question])
    try:
        return answer(question)
    except DoesNotFit as refusal:
        error = with_remedies(question, refusal)
    raise error
