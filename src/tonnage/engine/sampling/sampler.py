"""From logits to tokens, for all sampling rows of a step at once.

In this order: penalties, biases and masked stops; then the most probable token where the temperature is 0, else
temperature, top-k, top-p, min-p, and a draw. Log-probabilities are the model's own, before all of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch

from tonnage.costs.activations import SAMPLER_TILE_ELEMENTS
from tonnage.engine.outcome import TokenLogprobs, Top
from tonnage.engine.sampling.edit import edited
from tonnage.engine.sampling.rows import SamplingRows
from tonnage.engine.sampling.select import draw, gaps_to_best, index, limits, pick, weights
from tonnage.resources.penalties import PenaltyTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One entry a row: the token, its natural-log probability, and whether the row's logits were all numbers.

    ``finite`` is False too where nothing can be chosen, every logit being -inf. ``top`` has the rows that asked.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)
    top: dict[int, Top] = field(default_factory=dict)


#: Tokens, their log-probabilities, and whether the row's logits are numbers, [rows, 1] each.
_Tile: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Sampler:
    """Works on ``tile_elements`` logits at once, at least one row, so what it holds does not grow with the batch:
    at most ``costs.activations.sampler_scratch_bytes`` beside the logits and the tables.
    """

    def __init__(self, vocab_size: int, *, tile_elements: int = SAMPLER_TILE_ELEMENTS["host"]) -> None:
        self._vocab_size = vocab_size
        self._tile_rows = max(1, tile_elements // vocab_size)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: SamplingRows, penalties: PenaltyTensors | None = None) -> Sampled:
        """A token for every row of ``logits`` [rows, V], which are of any float type and stay as they are.

        ``penalties``: the tables by slot, wanted where ``rows`` has penalties. A row without numbers gives token 0
        and ``finite`` False, and its neighbours what they would give without it.
        """
        assert logits.shape == (rows.num_rows, self._vocab_size), (logits.shape, rows.num_rows, self._vocab_size)
        top: dict[int, Top] = {}
        found: list[_Tile] = []
        for start, stop in self._tiles(rows.num_rows):
            tile, tops = _sample_tile(logits[start:stop], rows.between(start, stop), penalties)
            top.update((row + start, told) for row, told in tops.items())
            found.append(tile)
        if not found:
            return Sampled()
        # The host looks once, for each look waits until the device has come so far: all in one kind of number, of
        # which every token and every float32 is one.
        parts = [torch.cat(columns).double() for columns in zip(*found, strict=True)]
        tokens, logprobs, finite = torch.cat(parts, dim=1).T.cpu().numpy()
        return Sampled(
            tokens=tokens.astype(np.int64).tolist(),
            logprobs=logprobs.tolist(),
            finite=finite.astype(bool).tolist(),
            top=top,
        )

    @torch.inference_mode()
    def prompt_logprobs(self, logits: torch.Tensor, targets: torch.Tensor, *, num_top: int) -> list[TokenLogprobs]:
        """What the model said of ``targets``, int64 [n], at the rows of ``logits`` [n, V], with the ``num_top`` most
        probable tokens beside each. NaN where a row's logits are not all numbers.
        """
        assert logits.shape == (len(targets), self._vocab_size), (logits.shape, len(targets), self._vocab_size)
        found: list[TokenLogprobs] = []
        for start, stop in self._tiles(len(targets)):
            numbers, wanted = logits[start:stop].float(), targets[start:stop]
            norm = _log_norm(numbers)
            logprobs = (numbers.gather(1, wanted.unsqueeze(1)) - norm).squeeze(1)
            tops = _tops(numbers, norm, [num_top] * len(wanted))
            found += map(TokenLogprobs, wanted.tolist(), logprobs.tolist(), tops)
        return found

    def _tiles(self, num_rows: int) -> Iterator[tuple[int, int]]:
        for start in range(0, num_rows, self._tile_rows):
            yield start, min(start + self._tile_rows, num_rows)


def _sample_tile(
    logits: torch.Tensor, rows: SamplingRows, tables: PenaltyTensors | None
) -> tuple[_Tile, dict[int, Top]]:
    """What the rows of one tile give, and the alternatives by row of those that asked."""
    numbers = logits.float()
    norm = _log_norm(numbers)
    top: dict[int, Top] = {}
    if (tops := rows.tops) is not None:
        found = _tops(pick(numbers, tops.rows), pick(norm, tops.rows), tops.counts.tolist())
        top = dict(zip(tops.rows.tolist(), found, strict=True))
    numbers = edited(numbers, rows, tables, in_place=logits.dtype != torch.float32)
    draws = rows.draws
    if draws is not None and len(draws.rows) == rows.num_rows:
        best, tokens = numbers.amax(-1, keepdim=True), norm.new_empty((rows.num_rows, 1), dtype=torch.int64)
    else:
        best, tokens = numbers.max(-1, keepdim=True)
    if draws is not None:
        gaps = gaps_to_best(pick(numbers, draws.rows), pick(best, draws.rows), draws.temperature)
        del numbers  # the largest tensors are still to come
        drawn = draw(weights(gaps, limits(gaps, draws)), draws.uniform)
        tokens.index_copy_(0, index(draws.rows, logits.device), drawn)
    finite = norm.isfinite() & best.isfinite()
    tokens = torch.where(finite, tokens, 0)
    logprobs = logits.gather(1, tokens).float() - norm
    return (tokens, logprobs, finite), top


def _log_norm(logits: torch.Tensor) -> torch.Tensor:
    """log(sum(exp(logits))) of float32 ``logits`` [rows, V], as [rows, 1]; not finite if a row has a NaN, +inf, or
    nothing but -inf."""
    best = logits.amax(-1, keepdim=True)
    return (logits - best).exp_().sum(-1, keepdim=True).log_().add_(best)


def _tops(logits: torch.Tensor, norm: torch.Tensor, counts: Sequence[int]) -> list[Top]:
    """The ``counts[i]`` most probable tokens of each row."""
    most = min(max(counts, default=0), logits.shape[1])
    if most == 0:
        return [()] * len(counts)
    values, ids = logits.topk(most)
    rows = zip(ids.tolist(), (values - norm).tolist(), counts, strict=True)
    return [tuple(zip(ids[:count], logprobs[:count], strict=True)) for ids, logprobs, count in rows]
