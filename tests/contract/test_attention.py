"""Every attention backend against plain softmax attention in float64, over mixed steps and shapes.

On each device that it runs on. Triton's kernels run on a CPU where ``TRITON_INTERPRET=1`` is set.
"""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.attention import BACKENDS, FLASHINFER, make_backend
from tonnage.attention.base import FEATURES, Row, Rows
from tonnage.attention.flashinfer_modules import Variant, is_built
from tonnage.attention.pages import Pages
from tonnage.buffers import Device, Stream, VaArena
from tonnage.config import Limits
from tonnage.declarations import AttentionShape, declare, declare_for
from tonnage.declarations.triton_decode import num_splits
from tonnage.device.host import HostDriver
from tonnage.errors import InvalidSetting
from tonnage.ledger import Ledger
from tonnage.step import StepItem, StepPlan
from tonnage.terms import Chip, LineKind, StepShape
from tonnage.units import MiB
from tonnage.workspace import ScratchArena

BLOCK = 16
HOST = Chip(name="host", sm=0, num_sms=0, total_bytes=2**30)
LIMITS = Limits(max_seq_len=256, max_batch_size=16, max_num_tokens=192, max_logits_rows=16)
HEADS = [(4, 4), (9, 3), (8, 1)]  # MHA, GQA, MQA

#: Needed for Triton on a CPU; it is read when the kernels are first imported.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
on_cpu_by_interpreter = pytest.mark.skipif(
    not IS_INTERPRETED, reason="triton on a CPU: needs TRITON_INTERPRET=1, numpy < 2.4"
)
#: Triton 3.6's interpreter does what numpy deprecated, and what numpy 2.4 refuses.
as_numpy_lets_it = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
#: Where each backend runs: one that is not here has no kernel on a CPU.
ON_CPU = {"sdpa": (), "triton": (on_cpu_by_interpreter, as_numpy_lets_it)}
ON_CARD = [
    pytest.param(name, "cuda", id=f"{name}-cuda", marks=[pytest.mark.gpu, pytest.mark.shares_card]) for name in BACKENDS
]
#: Dtype and head dim of backends that have not those of the others, and how far off half precision may be.
KINDS = dict.fromkeys(("flashinfer", "paired"), (torch.bfloat16, 128))
SMALL, HALF_BOUND = (torch.float32, 16), 0.03
PLACES = [pytest.param(name, "cpu", id=name, marks=marks) for name, marks in ON_CPU.items()] + ON_CARD
everywhere = pytest.mark.parametrize(("backend", "device"), PLACES)


@dataclass
class Sequence:
    """Ground truth of one sequence: all keys and values that were ever written, per layer. ``blocks`` by group; an
    entry that has left the window of its layers is 0."""

    blocks: list[np.ndarray]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    length: int = 0


def make_driver(device: str):
    if device == "cpu":
        return HostDriver(64 * MiB)
    from tonnage.device.cuda import CudaDriver

    torch.zeros(1, device=device)
    return CudaDriver(0)


def chip_of(device: str) -> Chip:
    if device == "cpu":
        return HOST
    found = torch.cuda.get_device_properties(0)
    return Chip(
        name=found.name,
        sm=10 * found.major + found.minor,
        num_sms=found.multi_processor_count,
        total_bytes=found.total_memory,
    )


@pytest.fixture
def scratch_memory(device):
    driver = make_driver(device)
    arena = VaArena(
        Stream(Device(driver)),
        ledger=Ledger(0, 64 * MiB),
        owner="scratch",
        line=LineKind.SCRATCH,
        reserve_bytes=64 * MiB,
    )
    yield arena
    if device == "cuda":
        torch.cuda.synchronize()
    driver.close()


def require_kernels(backend: str, world: World) -> None:
    """Skip what this machine lacks: the loader of FlashInfer's kernels, and theirs, a file for each set of features."""
    if backend in FLASHINFER and importlib.util.find_spec("tvm_ffi") is None:
        pytest.skip("apache-tvm-ffi is not installed")
    for window in set(world.windows.values()):
        variant = Variant(
            dtype=str(world.dtype).removeprefix("torch."),
            head_dim=world.dim,
            has_window=window is not None or "window" in world.features,
            has_softcap="softcap" in world.features,
        )
        if backend in FLASHINFER and "sinks" not in world.features and not is_built(variant):
            pytest.skip(f"not compiled: {variant.file_name('fa2')} (scripts/build_flashinfer.py)")


class World:
    """A pool, a backend over it and the same history kept densely.

    ``features`` are those of every layer. ``groups``: (layers, window) of each group of them; in a pool of several,
    what has left a window is gone, and slab 0, which entries of a table without a block name, is nobody's.
    """

    def __init__(
        self,
        backend: str,
        memory,
        device: str,
        *,
        heads: int,
        kv_heads: int,
        dtype=None,
        features: dict | None = None,
        groups=(((0, 1), None),),
        limits: Limits = LIMITS,
    ) -> None:
        usual, dim = KINDS.get(backend, SMALL)
        dtype = dtype or usual
        self.bound = 2e-5 if dtype == torch.float32 else HALF_BOUND
        self.dim, self.heads, self.kv_heads, self.dtype, self.groups = dim, heads, kv_heads, dtype, groups
        self.device, self.chip, self.limits = device, chip_of(device), limits
        self.rng = torch.Generator().manual_seed(0)
        self.features = features or {}
        self.layers = sum(len(layers) for layers, _ in groups)
        self.windows = {layer: window for layers, window in groups for layer in layers}
        require_kernels(backend, self)
        most = max(len(layers) for layers, _ in groups)
        pool = torch.full((128, most, 2, BLOCK, kv_heads, dim), math.nan, dtype=dtype, device=device)
        self.pages = pool if len(groups) == 1 else paged(pool, groups)
        self.pool, self.backend = pool, make_backend(backend, self.pages)
        shape = AttentionShape(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            v_head_dim=dim,
            kv_dtype=str(dtype).removeprefix("torch."),
            block_tokens=BLOCK,
            is_scored=not self.features.keys().isdisjoint(("softcap", "sinks")),
            num_windows=len(set(self.windows.values())),
        )
        self.declared = declare_for(backend, shape)
        self.scratch = ScratchArena(memory, self.declared, limits=limits, chip=self.chip)
        self.sequences: dict[str, Sequence] = {}
        self.static = None
        self.free = list(np.random.default_rng(0).permutation(np.arange(1, 128)).astype(np.int32))

    def add(self, name: str) -> None:
        width = self.limits.max_seq_len // BLOCK
        empty = [torch.zeros(0, self.kv_heads, self.dim, dtype=self.dtype) for _ in range(self.layers)]
        blocks = [np.zeros(width, np.int32) for _ in self.groups]
        self.sequences[name] = Sequence(blocks, list(empty), list(empty))

    def step(self, counts: dict[str, int], *, as_arrays: bool = False, as_captured: bool = False) -> float:
        """Compute ``counts[name]`` more tokens of each sequence; returns the largest error against the truth.

        ``as_captured``: a step of decodes, prepared as that of a graph is.
        """
        items = tuple(
            StepItem(request_id=name, start=self.sequences[name].length, count=count, samples=True)
            for name, count in counts.items()
        )
        rows, offset = [], 0
        for item in items:
            blocks = self._grown(self.sequences[item.request_id], item)
            rows.append(Row(start=item.start, end=item.end, offset=offset, blocks=blocks[0]))
            offset += item.count
        plan, worst = StepPlan.of(0, items), 0.0
        with self.scratch.step(replace(plan.shape, captured=as_captured)) as scratch:
            is_array = as_arrays or as_captured or len(self.groups) > 1
            given = self._arrays(rows, items) if is_array else rows
            prepared = self._captured(given, scratch) if as_captured else self.backend.prepare(given, scratch)
            for layer in range(self.layers):
                worst = max(worst, self._layer(layer, rows, items, prepared, offset))
        for item in items:
            self._landed(self.sequences[item.request_id], item.end)
        return worst

    def _captured(self, rows: Rows, scratch):
        if self.static is None:
            self.static = self.backend.static_inputs(self.limits)
        self.backend.load(self.static, rows, len(rows))
        return self.backend.captured(self.static, len(rows), scratch)

    def _grown(self, sequence: Sequence, item: StepItem) -> list[np.ndarray]:
        for blocks in sequence.blocks:
            for at in range(-(-item.start // BLOCK), -(-item.end // BLOCK)):
                blocks[at] = self.free.pop()
        return sequence.blocks

    def _arrays(self, rows, items) -> Rows:
        tables = [
            np.stack([self.sequences[item.request_id].blocks[group] for item in items])
            for group in range(len(self.groups))
        ]
        return replace(Rows.of(rows), table=tables[0], further=tables[1:])

    def _landed(self, sequence: Sequence, end: int) -> None:
        """What no token to come sees is given up, and means nothing to its next owner."""
        sequence.length = end
        for blocks, (_, window) in zip(sequence.blocks, self.groups, strict=True):
            for at in range(0 if window is None else max(0, end - window + 1) // BLOCK):
                if blocks[at]:
                    self.pool[int(blocks[at])] = math.nan
                    self.free.append(blocks[at])
                    blocks[at] = 0

    def _layer(self, layer, rows, items, prepared, tokens) -> float:
        def random(heads):
            return torch.randn(1, heads, tokens, self.dim, generator=self.rng).to(self.dtype)

        query, key, value = random(self.heads), random(self.kv_heads), random(self.kv_heads)
        there = (part.to(self.device) for part in (query, key, value))
        asked = {"window": self.windows[layer], **self.features}
        out = self.backend.forward(prepared, layer, *there, scaling=0.2, **asked).cpu()
        assert out.shape == (1, tokens, self.heads, self.dim)
        worst = 0.0
        for row, item in zip(rows, items, strict=True):
            sequence, here = self.sequences[item.request_id], slice(row.offset, row.offset + row.count)
            sequence.keys[layer] = torch.cat([sequence.keys[layer], key[0, :, here].transpose(0, 1)])
            sequence.values[layer] = torch.cat([sequence.values[layer], value[0, :, here].transpose(0, 1)])
            truth = attend(query[0, :, here], sequence.keys[layer], sequence.values[layer], row.start, **asked)
            error = (out[0, here].double() - truth).abs().max()
            worst = max(worst, math.inf if error.isnan() else float(error))
        return worst


def paged(pool: torch.Tensor, groups) -> Pages:
    """The same slabs for groups of few layers and of many."""
    places = {layer: (group, at) for group, (layers, _) in enumerate(groups) for at, layer in enumerate(layers)}
    return Pages(
        slabs=pool.flatten(1),
        shapes=tuple((len(layers), *pool.shape[2:]) for layers, _ in groups),
        places=tuple(places[layer] for layer in range(len(places))),
    )


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, *, window=None, softcap=None, sinks=None
) -> torch.Tensor:
    """Causal softmax attention of [Hq, T, D] queries at positions start.. over all keys, in float64: [T, Hq, D]."""
    repeat = query.shape[0] // keys.shape[1]
    k = keys.double().repeat_interleave(repeat, dim=1)
    v = values.double().repeat_interleave(repeat, dim=1)
    scores = torch.einsum("htd,khd->htk", query.double(), k) * 0.2
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    position = start + torch.arange(query.shape[1])[:, None]
    at = torch.arange(keys.shape[0])[None]
    hidden = (at > position) if window is None else (at > position) | (at <= position - window)
    scores = scores.masked_fill(hidden[None], -math.inf)
    if sinks is not None:
        extra = sinks.cpu().double()[:, None, None].expand(-1, scores.shape[1], 1)
        return torch.einsum("htk,khd->thd", torch.cat([scores, extra], -1).softmax(-1)[..., :-1], v)
    return torch.einsum("htk,khd->thd", scores.softmax(-1), v)


MIXED = [
    {"a": 5},
    {"a": 1, "b": 1},
    {"a": 1, "b": 1, "c": 64},
    {"a": 1, "b": 30, "c": 1},
    {"b": 17, "c": 1, "a": 8},
    {"a": 1, "b": 1, "c": 1},
    {"c": 1},
]


@everywhere
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_mixed_steps_agree_with_dense_attention(backend, device, heads, kv_heads, scratch_memory):
    world = World(backend, scratch_memory, device, heads=heads, kv_heads=kv_heads)
    for name in "abc":
        world.add(name)
    for number, counts in enumerate(MIXED):
        assert world.step(counts, as_arrays=number % 2 == 1) < world.bound, counts


@everywhere
def test_half_precision_agrees_within_its_precision(backend, device, scratch_memory):
    # Triton's interpreter multiplies bfloat16 as if it were integers.
    half = torch.float16 if (backend, device) == ("triton", "cpu") else torch.bfloat16
    world = World(backend, scratch_memory, device, heads=8, kv_heads=2, dtype=half)
    world.add("a")
    for count in (20, 1, 12, 1):
        assert world.step({"a": count}) < HALF_BOUND


ASKED = [("window",), ("softcap",), ("sinks",), ("window", "softcap"), ("window", "sinks")]


def values_of(asked, device):
    sinks = torch.randn(6, generator=torch.Generator().manual_seed(1)).to(device)
    values = {"window": 13, "softcap": 0.7, "sinks": sinks}
    return {feature: values[feature] for feature in asked}


@everywhere
@pytest.mark.parametrize("asked", ASKED, ids="+".join)
def test_what_a_backend_has_agrees_and_what_it_lacks_is_refused_with_those_that_have_it(
    backend, device, asked, scratch_memory
):
    world = World(backend, scratch_memory, device, heads=6, kv_heads=2, features=values_of(asked, device))
    for name in "abc":
        world.add(name)
    lacking = [feature for feature in asked if backend not in FEATURES[feature]]
    if lacking:
        with pytest.raises(InvalidSetting, match=f"has no {lacking[0]}.*use .*triton"):
            world.step({"a": 5})
        return
    for counts in MIXED:
        assert world.step(counts) < world.bound, counts


#: Windows within a block, of a block, across some; groups of one layer and of two in slabs of two. Each window and each
#: feature is compiled anew where kernels are, so there are few, and features are tried in one of the layouts.
GROUPS = {
    "full and window": (((0,), None), ((1,), 21)),
    "uneven": (((1,), None), ((0, 2), 9)),
    "windows alone": (((0, 2), 16), ((1,), 21)),
    "one window": (((0, 1), 21),),
}
IN_GROUPS = [*((groups, ()) for groups in GROUPS), ("uneven", ("softcap",)), ("uneven", ("sinks",))]
LONG = Limits(max_seq_len=512, max_batch_size=16, max_num_tokens=192, max_logits_rows=16, graph_batch_sizes=(16,))
FAR = [
    {"a": 70, "b": 5}, {"a": 1, "b": 90}, {"a": 1, "b": 1, "c": 150}, {"a": 50, "b": 1, "c": 1},
    {"a": 1, "b": 33, "c": 1},
    *[{"a": 1, "b": 1, "c": 1}] * 20, {"a": 100, "c": 60}, {"b": 1, "a": 1},
]  # fmt: skip


@everywhere
@pytest.mark.parametrize(("groups", "asked"), IN_GROUPS, ids=lambda told: "".join(told) or "plain")
def test_each_group_of_layers_reads_its_own_table_from_its_window_on(backend, device, groups, asked, scratch_memory):
    """Texts several windows long; what has left a window has other owners, and slab 0 holds no numbers."""
    if any(backend not in FEATURES[feature] for feature in ("window", *asked)):
        pytest.skip(f"{backend} has no {asked or 'window'}")
    features = values_of(asked, device)
    world = World(
        backend, scratch_memory, device, heads=6, kv_heads=2, features=features, groups=GROUPS[groups], limits=LONG
    )
    for name in "abc":
        world.add(name)
    for number, counts in enumerate(FAR):
        is_decode = set(counts.values()) == {1} and all(world.sequences[name].length for name in counts)
        as_captured = is_decode and number % 2 == 0 and hasattr(world.backend, "captured")
        assert world.step(counts, as_arrays=True, as_captured=as_captured) < world.bound, counts
    assert world.pool[0].isnan().all()


@everywhere
@pytest.mark.parametrize("tile", [16, 64, 10_000])
def test_tiles_of_any_size_give_the_same_answer(backend, device, tile, scratch_memory, monkeypatch):
    if backend == "sdpa":
        monkeypatch.setattr("tonnage.attention.sdpa_tiles.TILE_TOKENS", tile)
        monkeypatch.setattr("tonnage.attention.sdpa_tiles.MASK_TILE_ELEMENTS", tile)
        monkeypatch.setattr("tonnage.declarations.sdpa.TILE_TOKENS", tile)
        monkeypatch.setattr("tonnage.declarations.sdpa.MASK_TILE_ELEMENTS", tile)
    if backend == "triton":  # 16 keys, 64 and 128 a tile
        monkeypatch.setattr("tonnage.attention.triton_tuning.DECODE_TILE_BYTES", tile * 16 * 4)
    world = World(backend, scratch_memory, device, heads=9, kv_heads=3)
    for name in "abcd":
        world.add(name)
    assert world.step({"a": 40, "b": 3, "c": 17, "d": 1}) < world.bound
    assert world.step({"a": 20, "b": 1, "c": 1, "d": 1}) < world.bound
    assert world.step({"a": 1, "b": 1, "c": 1, "d": 1}) < world.bound


@everywhere
@pytest.mark.parametrize("features", [{}, {"softcap": 0.7}], ids=["plain", "softcap"])
def test_scratch_stays_within_the_declaration_and_the_declaration_is_not_lavish(
    backend, device, features, scratch_memory
):
    """High-water <= declared at the step's shape (the arena refuses more), and declared <= 2x high-water."""
    world = World(backend, scratch_memory, device, heads=8, kv_heads=2, features=features)
    names = [f"s{i}" for i in range(LIMITS.max_batch_size)]
    for name in names:
        world.add(name)
    for name in names:
        world.step({name: 62})
    world.step(dict.fromkeys(names, 1))
    high = world.scratch.high_water_bytes
    plan = StepPlan.of(0, tuple(StepItem(request_id=name, start=62, count=1, samples=True) for name in names))
    at_shape = max(declaration.bytes_at(plan.shape, world.chip) for declaration in world.declared)
    assert 0 < high <= at_shape <= 2 * high


@pytest.mark.parametrize("backend", BACKENDS)
def test_declarations_never_shrink_when_a_shape_grows(backend):
    every = declare(backend, kv_heads=2, head_dim=64, kv_dtype="bfloat16", block_tokens=BLOCK)
    fields = ("num_tokens", "prefill_tokens", "prefill_rows", "decode_rows", "attended_tokens", "max_row_tokens")
    base = dict(zip(fields, (64, 32, 2, 32, 900, 200), strict=True))
    for declared in every:
        before = declared.bytes_at(StepShape(**base), HOST)
        for field in base:
            grown = StepShape(**{**base, field: base[field] + 33})
            assert declared.bytes_at(grown, HOST) >= before, field


class CountingScratch:
    """Counts what a backend takes, aligned as the arena aligns it, and gives ordinary tensors."""

    def __init__(self, alignment: int) -> None:
        self.alignment, self.used = alignment, 0

    def tensor(self, shape, dtype):
        self.used = -(-self.used // self.alignment) * self.alignment + math.prod(shape) * dtype.itemsize
        return torch.empty(shape, dtype=dtype)


@st.composite
def steps(draw):
    """Rows as (start, count): decodes, chunks after a prefix and fresh prefills, with lengths around block borders."""
    row = st.tuples(st.integers(0, 120), st.sampled_from([1, 1, 1, 2, 3, 15, 16, 17, 40]))
    return draw(st.lists(row, min_size=1, max_size=12))


@pytest.mark.parametrize("backend", [pytest.param(name, id=name, marks=marks) for name, marks in ON_CPU.items()])
@settings(max_examples=300)
@given(
    rows=steps(),
    tile=st.sampled_from([16, 64, 8192]),
    kv_heads=st.sampled_from([1, 3]),
    dim=st.sampled_from([4, 8]),
    window=st.sampled_from([None, 1, 7, 16, 33, 100]),
    is_scored=st.booleans(),
)
def test_no_admissible_step_takes_more_than_was_declared_for_its_shape(
    backend, rows, tile, kv_heads, dim, window, is_scored
):
    with pytest.MonkeyPatch.context() as patch:
        if backend == "sdpa":
            for module in ("attention.sdpa_tiles", "declarations.sdpa"):
                patch.setattr(f"tonnage.{module}.TILE_TOKENS", tile)
                patch.setattr(f"tonnage.{module}.MASK_TILE_ELEMENTS", tile)
        items = tuple(
            StepItem(request_id=str(i), start=start, count=count, samples=True) for i, (start, count) in enumerate(rows)
        )
        batch, offset = [], 0
        for item in items:
            batch.append(Row(start=item.start, end=item.end, offset=offset, blocks=np.zeros(16, np.int32)))
            offset += item.count
        shape = AttentionShape(
            num_heads=2 * kv_heads, num_kv_heads=kv_heads, head_dim=dim, v_head_dim=dim, kv_dtype="float32",
            block_tokens=BLOCK, is_scored=is_scored,
        )  # fmt: skip
        (declared,) = declare_for(backend, shape)
        scratch = CountingScratch(declared.alignment)
        pool = torch.zeros(1, 1, 2, BLOCK, kv_heads, dim)
        made = make_backend(backend, pool)
        step = made.prepare(batch, scratch)
        if backend == "sdpa":  # pieces that were too small for what a layer writes into them would raise
            new = (torch.zeros(1, heads, offset, dim) for heads in (2 * kv_heads, kv_heads, kv_heads))
            made.forward(step, 0, *new, scaling=1.0, window=window, softcap=5.0 if is_scored else None)
        if backend == "triton" and step.decode is not None and step.decode.num_splits > 1:
            step.decode.take_partials(2 * kv_heads, dim)  # in the first layer that attends
        assert scratch.used <= declared.bytes_at(StepPlan.of(0, items).shape, HOST)


@given(rows=steps(), block_tokens=st.sampled_from([1, 16, 24]), seed=st.integers(0, 99))
def test_slots_and_rows_built_as_arrays_are_those_written_out(rows, block_tokens, seed):
    """``Rows`` says of every token and row what a loop over them would."""
    rng = np.random.default_rng(seed)
    slots = rng.permutation(12)[: len(rows)]
    table = rng.integers(0, 2**20, (12, 160), np.int32)
    starts, counts = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    made = Rows(starts=starts, ends=starts + counts, table=table, slots=slots)
    assert made.is_decode.tolist() == [count == 1 and start > 0 for start, count in rows]
    expected = []
    for row in made:
        for position in range(row.start, row.end):
            block, inside = divmod(position, block_tokens)
            expected.append(int(row.blocks[block]) * 3000 * block_tokens + inside)
    assert made.token_slots(block_tokens=block_tokens, slab_tokens=3000 * block_tokens).tolist() == expected
    again = Rows.of(list(made))
    assert [row.offset for row in again] == np.cumsum([0, *counts[:-1]]).tolist()


@pytest.mark.parametrize(("kv_heads", "num_sms"), [(8, 132), (1, 132), (3, 108), (64, 132), (2, 160)])
def test_the_splits_of_every_batch_make_what_the_declaration_counts(kv_heads, num_sms):
    """The rule that the kernel is launched by, against the bytes of float32 outputs and sums that are declared."""
    group, dim = 4, 128
    shape = AttentionShape(num_heads=group * kv_heads, num_kv_heads=kv_heads, head_dim=dim, v_head_dim=dim)
    (declared,) = declare_for("triton", shape)
    chip = Chip(name="card", sm=90, num_sms=num_sms, total_bytes=2**37)
    most = 0
    for rows in range(1, 400):
        splits = num_splits(rows, kv_heads, num_sms=num_sms)
        assert 1 <= splits <= 32
        assert splits == 1 or (splits - 1) * rows * kv_heads < 2 * num_sms, "no more than fill the chip"
        if splits > 1:
            most = max(most, rows * kv_heads * group * splits * (dim + 1) * 4)
        assert declared.bytes_at(StepShape(decode_rows=rows), chip) == most
