"""Plans for a model on a device: with neither at hand, or from what an engine's probes measured.

After ``Measured`` is filled, by closed forms or by probes, both are one code. A plan that is refused is tried again
with one thing changed at a time, and only changes that really plan are suggested.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tonnage.config import Knobs, LimitKnobs
from tonnage.costs.config import ModelConfig, refuse_unsupported
from tonnage.costs.dtypes import WEIGHT_DTYPES, parse_dtype
from tonnage.costs.models import find_config
from tonnage.costs.weights import weights_layout
from tonnage.errors import DoesNotFit
from tonnage.hardware import Card
from tonnage.planner.claims import claims_for, unlisted
from tonnage.planner.knobs import check_knobs, refuse_planned_only
from tonnage.planner.limits import resolve_limits
from tonnage.planner.question import Question, answer, listed_claims
from tonnage.planner.remedies import with_remedies
from tonnage.terms import Claim, Measured, MemoryPlan, Rank

__all__ = [
    "check_knobs",
    "claims_for",
    "find_config",
    "plan_measured",
    "plan_without_device",
    "refuse_planned_only",
    "resolve_limits",
]


def plan_without_device(
    config: ModelConfig,
    *,
    card: Card,
    knobs: Knobs | None = None,
    limit_knobs: LimitKnobs | None = None,
    rank: Rank | None = None,
    dtype: str | None = None,
    backend: str = "sdpa",
) -> MemoryPlan:
    """The plan of one rank from config.json and the catalogue alone; ``dtype`` of the weights, default the model's.

    Raises ``UnsupportedModel``, ``InvalidSetting``, or ``DoesNotFit`` with remedies that were each planned.
    """
    question = _question(
        config, card=card, knobs=knobs, limit_knobs=limit_knobs, rank=rank, dtype=dtype, backend=backend
    )
    return _answer(question)


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
) -> MemoryPlan:
    """The plan of one rank from what its probes measured, by the same arithmetic.

    The device's size is ``measured.device_bytes``, whatever the card says. ``page_bytes`` defaults to the card's.
    ``extra_claims`` come beside those of ``claims_for``; one of a name that is already there counts once and must
    cost the same at the limits that come out of ``limit_knobs``, else ``ValueError``. The probes must have run at
    those limits. ``versions`` (torch, driver ...) enter the fingerprint. Raises as ``plan_without_device``.
    """
    question = _question(
        config,
        card=card.with_total(measured.device_bytes),
        knobs=knobs,
        limit_knobs=limit_knobs,
        rank=rank or measured.rank,
        dtype=dtype,
        backend=backend,
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
    return unlisted(listed_claims(question, limits), extra)


def _question(
    config: ModelConfig,
    *,
    card: Card,
    knobs: Knobs | None,
    limit_knobs: LimitKnobs | None,
    rank: Rank | None,
    dtype: str | None,
    backend: str,
) -> Question:
    refuse_unsupported(config)
    element = parse_dtype(dtype or config.dtype, knob="dtype", allowed=WEIGHT_DTYPES)
    rank = rank or Rank()
    return Question(
        config=config,
        card=card,
        knobs=knobs or Knobs(),
        limit_knobs=limit_knobs or LimitKnobs(),
        rank=rank,
        dtype=element,
        backend=backend,
        page_bytes=card.page_bytes,
        weights=weights_layout(config, dtype=element, rank=rank).quantity(),
    )


def _answer(question: Question) -> MemoryPlan:
    try:
        return answer(question)
    except DoesNotFit as refusal:
        error = with_remedies(question, refusal)
    raise error
