"""What-ifs around one question: the curve of pool against attended tokens, and what one more GiB would give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tonnage.budget.curve import Curve, curve
from tonnage.budget.plan import PlanInputs, plan
from tonnage.config import Knobs, LimitKnobs, Origin, Setting
from tonnage.costs.checkpoint import Checkpoint
from tonnage.costs.config import ModelConfig
from tonnage.errors import UserError
from tonnage.hardware import Card
from tonnage.planner import _question, plan_without_device
from tonnage.planner.claims import without
from tonnage.planner.predict import predict
from tonnage.planner.question import Question, listed_claims
from tonnage.terms import MemoryPlan, Rank
from tonnage.units import GiB

#: Caps that a GiB more of the knob moves, and those that a GiB more of the device does.
RAISED_CAPS, DEVICE_CAPS = ("total_bytes", "kv_bytes"), ("budget", "kv_fraction")


@dataclass(frozen=True, slots=True, kw_only=True)
class OneMore:
    """The plan with one GiB more of ``what``: "the device", or the cap that binds."""

    what: str
    plan: MemoryPlan


def curve_without_device(
    config: ModelConfig,
    *,
    card: Card,
    knobs: Knobs | None = None,
    limit_knobs: LimitKnobs | None = None,
    rank: Rank | None = None,
    dtype: str | None = None,
    backend: str = "sdpa",
    checkpoint: Checkpoint | None = None,
) -> Curve:
    """Both pictures of the question that ``plan_without_device`` answers, for one rank as if it were alone. Raises as
    that does."""
    asked: dict[str, Any] = {
        "card": card, "knobs": knobs, "limit_knobs": limit_knobs, "rank": rank, "dtype": dtype, "backend": backend,
        "checkpoint": checkpoint,
    }  # fmt: skip
    made = plan_without_device(config, **asked)
    return curve(inputs_of(_question(config, **asked), made))


def inputs_of(question: Question, made: MemoryPlan) -> PlanInputs:
    """What the arithmetic saw when it answered ``question`` with ``made``, at the limits that came out."""
    limits = made.limits
    measured = question.measured or predict(
        question.config,
        card=question.card,
        limits=limits,
        rank=question.rank,
        dtype=question.dtype,
        weights=question.weights,
    )
    inputs = PlanInputs(
        device_name=made.device_name,
        model_name=made.model_name,
        chip=question.card.chip,
        measured=measured,
        claims=without((*listed_claims(question, limits), *question.extra_claims), question.knobs.disabled_claims),
        layout=made.kv.layout,
        page_bytes=question.page_bytes,
        knobs=question.knobs,
        limits=limits,
        limit_knobs=made.limit_knobs,
        fingerprint=made.fingerprint,
        warnings=made.warnings,
        ranks_tokens=question.ranks_tokens,
        ranks_attended=question.ranks_attended,
    )
    assert plan(inputs) == made, "the inputs of a plan do not give that plan again"
    return inputs


def one_more_gib(
    made: MemoryPlan, *, card: Card, plan_on: Callable[[Knobs, LimitKnobs, Card], MemoryPlan]
) -> OneMore | None:
    """``made`` planned again at the same limits with a GiB more of what binds; None where no memory would help.

    ``plan_on`` plans the same model with other knobs and limits, on another card.
    """
    binding = next(cap.name for cap in made.caps if cap.binding)
    knobs, what = made.knobs, "the device"
    if binding in RAISED_CAPS:
        what, setting = binding, getattr(knobs, binding)
        raised: dict[str, Any] = {binding: replace(setting, value=setting.value + GiB)}
        knobs = replace(knobs, **raised)
    elif binding in DEVICE_CAPS:
        card = card.with_total(card.total_bytes + GiB)
    else:
        return None
    names = ("max_seq_len", "max_batch_size", "max_num_tokens")
    pinned: dict[str, Any] = {name: Setting(getattr(made.limits, name), None, Origin.FIT, None) for name in names}
    try:
        again = plan_on(knobs, replace(made.limit_knobs, **pinned), card)
    except UserError:
        return None
    return OneMore(what=what, plan=again)
