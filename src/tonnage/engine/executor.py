"""One step on the device: flatten the batch, run the model over paged KV, sample.

The batch is one row of T tokens, as transformers calls it: input_ids [1, T], position_ids [1, T]. Attention goes
through transformers' registry to our backend, which finds pages and positions in the step object passed along.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tonnage.attention.base import Backend, Row
from tonnage.engine.sampler import Sampled, greedy
from tonnage.step import StepItem, StepPlan
from tonnage.workspace import ScratchArena

#: Name of our attention function in transformers' registry. No mask is registered under it, so that none is made.
ATTENTION_NAME = "tonnage"


def register_attention() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _attend)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,  # noqa: ARG001 - causality and pages are in the step
    *,
    scaling: float,
    step: tuple[Backend, Any],
    **_: Any,
) -> tuple[torch.Tensor, None]:
    backend, prepared = step
    out = backend.forward(prepared, int(module.layer_idx), query, key, value, scaling=scaling)  # type: ignore[arg-type]
    return out, None


class Executor:
    """The model, its attention backend and its scratch: ``launch`` computes a prepared step and asks no driver."""

    def __init__(self, model: torch.nn.Module, backend: Backend, scratch: ScratchArena) -> None:
        self._model: torch.nn.Module | None = model
        self._backend: Backend | None = backend
        self._scratch = scratch

    def close(self) -> None:
        """Let go of every tensor over weights, pool and scratch."""
        self._model = self._backend = None
        self._scratch.close()

    @torch.inference_mode()
    def launch(
        self, plan: StepPlan, tokens: Mapping[str, Sequence[int]], blocks: Mapping[str, np.ndarray]
    ) -> dict[str, Sampled]:
        """Run ``plan`` over each request's token ids and KV blocks; returns what its rows sampled."""
        if self._model is None or self._backend is None:
            raise RuntimeError("the engine is closed")
        rows = self._rows(plan.items, blocks)
        ids = np.concatenate([np.asarray(tokens[i.request_id][i.start : i.end], np.int64) for i in plan.items])
        positions = np.concatenate([np.arange(item.start, item.end, dtype=np.int64) for item in plan.items])
        sampling = [(item, row) for item, row in zip(plan.items, rows, strict=True) if item.samples]
        last = torch.tensor([row.offset + row.count - 1 for _, row in sampling], dtype=torch.int64)
        with self._scratch.step(plan.shape) as scratch:
            prepared = self._backend.prepare(rows, scratch)
            logits = self._model(
                input_ids=torch.from_numpy(ids).unsqueeze(0),
                position_ids=torch.from_numpy(positions).unsqueeze(0),
                use_cache=False,
                logits_to_keep=last,
                step=(self._backend, prepared),
            ).logits
        sampled = greedy(logits[0])
        return {item.request_id: outcome for (item, _), outcome in zip(sampling, sampled, strict=True)}

    @staticmethod
    def _rows(items: Sequence[StepItem], blocks: Mapping[str, np.ndarray]) -> list[Row]:
        rows, offset = [], 0
        for item in items:
            rows.append(Row(start=item.start, end=item.end, offset=offset, blocks=blocks[item.request_id]))
            offset += item.count
        return rows
