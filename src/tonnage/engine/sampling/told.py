"""What a step drew, on its way from the device: read once the host needs it, which may be a step later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tonnage.buffers.torch_copies import Download
from tonnage.engine.outcome import TokenLogprobs, Top


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One entry a row: the token, its natural-log probability, and whether the row's logits were all numbers.

    ``finite`` is False too where nothing can be chosen, every logit being -inf. ``top`` has the rows that asked.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)
    top: dict[int, Top] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Some rows of a step, [rows] each on the device: int64 tokens, their log-probabilities in float32, and whether
    the logits are numbers."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    finite: torch.Tensor


class _Lists:
    """Tensors as nested lists, once they are here. On the host they are at once, and the tensors go: small ones that
    stay between the large ones of a step keep the heap from using their room again."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._download: Download | None = Download(tensors)
        self._found: list[Any] = []
        if all(tensor.device.type == "cpu" for tensor in tensors):  # tensors without bytes are never read
            self.read()

    def read(self) -> list[Any]:
        if self._download is not None:
            self._found = [array.tolist() for array in self._download.read()]
            self._download = None
        return self._found


class Alternatives:
    """The most probable tokens of some positions, ``counts[i]`` of them each; none is more than ``logits`` has."""

    def __init__(self, logits: torch.Tensor, norm: torch.Tensor, counts: Sequence[int]) -> None:
        """From float32 ``logits`` [n, V] and their log-sums ``norm`` [n, 1]."""
        self._counts = counts
        most = min(max(counts, default=0), logits.shape[1])
        self._lists: _Lists | None = None
        if most:
            values, ids = logits.topk(most)
            self._lists = _Lists([ids, values - norm])

    def read(self) -> list[Top]:
        if self._lists is None:
            return [()] * len(self._counts)
        rows = zip(*self._lists.read(), self._counts, strict=True)
        return [tuple(zip(ids[:count], logprobs[:count], strict=True)) for ids, logprobs, count in rows]


class Drawn:
    """``tokens`` int64 [rows] are on the device, for the next step; ``read`` has all of it."""

    def __init__(
        self, tokens: torch.Tensor, told: torch.Tensor, tops: Sequence[tuple[Sequence[int], Alternatives]] = ()
    ) -> None:
        """``told`` float64 [3, rows]: tokens, log-probabilities and whether they are finite, all in one kind of number,
        of which every token and every float32 is one: a copy less. ``tops``: alternatives, and whose they are."""
        self.tokens, self._tops = tokens, tops
        self._lists = _Lists([told])

    @classmethod
    def of(cls, tiles: Sequence[Tile], tops: Sequence[tuple[Sequence[int], Alternatives]]) -> Drawn:
        tokens, logprobs, finite = (
            _joined([getattr(tile, name) for tile in tiles]) for name in ("tokens", "logprobs", "finite")
        )
        return cls(tokens, torch.stack([tokens.double(), logprobs.double(), finite.double()]), tops)

    def read(self) -> Sampled:
        (found,) = self._lists.read()
        tokens, logprobs, finite = found
        top: dict[int, Top] = {}
        for rows, alternatives in self._tops:
            top.update(zip(rows, alternatives.read(), strict=True))
        return Sampled(
            tokens=[int(token) for token in tokens], logprobs=logprobs, finite=[one == 1 for one in finite], top=top
        )


class PromptLogprobs:
    """What the model said of some tokens of a prompt."""

    def __init__(self, targets: torch.Tensor, logprobs: torch.Tensor, tops: Alternatives) -> None:
        self._lists, self._tops = _Lists([targets, logprobs]), tops

    def read(self) -> list[TokenLogprobs]:
        """NaN where a row's logits are not all numbers."""
        return list(map(TokenLogprobs, *self._lists.read(), self._tops.read()))


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts)) if parts else torch.empty(0, dtype=torch.int64)
