"""Two backends over one pool: steps of decodes alone by our Triton kernels, all others by FlashInfer's.

Ours reads the past of decodes at a higher rate (``choice.RATES``) and appends in the same kernel; FlashInfer's "fa3"
computes prompts on Hopper's own instructions. Both write and read the same pages, and one step is done by one of them,
so that they use one scratch in turn. Graphs hold decodes, and so our kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tonnage.attention.base import Backend, Row, Rows
from tonnage.attention.flashinfer import FlashInferBackend
from tonnage.attention.pages import Pages
from tonnage.attention.triton import TritonBackend
from tonnage.attention.triton_inputs import StaticInputs
from tonnage.config import Limits

if TYPE_CHECKING:
    from tonnage.workspace import StepScratch


@dataclass(frozen=True, slots=True)
class PairedStep:
    """A step as the backend that does it has prepared it."""

    by: Backend
    step: Any


class PairedBackend:
    """``pool`` may grow behind the same address; see ``Pages``.

    Raises ``InvalidSetting`` where either of the two cannot run.
    """

    name = "paired"

    def __init__(self, pool: torch.Tensor | Pages) -> None:
        pages = Pages.of(pool)
        self._decodes, self._others = TritonBackend(pages), FlashInferBackend(pages)
        self.block_tokens = pages.block_tokens

    def prepare(self, rows: Rows | Sequence[Row], scratch: StepScratch) -> PairedStep:
        rows = rows if isinstance(rows, Rows) else Rows.of(rows)
        by: Backend = self._decodes if rows.is_decode.all() else self._others
        return PairedStep(by, by.prepare(rows, scratch))

    def static_inputs(self, limits: Limits) -> StaticInputs:
        """As those of ``TritonBackend``, which does all that is captured."""
        return self._decodes.static_inputs(limits)

    def load(self, inputs: StaticInputs, rows: Rows, num_rows: int) -> None:
        self._decodes.load(inputs, rows, num_rows)

    def rest(self, inputs: StaticInputs, num_rows: int) -> None:
        self._decodes.rest(inputs, num_rows)

    def captured(self, inputs: StaticInputs, num_rows: int, scratch: StepScratch) -> PairedStep:
        return PairedStep(self._decodes, self._decodes.captured(inputs, num_rows, scratch))

    def forward(
        self,
        step: PairedStep,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return step.by.forward(
            step.step, layer, query, key, value, scaling=scaling, window=window, softcap=softcap, sinks=sinks
        )
