"""The Triton kernels on a card: against dense attention in float32, under graphs, over a pool beyond 2^31 elements."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.shares_card]

DEVICE = "cuda"
LAYERS, LAYER = 3, 1


class Scratch:
    """Ordinary tensors, poisoned, instead of pieces of an arena; counts what is taken."""

    def __init__(self):
        self.used_bytes = 0

    def tensor(self, shape, dtype):
        import torch

        self.used_bytes += math.prod(shape) * dtype.itemsize
        return torch.full(shape, math.nan, dtype=dtype, device=DEVICE)


@dataclass
class Case:
    """A pool with the pasts of some sequences in pages at random places, everything else not a number."""

    heads: int
    kv_heads: int
    dim: int
    page: int = 16
    dtype: str = "bfloat16"
    features: dict = field(default_factory=dict)
    num_slabs: int = 400
    max_blocks: int = 40
    seed: int = 0
    from_the_end: bool = False

    def __post_init__(self):
        import torch

        from tonnage.attention import make_backend

        self.rng = np.random.default_rng(self.seed)
        self.generator = torch.Generator(DEVICE).manual_seed(self.seed)
        shape = (self.num_slabs, LAYERS, 2, self.page, self.kv_heads, self.dim)
        self.pool = torch.full(shape, math.nan, dtype=getattr(torch, self.dtype), device=DEVICE)
        self.backend = make_backend("triton", self.pool)

    def random(self, *shape):
        import torch

        made = torch.randn(*shape, generator=self.generator, device=DEVICE)
        return made.to(self.pool.dtype)

    def rows(self, spans):
        """Sequences that compute [start, end), with a past of ``start`` tokens in the pool; and their pasts."""
        from tonnage.attention.base import Rows

        table = np.zeros((len(spans) + 3, self.max_blocks), np.int32)
        free = list(range(self.num_slabs) if self.from_the_end else self.rng.permutation(self.num_slabs))
        slots = self.rng.permutation(len(table))[: len(spans)]
        pasts = []
        for (start, end), slot in zip(spans, slots, strict=True):
            num_blocks = -(-end // self.page)
            table[slot, :num_blocks] = [free.pop() for _ in range(num_blocks)]
            past = self.random(2, start, self.kv_heads, self.dim)
            for block in range(-(-start // self.page)):
                part = past[:, block * self.page : (block + 1) * self.page]
                self.pool[int(table[slot, block]), LAYER, :, : part.shape[1]] = part
            pasts.append(past)
        starts, ends = (np.array(column, np.int64) for column in zip(*spans, strict=True))
        return Rows(starts=starts, ends=ends, table=table, slots=slots), pasts

    def tokens(self, num):
        """Query, key and value as a packed projection leaves them: strided views of [T, heads, D]."""
        packed = self.random(1, num, self.heads + 2 * self.kv_heads, self.dim).transpose(1, 2)
        return packed.split([self.heads, self.kv_heads, self.kv_heads], dim=1)

    def forward(self, step, tokens):
        return self.backend.forward(step, LAYER, *tokens, scaling=self.dim**-0.5, **self.features)[0]

    def truth(self, rows, pasts, tokens):
        """Dense attention in float32, [T, Hq, D]."""
        import torch

        query, key, value = (part[0].transpose(0, 1).float() for part in tokens)
        found = []
        for row, past in zip(rows, pasts, strict=True):
            here = slice(row.offset, row.offset + row.count)
            keys = torch.cat([past[0].float(), key[here]]).repeat_interleave(self.heads // self.kv_heads, 1)
            values = torch.cat([past[1].float(), value[here]]).repeat_interleave(self.heads // self.kv_heads, 1)
            found.append(dense(query[here], keys, values, row.start, self.dim**-0.5, **self.features))
        return torch.cat(found)


def dense(query, keys, values, start, scaling, *, window=None, softcap=None, sinks=None):
    import torch

    scores = torch.einsum("qhd,khd->hqk", query, keys) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position = start + torch.arange(query.shape[0], device=query.device)[:, None]
    at = torch.arange(keys.shape[0], device=query.device)[None]
    hidden = (at > position) if window is None else (at > position) | (at <= position - window)
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        extra = sinks.float()[:, None, None].expand(-1, query.shape[0], 1)
        scores = torch.cat([scores, extra], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : keys.shape[0]], values)


def spans_of(rng, num_rows, longest):
    """Decodes, chunks after a prefix and fresh prompts of uneven lengths."""
    spans = []
    for _ in range(num_rows):
        start = int(rng.integers(0, longest))
        count = int(rng.choice([1, 1, 1, 2, 17, 64, 200]))
        spans.append((0 if rng.random() < 0.2 else start, start + count))
    return [(start, min(end, start + 200)) for start, end in spans]


def bound(dtype):
    """Half precision rounds weights, values and outputs to 8 or 11 bits; outputs here are averages of values, < 4."""
    return {"bfloat16": 3e-2, "float16": 4e-3, "float32": 5e-5}[dtype]


SHAPES = [(32, 8, 128), (9, 3, 64), (8, 8, 80), (8, 1, 96), (16, 2, 256), (14, 2, 64), (5, 1, 128)]


@pytest.mark.parametrize("page", [16, 32, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_ragged_steps_agree_with_dense_attention(heads, kv_heads, dim, dtype, page):
    case = Case(heads, kv_heads, dim, page=page, dtype=dtype, seed=page + dim)
    for num_rows in (1, 3, 12):
        check(case, spans_of(case.rng, num_rows, 300), bound(dtype))


@pytest.mark.parametrize("asked", ["window", "softcap", "sinks", "window softcap", "window sinks"])
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (9, 3, 64), (8, 4, 256)])
def test_windows_soft_caps_and_sinks(heads, kv_heads, dim, page, asked):
    case = Case(heads, kv_heads, dim, page=page)
    values = {"window": 50, "softcap": 2.0, "sinks": case.random(heads)}
    case.features = {name: values[name] for name in asked.split()}
    for num_rows in (1, 12):
        check(case, spans_of(case.rng, num_rows, 300), bound("bfloat16"))


def check(case, spans, limit):
    rows, pasts = case.rows(spans)
    tokens = case.tokens(int(rows.counts.sum()))
    before = case.pool.clone()
    found = case.forward(case.backend.prepare(rows, Scratch()), tokens).float()
    worst = float((found - case.truth(rows, pasts, tokens)).abs().max())
    assert worst < limit, (spans, worst)
    put(before, rows, tokens, case.page)
    assert same_bits(case.pool, before), "keys and values must go to their slots and nowhere else"


def put(pool, rows, tokens, page):
    """The new keys and values where they belong, one by one."""
    _, key, value = tokens
    for row in rows:
        for number, position in enumerate(range(row.start, row.end)):
            block = int(row.blocks[position // page])
            pool[block, LAYER, 0, position % page] = key[0, :, row.offset + number]
            pool[block, LAYER, 1, position % page] = value[0, :, row.offset + number]


def same_bits(left, right):
    import torch

    words = torch.int16 if left.element_size() == 2 else torch.int32
    return torch.equal(left.view(words), right.view(words))


def test_long_prompts_and_long_chunks():
    case = Case(32, 8, 128, max_blocks=160, num_slabs=400)
    rows, pasts = case.rows([(0, 1500), (0, 40), (700, 1900), (0, 2048)])
    tokens = case.tokens(int(rows.counts.sum()))
    truth = case.truth(rows, pasts, tokens)
    step = case.backend.prepare(rows, Scratch())
    assert float((case.forward(step, tokens).float() - truth).abs().max()) < bound("bfloat16")


def test_pages_beyond_the_reach_of_32_bits():
    """A pool of more than 2^31 elements: reads and writes in its last slabs are right."""
    import torch

    slab = LAYERS * 2 * 16 * 8 * 128
    case = Case(32, 8, 128, num_slabs=2**31 // slab + 40, from_the_end=True)
    rows, pasts = case.rows([(60, 61), (30, 90), (0, 20)])
    used = rows.table[rows.slots]
    assert int(used[used > 0].min()) * slab > 2**31
    tokens = case.tokens(int(rows.counts.sum()))
    found = case.forward(case.backend.prepare(rows, Scratch()), tokens).float()
    assert float((found - case.truth(rows, pasts, tokens)).abs().max()) < bound("bfloat16")
    _, key, value = tokens
    last = int(rows.table[rows.slots[0], 60 // 16])
    assert torch.equal(case.pool[last, LAYER, 0, 60 % 16], key[0, :, 0])
    assert torch.equal(case.pool[last, LAYER, 1, 60 % 16], value[0, :, 0])
    assert bool(case.pool[: case.num_slabs - 40].isnan().all()), "nothing was written at an address cut to 32 bits"


@pytest.mark.parametrize("bucket", [1, 8, 48])
@pytest.mark.parametrize("features", [{}, {"window": 40}, {"sinks": 0}], ids=["plain", "window", "sinks"])
def test_a_graph_replayed_with_other_rows_equals_eager_and_padding_touches_nothing(bucket, features):
    """Invariant of every bucket: bit for bit with as many rows; within rounding below it, where eager splits more."""
    import torch

    case = Case(32, 8, 128, num_slabs=2000, max_blocks=40)
    case.features = {"sinks": case.random(32)} if "sinks" in features else features
    static = static_inputs(case, bucket)
    queries = [part.clone() for part in case.tokens(bucket)]
    scratch = Scratch()
    step = case.backend.captured(static, bucket, scratch)
    case.forward(step, queries)  # all padding: compiles, takes its scratch, and writes nothing
    assert bool(case.pool.isnan().all())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.forward(step, queries)
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
        assert not out[num_rows:].any(), "a row of padding gives 0"
        eager = case.forward(case.backend.prepare(rows, Scratch()), real)
        if num_rows == bucket:
            assert torch.equal(out, eager)
        assert float((out[:num_rows].float() - eager.float()).abs().max()) < bound("bfloat16")


def static_inputs(case, bucket):
    from tonnage.config import Limits

    limits = Limits(max_seq_len=640, max_batch_size=bucket + 5, max_num_tokens=1024, max_logits_rows=bucket + 5)
    made = case.backend.static_inputs(limits)
    assert (made.max_rows, made.max_blocks) == (bucket + 5, 640 // case.page)
    return made


def test_steps_in_flight_keep_their_own_inputs():
    """Many loads and replays queued behind a busy stream: each replay reads what was loaded for it.

    Rows grow shorter from step to step, so that no step attends to what an earlier one wrote.
    """
    import torch

    from tonnage.attention.base import Rows

    case = Case(32, 8, 128, num_slabs=400, max_blocks=40)
    static = static_inputs(case, 8)
    tokens = [part.clone() for part in case.tokens(8)]
    step = case.backend.captured(static, 8, Scratch())
    case.forward(step, tokens)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.forward(step, tokens)
    rows, pasts = case.rows([(start, start + 1) for start in case.rng.integers(200, 600, 8).tolist()])
    steps = []
    for cut in range(16):
        ends = rows.ends - 11 * cut
        steps.append(Rows(starts=ends - 1, ends=ends, table=rows.table, slots=rows.slots))
    busy = torch.randn(8192, 8192, device=DEVICE)
    torch.cuda.synchronize()
    for _ in range(10):
        busy = busy @ busy * 1e-2
    found = []
    for shorter in steps:
        case.backend.load(static, shorter, 8)
        graph.replay()
        found.append(out.clone())
    for shorter, got in zip(steps, found, strict=True):
        cut_pasts = [past[:, :start] for past, start in zip(pasts, shorter.starts.tolist(), strict=True)]
        truth = case.truth(shorter, cut_pasts, tokens)
        assert float((got.float() - truth).abs().max()) < bound("bfloat16")


def test_what_is_taken_is_what_is_declared():
    """High-water <= declared, and the declaration at the limits is the largest that any batch takes, to the byte."""
    import torch

    from tonnage.declarations import AttentionShape, declare_for
    from tonnage.terms import Chip, StepShape

    case = Case(32, 8, 128, num_slabs=300)
    found = torch.cuda.get_device_properties(0)
    chip = Chip(name=found.name, sm=90, num_sms=found.multi_processor_count, total_bytes=found.total_memory)
    shape = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128)
    (declared,) = declare_for("triton", shape)
    most = 0
    for num_rows in range(1, 65):
        rows, _ = case.rows([(20, 21)] * num_rows)
        scratch = Scratch()
        case.forward(case.backend.prepare(rows, scratch), case.tokens(num_rows))
        most = max(most, scratch.used_bytes)
        assert scratch.used_bytes <= declared.bytes_at(StepShape(num_tokens=num_rows, decode_rows=num_rows), chip)
    at_limits = StepShape(num_tokens=512, decode_rows=512, captured=True)
    assert most == declared.bytes_at(at_limits, chip)
