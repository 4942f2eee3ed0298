"""FlashInfer's kernels on a card: against dense attention in float32, under graphs, with steps in flight, and what they
take of the scratch. Needs modules of ``scripts/build_flashinfer.py``; what has not been compiled is skipped."""

from __future__ import annotations

import math

import numpy as np
import pytest
from test_triton_attention import Case, bound, put, same_bits, spans_of

from tonnage.attention.base import Rows
from tonnage.attention.flashinfer_modules import Variant, find_module, is_built
from tonnage.config import Limits
from tonnage.declarations import AttentionShape, declare_for
from tonnage.terms import StepShape

pytestmark = [pytest.mark.gpu, pytest.mark.shares_card]

DEVICE = "cuda"
SHAPES = [(32, 8, 128), (8, 8, 128), (5, 1, 128), (9, 3, 64), (14, 2, 64), (16, 2, 256)]


class Scratch:
    """Ordinary tensors full of what no kernel would write, instead of pieces of an arena; counts what is taken."""

    def __init__(self):
        self.used_bytes, self.addresses = 0, []

    def tensor(self, shape, dtype):
        import torch

        self.used_bytes = -(-self.used_bytes // 256) * 256 + math.prod(shape) * dtype.itemsize
        made = torch.full(shape, 0xAA, dtype=dtype, device=DEVICE)
        self.addresses.append(made.data_ptr())
        return made


class FlashInferCase(Case):
    def __post_init__(self):
        from tonnage.attention import make_backend

        super().__post_init__()
        features = {f"has_{name}": name in self.features for name in ("window", "softcap")}
        self.variant = Variant(dtype=self.dtype, head_dim=self.dim, **features)
        if not is_built(self.variant):
            pytest.skip(f"not compiled: {self.variant.file_name('fa2')}")
        self.backend = make_backend("flashinfer", self.pool)

    def captured(self, bucket, max_seq_len=640):
        """Static inputs, tokens in place, output and graph of one layer of ``bucket`` decodes."""
        import torch

        limits = Limits(
            max_seq_len=max_seq_len, max_batch_size=bucket + 5, max_num_tokens=1024, max_logits_rows=bucket + 5
        )
        static = self.backend.static_inputs(limits)
        tokens = [part.clone() for part in self.tokens(bucket)]
        self.forward(self.backend.captured(static, bucket, Scratch()), tokens)  # all padding: makes the plans
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.forward(self.backend.captured(static, bucket, None), tokens)
        return static, tokens, out, graph


def check(case, spans, limit=None):
    """One eager step; returns it."""
    rows, pasts = case.rows(spans)
    tokens = case.tokens(int(rows.counts.sum()))
    before = case.pool.clone()
    step = case.backend.prepare(rows, Scratch())
    found = case.forward(step, tokens).float()
    worst = float((found - case.truth(rows, pasts, tokens)).abs().max())
    assert worst < (limit or bound(case.dtype)), (spans, worst)
    put(before, rows, tokens, case.page)
    assert same_bits(case.pool, before), "keys and values must go to their slots and nowhere else"
    return step


def families(case):
    return {kernel.family for kernel in case.backend._kernels.values()}


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_ragged_steps_agree_with_dense_attention(heads, kv_heads, dim, dtype, page):
    case = FlashInferCase(heads, kv_heads, dim, page=page, dtype=dtype, seed=page + dim)
    for num_rows in (1, 3, 12):
        check(case, spans_of(case.rng, num_rows, 300))


@pytest.mark.parametrize("asked", ["window", "softcap", "window softcap"])
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (9, 3, 64)])
def test_windows_and_soft_caps(heads, kv_heads, dim, page, asked):
    values = {"window": 50, "softcap": 2.0}
    case = FlashInferCase(heads, kv_heads, dim, page=page, features={name: values[name] for name in asked.split()})
    for num_rows in (1, 12):
        check(case, spans_of(case.rng, num_rows, 300))


LONG = [(1023, 1024), (8000, 8001), (0, 1500), (0, 40), (700, 1900), (0, 2048), (6144, 8192), (1999, 2000)]


@pytest.mark.parametrize("has_fa3", [True, False])
def test_long_prompts_and_chunks_beside_decodes(has_fa3, monkeypatch):
    if not has_fa3:
        monkeypatch.setattr(
            "tonnage.attention.flashinfer.find_module",
            lambda family, variant: None if family == "fa3" else find_module(family, variant),
        )
    case = FlashInferCase(32, 8, 128, max_blocks=520, num_slabs=2000)
    if has_fa3 and find_module("fa3", case.variant) is None:
        pytest.skip("not compiled: fa3")
    check(case, LONG)
    assert families(case) == ({"fa2", "fa3"} if has_fa3 else {"fa2"})


def test_pages_beyond_the_reach_of_32_bits():
    """A pool of more than 2^31 elements: reads and writes in its last slabs are right."""
    slab = 3 * 2 * 16 * 8 * 128
    case = FlashInferCase(32, 8, 128, num_slabs=2**31 // slab + 40, from_the_end=True)
    rows, pasts = case.rows([(60, 61), (30, 90), (0, 20)])
    used = rows.table[rows.slots]
    assert int(used[used > 0].min()) * slab > 2**31
    tokens = case.tokens(int(rows.counts.sum()))
    found = case.forward(case.backend.prepare(rows, Scratch()), tokens).float()
    assert float((found - case.truth(rows, pasts, tokens)).abs().max()) < bound("bfloat16")
    assert bool(case.pool[: case.num_slabs - 40].isnan().all()), "nothing was written at an address cut to 32 bits"


@pytest.mark.parametrize("bucket", [1, 8, 48, 200])
@pytest.mark.parametrize("features", [{}, {"window": 40}], ids=["plain", "window"])
def test_a_graph_replayed_with_other_rows_equals_eager_and_padding_touches_nothing(bucket, features):
    case = FlashInferCase(32, 8, 128, num_slabs=200 * 40, max_blocks=40, features=features)
    static, queries, out, graph = case.captured(bucket)
    assert bool(case.pool.isnan().all())
    lists, inputs = static._lists, static.inputs
    fixed = [
        *lists.pages, lists.page_indptr, lists.query_indptr, lists.last_page_tokens, *inputs.slots, inputs.lengths,
        *(tensor for plan in static.plans[bucket].values() for tensor in (plan.ints, plan.floats)),
    ]  # fmt: skip
    addresses = [tensor.data_ptr() for tensor in fixed]
    for num_rows in sorted({1, bucket // 2 or 1, max(1, bucket - 1), bucket}):
        spans = [(start, start + 1) for start in case.rng.integers(1, 600, num_rows).tolist()]
        rows, pasts = case.rows(spans)
        for part, new in zip(queries, case.tokens(bucket), strict=True):
            part.copy_(new)
        before = case.pool.clone()
        case.backend.load(static, rows, bucket)
        graph.replay()
        real = [part[:, :, :num_rows] for part in queries]
        put(before, rows, real, case.page)
        assert same_bits(case.pool, before)
        truth = case.truth(rows, pasts, real)
        assert float((out[:num_rows].float() - truth).abs().max()) < bound("bfloat16")
        eager = case.forward(case.backend.prepare(rows, Scratch()), real)
        assert float((out[:num_rows].float() - eager.float()).abs().max()) < bound("bfloat16")
    assert [tensor.data_ptr() for tensor in fixed] == addresses


@pytest.mark.parametrize("bucket", [8, 64])
def test_steps_in_flight_keep_their_own_plans(bucket):
    """Many plans and replays queued behind a busy stream, with lengths that change how pasts are cut: each replay reads
    what was planned for it. Rows grow shorter, so that no step attends to what an earlier one wrote."""
    import torch

    case = FlashInferCase(32, 8, 128, num_slabs=bucket * 130, max_blocks=130)
    static, tokens, out, graph = case.captured(bucket, max_seq_len=2080)
    rows, pasts = case.rows([(start, start + 1) for start in case.rng.integers(1200, 2000, bucket).tolist()])
    steps = []
    for cut in range(16):
        ends = np.maximum(rows.ends - 71 * cut, 2)
        steps.append(Rows(starts=ends - 1, ends=ends, table=rows.table, slots=rows.slots))
    busy = torch.randn(8192, 8192, device=DEVICE)
    torch.cuda.synchronize()
    for _ in range(10):
        busy = busy @ busy * 1e-2
    found = []
    for shorter in steps:
        case.backend.load(static, shorter, bucket)
        graph.replay()
        found.append(out.clone())
    for shorter, got in zip(steps, found, strict=True):
        cut_pasts = [past[:, :start] for past, start in zip(pasts, shorter.starts.tolist(), strict=True)]
        truth = case.truth(shorter, cut_pasts, tokens)
        assert float((got.float() - truth).abs().max()) < bound("bfloat16")


def test_eager_steps_in_flight_keep_their_own_plans():
    """Mixed steps queued behind a busy stream, each with plans for decodes and for chunks, over pages of their own."""
    import torch

    case = FlashInferCase(32, 8, 128, num_slabs=1600, max_blocks=130)
    spans = []
    for step in range(6):
        spans += [
            (900 - 100 * step, 901 - 100 * step),
            (64 * step, 64 * step + 150),
            (500 + 70 * step, 501 + 70 * step),
        ]
    rows, pasts = case.rows(spans)
    jobs = []
    for first in range(0, len(spans), 3):
        here = slice(first, first + 3)
        own = Rows(starts=rows.starts[here], ends=rows.ends[here], table=rows.table, slots=rows.slots[here])
        jobs.append((own, pasts[here], case.tokens(int(own.counts.sum()))))
    case.forward(case.backend.prepare(jobs[0][0], Scratch()), jobs[0][2])  # loads modules
    busy = torch.randn(8192, 8192, device=DEVICE)
    torch.cuda.synchronize()
    for _ in range(10):
        busy = busy @ busy * 1e-2
    found = [case.forward(case.backend.prepare(own, Scratch()), tokens) for own, _, tokens in jobs]
    for (own, past, tokens), got in zip(jobs, found, strict=True):
        assert float((got.float() - case.truth(own, past, tokens)).abs().max()) < bound("bfloat16")


HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "v_head_dim": 128}


def needed(layout):
    """Bytes of ints and floats that a plan of "fa2" occupies, from where its arrays begin (``PrefillPlanInfo``)."""
    items, _, _, tile, *offsets, _, is_split = layout
    _, _, _, merge_at, rows_at, _, _, sums_at, valid_at = offsets
    if not is_split:
        return rows_at, 0
    assert valid_at > merge_at >= rows_at
    return valid_at + items, sums_at + 32 * items * tile * 4


@pytest.mark.parametrize("bucket", [1, 8, 33, 64, 256, 512])
def test_the_planner_takes_what_is_declared_for_a_graph(bucket):
    """From the real plan: within the declaration, which is no more than twice of it (here: within a page)."""
    case = FlashInferCase(32, 8, 128, num_slabs=40)
    limits = Limits(max_seq_len=640, max_batch_size=bucket, max_num_tokens=1024, max_logits_rows=1)
    static, scratch = case.backend.static_inputs(limits), Scratch()
    case.forward(case.backend.captured(static, bucket, scratch), case.tokens(bucket))
    (plan,) = static.plans[bucket].values()
    ints, floats = needed(plan.layout)
    (declared,) = declare_for("flashinfer", AttentionShape(**HEADS))
    chip = case.backend.chip
    assert ints <= declared.decode_plan_bytes(bucket, chip, captured=True) <= ints + 7 * 16
    assert floats == declared.float_bytes(bucket, chip, captured=True)
    at_shape = declared.bytes_at(StepShape(num_tokens=bucket, decode_rows=bucket, captured=True), chip)
    assert at_shape - 256 < scratch.used_bytes <= at_shape


@pytest.mark.parametrize("num_rows", [1, 2, 7, 16, 32, 33, 40, 200])
def test_the_planner_takes_no_more_than_declared_for_eager_decodes(num_rows):
    case = FlashInferCase(32, 8, 128, num_slabs=40 * 200, max_blocks=40)
    rows, _ = case.rows([(600, 601)] * num_rows)
    scratch = Scratch()
    step = case.backend.prepare(rows, scratch)
    case.forward(step, case.tokens(num_rows))
    (plan,) = step.parts[0].plans.values()
    ints, floats = needed(plan.layout)
    assert ints <= plan.ints.numel()
    assert floats <= plan.floats.numel()
    (declared,) = declare_for("flashinfer", AttentionShape(**HEADS))
    shape = StepShape(num_tokens=num_rows, decode_rows=num_rows)
    assert scratch.used_bytes <= declared.bytes_at(shape, case.backend.chip)


@pytest.mark.parametrize("lengths", [[1] * 200, [5] * 60, [129] * 40, [3000], [1, 1, 4000, 7], [8192]])
@pytest.mark.parametrize("has_fa3", [True, False])
def test_plans_of_prompts_fit_what_is_declared(lengths, has_fa3, monkeypatch):
    """Prompts of many and few rows: the planner raises where its memory is too small."""
    if not has_fa3:
        monkeypatch.setattr(
            "tonnage.attention.flashinfer.find_module",
            lambda family, variant: None if family == "fa3" else find_module(family, variant),
        )
    case = FlashInferCase(32, 8, 128, num_slabs=1200, max_blocks=520)
    rows, _ = case.rows([(0, length) for length in lengths])
    scratch = Scratch()
    step = case.backend.prepare(rows, scratch)
    case.forward(step, case.tokens(sum(lengths)))
    (declared,) = declare_for("flashinfer", AttentionShape(**HEADS))
    shape = StepShape(num_tokens=sum(lengths), prefill_tokens=sum(lengths), prefill_rows=len(lengths))
    assert 0 < scratch.used_bytes <= declared.bytes_at(shape, case.backend.chip)
    (plan,) = step.parts[0].plans.values()
    assert len(plan.layout) == (9 if families(case) == {"fa3"} else 15)
