"""From logits to tokens, for all sampling rows of a step at once.

In this order: penalties, biases and masked stops; then the most probable token where the temperature is 0, else
temperature, top-k, top-p, min-p, and a draw. Log-probabilities are the model's own, before all of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from importlib.util import find_spec

import torch

from tonnage.costs.activations import SAMPLER_TILE_ELEMENTS
from tonnage.engine.outcome import TokenLogprobs
from tonnage.engine.sampling.edit import edited
from tonnage.engine.sampling.rows import SamplingRows
from tonnage.engine.sampling.select import draw, gaps_to_best, index, limits, pick, weights
from tonnage.engine.sampling.told import Alternatives, Drawn, PromptLogprobs, Sampled, Tile
from tonnage.resources.penalties import PenaltyTensors


class Sampler:
    """Works on ``tile_elements`` logits at once, at least one row, so what it holds does not grow with the batch:
    at most ``costs.activations.sampler_scratch_bytes`` beside the logits and the tables. Nothing waits for the device
    but ``sample`` and who reads what the others return.
    """

    def __init__(self, vocab_size: int, *, tile_elements: int = SAMPLER_TILE_ELEMENTS["host"]) -> None:
        self._vocab_size = vocab_size
        self._tile_rows = max(1, tile_elements // vocab_size)

    @torch.inference_mode()
    def draw(self, logits: torch.Tensor, rows: SamplingRows, penalties: PenaltyTensors | None = None) -> Drawn:
        """A token for every row of ``logits`` [rows, V], which are of any float type and stay as they are.

        ``penalties``: the tables by slot, wanted where ``rows`` has penalties. A row without numbers gives token 0
        and is not ``finite``, and its neighbours what they would give without it.
        """
        assert logits.shape == (rows.num_rows, self._vocab_size), (logits.shape, rows.num_rows, self._vocab_size)
        if rows.is_plain and logits.is_cuda and self._has_triton:
            from tonnage.engine.sampling.greedy import greedy

            return greedy(logits)
        tops: list[tuple[list[int], Alternatives]] = []
        found: list[Tile] = []
        for start, stop in self._tiles(rows.num_rows):
            tile, told = _sample_tile(logits[start:stop], rows.between(start, stop), penalties)
            if told is not None:
                tops.append(([row + start for row in told[0]], told[1]))
            found.append(tile)
        return Drawn.of(found, tops)

    def sample(self, logits: torch.Tensor, rows: SamplingRows, penalties: PenaltyTensors | None = None) -> Sampled:
        """As ``draw``, read at once."""
        return self.draw(logits, rows, penalties).read()

    @torch.inference_mode()
    def told(self, logits: torch.Tensor, targets: torch.Tensor, *, num_top: int) -> list[PromptLogprobs]:
        """What the model said of ``targets``, int64 [n], at the rows of ``logits`` [n, V], with the ``num_top`` most
        probable tokens beside each: in pieces, one behind the other."""
        assert logits.shape == (len(targets), self._vocab_size), (logits.shape, len(targets), self._vocab_size)
        found: list[PromptLogprobs] = []
        for start, stop in self._tiles(len(targets)):
            numbers, wanted = logits[start:stop].float(), targets[start:stop]
            norm = _log_norm(numbers)
            logprobs = (numbers.gather(1, wanted.unsqueeze(1)) - norm).squeeze(1)
            found.append(PromptLogprobs(wanted, logprobs, Alternatives(numbers, norm, [num_top] * len(wanted))))
        return found

    def prompt_logprobs(self, logits: torch.Tensor, targets: torch.Tensor, *, num_top: int) -> list[TokenLogprobs]:
        """As ``told``, read at once. NaN where a row's logits are not all numbers."""
        return [one for piece in self.told(logits, targets, num_top=num_top) for one in piece.read()]

    @cached_property
    def _has_triton(self) -> bool:
        return find_spec("triton") is not None

    def _tiles(self, num_rows: int) -> Iterator[tuple[int, int]]:
        for start in range(0, num_rows, self._tile_rows):
            yield start, min(start + self._tile_rows, num_rows)


def _sample_tile(
    logits: torch.Tensor, rows: SamplingRows, tables: PenaltyTensors | None
) -> tuple[Tile, tuple[list[int], Alternatives] | None]:
    """What the rows of one tile give, and the alternatives of those that asked, with their rows."""
    numbers = logits.float()
    norm = _log_norm(numbers)
    top = None
    if (tops := rows.tops) is not None:
        alternatives = Alternatives(pick(numbers, tops.rows), pick(norm, tops.rows), tops.counts.tolist())
        top = tops.rows.tolist(), alternatives
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
    return Tile(tokens=tokens.squeeze(1), logprobs=logprobs.squeeze(1), finite=finite.squeeze(1)), top


def _log_norm(logits: torch.Tensor) -> torch.Tensor:
    """log(sum(exp(logits))) of float32 ``logits`` [rows, V], as [rows, 1]; not finite if a row has a NaN, +inf, or
    nothing but -inf."""
    best = logits.amax(-1, keepdim=True)
    return (logits - best).exp_().sum(-1, keepdim=True).log_().add_(best)
