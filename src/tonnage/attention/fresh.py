"""Long prompts from their first token, whose keys are the ones just computed: torch's own attention, no page read.

Prompts of one length that stand side by side are one call: more work for the card at once, and one result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class Run:
    """``num`` prompts of ``length`` tokens each, one behind the other from token ``begin`` of the batch on."""

    begin: int
    num: int
    length: int

    @property
    def end(self) -> int:
        return self.begin + self.num * self.length

    def of(self, part: torch.Tensor) -> torch.Tensor:
        """Its tokens of [1, heads, T, D], as [num, heads, length, D]; a view."""
        return part[0, :, self.begin : self.end].unflatten(1, (self.num, self.length)).transpose(0, 1)


def runs_of(rows: Sequence[tuple[int, int]]) -> list[Run]:
    """From [begin, end) of each prompt, in the order of the batch."""
    found = []
    number = 0

    def key(row: tuple[int, int]) -> tuple[int, int]:
        nonlocal number
        number += 1
        length = row[1] - row[0]
        return length, row[0] - number * length  # the same for neighbours of one length

    for (length, _), run in groupby(rows, key):
        begins = [begin for begin, _ in run]
        found.append(Run(begins[0], len(begins), length))
    return found


def attend(run: Run, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float) -> torch.Tensor:
    """Each prompt to itself, causally; query, key and value [1, heads, T, D]. Returns [num, length, Hq, D]."""
    # Not cuDNN's, which torch would rather take on a card: it builds a plan for every shape that it has not met, and a
    # step with a prompt of a new length would wait for that.
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        found = scaled_dot_product_attention(
            run.of(query), run.of(key), run.of(value), is_causal=True, scale=scaling, enable_gqa=True
        )
    return found.transpose(1, 2)
