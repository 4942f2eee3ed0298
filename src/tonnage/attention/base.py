"""What an attention backend is to the engine, and the flattened batch that it works on.

Shapes: T = tokens of the step, Hq / Hkv = query / KV heads of this rank, D = head dim, B = tokens of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch

    from tonnage.workspace import StepScratch


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence of a step: its tokens ``[start, end)`` stand at ``[offset, offset + end - start)`` of the batch.

    ``blocks`` are its KV blocks, int32, the first ``ceil(end / B)`` of them in use.
    """

    start: int
    end: int
    offset: int
    blocks: np.ndarray

    @property
    def count(self) -> int:
        return self.end - self.start


class Backend(Protocol):
    """An attention kernel over paged KV. ``prepare`` runs once a step, ``forward`` once a layer."""

    name: str

    def prepare(self, rows: Sequence[Row], scratch: StepScratch) -> Any:
        """Everything that does not depend on the layer: slot indices, tiles, masks."""

    def forward(
        self, step: Any, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float
    ) -> torch.Tensor:
        """Write key and value [1, Hkv, T, D] to the pages, attend with query [1, Hq, T, D]; returns [1, T, Hq, D]."""
