"""From logits to tokens. Greedy for now: the most probable token, the first of them on an exact tie."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Sampled:
    """One row's outcome: the token, its natural-log probability, and whether the row's logits were all numbers."""

    token: int
    logprob: float
    finite: bool


def greedy(logits: torch.Tensor) -> list[Sampled]:
    """``logits`` [rows, vocabulary] in any float type; one ``Sampled`` per row."""
    if logits.shape[0] == 0:
        return []
    best, token = logits.max(dim=-1)
    # In float32: a bfloat16 log-sum-exp over 100,000 terms has no useful digits.
    logprob = best.float() - torch.logsumexp(logits.float(), dim=-1)
    # max() returns NaN if a row holds one, and an infinity makes the difference NaN.
    finite = torch.isfinite(logprob)
    return [Sampled(*row) for row in zip(token.tolist(), logprob.tolist(), finite.tolist(), strict=True)]
