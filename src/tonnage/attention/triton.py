"""Attention by our own Triton kernels: what a GPU runs with no package beside torch.

Decode rows go through a split-KV kernel that reads pages where they lie, all of them in one launch. Prefill rows go
through one that does the same for many queries a row.

The number of splits depends on the number of decode rows alone, so that a captured graph replays what it captured
and an eager step of as many rows gives the same bits. Partial outputs are the only scratch; their bound is
``declarations/triton_decode.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tonnage.attention import require_triton
from tonnage.attention.append import append, next_power_of_2
from tonnage.attention.base import Row, Rows
from tonnage.attention.pages import Pages
from tonnage.attention.triton_inputs import StaticInputs
from tonnage.attention.triton_tuning import Tuning, decode_tuning, prefill_tuning
from tonnage.buffers.torch_copies import upload
from tonnage.config import Limits
from tonnage.declarations.splits import MOST_SMS
from tonnage.declarations.triton_decode import num_splits
from tonnage.errors import InvalidSetting
from tonnage.units import ceil_div

if TYPE_CHECKING:
    from tonnage.workspace import StepScratch

LOG2_E = 1 / math.log(2)
#: A dot product of the tensor cores is at least so wide each way; query heads of a group are padded to it.
LEAST_DOT_SIZE = 16
MOST_HEAD_DIM = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(slots=True, kw_only=True)
class DecodeRows:
    """Rows that attend with one token each, on the device; see ``StaticInputs``. ``tables`` by group."""

    tokens: torch.Tensor
    lengths: torch.Tensor
    tables: Sequence[torch.Tensor]
    num_splits: int
    scratch: StepScratch
    partials: torch.Tensor | None = None

    @property
    def num(self) -> int:
        return self.lengths.shape[0]

    def take_partials(self, num_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 outputs [rows, Hq, splits, D] and base-2 log-sums [rows, Hq, splits], flat: one piece of the step's
        scratch for all layers, taken by the first."""
        num_results = self.num * num_heads * self.num_splits
        if self.partials is None or self.partials.numel() < num_results * (head_dim + 1):
            self.partials = self.scratch.tensor((num_results * (head_dim + 1),), torch.float32)
        return self.partials[: num_results * head_dim], self.partials[num_results * head_dim :]


@dataclass(slots=True, kw_only=True)
class PrefillRows:
    """Rows of several queries, on the device as ``prefill_kernel`` takes them; ``tables`` by group."""

    spans: torch.Tensor
    blocks: torch.Tensor
    tables: Sequence[torch.Tensor]


@dataclass(slots=True, kw_only=True)
class TritonStep:
    """What one step needs, the same for every layer of a group. ``slots``, by group, int64 [T]: where each new token
    goes; none in a step of decodes, which write theirs themselves."""

    slots: Sequence[torch.Tensor] = ()
    decode: DecodeRows | None = None
    prefill: PrefillRows | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """What a layer asks for, as the kernels take it: see ``_attend_tile`` for ``scale`` and ``cap``."""

    scaling: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None

    @property
    def scale(self) -> float:
        return 2 * LOG2_E * self.scaling / self.softcap if self.softcap else LOG2_E * self.scaling

    @property
    def options(self) -> dict[str, Any]:
        """Compile-time constants."""
        return {
            "WINDOW": self.window or 0,
            "CAPPED": bool(self.softcap),
            "HAS_SINKS": self.sinks is not None,
        }


class TritonBackend:
    """``pool`` may grow behind the same address; see ``Pages``.

    Raises ``InvalidSetting`` where the kernels cannot run: no card, no Triton, heads too wide, a dtype they lack.
    """

    name = "triton"

    def __init__(self, pool: torch.Tensor | Pages) -> None:
        pages = Pages.of(pool)
        _require_runnable(pages)
        self._pool, self._pages = pages.slabs, pages
        self.block_tokens, self._kv_heads, self._head_dim = pages.block_tokens, pages.kv_heads, pages.head_dim
        self._layers = [(group, pages.views[group][0, layer, 0]) for group, layer in pages.places]
        self._dim_pad = max(LEAST_DOT_SIZE, next_power_of_2(self._head_dim))
        self._num_sms = MOST_SMS
        if self._pool.device.type == "cuda":
            self._num_sms = torch.cuda.get_device_properties(self._pool.device).multi_processor_count

    @cached_property
    def decode_tuning(self) -> Tuning:
        return decode_tuning(self._dim_pad, self._pool.element_size(), self.block_tokens)

    @cached_property
    def prefill_tuning(self) -> Tuning:
        return prefill_tuning(self._dim_pad, self._pool.element_size())

    # -- once a step ---------------------------------------------------------------------------------------------

    def prepare(self, rows: Rows | Sequence[Row], scratch: StepScratch) -> TritonStep:
        """A step with any rows, to be run once: its inputs go over in one copy."""
        rows = rows if isinstance(rows, Rows) else Rows.of(rows)
        decode, prefill = np.flatnonzero(rows.is_decode), np.flatnonzero(~rows.is_decode)
        arrays: list[np.ndarray] = self._slots(rows) if prefill.size else []
        if decode.size:
            arrays += [rows.offsets[decode].astype(np.int32), rows.ends[decode].astype(np.int32)]
            arrays += self._tables(rows, decode)
        if prefill.size:
            spans = np.stack([rows.starts, rows.ends, rows.offsets], axis=1)[prefill].astype(np.int32)
            arrays += [spans, _query_blocks(spans, self.prefill_tuning.queries), *self._tables(rows, prefill)]
        there = iter(upload(arrays, self._pool.device))
        step = TritonStep(slots=self._by_group(there) if prefill.size else ())
        if decode.size:
            step.decode = self._decode_rows(next(there), next(there), self._by_group(there), scratch)
        if prefill.size:
            step.prefill = PrefillRows(spans=next(there), blocks=next(there), tables=self._by_group(there))
        return step

    def static_inputs(self, limits: Limits) -> StaticInputs:
        """For the graphs of decodes: one set serves the buckets of every batch size, in turn."""
        return StaticInputs(
            max_rows=limits.max_batch_size,
            max_blocks=ceil_div(limits.max_seq_len, self.block_tokens),
            num_groups=self._pages.num_groups,
            device=self._pool.device,
        )

    def load(self, inputs: StaticInputs, rows: Rows, num_rows: int) -> None:  # noqa: ARG002 - padding is in the inputs
        """Write a step of decodes for the next replay of the graph of ``num_rows``, on the current stream."""
        inputs.load(rows, self._slots(rows), block_tokens=self.block_tokens)

    def rest(self, inputs: StaticInputs, num_rows: int) -> None:
        """Every row is padding from now on, until the next ``load``."""
        self.load(inputs, Rows.nobody(self._pages.num_groups), num_rows)

    def captured(self, inputs: StaticInputs, num_rows: int, scratch: StepScratch) -> TritonStep:
        """The step of a graph for ``num_rows`` rows: it reads ``inputs`` and nothing of the host.

        The scratch must be that of a captured step of ``num_rows`` decodes, at an address that stays.
        """
        decode = self._decode_rows(inputs.tokens[:num_rows], inputs.lengths[:num_rows], inputs.tables, scratch)
        return TritonStep(decode=decode)

    def _slots(self, rows: Rows) -> list[np.ndarray]:
        """By group: where each token goes."""
        groups = [rows.of_group(group) for group in range(self._pages.num_groups)]
        slab_tokens = self._pages.slab_tokens
        return [group.token_slots(block_tokens=self.block_tokens, slab_tokens=slab_tokens) for group in groups]

    def _tables(self, rows: Rows, which: np.ndarray) -> list[np.ndarray]:
        """By group: pages of some rows, up to the last one that any of them uses."""
        width = ceil_div(int(rows.ends[which].max()), self.block_tokens)
        return [table[rows.slots[which], :width] for table in rows.tables]

    def _by_group(self, tensors: Iterator[torch.Tensor]) -> list[torch.Tensor]:
        """The next ones, one a group."""
        return list(islice(tensors, self._pages.num_groups))

    def _decode_rows(
        self, tokens: torch.Tensor, lengths: torch.Tensor, tables: Sequence[torch.Tensor], scratch: StepScratch
    ) -> DecodeRows:
        splits = num_splits(lengths.shape[0], self._kv_heads, num_sms=self._num_sms)
        return DecodeRows(tokens=tokens, lengths=lengths, tables=tables, num_splits=splits, scratch=scratch)

    # -- once a layer --------------------------------------------------------------------------------------------

    def forward(
        self,
        step: TritonStep,
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
        assert query.dtype == key.dtype == self._pool.dtype, (query.dtype, self._pool.dtype)
        query, key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in (query, key, value))
        wanted = _Layer(scaling=scaling, window=window, softcap=softcap, sinks=sinks)
        out = query.new_empty(query.shape[2], query.shape[1], self._head_dim)
        group, pages = self._layers[layer]
        if step.slots:
            append(step.slots[group], pages, key, value)
        if step.decode is not None:
            new = None if step.slots else (key, value)
            self._decode(step.decode, step.decode.tables[group], pages, query, out, wanted, new=new)
        if step.prefill is not None:
            self._prefill(step.prefill, step.prefill.tables[group], pages, query, out, wanted)
        return out.unsqueeze(0)

    def _decode(
        self,
        rows: DecodeRows,
        table: torch.Tensor,
        pages: torch.Tensor,
        query: torch.Tensor,
        out: torch.Tensor,
        wanted: _Layer,
        *,
        new: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """``new``: keys and values that are not in their pages yet."""
        from tonnage.attention.triton_kernels import combine_kernel, decode_kernel

        num_heads, splits, tuning = query.shape[1], rows.num_splits, self.decode_tuning
        group = num_heads // self._kv_heads
        is_split = splits > 1
        parts, sums = rows.take_partials(num_heads, self._head_dim) if is_split else (out, out)
        key, value = new or (query, query)
        decode_kernel[(self._kv_heads, rows.num, splits)](
            out, parts, sums, query, key, value, pages, table, rows.lengths, rows.tokens,
            out if wanted.sinks is None else wanted.sinks,
            query.stride(1), query.stride(2), key.stride(1), key.stride(2), value.stride(1), value.stride(2),
            table.stride(0), wanted.scale, LOG2_E * (wanted.softcap or 0.0), APPENDS=new is not None,
            GROUP=group, GROUP_PAD=max(LEAST_DOT_SIZE, next_power_of_2(group)), TILE=tuning.keys,
            IS_SPLIT=is_split, **self._shape, **wanted.options, **tuning.launch,
        )  # fmt: skip
        if is_split:
            combine_kernel[(num_heads, rows.num)](
                out, parts, sums, rows.tokens, splits,
                NUM_HEADS=num_heads, HEAD_DIM=self._head_dim, DIM_PAD=self._dim_pad,
                SPLITS_PAD=next_power_of_2(splits), num_warps=4,
            )  # fmt: skip

    def _prefill(
        self,
        rows: PrefillRows,
        table: torch.Tensor,
        pages: torch.Tensor,
        query: torch.Tensor,
        out: torch.Tensor,
        wanted: _Layer,
    ) -> None:
        from tonnage.attention.triton_prefill import prefill_kernel

        num_heads, tuning = query.shape[1], self.prefill_tuning
        prefill_kernel[(num_heads, rows.blocks.shape[0])](
            out, query, pages, table, rows.spans, rows.blocks, out if wanted.sinks is None else wanted.sinks,
            query.stride(1), query.stride(2), table.stride(0), wanted.scale, LOG2_E * (wanted.softcap or 0.0),
            NUM_HEADS=num_heads, QUERIES=tuning.queries, TILE=tuning.keys,
            **self._shape, **wanted.options, **tuning.launch,
        )  # fmt: skip

    @cached_property
    def _shape(self) -> dict[str, Any]:
        """Compile-time constants of the pool."""
        return {
            "NUM_KV_HEADS": self._kv_heads,
            "SLAB": self._pages.slab_elements,
            "HEAD_DIM": self._head_dim,
            "DIM_PAD": self._dim_pad,
            "PAGE": self.block_tokens,
            # Tensor cores round float32 to 10 bits of mantissa; three products of parts leave about 21.
            "PRECISION": "tf32x3" if self._pool.dtype == torch.float32 else "tf32",
        }


def _query_blocks(spans: np.ndarray, queries: int) -> np.ndarray:
    """Rows cut into blocks of queries, int32 [blocks, 2] as (row, first query): those with the most keys first, so that
    no long one is left for the end."""
    counts = spans[:, 1] - spans[:, 0]
    num_blocks = -(-counts // queries)
    row = np.repeat(np.arange(len(spans)), num_blocks)
    first = (np.arange(row.size) - np.repeat(np.cumsum(num_blocks) - num_blocks, num_blocks)) * queries
    num_keys = np.minimum(spans[row, 0] + first + queries, spans[row, 1])
    order = np.argsort(-num_keys, kind="stable")
    return np.stack([row, first], axis=1)[order].astype(np.int32)


def _require_runnable(pages: Pages) -> None:
    remedy, pool = "use sdpa", pages.slabs
    require_triton("triton", "cuda" if pool.device.type == "cuda" else "host")
    if pages.head_dim > MOST_HEAD_DIM:
        what = f"has heads of at most {MOST_HEAD_DIM}, the model's are {pages.head_dim} wide"
        raise InvalidSetting("attention", "triton", what, remedy=remedy)
    if pool.dtype not in DTYPES:
        have = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise InvalidSetting("attention", "triton", f"has no cache of {pool.dtype}", remedy=f"use one of {have}")
