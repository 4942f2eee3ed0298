"""What an attention backend is to the engine, and the flattened batch that it works on.

Shapes: T = tokens of the step, Hq / Hkv = query / KV heads of this rank, D = head dim, B = tokens of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from tonnage.errors import InvalidSetting
from tonnage.step import Flags, Ints

if TYPE_CHECKING:
    import torch

    from tonnage.workspace import StepScratch

Table: TypeAlias = npt.NDArray[np.int32]

#: What a layer may ask of attention beyond causal softmax over grouped heads, and which backends of ours have it.
FEATURES: dict[str, tuple[str, ...]] = {
    "window": ("sdpa", "triton", "flashinfer", "paired"),
    "softcap": ("sdpa", "triton", "flashinfer", "paired"),
    "sinks": ("sdpa", "triton"),
}


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """All rows of a step as arrays: row i computes tokens ``[starts[i], ends[i])``, one row behind the other.

    ``table`` is the page table of the first group of layers, int32 [slots, blocks], of which row i reads the row
    ``slots[i]``; ``further``: those of the other groups, read alike. To iterate gives each as a ``Row`` with its blocks
    of the first group, for a backend that goes row by row.
    """

    starts: Ints
    ends: Ints
    table: Table
    slots: Ints
    further: Sequence[Table] = ()

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Rows:
        """From rows written out, which must stand one behind the other in the batch."""
        starts = np.array([row.start for row in rows], np.int64)
        ends = np.array([row.end for row in rows], np.int64)
        made = cls(
            starts=starts,
            ends=ends,
            table=np.stack([row.blocks for row in rows]) if rows else np.zeros((0, 0), np.int32),
            slots=np.arange(len(rows)),
        )
        assert made.offsets.tolist() == [row.offset for row in rows]
        return made

    @classmethod
    def nobody(cls, num_groups: int) -> Rows:
        """No rows, with tables for so many groups of layers."""
        none, table = np.zeros(0, np.int64), np.zeros((1, 1), np.int32)
        return cls(starts=none, ends=none, table=table, slots=none, further=[table] * (num_groups - 1))

    def __len__(self) -> int:
        return self.starts.size

    def __iter__(self) -> Iterator[Row]:
        places = zip(self.starts.tolist(), self.ends.tolist(), self.offsets.tolist(), self.slots.tolist(), strict=True)
        for start, end, offset, slot in places:
            yield Row(start=start, end=end, offset=offset, blocks=self.table[slot])

    @property
    def tables(self) -> tuple[Table, ...]:
        """By group. An entry whose block has left the window of its layers is 0, and so may be one behind the end."""
        return self.table, *self.further

    def of_group(self, group: int) -> Rows:
        """The same rows as the layers of one group see them."""
        return replace(self, table=self.tables[group], further=())

    @property
    def counts(self) -> Ints:
        return self.ends - self.starts

    @property
    def offsets(self) -> Ints:
        """Where each row's tokens begin in the flattened batch."""
        counts = self.counts
        return np.cumsum(counts) - counts

    @property
    def is_decode(self) -> Flags:
        """One token on top of a cached prefix: the rows that ``StepShape.decode_rows`` counts."""
        return (self.counts == 1) & (self.starts > 0)

    def token_slots(self, *, block_tokens: int, slab_tokens: int) -> Ints:
        """Where each token of the batch lies in the first group, in tokens from the first of slab 0: int64 [T].

        ``slab_tokens`` is the distance between two slabs; an entry of ``table`` is the number of one.
        """
        counts = self.counts
        position = np.arange(int(counts.sum())) + np.repeat(self.starts - self.offsets, counts)
        block, inside = np.divmod(position, block_tokens)
        return self.table[np.repeat(self.slots, counts), block] * np.int64(slab_tokens) + inside


class Backend(Protocol):
    """An attention kernel over paged KV. ``prepare`` runs once a step, ``forward`` once a layer.

    Made over ``Pages``, or over the tensor of a pool that has one group of layers. Layers are counted as the model has
    them; each reads the table of its group.
    """

    name: str

    def prepare(self, rows: Rows | Sequence[Row], scratch: StepScratch) -> Any:
        """Everything that does not depend on the layer: slot indices, tiles, masks."""

    def forward(
        self,
        step: Any,
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
        """Write key and value [1, Hkv, T, D] to the pages, attend with query [1, Hq, T, D]; returns [1, T, Hq, D].

        window   a token sees this many, itself included; None: all before it
        softcap  scores x become softcap * tanh(x / softcap)
        sinks    [Hq], one more score for each query head, to which no value belongs

        Raises ``InvalidSetting`` for a feature that the backend lacks.
        """


def refuse(backend: str, **features: object) -> None:
    """Raise ``InvalidSetting`` where one of ``FEATURES`` is wanted (given, not None) that ``backend`` lacks."""
    for feature, value in features.items():
        if value is not None and backend not in FEATURES[feature]:
            have = " or ".join(FEATURES[feature])
            raise InvalidSetting("attention", backend, f"has no {feature}, which the model needs", remedy=f"use {have}")
