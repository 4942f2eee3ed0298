"""Attention by FlashInfer's compiled kernels, called without its Python (``flashinfer_modules`` says what that takes).

Rows that decode, at the head of a step, go through the "fa2" kernels, on tensor cores, with pasts cut into parts so
that few rows fill the chip; all behind them, whole prompts as well as chunks on a cached past, through "fa3" where the
chip is a Hopper and that module is there, else through "fa2". So do all rows in layers with a window: "fa3" reads whole
tiles, of which a window may begin in the middle, and the pages before it may have other owners by then. New keys and
values are written by the append kernel that we have for Triton.

A kernel needs a plan that its library makes on the host: once a step for each window that layers have, by the first of
those layers. In a graph the plan is data: every replay gets a fresh one, whose layout must be that of the captured one.
Plans and floats come from the step's scratch; their bound is ``declarations/flashinfer.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from tonnage.attention.append import append
from tonnage.attention.base import Row, Rows, refuse
from tonnage.attention.flashinfer_calls import SEES_ALL, SEES_BEFORE, Heads, Kernel, Plan
from tonnage.attention.flashinfer_inputs import DeviceLists, HostLists, StaticLists
from tonnage.attention.flashinfer_modules import (
    Variant,
    find_module,
    load_module,
    refuse_missing_modules,
    refuse_missing_packages,
    refuse_other_devices,
    refuse_other_heads,
)
from tonnage.attention.flashinfer_ring import PinnedRing
from tonnage.attention.pages import Pages
from tonnage.buffers.torch_copies import upload
from tonnage.config import Limits
from tonnage.declarations.flashinfer import FA3_SM, FlashInferScratch
from tonnage.declarations.shape import AttentionShape
from tonnage.terms import Chip

if TYPE_CHECKING:
    from tonnage.workspace import StepScratch

#: What a kernel is compiled for and a plan made for: window and soft-cap of a layer.
Kind: TypeAlias = tuple[int | None, float | None]


@dataclass(slots=True, kw_only=True)
class Part:
    """The rows of a step that one kernel attends with: those that decode (``mask`` SEES_ALL), or the others.

    tokens  which of the batch are theirs
    plans   by the window and soft-cap of layers, made by the first layer of each kind
    """

    mask: int
    host: HostLists
    lists: DeviceLists
    tokens: slice
    is_captured: bool = False
    plans: dict[Kind, Plan] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.host.num_rows if self.is_captured else int(self.host.query_indptr[-1])


@dataclass(slots=True, kw_only=True)
class FlashInferStep:
    """What one step needs, the same for every layer of a group. ``slots``, by group, int64 [T]: where each new token
    goes, -1: nowhere."""

    slots: Sequence[torch.Tensor]
    parts: list[Part]
    scratch: StepScratch
    floats: torch.Tensor | None = None


class FlashInferInputs(StaticLists):
    """``StaticLists`` with what was planned for each graph over them, by its rows: the rows that were loaded last, and
    the plan of every kind of layer."""

    def __init__(self, limits: Limits, *, block_tokens: int, device: torch.device, num_groups: int = 1) -> None:
        super().__init__(limits, block_tokens=block_tokens, device=device, num_groups=num_groups)
        self.loaded: dict[int, HostLists] = {}
        self.plans: dict[int, dict[Kind, Plan]] = {}


class FlashInferBackend:
    """``pool`` may grow behind the same address; see ``Pages``.

    Raises ``InvalidSetting`` where the kernels cannot run: no card, heads or a dtype they are not made for, no loader,
    none compiled.
    """

    name = "flashinfer"

    def __init__(self, pool: torch.Tensor | Pages) -> None:
        pages = Pages.of(pool)
        dtype = str(pages.slabs.dtype).removeprefix("torch.")
        self._variant = Variant(dtype=dtype, head_dim=pages.head_dim)
        self.chip = _require_runnable(pages.slabs, self._variant)
        self._pool, self._pages = pages.slabs, pages
        self.block_tokens, self._kv_heads, self._head_dim = pages.block_tokens, pages.kv_heads, pages.head_dim
        views = pages.views
        self._layers = [(group, views[group][:, at, 0], views[group][:, at, 1]) for group, at in pages.places]
        self._rings: dict[tuple[int, Kind], PinnedRing] = {}
        self._kernels: dict[tuple[int, Kind], Kernel] = {}

    # -- once a step ---------------------------------------------------------------------------------------------

    def prepare(self, rows: Rows | Sequence[Row], scratch: StepScratch) -> FlashInferStep:
        """A step with any rows, to be run once: its inputs go over in one copy.

        A row of one token that stands behind a prompt is taken for one: the tokens of a part stand together, so that no
        layer has to gather them in memory of its own.
        """
        rows = rows if isinstance(rows, Rows) else Rows.of(rows)
        num_decodes = int(np.argmin(np.append(rows.is_decode, False)))  # up to the first that is none
        kinds = [(SEES_ALL, np.arange(num_decodes)), (SEES_BEFORE, np.arange(num_decodes, len(rows)))]
        there = [(mask, which) for mask, which in kinds if which.size]
        groups, hosts = [rows.of_group(group) for group in range(self._pages.num_groups)], []
        arrays: list[np.ndarray] = self._slots(groups)
        for _, which in there:
            host = HostLists.of(rows.counts[which], rows.ends[which], block_tokens=self.block_tokens)
            hosts.append(host)
            arrays += [host.query_indptr, host.page_indptr, host.last_page_tokens]
            arrays += [host.pages(group, which) for group in groups]
        on_device = iter(upload(arrays, self._pool.device))
        step = FlashInferStep(slots=list(islice(on_device, len(groups))), parts=[], scratch=scratch)
        first = 0
        for (mask, _), host in zip(there, hosts, strict=True):
            query_indptr, page_indptr, last = islice(on_device, 3)
            lists = DeviceLists(
                query_indptr=query_indptr,
                page_indptr=page_indptr,
                last_page_tokens=last,
                pages=list(islice(on_device, len(groups))),
            )
            end = first + int(host.query_indptr[-1])
            step.parts.append(Part(mask=mask, host=host, lists=lists, tokens=slice(first, end)))
            first = end
        return step

    def static_inputs(self, limits: Limits) -> FlashInferInputs:
        """For the graphs of decodes: one set serves the buckets of every batch size, in turn."""
        return FlashInferInputs(
            limits, block_tokens=self.block_tokens, device=self._pool.device, num_groups=self._pages.num_groups
        )

    def load(self, inputs: FlashInferInputs, rows: Rows, num_rows: int) -> None:
        """Write a step of decodes, and its plans, for the next replay of the graph of ``num_rows``, on the current
        stream."""
        groups = [rows.of_group(group) for group in range(self._pages.num_groups)]
        inputs.inputs.load(rows, self._slots(groups), block_tokens=self.block_tokens)
        host = HostLists.of(rows.counts, rows.ends, block_tokens=self.block_tokens, num_rows=num_rows)
        inputs.loaded[num_rows] = host
        for kind, captured in inputs.plans.get(num_rows, {}).items():
            plan = self._plan(host, SEES_ALL, kind, captured, is_captured=True)
            # A graph holds the offsets of the plan it was captured with, and no others.
            assert plan.layout == captured.layout, f"{plan.layout} is not the captured {captured.layout}"

    def rest(self, inputs: FlashInferInputs, num_rows: int) -> None:
        """Every row is padding from now on, until the next ``load``."""
        self.load(inputs, Rows.nobody(self._pages.num_groups), num_rows)

    def captured(self, inputs: FlashInferInputs, num_rows: int, scratch: StepScratch) -> FlashInferStep:
        """The step of a graph for ``num_rows`` rows: it reads ``inputs`` and nothing of the host.

        To be run once before it is captured, which makes its plans: of what is loaded, or of padding alone. The scratch
        must be that of a captured step of ``num_rows`` decodes, at an address that stays.
        """
        nobody = np.zeros(0, np.int64)
        padding = HostLists.of(nobody, nobody, block_tokens=self.block_tokens, num_rows=num_rows)
        part = Part(
            mask=SEES_ALL,
            host=inputs.loaded.get(num_rows, padding),
            lists=inputs.compact(num_rows),
            tokens=slice(0, num_rows),
            is_captured=True,
            plans=inputs.plans.setdefault(num_rows, {}),
        )
        return FlashInferStep(slots=[slots[:num_rows] for slots in inputs.inputs.slots], parts=[part], scratch=scratch)

    def _slots(self, groups: Sequence[Rows]) -> list[np.ndarray]:
        """By group: where each token goes."""
        slab_tokens = self._pages.slab_tokens
        return [group.token_slots(block_tokens=self.block_tokens, slab_tokens=slab_tokens) for group in groups]

    # -- once a step and kind of layer ---------------------------------------------------------------------------

    def _first_plan(self, step: FlashInferStep, part: Part, kind: Kind, num_heads: int) -> Plan:
        """With scratch taken for it: the first layer of a kind makes it."""
        is_capturing = self._pool.is_cuda and torch.cuda.is_current_stream_capturing()
        assert not is_capturing, "a step runs once before it is captured"
        declared, num_rows = self._declared(num_heads), part.host.num_rows
        if part.mask == SEES_ALL:
            num_bytes = declared.decode_plan_bytes(num_rows, self.chip, captured=part.is_captured)
            if step.floats is None:
                needed = declared.float_bytes(num_rows, self.chip, captured=part.is_captured)
                step.floats = step.scratch.tensor((needed,), torch.uint8)
        else:
            num_bytes = declared.prefill_plan_bytes(num_rows, part.num_tokens, self.chip)
        ints = step.scratch.tensor((num_bytes,), torch.uint8)
        floats = ints if part.mask == SEES_BEFORE or step.floats is None else step.floats  # prompts leave no parts
        room = Plan(heads=self._heads(num_heads), ints=ints, floats=floats)
        return self._plan(part.host, part.mask, kind, room, is_captured=part.is_captured)

    def _plan(self, host: HostLists, mask: int, kind: Kind, room: Plan, *, is_captured: bool) -> Plan:
        """Into the memory of ``room``, an earlier plan or an empty one."""
        ring = self._rings.setdefault((mask, kind), PinnedRing(self._pool.device))
        with ring.piece(room.ints.numel()) as pinned:
            return self._kernel(mask, kind).plan(host, room, pinned=pinned, mask=mask, is_captured=is_captured)

    def _kernel(self, mask: int, kind: Kind) -> Kernel:
        if (mask, kind) not in self._kernels:
            window, softcap = kind
            variant = Variant(
                dtype=self._variant.dtype,
                head_dim=self._head_dim,
                has_window=window is not None,
                has_softcap=softcap is not None,
            )
            refuse_missing_modules(variant)
            wants_fa3 = mask == SEES_BEFORE and window is None and self.chip.sm == FA3_SM
            family = "fa3" if wants_fa3 and find_module("fa3", variant) else "fa2"
            path = find_module(family, variant)
            assert path is not None
            self._kernels[mask, kind] = Kernel(load_module(path), family, window=window, softcap=softcap)
        return self._kernels[mask, kind]

    # -- once a layer --------------------------------------------------------------------------------------------

    def forward(
        self,
        step: FlashInferStep,
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
        refuse(self.name, sinks=sinks)
        assert query.dtype == key.dtype == self._pool.dtype, (query.dtype, self._pool.dtype)
        query, key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in (query, key, value))
        group, keys, _ = self._layers[layer]
        append(step.slots[group], keys[0], key, value)
        queries = query[0].transpose(0, 1)
        out = query.new_empty(queries.shape)
        for part in step.parts:
            self._attend(step, part, layer, queries, out, scaling=scaling, kind=(window, softcap))
        return out.unsqueeze(0)

    def _attend(
        self,
        step: FlashInferStep,
        part: Part,
        layer: int,
        queries: torch.Tensor,
        out: torch.Tensor,
        *,
        scaling: float,
        kind: Kind,
    ) -> None:
        plan = part.plans.get(kind)
        if plan is None:
            plan = part.plans[kind] = self._first_plan(step, part, kind, queries.shape[1])
        group, keys, values = self._layers[layer]
        own, found = queries[part.tokens], out[part.tokens]
        kernel, pages = self._kernel(part.mask, kind), part.lists.pages[group]
        kernel.run(plan, own, keys, values, part.lists, pages, found, mask=part.mask, scaling=scaling)

    def _heads(self, num_heads: int) -> Heads:
        return Heads(
            num_heads=num_heads,
            num_kv_heads=self._kv_heads,
            head_dim=self._head_dim,
            block_tokens=self.block_tokens,
        )

    def _declared(self, num_heads: int) -> FlashInferScratch:
        shape = AttentionShape(
            num_heads=num_heads, num_kv_heads=self._kv_heads, head_dim=self._head_dim, v_head_dim=self._head_dim
        )
        return FlashInferScratch(shape=shape)


def _require_runnable(pool: torch.Tensor, variant: Variant) -> Chip:
    """The chip of the pool. Raises ``InvalidSetting``."""
    refuse_other_devices(str(pool.device))
    refuse_other_heads(variant)
    refuse_missing_packages()
    about = torch.cuda.get_device_properties(pool.device)
    return Chip(
        name=about.name,
        sm=10 * about.major + about.minor,
        num_sms=about.multi_processor_count,
        total_bytes=about.total_memory,
    )
