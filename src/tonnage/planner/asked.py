"""What every planning call takes beside the model, named and explained once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Required, TypedDict

from tonnage.config import Knobs, LimitKnobs
from tonnage.costs.checkpoint import Checkpoint
from tonnage.costs.config import ModelConfig
from tonnage.costs.dtypes import WEIGHT_DTYPES, parse_dtype
from tonnage.hardware import Card
from tonnage.planner.predict import StageProbe
from tonnage.planner.question import Question
from tonnage.planner.weights import weights_of
from tonnage.terms import Rank

if TYPE_CHECKING:
    from tonnage.budget.reference.knobs import ReferenceKnobs


class Asked(TypedDict, total=False):
    """Keywords of ``plan_without_device`` and its kin; only ``card`` must be given.

    card         the kind of device, and its size
    knobs, limit_knobs   what was asked about money and shapes (default: nothing)
    rank         the rank planned for (default: the only one)
    dtype        of the weights (default: the model's own)
    backend      the attention backend whose scratch is declared (default: sdpa)
    checkpoint   what the headers of the model's files say, where they are at hand
    reference    plan by the reference policy with these knobs (default: by our own)
    draft        a smaller model that proposes tokens, loaded beside it
    probe        who knows the stages of a step better than closed forms
    """

    card: Required[Card]
    knobs: Knobs | None
    limit_knobs: LimitKnobs | None
    rank: Rank | None
    dtype: str | None
    backend: str
    checkpoint: Checkpoint | None
    reference: ReferenceKnobs | None
    draft: ModelConfig | None
    probe: StageProbe | None


def on_rank(asked: Asked, rank: Rank) -> Asked:
    """The same keywords for another rank."""
    return {**asked, "rank": rank}


def question_for(
    config: ModelConfig,
    *,
    card: Card,
    knobs: Knobs | None = None,
    limit_knobs: LimitKnobs | None = None,
    rank: Rank | None = None,
    dtype: str | None = None,
    backend: str = "sdpa",
    checkpoint: Checkpoint | None = None,
    reference: ReferenceKnobs | None = None,
    draft: ModelConfig | None = None,
    probe: StageProbe | None = None,
) -> Question:
    """The question that those arguments ask. Raises ``InvalidSetting`` for a dtype or a rank that cannot be."""
    element = parse_dtype(dtype or config.dtype, knob="dtype", allowed=WEIGHT_DTYPES)
    rank, limit_knobs = rank or Rank(), limit_knobs or LimitKnobs()
    drafts = bool(limit_knobs.max_draft_tokens.value)
    return Question(
        config=config,
        card=card,
        knobs=knobs or Knobs(),
        limit_knobs=limit_knobs,
        rank=rank,
        dtype=element,
        backend=backend,
        page_bytes=card.page_bytes,
        weights=weights_of(config, dtype=element, rank=rank, checkpoint=checkpoint, drafts=drafts, draft=draft),
        reference=reference,
        draft=draft,
        checkpoint=checkpoint,
        probe=probe,
    )
