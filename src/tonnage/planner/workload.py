"""What a fit is for: the longest context, the most sequences at once, or a workload with a name."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tonnage.config import LimitKnobs
from tonnage.costs.config import ModelConfig
from tonnage.errors import InvalidSetting
from tonnage.planner.limits import num_drafts


class Goal(StrEnum):
    """Open ends: as much of it as there can be."""

    LONGEST_CONTEXT = "longest-context"
    MOST_CONCURRENCY = "most-concurrency"


def parse_goal(text: str, *, knob: str = "goal") -> Goal:
    """The goal of that name; underscores and capitals are fine. Raises ``InvalidSetting``."""
    name = text.strip().lower().replace("_", "-")
    if name not in list(Goal):
        raise InvalidSetting(
            knob, text, "no such goal", remedy=f"write {' or '.join(Goal)}, or give --users and the tokens of each"
        )
    return Goal(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Users at once, every one with a whole prompt and a whole output in the cache. Tokens of one user."""

    num_users: int
    prompt_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        for name, least in (("num_users", 1), ("prompt_tokens", 1), ("output_tokens", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidSetting(name, value, "not a whole number", remedy=f"write {least} or more")

    @property
    def seq_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    def told(self) -> str:
        users = "1 user" if self.num_users == 1 else f"{self.num_users:,} users"
        return f"{users} at {self.prompt_tokens:,} prompt + {self.output_tokens:,} output tokens"


def check_workload(workload: Workload, config: ModelConfig, limits: LimitKnobs, *, has_draft: bool = False) -> None:
    """Raise ``InvalidSetting`` where a limit that was set, or the model's length, is below what the workload says."""
    if workload.seq_tokens > config.max_position_embeddings:
        raise InvalidSetting(
            "workload",
            workload.told(),
            f"{workload.seq_tokens:,} tokens each, and {config.name} has {config.max_position_embeddings:,} positions",
            remedy=f"use at most {config.max_position_embeddings} prompt and output tokens together",
        )
    step_tokens = 1 + num_drafts(limits, has_draft=has_draft)
    decoded = "users who each get a token in every step"
    if step_tokens > 1:
        decoded = (
            f"tokens of {workload.num_users:,} users who each decode {step_tokens}, drafts included, in every step"
        )
    needs = (
        ("max_seq_len", workload.seq_tokens, "tokens of each user"),
        ("max_batch_size", workload.num_users, "users at once"),
        ("max_num_tokens", workload.num_users * step_tokens, decoded),
    )
    for name, least, noun in needs:
        value = getattr(limits, name).value
        if value is not None and value < least:
            raise InvalidSetting(
                name, value, f"below the {least:,} {noun}", remedy=f"leave {name} out, or raise it to {least}"
            )
