"""What a step gave: the tokens drawn, with their log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One position: the token that stands there, its natural-log probability, and the most probable alternatives.

    ``top`` holds (token id, log-probability), most probable first; empty where none were asked for.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One entry per sampling row of the plan, in its order; ``finite``: whether the row's logits were all numbers.

    top     alternatives at the sampled position, for the rows (by index here) that asked
    prompt  prompt positions whose log-probabilities this step made, by request, in order of position
    """

    request_ids: Sequence[str]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    finite: Sequence[bool]
    top: Mapping[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    prompt: Mapping[str, Sequence[TokenLogprobs]] = field(default_factory=dict)
