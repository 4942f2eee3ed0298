"""What-ifs around one question: the curve of pool against attended tokens, and what one more GiB would give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Unpack

from tonnage.budget.curve import Curve, curve
from tonnage.budget.plan import PlanInputs, plan
from tonnage.config import Knobs, LimitKnobs, Origin, Setting
from tonnage.costs.config import ModelConfig
from tonnage.errors import UserError
from tonnage.hardware import Card
from tonnage.planner import plan_without_device
from tonnage.planner.asked import Asked, question_for
from tonnage.planner.question import Question, inputs_at
from tonnage.terms import MemoryPlan
from tonnage.units import GiB

#: Caps that a GiB more of the knob moves, and those that a GiB more of the device does.
RAISED_CAPS, DEVICE_CAPS = ("total_bytes", "kv_bytes"), ("budget", "kv_fraction")


@dataclass(frozen=True, slots=True, kw_only=True)
class OneMore:
    """The plan with one GiB more of ``what``: "the device", or the cap that binds."""

    what: str
    plan: MemoryPlan


def curve_without_device(config: ModelConfig, **asked: Unpack[Asked]) -> Curve:
    """Both pictures of the question that ``plan_without_device`` answers, for one rank as if it were alone. Raises as
    that does."""
    return curve(inputs_of(question_for(config, **asked), plan_without_device(config, **asked)))


def inputs_of(question: Question, made: MemoryPlan) -> PlanInputs:
    """What the arithmetic saw when it answered ``question`` with ``made``, its max_seq_len fitted where it was open."""
    setting = made.limit_knobs.max_seq_len
    was_open = not question.limit_knobs.max_seq_len.is_set
    inputs = inputs_at(question, setting.value if was_open and setting.origin is Origin.FIT else None)
    again = plan(inputs)
    # How much of the host a rank's own slabs take is worked out behind the arithmetic.
    assert replace(again, host=made.host) == made, "the inputs of a plan do not give that plan again"
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
