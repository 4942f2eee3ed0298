"""The FlashInfer backend around its compiled modules: what it hands them, when it plans, and what it refuses.

Stand-ins attend in float64 on a CPU with whatever lists, plans and tensors the backend gives them; what is true of the
real ones is tested on a card.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from flashinfer_fakes import FakeModule, attend, install
from hypothesis import given
from hypothesis import strategies as st

from tonnage.attention import make_backend
from tonnage.attention.base import Row, Rows
from tonnage.attention.flashinfer_calls import Heads, Kernel, Plan
from tonnage.attention.flashinfer_inputs import HostLists
from tonnage.attention.flashinfer_modules import Variant, is_built, modules_folder, refuse_missing_modules, variants_of
from tonnage.attention.flashinfer_ring import DEPTH, PinnedRing
from tonnage.attention.pages import Pages
from tonnage.config import Limits
from tonnage.costs.config import ModelConfig
from tonnage.declarations import AttentionShape, declare_for
from tonnage.errors import InvalidSetting
from tonnage.terms import StepShape

HEADS, KV_HEADS, DIM, BLOCK, LAYERS = 6, 2, 64, 16, 2
PLAIN = Variant(dtype="bfloat16", head_dim=128)


class Scratch:
    """Counts what is taken, each piece aligned as the arena aligns it."""

    def __init__(self):
        self.used_bytes = 0

    def tensor(self, shape, dtype):
        self.used_bytes = -(-self.used_bytes // 256) * 256 + math.prod(shape) * dtype.itemsize
        return torch.zeros(shape, dtype=dtype)


class World:
    """Some sequences in a pool whose other contents are not numbers, and all of their keys and values kept densely."""

    def __init__(self):
        self.random = torch.Generator().manual_seed(3)
        self.pool = torch.full((160, LAYERS, 2, BLOCK, KV_HEADS, DIM), math.nan, dtype=torch.float32)
        self.backend = make_backend("flashinfer", self.pool)
        self.free = np.random.default_rng(0).permutation(160).astype(np.int32)
        self.past: dict[str, list[torch.Tensor]] = {}
        self.blocks: dict[str, np.ndarray] = {}

    def rows(self, counts):
        rows, offset = [], 0
        for name, count in counts.items():
            if name not in self.past:
                self.past[name] = [torch.zeros(0, 2, KV_HEADS, DIM) for _ in range(LAYERS)]
                self.blocks[name], self.free = self.free[:10], self.free[10:]
            start = len(self.past[name][-1])
            rows.append(Row(start=start, end=start + count, offset=offset, blocks=self.blocks[name]))
            offset += count
        return rows

    def tokens(self, num):
        made = torch.randn(1, num, HEADS + 2 * KV_HEADS, DIM, generator=self.random).transpose(1, 2)
        return made.split([HEADS, KV_HEADS, KV_HEADS], dim=1)

    def step(self, counts, *, scratch=None, **features):
        """One step of ``counts[name]`` tokens more; asserts that every layer attends as dense attention does."""
        rows = self.rows(counts)
        step = self.backend.prepare(rows, scratch or Scratch())
        for layer in range(LAYERS):
            tokens = self.tokens(sum(counts.values()))
            out = self.backend.forward(step, layer, *tokens, scaling=0.3, **features)[0]
            truth = self.truth(rows, counts, layer, tokens, **features)
            torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=1e-5)
        return step

    def truth(self, rows, counts, layer, tokens, *, window=None, softcap=None):
        query, key, value = (part[0].transpose(0, 1).double() for part in tokens)
        found = []
        for name, row in zip(counts, rows, strict=True):
            here = slice(row.offset, row.offset + row.count)
            new = torch.stack([key[here], value[here]], 1).float()
            kept = self.past[name][layer] = torch.cat([self.past[name][layer], new])
            keys, values = kept.double().repeat_interleave(HEADS // KV_HEADS, 2).unbind(1)
            scores = torch.einsum("thd,khd->htk", query[here], keys) * 0.3
            if softcap:
                scores = softcap * (scores / softcap).tanh()
            position, at = row.start + torch.arange(row.count)[:, None], torch.arange(len(kept))[None]
            hidden = (at > position) if window is None else (at > position) | (at <= position - window)
            found.append(torch.einsum("htk,khd->thd", scores.masked_fill(hidden, -math.inf).softmax(-1), values))
        return torch.cat(found)


MIXED = [
    {"a": 5, "b": 40},
    {"a": 1, "b": 1},
    {"a": 1, "b": 1, "c": 33},
    {"b": 1, "d": 1, "a": 1},  # the first token of d is no decode, and stands between two that are
    {"a": 17, "b": 1, "c": 2, "d": 1},
    {"c": 1},
]


def test_mixed_steps_attend_to_what_they_should(monkeypatch):
    modules = install(monkeypatch)
    world = World()
    for counts in MIXED:
        world.step(counts)
    fa2, fa3 = modules["fa2-float32-64.so"], modules["fa3-float32-64.so"]
    assert set(fa2.masks) == {0}, "rows that decode see all of their past"
    assert set(fa3.masks) == {1}
    assert [plan["may_split"] for plan in fa2.planned] == [True] * len(fa2.planned)
    assert not any(plan["is_captured"] for plan in fa2.planned)
    assert {plan["heads"] for plan in fa2.planned + fa3.planned} == {(HEADS, KV_HEADS, DIM, BLOCK)}


@pytest.mark.parametrize("features", [{"window": 7}, {"softcap": 2.0}, {"window": 20, "softcap": 0.5}])
def test_windows_and_soft_caps_are_modules_of_their_own(monkeypatch, features):
    modules = install(monkeypatch)
    world = World()
    for counts in MIXED:
        world.step(counts, **features)
    name = "-".join(["float32-64", *features])
    others = set() if "window" in features else {f"fa3-{name}.so"}
    assert set(modules) == {f"fa2-{name}.so"} | others, "fa3 reads more than a window shows"
    left = features.get("window", 0) - 1
    assert {plan["window_left"] for module in modules.values() for plan in module.planned} == {left}


def test_without_fa3_prompts_go_through_fa2_and_are_not_cut(monkeypatch):
    modules = install(monkeypatch, built=("fa2",))
    world = World()
    for counts in MIXED:
        world.step(counts)
    (fa2,) = modules.values()
    assert {(plan["causal"], plan["may_split"]) for plan in fa2.planned} == {(True, False), (False, True)}


def test_a_step_plans_once_for_each_kind_of_layer(monkeypatch):
    modules = install(monkeypatch)
    world = World()
    world.step({"a": 40})
    rows = world.rows({"a": 1})
    step = world.backend.prepare(rows, Scratch())
    for layer, window in ((0, None), (1, 9), (0, None), (1, 9)):
        world.backend.forward(step, layer, *world.tokens(1), scaling=0.3, window=window)
    assert len(modules["fa2-float32-64.so"].planned) == len(modules["fa2-float32-64-window.so"].planned) == 1


def test_sinks_are_refused_with_who_has_them(monkeypatch):
    install(monkeypatch)
    world = World()
    step = world.backend.prepare(world.rows({"a": 3}), Scratch())
    with pytest.raises(InvalidSetting, match=r"has no sinks.*use .*triton"):
        world.backend.forward(step, 0, *world.tokens(3), scaling=0.3, sinks=torch.zeros(HEADS))


@pytest.mark.parametrize(
    ("counts", "num_decodes"),
    [
        ({"a": 1, "b": 1}, 2),
        ({"a": 1, "b": 30}, 1),
        ({"a": 1, "b": 1, "c": 20, "d": 1}, 2),
        ({"a": 1, "c": 20, "b": 1}, 1),  # b decodes, too, and stands behind a prompt
        ({"c": 20, "a": 1, "b": 1}, 0),
    ],
)
def test_what_is_taken_is_what_is_declared(monkeypatch, counts, num_decodes):
    """Decodes at the head of a step have a plan of their own, all behind them another."""
    install(monkeypatch)
    world = World()
    world.step({"a": 20, "b": 30})
    scratch = Scratch()
    step = world.step(counts, scratch=scratch)
    tokens, rows = sum(counts.values()), len(counts)
    heads = AttentionShape(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, v_head_dim=DIM)
    (declared,) = declare_for("flashinfer", heads)
    chip, pieces = world.backend.chip, []
    if num_decodes:
        pieces.append(declared.decode_plan_bytes(num_decodes, chip, captured=False))
        pieces.append(declared.float_bytes(num_decodes, chip, captured=False))
    if num_decodes < rows:
        pieces.append(declared.prefill_plan_bytes(rows - num_decodes, tokens - num_decodes, chip))
    taken = sum(-(-piece // 256) * 256 for piece in pieces)
    assert taken - 256 < scratch.used_bytes <= taken
    is_decode = [name in "ab" and count == 1 for name, count in counts.items()]
    shape = StepShape(
        num_tokens=tokens, decode_rows=sum(is_decode), prefill_rows=rows - sum(is_decode),
        prefill_tokens=tokens - sum(is_decode),
    )  # fmt: skip
    assert scratch.used_bytes <= declared.bytes_at(shape, chip)
    ends = [part.tokens.stop for part in step.parts]
    assert ends == ([num_decodes] if num_decodes else []) + ([tokens] if num_decodes < rows else [])


class Captured(World):
    """Decodes of up to ``size`` rows over static inputs, "replayed" by running the captured step again."""

    def __init__(self, size, **features):
        super().__init__()
        limits = Limits(max_seq_len=160, max_batch_size=size + 2, max_num_tokens=64, max_logits_rows=size)
        self.size, self.features, self.scratch = size, features, Scratch()
        self.static = self.backend.static_inputs(limits)
        self.first = self.backend.captured(self.static, size, self.scratch)
        for layer in range(LAYERS):  # all padding: makes the plans
            self.backend.forward(self.first, layer, *self.tokens(size), scaling=0.3, **features)

    def replay(self, names):
        counts = dict.fromkeys(names, 1)
        rows = self.rows(counts)
        self.backend.load(self.static, Rows.of(rows), self.size)
        step = self.backend.captured(self.static, self.size, self.scratch)
        for layer in range(LAYERS):
            tokens = self.tokens(self.size)
            out = self.backend.forward(step, layer, *tokens, scaling=0.3, **self.features)[0]
            truth = self.truth(rows, counts, layer, tokens, **self.features)
            torch.testing.assert_close(out[: len(rows)].double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("features", [{}, {"window": 11}])
def test_a_replay_reads_a_fresh_plan_and_only_its_own_rows(monkeypatch, features):
    modules = install(monkeypatch)
    world = Captured(4, **features)
    assert world.pool.isnan().all(), "padding writes nowhere"
    world.step({"a": 15, "b": 31, "c": 70, "d": 3}, **features)
    taken = world.scratch.used_bytes
    for names in ("abcd", "ab", "c", "dcb", "abcd"):
        world.replay(names)
    assert world.scratch.used_bytes == taken, "plans lie where they lay when the graph was captured"
    (fa2,) = (module for name, module in modules.items() if name.startswith("fa2"))
    planned = [plan for plan in fa2.planned if plan["is_captured"]]
    assert len(planned) == 1 + 5
    assert {(plan["num_tokens"], plan["may_split"]) for plan in planned} == {(4, True)}
    assert planned[2]["page_indptr"] == [0, 2, 5, 5, 5], "17 tokens, 33 and two rows of padding"


@pytest.mark.parametrize("is_captured", [False, True])
def test_each_group_of_layers_reads_its_own_table(monkeypatch, is_captured):
    """Layer 0 has all of its past; layer 1, in slabs of the same pool, what its window shows, the rest given up."""
    modules = install(monkeypatch)
    random, window = torch.Generator().manual_seed(0), 20
    pool = torch.full((60, 1, 2, BLOCK, KV_HEADS, DIM), math.nan)
    shape = (1, *pool.shape[2:])
    backend = make_backend("flashinfer", Pages(slabs=pool.flatten(1), shapes=(shape, shape), places=((0, 0), (1, 0))))
    ends = np.array([50, 97])
    slabs = iter(np.random.default_rng(0).permutation(np.arange(1, 60)).tolist())
    tables, pasts = [np.zeros((2, 7), np.int32) for _ in range(2)], {}
    for group, row in np.ndindex(2, 2):
        past = pasts[group, row] = torch.randn(2, int(ends[row]) - 1, KV_HEADS, DIM, generator=random)
        for at in range(0 if group == 0 else (int(ends[row]) - window) // BLOCK, -(-int(ends[row]) // BLOCK)):
            tables[group][row, at] = slab = next(slabs)
            part = past[:, at * BLOCK : (at + 1) * BLOCK]
            pool[slab, 0, :, : part.shape[1]] = part
    rows = Rows(starts=ends - 1, ends=ends, table=tables[0], further=tables[1:], slots=np.arange(2))
    if is_captured:
        limits = Limits(max_seq_len=112, max_batch_size=3, max_num_tokens=64, max_logits_rows=3)
        static = backend.static_inputs(limits)
        backend.load(static, rows, 3)
        step = backend.captured(static, 3, Scratch())
    else:
        step = backend.prepare(rows, Scratch())
    for layer, seen in ((0, None), (1, window)):
        tokens = torch.randn(1, HEADS + 2 * KV_HEADS, 3 if is_captured else 2, DIM, generator=random)
        query, key, value = tokens.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        out = backend.forward(step, layer, query, key, value, scaling=0.3, window=seen)[0]
        for row in range(2):
            new = torch.stack([key[0, :, row], value[0, :, row]])[:, None]
            keys, values = torch.cat([pasts[layer, row], new], 1)[:, -(seen or 0) :].double()
            truth = attend(query[0, :, row][None].double(), keys, values, 0, -1, None, 0.3)[0]
            torch.testing.assert_close(out[row].double(), truth, rtol=1e-5, atol=1e-5)
    assert set(modules) == {"fa2-float32-64.so", "fa2-float32-64-window.so"}


def test_a_plan_of_another_layout_than_the_captured_one_is_not_replayed(monkeypatch):
    modules = install(monkeypatch)
    world = Captured(4)
    world.step({"a": 15})
    modules["fa2-float32-64.so"].layout_shift = 16
    with pytest.raises(AssertionError, match="is not the captured"):
        world.replay("a")


@given(
    rows=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), min_size=1, max_size=9),
    block_tokens=st.sampled_from([1, 16, 24]),
    num_padding=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_lists_of_pages_are_those_of_a_loop_over_rows(rows, block_tokens, num_padding, seed):
    random = np.random.default_rng(seed)
    starts, counts = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    table = random.integers(0, 2**20, (12, 140), np.int32)
    batch = Rows(starts=starts, ends=starts + counts, table=table, slots=random.permutation(12)[: len(rows)])
    which = np.flatnonzero(random.random(len(rows)) < 0.7)
    made = HostLists.of(counts[which], batch.ends[which], block_tokens=block_tokens, num_rows=which.size + num_padding)
    queries, pages, expected = [0], [0], []
    for row in which.tolist():
        used = -(-int(batch.ends[row]) // block_tokens)
        queries.append(queries[-1] + int(counts[row]))
        pages.append(pages[-1] + used)
        expected += table[batch.slots[row], :used].tolist()
        last = int(batch.ends[row]) - (used - 1) * block_tokens
        assert made.last_page_tokens[len(queries) - 2] == last
    assert made.query_indptr.tolist() == queries + queries[-1:] * num_padding
    assert made.page_indptr.tolist() == pages + pages[-1:] * num_padding
    assert made.lengths.tolist() == batch.ends[which].tolist() + [0] * num_padding
    without = HostLists.of(counts[which], batch.ends[which], block_tokens=block_tokens)
    assert without.pages(batch, which).tolist() == expected
    assert {array.dtype for array in (made.query_indptr, made.page_indptr, made.lengths)} == {np.dtype(np.int32)}


def test_a_kernel_is_called_with_what_its_release_wants():
    """Argument by argument, from the signatures of ``BatchPrefillWithKVCachePlan`` and its sm90 sister in 0.6.14."""
    heads = Heads(num_heads=32, num_kv_heads=8, head_dim=128, block_tokens=16)
    lists = HostLists.of(np.array([1, 1]), np.array([17, 5]), block_tokens=16, num_rows=3)
    ints, floats, pinned = (torch.zeros(size, dtype=torch.uint8) for size in (64, 32, 64))
    for family, rest in (("fa2", [-1, False, 0]), ("fa3", [])):
        seen: list = []
        fake = FakeModule(family)
        fake.plan = lambda *args, seen=seen: seen.extend(args) or [1, 2]  # type: ignore[method-assign]
        kernel = Kernel(fake, family, window=None, softcap=None)
        plan = kernel.plan(lists, Plan(heads=heads, ints=ints, floats=floats), pinned=pinned, mask=0, is_captured=True)
        assert [id(part) for part in seen[:3]] == [id(floats), id(ints), id(pinned)]
        assert [part.tolist() for part in seen[3:6]] == [[0, 1, 2, 2], [0, 2, 3, 3], [17, 5, 0]]
        assert seen[6:] == [3, 3, 32, 8, 16, True, 128, 128, False, -1, *rest]
        assert plan.layout == (1, 2)


class Event:
    """Counts who waits for it."""

    def __init__(self):
        self.num_waits = self.num_records = 0

    def record(self):
        self.num_records += 1

    def synchronize(self):
        self.num_waits += 1


def test_a_piece_is_used_again_only_when_its_copy_has_arrived(monkeypatch):
    events = []
    monkeypatch.setattr("torch.cuda.Event", lambda: events.append(Event()) or events[-1])
    empty = torch.empty
    monkeypatch.setattr("torch.empty", lambda *size, pin_memory=False, **how: empty(*size, **how))
    ring, used = PinnedRing(torch.device("cuda")), []
    for step in range(2 * DEPTH + 1):
        with ring.piece(64) as piece:
            used.append(piece.data_ptr())
            assert [event.num_waits for event in events] == [(step - i) // DEPTH for i in range(len(events))]
    assert len(set(used)) == len(events) == DEPTH == 2
    assert used[:DEPTH] == used[DEPTH : 2 * DEPTH]
    with ring.piece(100) as larger:
        assert larger.numel() == 100


class TestWhatIsThere:
    def test_a_module_that_was_not_compiled_is_refused_with_how_to_make_it(self, monkeypatch, tmp_path):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
        monkeypatch.setenv("TONNAGE_FLASHINFER", str(tmp_path))
        variant = Variant(dtype="bfloat16", head_dim=128, has_window=True)
        with pytest.raises(InvalidSetting) as caught:
            refuse_missing_modules(variant)
        assert "fa2-bfloat16-128-window.so is not in" in str(caught.value)
        assert "build_flashinfer.py --head-dim 128 --dtype bfloat16 --window`" in str(caught.value)
        assert "TONNAGE_FLASHINFER" in str(caught.value)
        modules_folder().mkdir()
        (modules_folder() / "fa2-bfloat16-128-window.so").touch()
        refuse_missing_modules(variant)
        assert is_built(variant)
        assert not is_built(PLAIN)

    def test_a_package_that_is_missing_is_named(self, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(InvalidSetting, match="apache-tvm-ffi, which loads its kernels, is not installed"):
            refuse_missing_modules(PLAIN)

    @pytest.mark.parametrize(("dtype", "dim"), [("float32", 128), ("bfloat16", 80)])
    def test_heads_and_dtypes_without_kernels_are_refused(self, dtype, dim):
        with pytest.raises(InvalidSetting, match=f"has no heads of {dim} elements in {dtype}.*use triton or sdpa"):
            refuse_missing_modules(Variant(dtype=dtype, head_dim=dim))

    def test_a_pool_in_host_memory_is_refused(self):
        with pytest.raises(InvalidSetting, match="runs on a CUDA device, not on cpu"):
            make_backend("flashinfer", torch.zeros(1, 1, 2, BLOCK, 1, 128, dtype=torch.bfloat16))

    def test_modules_are_looked_for_by_release(self, monkeypatch):
        for name in ("TONNAGE_FLASHINFER", "TONNAGE_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        assert modules_folder().parts[-4:] == (".cache", "tonnage", "flashinfer", "0.6.14")
        monkeypatch.setenv("TONNAGE_CACHE", "/cache")
        assert str(modules_folder()) == "/cache/flashinfer/0.6.14"
        monkeypatch.setenv("TONNAGE_FLASHINFER", "/made")
        assert str(modules_folder()) == "/made/0.6.14"

    def test_a_model_needs_a_variant_for_each_kind_of_layer(self):
        raw = {
            "model_type": "gemma2", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
            "vocab_size": 9, "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 64, "sliding_window": 32,
            "max_position_embeddings": 128, "torch_dtype": "bfloat16",
        }  # fmt: skip
        config = ModelConfig.from_dict(raw)
        made = variants_of(config, dtype="bfloat16")
        assert {variant.file_name("fa2") for variant in made} == {
            "fa2-bfloat16-256-softcap.so",
            "fa2-bfloat16-256-window-softcap.so",
        }
