"""Where a fit tries its values: one question for each pipeline stage, answered together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Unpack

from tonnage.budget.fit import Values
from tonnage.budget.pool import group_prices, unit_tokens
from tonnage.costs.config import ModelConfig
from tonnage.errors import DoesNotFit, UserError
from tonnage.planner.asked import Asked
from tonnage.planner.dimensions import with_values
from tonnage.planner.knobs import check_knobs
from tonnage.planner.question import Question, answer, refuse_small_tier
from tonnage.planner.ranks import all_plan, changed_like, plan_stages, questions_for
from tonnage.planner.remedies import with_remedies
from tonnage.terms import MemoryPlan

Plans = Sequence[MemoryPlan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """``stages`` differ in their rank and their weights, and in nothing else."""

    stages: tuple[Question, ...]

    @classmethod
    def of(cls, config: ModelConfig, **asked: Unpack[Asked]) -> Site:
        """Raises ``UnsupportedModel`` or ``InvalidSetting``, and ``DoesNotFit`` for a host tier of not one block."""
        questions = questions_for(config, **asked)
        check_knobs(questions[0].knobs)
        refuse_small_tier(questions)
        return cls(stages=tuple(questions))

    @property
    def first(self) -> Question:
        return self.stages[0]

    def like(self, question: Question) -> Site:
        """The same stages, changed as the question was."""
        return Site(stages=tuple(changed_like(stage, question) for stage in self.stages))

    def at(self, values: Values) -> Site:
        """The same stages with the values in force."""
        return Site(stages=tuple(with_values(stage, values) for stage in self.stages))

    def on(self, total_bytes: int) -> Site:
        """The same stages on devices of that size."""
        card = self.first.card.with_total(total_bytes)
        return Site(stages=tuple(replace(stage, card=card) for stage in self.stages))

    def plans(self) -> tuple[MemoryPlan, ...]:
        """A plan for each stage. Raises ``DoesNotFit`` (without remedies) or ``InvalidSetting``."""
        return tuple(answer(stage) for stage in self.stages)

    def agreed(self) -> tuple[MemoryPlan, ...]:
        """The same, all with the tokens of the smallest pool: one schedule must do for all ranks."""
        return plan_stages(self.stages, answer)

    def reaches(self, values: Values, met: Callable[[Plans], bool]) -> bool:
        """Whether there are plans with these values, and they are what is wanted. What ``met`` holds for, it holds for
        with some of the ranks left out, so that the first that falls short is the end of it."""
        plans: list[MemoryPlan] = []
        try:
            for stage in self.at(values).stages:
                plans.append(answer(stage))
                if not met(plans[-1:]):
                    return False
        except UserError:
            return False
        return met(plans)

    def refusal(self) -> DoesNotFit | None:
        """Why there is no plan, with remedies; None where there is one. Raises ``InvalidSetting``."""
        for stage in self.stages:
            try:
                answer(stage)
            except DoesNotFit as refused:
                return with_remedies(stage, refused, works=partial(all_plan, self.stages))
        return None


def fewest_tokens(plans: Plans) -> int:
    """Tokens that every rank's pool holds."""
    return min(plan.kv.tokens for plan in plans)


def tightest(plans: Plans) -> MemoryPlan:
    """The plan of the rank with the fewest tokens."""
    return min(plans, key=lambda plan: plan.kv.tokens)


def holds(plans: Plans, *, num_sequences: int, seq_tokens: int) -> bool:
    """Whether every rank's pool holds so many sequences of that length, all whole at once."""
    return all(plan.kv.bytes >= kv_bytes_for(plan, num_sequences, seq_tokens) for plan in plans)


def kv_bytes_for(plan: MemoryPlan, num_sequences: int, seq_tokens: int) -> int:
    """Bytes of a pool that holds them, block by block; states and encoders as for every sequence that may run."""
    limits, layout = replace(plan.limits, max_seq_len=seq_tokens), plan.kv.layout
    prices = group_prices(layout, limits=limits, unit=unit_tokens(layout) or 1, cp=plan.rank.cp)
    return layout.slab_bytes * sum(price.blocks_of_sequences(num_sequences) for price in prices)
