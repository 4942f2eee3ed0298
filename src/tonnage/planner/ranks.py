"""Plans for all ranks of a parallel engine: each with its own share of the model, and one schedule for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tonnage.errors import DoesNotFit
from tonnage.planner.question import Question
from tonnage.terms import MemoryPlan, Rank


def distinct_ranks(rank: Rank) -> list[Rank]:
    """One rank of each pipeline stage; the others of a stage hold shares of the same size."""
    return [replace(rank, index=stage * rank.tp) for stage in range(rank.pp)]


def plan_stages(question: Question, answer: Callable[[Question], MemoryPlan]) -> tuple[MemoryPlan, ...]:
    """One plan for each pipeline stage, all with the tokens and the attended tokens of the smallest.

    Ranks differ in bytes a token, and in what they hold beside the pool; a schedule that all can follow counts the
    tokens of the one that has fewest. Raises ``DoesNotFit`` naming the first rank that has no plan.
    """
    questions = [replace(question, rank=rank) for rank in distinct_ranks(question.rank)]
    alone = [_answered(each, answer) for each in questions]
    if len(alone) == 1:
        return tuple(alone)
    tokens = min(made.kv.tokens for made in alone)
    attended = min((made.attended_cap for made in alone if made.attended_cap is not None), default=None)
    return tuple(answer(_at_most(each, alone, tokens=tokens, attended=attended)) for each in questions)


def _at_most(question: Question, alone: Sequence[MemoryPlan], *, tokens: int, attended: int | None) -> Question:
    """The question with the smallest rank's figures, and with one max_seq_len for all where it was left open."""
    shortest = min(alone, key=lambda made: made.limits.max_seq_len)
    limits = replace(question.limit_knobs, max_seq_len=shortest.limit_knobs.max_seq_len)
    return replace(question, limit_knobs=limits, ranks_tokens=tokens, ranks_attended=attended)


def _answered(question: Question, answer: Callable[[Question], MemoryPlan]) -> MemoryPlan:
    try:
        return answer(question)
    except DoesNotFit as refusal:
        where = f"rank {question.rank.index} of {question.rank.tp * question.rank.pp}"
        told = DoesNotFit(
            f"{where}: {refusal.what}" if question.rank.pp > 1 else refusal.what,
            need_bytes=refusal.need_bytes,
            have_bytes=refusal.have_bytes,
            remedies=refusal.remedies,
            need=refusal.need,
            have=refusal.have,
            where=refusal.where,
        )
    raise told
