"""CUDA graphs of decode steps: one for each bucket of batch sizes, replayed over inputs at fixed addresses.

What a replay reads is written in place before it: token ids and positions in the feed, pages and lengths by the
backend. Rows that pad a bucket have no length: they write to no page and what they give is not looked at. All graphs
share one private pool of torch's and are never replayed at the same time, so the largest is captured first and the
others live in what it left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import torch

from tonnage.config import Limits
from tonnage.graphs.extra_inputs import ExtraInput, ExtraInputs, Value
from tonnage.graphs.token_feed import TokenFeed
from tonnage.planner.buckets import round_up
from tonnage.step import Ints
from tonnage.terms import StepShape
from tonnage.workspace import ScratchArena

#: (token ids [1, n], positions [1, n], the backend's step, extra inputs by name) -> last hidden states [n, H].
Forward: TypeAlias = Callable[..., torch.Tensor]
_NOTHING: Mapping[str, Value] = MappingProxyType({})


class Decodes(Protocol):
    """The rows of a step that decode one token each: where it stands, and whatever the backend wants to know."""

    @property
    def starts(self) -> Ints: ...
    @property
    def slots(self) -> Ints: ...
    def __len__(self) -> int: ...


class CapturingBackend(Protocol):
    """What a backend has whose decodes can be captured."""

    def static_inputs(self, limits: Limits) -> Any: ...
    def load(self, inputs: Any, rows: Any, num_rows: int) -> None: ...
    def captured(self, inputs: Any, num_rows: int, scratch: Any) -> Any: ...
    def rest(self, inputs: Any, num_rows: int) -> None:
        """Every row is padding from now on, until the next ``load``."""


class DecodeGraphs:
    """Graphs for batches of up to ``max(sizes)`` decodes. ``num_replays`` counts by bucket, ``num_eager`` the steps of
    decodes that found none.

    Addresses are those of ``scratch``, of ``feed`` and of tensors made here: none may move while there are graphs.
    ``extra_inputs`` are keywords of the forward beside ids and positions.
    """

    def __init__(
        self,
        forward: Forward,
        backend: CapturingBackend,
        scratch: ScratchArena,
        feed: TokenFeed,
        *,
        sizes: Sequence[int],
        limits: Limits,
        device: torch.device,
        extra_inputs: Sequence[ExtraInput] = (),
    ) -> None:
        self.sizes = tuple(sorted(set(sizes)))
        self.num_replays = dict.fromkeys(self.sizes, 0)
        self.num_eager = 0
        self._forward, self._backend, self._scratch, self._device = forward, backend, scratch, device
        self._feed = feed
        self._max_seq_len = limits.max_seq_len
        self._inputs = backend.static_inputs(limits)
        self._extra = ExtraInputs(extra_inputs, max_rows=self.sizes[-1], device=device)
        self._hidden: torch.Tensor | None = None
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run every bucket once, so that nothing is compiled or allocated for the first time by its capture. All rows
        are padding: whoever was in the inputs, no page is written to."""
        for size in reversed(self.sizes):
            self._backend.rest(self._inputs, size)
            self._run(size)
        torch.cuda.synchronize(self._device)

    @torch.inference_mode()
    def capture(self) -> None:
        """Largest first, all in one pool. Where one fails there are none."""
        try:
            self._capture_all()
        except BaseException:
            self.clear()
            raise

    def _capture_all(self) -> None:
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.sizes):
            graph = torch.cuda.CUDAGraph()
            # Not ``torch.cuda.graph``: that gives torch's cache back each time.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self._run(size)
            finally:
                graph.capture_end()
            self._graphs[size] = graph

    def bucket(self, num_rows: int) -> int | None:
        """The smallest bucket that holds so many rows; None where none does, or nothing is captured: that step runs
        without a graph, and is counted."""
        size = round_up(self.sizes, num_rows) if self._graphs else None
        self.num_eager += size is None
        return size

    def replay(self, size: int, ids: Ints, rows: Decodes, *, extra: Mapping[str, Value] = _NOTHING) -> torch.Tensor:
        """Last hidden states [rows, H] of a step of decodes; good until the next replay. ``extra``: of every input that
        was declared, [rows, ...]; raises ``GraphInputError`` for anything else."""
        self._extra.load(extra, num_rows=len(rows), size=size)
        self._feed.load(ids, rows.starts, rows.slots)
        self._backend.load(self._inputs, rows, size)
        self._graphs[size].replay()
        self.num_replays[size] += 1
        assert self._hidden is not None
        return self._hidden[: len(rows)]

    def clear(self) -> None:
        """Give the graphs' memory back."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._hidden = None
        torch.cuda.empty_cache()

    def _run(self, size: int) -> None:
        ids, positions = self._feed.ids(size)[None], self._feed.positions[:size][None]
        with self._scratch.step(self._shape(size)) as scratch:
            step = self._backend.captured(self._inputs, size, scratch)
            hidden = self._forward(ids, positions, step, **self._extra.views(size))
        if self._hidden is None:
            self._hidden = hidden.new_empty((self.sizes[-1], hidden.shape[-1]))
        self._hidden[:size].copy_(hidden)

    def _shape(self, size: int) -> StepShape:
        """Of a captured step of so many decodes, each as long as a sequence may be."""
        longest = self._max_seq_len
        return StepShape(
            num_tokens=size, decode_rows=size, attended_tokens=size * longest, max_row_tokens=longest,
            logits_rows=size, captured=True,
        )  # fmt: skip
