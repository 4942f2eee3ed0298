"""A compiled module of FlashInfer as an object: ``plan`` once a step and window, ``run`` once a layer.

What its functions take is that of release 0.6.14 (``csrc/batch_prefill.cu`` and ``batch_prefill_sm90.cu``), behind the
Python wrappers, whose ``plan`` takes 0.8 ms where this takes 0.1. One kernel family, made for prompts, serves decodes
too: on tensor cores, with all query heads of a KV head in one tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from tonnage.attention.flashinfer_inputs import DeviceLists, HostLists

#: Which keys a query sees: all of its row, or those up to its own position.
SEES_ALL, SEES_BEFORE = 0, 1
#: Pages are [tokens, heads, dim].
TOKENS_FIRST = 0
#: Positions are in queries and keys already; kernels that rotate them would divide by these.
NO_ROPE = (1.0, 1e-4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What ``run`` needs to know of a step: numbers in ``ints``, ``info`` about where they lie there, and room in
    ``floats`` for parts; both uint8. All but the contents of ``ints`` is fixed for captured rows."""

    heads: Heads
    ints: torch.Tensor
    floats: torch.Tensor
    info: Any = ()

    @cached_property
    def layout(self) -> tuple[int, ...]:
        return tuple(int(number) for number in self.info)


class Kernel:
    """``family`` "fa2" or "fa3" of ``module``, which has been compiled for windows where ``window`` is not None.

    window  a token sees this many, itself included; None: all before it
    """

    def __init__(self, module: Any, family: str, *, window: int | None, softcap: float | None) -> None:
        self.family = family
        self._plan, self._run = module.plan, module.paged_run
        self._window_left = -1 if window is None else window - 1
        self._softcap = softcap or 0.0

    def plan(
        self,
        lists: HostLists,
        room: Plan,
        *,
        pinned: torch.Tensor,
        mask: int,
        is_captured: bool,
    ) -> Plan:
        """Plan on the host, into ``pinned``, and queue its copy to the memory of ``room`` on the current stream.

        ``pinned`` is as long as ``room.ints``; who calls keeps it as it is until the copy is done. A captured plan is
        padded to what its rows and tokens may need at most. Pasts are cut into parts where queries see all of theirs:
        prompts fill the chip by themselves. Raises ``RuntimeError`` where the room is too small.
        """
        heads = room.heads
        host = [_tensor(array) for array in (lists.query_indptr, lists.page_indptr, lists.lengths)]
        num_tokens = lists.num_rows if is_captured else int(lists.query_indptr[-1])
        shared: list[Any] = [
            room.floats, room.ints, pinned, *host, num_tokens, lists.num_rows, heads.num_heads, heads.num_kv_heads,
            heads.block_tokens, is_captured, heads.head_dim, heads.head_dim, mask == SEES_BEFORE, self._window_left,
        ]  # fmt: skip
        if self.family == "fa2":
            any_split_size, beside_others = -1, 0
            shared += [any_split_size, mask == SEES_BEFORE, beside_others]
        return replace(room, info=self._plan(*shared))

    def run(
        self,
        plan: Plan,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        lists: DeviceLists,
        pages: torch.Tensor,
        out: torch.Tensor,
        *,
        mask: int,
        scaling: float,
    ) -> None:
        """Attend with ``query`` [T, Hq, D] to those ``pages`` of ``lists`` of ``keys`` and ``values``
        [slabs, B, Hkv, D]; ``out`` [T, Hq, D] is contiguous."""
        log_sums, beside_others = None, False
        self._run(
            plan.floats, plan.ints, plan.info, query, keys, values,
            lists.query_indptr, lists.page_indptr, pages, lists.last_page_tokens,
            out, log_sums, mask, TOKENS_FIRST, self._window_left, beside_others, *self._options(scaling),
        )  # fmt: skip

    def _options(self, scaling: float) -> Sequence[Any]:
        """Masks, slopes, lists of items and scales that we have none of; then numbers."""
        if self.family == "fa2":
            return (*(None,) * 8, self._softcap, scaling, *NO_ROPE, 0)
        value_scale = 1.0
        return (*(None,) * 4, self._softcap, scaling, value_scale, 0)


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, np.int32))
