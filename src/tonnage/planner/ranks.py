"""Plans for all ranks of a parallel engine: each with its own share of the model, and one schedule for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Unpack

from tonnage.costs.config import ModelConfig
from tonnage.errors import DoesNotFit, UserError
from tonnage.planner.asked import Asked, on_rank, question_for
from tonnage.planner.question import Question, answer
from tonnage.planner.weights import weights_for
from tonnage.terms import MemoryPlan, Rank


def distinct_ranks(rank: Rank) -> list[Rank]:
    """One rank of each pipeline stage; the others of a stage hold shares of the same size."""
    return [replace(rank, index=stage * rank.tp * rank.cp) for stage in range(rank.pp)]


def questions_for(config: ModelConfig, **asked: Unpack[Asked]) -> list[Question]:
    """One question for each pipeline stage. Raises ``InvalidSetting`` as ``question_for``."""
    return [question_for(config, **on_rank(asked, rank)) for rank in distinct_ranks(asked.get("rank") or Rank())]


def plan_stages(
    questions: Sequence[Question], answer: Callable[[Question], MemoryPlan] = answer
) -> tuple[MemoryPlan, ...]:
    """Plans for the stages' ``questions``, all with the tokens and the attended tokens of the smallest.

    Ranks differ in bytes a token, and in what they hold beside the pool; a schedule that all can follow counts the
    tokens of the one that has fewest. Raises ``DoesNotFit`` naming the first rank that has no plan.
    """
    alone = [_answered(each, answer) for each in questions]
    if len(alone) == 1:
        return tuple(alone)
    attended = min((made.attended_cap for made in alone if made.attended_cap is not None), default=None)
    # Where max_seq_len was left open each stage fitted its own; the shortest is everybody's.
    shortest = min(alone, key=lambda made: made.limits.max_seq_len).limit_knobs.max_seq_len
    tokens = min(made.kv.tokens for made in alone)
    return tuple(
        _answered(
            replace(
                each,
                limit_knobs=replace(each.limit_knobs, max_seq_len=shortest),
                ranks_tokens=tokens,
                ranks_sequences=min(made.max_concurrency for made in alone),
                ranks_attended=attended,
            ),
            answer,
        )
        for each in questions
    )


def all_plan(questions: Sequence[Question], changed: Question) -> bool:
    """Whether every stage has a plan, and one with all the others, once it is changed as one of them was."""
    try:
        plan_stages([changed_like(each, changed) for each in questions], answer)
    except UserError:
        return False
    return True


def changed_like(question: Question, like: Question) -> Question:
    """The stage with the other's money, limits, device, dtype and number of ranks."""
    rank = replace(like.rank, index=question.rank.index)
    changed = replace(
        question, knobs=like.knobs, limit_knobs=like.limit_knobs, card=like.card, dtype=like.dtype, rank=rank
    )
    if (changed.dtype, rank) == (question.dtype, question.rank):
        return changed
    return replace(changed, weights=weights_for(changed, rank))


def _answered(question: Question, answer: Callable[[Question], MemoryPlan]) -> MemoryPlan:
    try:
        return answer(question)
    except DoesNotFit as refusal:
        if question.rank.pp == 1:
            raise
        told = refusal.told_as(what=f"rank {question.rank.index} of {question.rank.size}: {refusal.what}")
    raise told
