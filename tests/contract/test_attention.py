"""Every attention backend against plain softmax attention in float64, over mixed steps and shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.attention import BACKENDS, make_backend
from tonnage.attention.base import Row
from tonnage.buffers import Device, Stream, VaArena
from tonnage.config import Limits
from tonnage.declarations import declare
from tonnage.device.host import HostDriver
from tonnage.ledger import Ledger
from tonnage.step import StepItem, StepPlan
from tonnage.terms import Chip, LineKind, StepShape
from tonnage.units import MiB
from tonnage.workspace import ScratchArena

BLOCK = 16
CHIP = Chip(name="host", sm=0, num_sms=0, total_bytes=2**30)
LIMITS = Limits(max_seq_len=256, max_batch_size=16, max_num_tokens=192, max_logits_rows=16)
HEADS = [(4, 4), (9, 3), (8, 1)]  # MHA, GQA, MQA


@dataclass
class Sequence:
    """Ground truth of one sequence: all keys and values that were ever written, per layer."""

    blocks: np.ndarray
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    length: int = 0


@pytest.fixture
def scratch_memory():
    driver = HostDriver(64 * MiB)
    arena = VaArena(
        Stream(Device(driver)),
        ledger=Ledger(0, 64 * MiB),
        owner="scratch",
        line=LineKind.SCRATCH,
        reserve_bytes=64 * MiB,
    )
    yield arena
    driver.close()


class World:
    """A pool, a backend over it and the same history kept densely."""

    def __init__(self, backend: str, memory, *, heads: int, kv_heads: int, dtype=torch.float32, poison=True) -> None:
        self.layers, self.dim, self.heads, self.kv_heads, self.dtype = 2, 16, heads, kv_heads, dtype
        self.rng = torch.Generator().manual_seed(0)
        pool = torch.zeros(128, self.layers, 2, BLOCK, kv_heads, self.dim, dtype=dtype)
        if poison:
            pool.fill_(math.nan)
        self.backend = make_backend(backend, pool)
        name = str(dtype).removeprefix("torch.")
        declared = declare(backend, kv_heads=kv_heads, head_dim=self.dim, kv_dtype=name, block_tokens=BLOCK)
        self.scratch = ScratchArena(memory, declared, limits=LIMITS, chip=CHIP)
        self.declared = declared
        self.sequences: dict[str, Sequence] = {}
        self.free = list(np.random.default_rng(0).permutation(128).astype(np.int32))

    def add(self, name: str) -> None:
        count = LIMITS.max_seq_len // BLOCK // 2
        blocks = np.array([self.free.pop() for _ in range(count)], dtype=np.int32)
        empty = [torch.zeros(0, self.kv_heads, self.dim, dtype=self.dtype) for _ in range(self.layers)]
        self.sequences[name] = Sequence(blocks, list(empty), list(empty))

    def step(self, counts: dict[str, int]) -> float:
        """Compute ``counts[name]`` more tokens of each sequence; returns the largest error against the truth."""
        items = tuple(
            StepItem(request_id=name, start=self.sequences[name].length, count=count, samples=True)
            for name, count in counts.items()
        )
        rows, offset = [], 0
        for item in items:
            rows.append(
                Row(start=item.start, end=item.end, offset=offset, blocks=self.sequences[item.request_id].blocks)
            )
            offset += item.count
        plan, worst = StepPlan.of(0, items), 0.0
        with self.scratch.step(plan.shape) as scratch:
            prepared = self.backend.prepare(rows, scratch)
            for layer in range(self.layers):
                worst = max(worst, self._layer(layer, rows, items, prepared, offset))
        for item in items:
            self.sequences[item.request_id].length = item.end
        return worst

    def _layer(self, layer, rows, items, prepared, tokens) -> float:
        def random(heads):
            return torch.randn(1, heads, tokens, self.dim, generator=self.rng).to(self.dtype)

        query, key, value = random(self.heads), random(self.kv_heads), random(self.kv_heads)
        out = self.backend.forward(prepared, layer, query, key, value, scaling=0.2)
        assert out.shape == (1, tokens, self.heads, self.dim)
        worst = 0.0
        for row, item in zip(rows, items, strict=True):
            sequence, here = self.sequences[item.request_id], slice(row.offset, row.offset + row.count)
            sequence.keys[layer] = torch.cat([sequence.keys[layer], key[0, :, here].transpose(0, 1)])
            sequence.values[layer] = torch.cat([sequence.values[layer], value[0, :, here].transpose(0, 1)])
            truth = attend(query[0, :, here], sequence.keys[layer], sequence.values[layer], row.start)
            worst = max(worst, float((out[0, here].double() - truth).abs().max()))
        return worst


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int) -> torch.Tensor:
    """Causal softmax attention of [Hq, T, D] queries at positions start.. over all keys, in float64: [T, Hq, D]."""
    repeat = query.shape[0] // keys.shape[1]
    k = keys.double().repeat_interleave(repeat, dim=1)
    v = values.double().repeat_interleave(repeat, dim=1)
    scores = torch.einsum("htd,khd->htk", query.double(), k) * 0.2
    position = start + torch.arange(query.shape[1])
    scores = scores.masked_fill(torch.arange(keys.shape[0])[None, None] > position[None, :, None], -math.inf)
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_mixed_steps_agree_with_dense_attention(backend, heads, kv_heads, scratch_memory):
    world = World(backend, scratch_memory, heads=heads, kv_heads=kv_heads)
    for name in "abc":
        world.add(name)
    for counts in MIXED:
        assert world.step(counts) < 2e-5, counts


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_agrees_within_its_precision(backend, scratch_memory):
    world = World(backend, scratch_memory, heads=8, kv_heads=2, dtype=torch.bfloat16)
    world.add("a")
    for count in (20, 1, 12, 1):
        assert world.step({"a": count}) < 0.03


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tile", [16, 64, 10_000])
def test_tiles_of_any_size_give_the_same_answer(backend, tile, scratch_memory, monkeypatch):
    if backend == "sdpa":
        monkeypatch.setattr("tonnage.attention.sdpa.TILE_TOKENS", tile)
        monkeypatch.setattr("tonnage.attention.sdpa.MASK_TILE_ELEMENTS", tile)
        monkeypatch.setattr("tonnage.declarations.sdpa.TILE_TOKENS", tile)
        monkeypatch.setattr("tonnage.declarations.sdpa.MASK_TILE_ELEMENTS", tile)
    world = World(backend, scratch_memory, heads=9, kv_heads=3)
    for name in "abcd":
        world.add(name)
    assert world.step({"a": 40, "b": 3, "c": 17, "d": 1}) < 2e-5
    assert world.step({"a": 20, "b": 1, "c": 1, "d": 1}) < 2e-5
    assert world.step({"a": 1, "b": 1, "c": 1, "d": 1}) < 2e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_scratch_stays_within_the_declaration_and_the_declaration_is_not_lavish(backend, scratch_memory):
    """High-water <= declared at the step's shape (the arena refuses more), and declared <= 2x high-water."""
    world = World(backend, scratch_memory, heads=8, kv_heads=2)
    names = [f"s{i}" for i in range(LIMITS.max_batch_size)]
    for name in names:
        world.add(name)
    for name in names:
        world.step({name: 62})
    world.step(dict.fromkeys(names, 1))
    high = world.scratch.high_water_bytes
    plan = StepPlan.of(0, tuple(StepItem(request_id=name, start=62, count=1, samples=True) for name in names))
    at_shape = max(declaration.bytes_at(plan.shape, CHIP) for declaration in world.declared)
    assert 0 < high <= at_shape <= 2 * high


@pytest.mark.parametrize("backend", BACKENDS)
def test_declarations_never_shrink_when_a_shape_grows(backend):
    (declared,) = declare(backend, kv_heads=2, head_dim=64, kv_dtype="bfloat16", block_tokens=BLOCK)
    fields = ("num_tokens", "prefill_tokens", "prefill_rows", "decode_rows", "attended_tokens", "max_row_tokens")
    base = dict(zip(fields, (64, 32, 2, 32, 900, 200), strict=True))
    before = declared.bytes_at(StepShape(**base), CHIP)
    for field in base:
        grown = StepShape(**{**base, field: base[field] + 33})
        assert declared.bytes_at(grown, CHIP) >= before, field


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


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=300)
@given(
    rows=steps(), tile=st.sampled_from([16, 64, 8192]), kv_heads=st.sampled_from([1, 3]), dim=st.sampled_from([4, 8])
)
def test_no_admissible_step_takes_more_than_was_declared_for_its_shape(backend, rows, tile, kv_heads, dim):
    with pytest.MonkeyPatch.context() as patch:
        if backend == "sdpa":
            for module in ("attention", "declarations"):
                patch.setattr(f"tonnage.{module}.sdpa.TILE_TOKENS", tile)
                patch.setattr(f"tonnage.{module}.sdpa.MASK_TILE_ELEMENTS", tile)
        items = tuple(
            StepItem(request_id=str(i), start=start, count=count, samples=True) for i, (start, count) in enumerate(rows)
        )
        batch, offset = [], 0
        for item in items:
            batch.append(Row(start=item.start, end=item.end, offset=offset, blocks=np.zeros(16, np.int32)))
            offset += item.count
        (declared,) = declare(backend, kv_heads=kv_heads, head_dim=dim, kv_dtype="float32", block_tokens=BLOCK)
        scratch = CountingScratch(declared.alignment)
        make_backend(backend, torch.zeros(1, 1, 2, BLOCK, kv_heads, dim)).prepare(batch, scratch)
        assert scratch.used <= declared.bytes_at(StepPlan.of(0, items).shape, CHIP)
