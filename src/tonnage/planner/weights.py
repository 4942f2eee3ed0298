"""Which way to know a model's weights a plan uses: the engine's own arena where there is one, else their price."""

from __future__ import annotations

from pathlib import Path

from tonnage.costs.checkpoint import Checkpoint, read_checkpoint
from tonnage.costs.config import ModelConfig
from tonnage.costs.families import FAMILIES
from tonnage.costs.ranks import rank_shape
from tonnage.costs.weights import weights_layout
from tonnage.planner.drafts import draft_rank
from tonnage.planner.question import Question
from tonnage.terms import Quantity, Rank


def checkpoint_of(model: str) -> Checkpoint | None:
    """What the headers of the files beside MODEL's config.json say; None where MODEL is no folder, or holds none."""
    path = Path(model).expanduser()
    try:
        is_there = path.exists()
    except OSError:
        return None
    if not is_there:
        return None
    is_itself = path.is_dir() or path.suffix.lower() == ".gguf"
    return read_checkpoint(path if is_itself else path.parent)


def weights_of(
    config: ModelConfig,
    *,
    dtype: str,
    rank: Rank,
    checkpoint: Checkpoint | None = None,
    drafts: bool = False,
    draft: ModelConfig | None = None,
) -> Quantity:
    """Bytes of one rank's weights. A dense model that the engine lays out itself costs its arena, tensor by tensor.

    ``drafts``: layers for multi-token prediction are loaded too, where the model has them. ``draft``: a draft model is,
    instead, on the last pipeline stage.
    """
    target = _target(config, dtype=dtype, rank=rank, checkpoint=checkpoint, drafts=drafts and draft is None)
    if draft is None or not rank_shape(config, rank).has_head:
        return target
    from tonnage.costs.price import weights_price

    beside = weights_price(draft, rank=draft_rank(rank)).quantity
    return Quantity(
        bytes=target.bytes + beside.bytes,
        low=target.low + beside.low,
        high=target.high + beside.high,
        source=target.source,
        ref=f"{target.ref}; {draft.name}: {beside.ref}",
    )


def weights_for(question: Question, rank: Rank) -> Quantity:
    """The question's weights on another rank, or in another dtype than it had."""
    return weights_of(
        question.config,
        dtype=question.dtype,
        rank=rank,
        checkpoint=question.checkpoint,
        drafts=bool(question.limit_knobs.max_draft_tokens.value),
        draft=question.draft,
    )


def _target(config: ModelConfig, *, dtype: str, rank: Rank, checkpoint: Checkpoint | None, drafts: bool) -> Quantity:
    if not config.unsupported and config.model_type in FAMILIES:
        return weights_layout(config, dtype=dtype, rank=rank).quantity()
    from tonnage.costs.price import weights_price  # only where there is no arena: its rooms are many

    with_mtp = drafts and bool(config.mtp_layers)
    return weights_price(config, dtype=dtype, rank=rank, checkpoint=checkpoint, with_mtp=with_mtp).quantity
