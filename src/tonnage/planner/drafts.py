"""A draft model beside the target: whole on the last pipeline stage, its cache in the same pool."""

from __future__ import annotations

from dataclasses import replace

from tonnage.costs.config import ModelConfig
from tonnage.terms import Rank

#: Tokens drafted ahead where a draft model is named and nothing else is said.
DEFAULT_DRAFT_TOKENS = 4


def with_draft_layers(config: ModelConfig, draft: ModelConfig | None) -> ModelConfig:
    """The target with the draft's layers in the place of its own for multi-token prediction.

    Both keep a cache on the last stage for every token of a sequence, so one layout prices both, and the pool is split
    between target and draft by what a token costs each, exactly.
    """
    return config if draft is None else replace(config, mtp_layers=draft.layers)


def draft_rank(rank: Rank) -> Rank:
    """The draft's place: split over the tensor-parallel ranks of the last stage, all of its layers there."""
    return replace(rank, index=0, size=rank.tp * rank.cp, pp=1, partition=())


def draft_warnings(config: ModelConfig, draft: ModelConfig | None) -> list[str]:
    """What would keep the draft's tokens from being judged."""
    if draft is None:
        return []
    found = [f"{draft.name}: {note}" for note in draft.notes]
    if draft.vocab_size != config.vocab_size:
        found.append(
            f"{draft.name} has {draft.vocab_size:,} tokens in its vocabulary and {config.name} {config.vocab_size:,}: "
            "its drafts can only be judged if both share one tokenizer"
        )
    return found
