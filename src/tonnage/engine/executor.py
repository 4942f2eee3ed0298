"""One step on the device: flatten the batch, run the model over paged KV, sample.

The batch is one row of T tokens, as transformers calls it: input_ids [1, T], position_ids [1, T]. Attention goes
through transformers' registry to our backend, which finds pages and positions in the step (``attend``). Steps of
decodes are replayed from CUDA graphs where some are captured.
The vocabulary projection runs for at most ``max_logits_rows`` rows at once, so its memory does not grow with prompts
that want log-probabilities of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tonnage.attention.base import Backend, Rows
from tonnage.buffers.torch_copies import upload, upload_one
from tonnage.config import Limits
from tonnage.engine.attend import attending
from tonnage.engine.inputs import PromptSlice, StepInputs
from tonnage.engine.outcome import Outcome
from tonnage.engine.sampling import Drawn, PromptLogprobs, Sampler, count
from tonnage.graphs.runner import DecodeGraphs
from tonnage.graphs.token_feed import TokenFeed
from tonnage.step import Ints
from tonnage.workspace import ScratchArena


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A step that may still run, and what it tells once it has: by row that samples, and of prompts by request."""

    request_ids: Sequence[str]
    drawn: Drawn
    prompts: Sequence[tuple[str, PromptLogprobs]]

    def outcome(self) -> Outcome:
        sampled = self.drawn.read()
        prompt: dict[str, list[Any]] = {}
        for request_id, piece in self.prompts:
            prompt.setdefault(request_id, []).extend(piece.read())
        return Outcome(
            request_ids=self.request_ids,
            tokens=sampled.tokens,
            logprobs=sampled.logprobs,
            finite=sampled.finite,
            top=sampled.top,
            prompt=prompt,
        )


class Executor:
    """The model, its attention backend, scratch and sampler: ``launch`` computes a prepared step and asks no driver.

    ``model`` is a causal language model of transformers whose logits are its output embeddings of the last hidden
    state and nothing more (the families that we run). ``num_slots``: of the batch; what each drew last is kept on the
    device, so that a step may be launched before the host has seen the tokens of the one before it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        backend: Backend,
        scratch: ScratchArena,
        sampler: Sampler,
        *,
        device: torch.device,
        max_logits_rows: int,
        num_slots: int,
    ) -> None:
        self._device = device
        self._model: Any = model
        self._backend: Backend | None = backend
        self._scratch, self._sampler = scratch, sampler
        self._max_logits_rows = max_logits_rows
        self._feed = TokenFeed(num_slots, device)
        self.graphs: DecodeGraphs | None = None

    def close(self) -> None:
        """Let go of every graph, and of every tensor over weights, pool and scratch."""
        if self.graphs is not None:
            self.graphs.clear()
            self.graphs = None
        self._model = self._backend = None
        self._scratch.close()

    @torch.inference_mode()
    def launch(self, inputs: StepInputs) -> Launched:
        """Ask for the step; every row that samples draws its token. Waits for nothing on a card.

        What it leaves for the next step, drawn tokens and counts of them, it writes last: whatever raises before, the
        step may be launched again.
        """
        if self._model is None or self._backend is None:
            raise RuntimeError("the engine is closed")
        hidden = self._hidden(inputs)
        plan = inputs.plan
        sampling = np.flatnonzero(plan.samples)
        last = (np.cumsum(plan.counts) - 1)[sampling]
        places, slots = upload([last, inputs.slots[sampling]], self._device)
        # A step of decodes samples from each row.
        chosen = hidden if sampling.size == len(hidden) else hidden.index_select(0, places)
        drawn = self._sampler.draw(self._logits(chosen), inputs.sampling, inputs.penalties)
        launched = Launched(
            request_ids=[plan.request_ids[row] for row in sampling.tolist()],
            drawn=drawn,
            prompts=list(self._prompt_logprobs(hidden, inputs.prompts)),
        )
        if inputs.sampling.penalties is not None and inputs.penalties is not None:
            count(drawn.tokens, inputs.sampling.penalties, inputs.penalties)
        if sampling.size:
            self._feed.keep(slots, drawn.tokens)
        return launched

    def prepare_graphs(self, sizes: Sequence[int], limits: Limits) -> None:
        """Get ready to capture decodes of up to so many rows; ``graphs.capture`` then does, and their steps are
        replayed."""
        assert self._backend is not None
        self.graphs = DecodeGraphs(
            self._forward,
            self._backend,  # type: ignore[arg-type]
            self._scratch,
            self._feed,
            sizes=sizes,
            limits=limits,
            device=self._device,
        )
        self.graphs.warm_up()

    def _hidden(self, inputs: StepInputs) -> torch.Tensor:
        """Last hidden states [T, H] of the flattened batch."""
        assert self._backend is not None
        plan = inputs.plan
        table, *further = inputs.tables
        rows = Rows(starts=plan.starts, ends=plan.ends, table=table, slots=inputs.slots, further=further)
        if self.graphs is not None and rows.is_decode.all():
            bucket = self.graphs.bucket(len(rows))
            if bucket is not None:
                return self.graphs.replay(bucket, inputs.ids, rows)
        with self._scratch.step(plan.shape) as scratch:
            prepared = self._backend.prepare(rows, scratch)
            positions = upload_one(_positions(plan.starts, plan.counts), self._device)
            return self._forward(self._feed.upload(inputs.ids)[None], positions[None], prepared)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, prepared: Any) -> torch.Tensor:
        """Last hidden states [T, H] of token ids and positions [1, T]."""
        assert self._backend is not None
        with attending(self._backend, prepared):
            states = self._model.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        found: torch.Tensor = states[0]
        return found

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, H] -> [rows, V], for at most ``max_logits_rows`` rows."""
        assert hidden.shape[0] <= self._max_logits_rows
        return self._model.get_output_embeddings()(hidden)

    def _prompt_logprobs(
        self, hidden: torch.Tensor, prompts: Sequence[PromptSlice]
    ) -> Iterator[tuple[str, PromptLogprobs]]:
        """For at most ``max_logits_rows`` rows of logits at once."""
        for piece in prompts:
            for begin, end in _slices(piece.targets.size, self._max_logits_rows):
                logits = self._logits(hidden[piece.first + begin : piece.first + end])
                targets = upload_one(piece.targets[begin:end], self._device)
                for told in self._sampler.told(logits, targets, num_top=piece.num_top):
                    yield piece.request_id, told


def _positions(starts: Ints, counts: Ints) -> Ints:
    """``starts[i] ... starts[i] + counts[i] - 1`` of every row, one behind the other."""
    offsets = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) + np.repeat(starts - offsets, counts)


def _slices(total: int, size: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + size, total)) for begin in range(0, total, size))
