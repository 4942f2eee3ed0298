"""Captures in any order, batches that are padded and left as they were, and scratch that stays where graphs know it."""

from __future__ import annotations

import contextlib
import copy
from types import SimpleNamespace

import numpy as np
import pytest
from test_graphs_gpu import SIZES, Steps, engine  # noqa: F401 - a fixture

pytestmark = pytest.mark.gpu


def captured_in(graphs, order):
    """Capture takes sizes from the last to the first: so they stand the other way round while it does."""
    whole, graphs.sizes = graphs.sizes, tuple(reversed(order))
    try:
        graphs.capture()
    finally:
        graphs.sizes = whole


class NoBackend:
    """What a forward without attention needs of one."""

    def static_inputs(self, limits):
        return None

    def load(self, inputs, rows, num_rows):
        pass

    def rest(self, inputs, num_rows):
        pass

    def captured(self, inputs, num_rows, scratch):
        return None


class NoScratch:
    @contextlib.contextmanager
    def step(self, shape):
        yield None


#: Activations of 16, 32 and 64 MiB: too large for a segment that torch shares, so none fits where a smaller one was.
WIDTH = 4096
ORDERS = {
    "largest first": (4096, 2048, 1024),
    "smallest first": (1024, 2048, 4096),
    "mixed": (2048, 4096, 1024),
}


def test_the_order_of_capture_changes_memory_only():
    """40: what replays give is equal to the bit, and largest first takes the least of the pool."""
    import torch

    with torch.cuda.stream(torch.cuda.Stream()), torch.inference_mode():
        forward = deep_forward(torch)
        found = {name: captured_and_replayed(forward, order) for name, order in ORDERS.items()}
    outputs, pools = ({name: each[part] for name, each in found.items()} for part in (0, 1))
    for name in ORDERS:
        assert all(map(torch.equal, outputs[name], outputs["largest first"])), name
    assert pools["largest first"] == min(pools.values()), pools
    assert pools["largest first"] < pools["smallest first"], "else this test shows nothing"


def deep_forward(torch):
    weights = [torch.randn((WIDTH, WIDTH), device="cuda") / 64 for _ in range(3)]
    table = torch.randn((300, WIDTH), device="cuda")

    def forward(ids, positions, step):
        hidden = table[ids[0]] + positions[0, :, None] / 100
        for weight in weights:
            hidden = torch.nn.functional.silu(hidden @ weight)
        return hidden

    return forward


def captured_and_replayed(forward, order):
    """What replays of batches of all kinds give, and the bytes of the pool."""
    import torch

    from tonnage.graphs.runner import DecodeGraphs
    from tonnage.graphs.token_feed import TokenFeed

    random, device = np.random.default_rng(0), torch.device("cuda")
    limits = SimpleNamespace(max_seq_len=200, max_batch_size=max(order))
    feed = TokenFeed(max(order), device)
    graphs = DecodeGraphs(forward, NoBackend(), NoScratch(), feed, sizes=order, limits=limits, device=device)
    graphs.warm_up()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    captured_in(graphs, order)
    torch.cuda.synchronize()
    pool_bytes = torch.cuda.memory_reserved() - before
    outputs = []
    for num in (1, 1024, 1025, 2048, 3000, 4096):
        ids, rows = random.integers(0, 300, num), Decoding(random.integers(0, 200, num))
        outputs.append(graphs.replay(graphs.bucket(num), ids, rows).clone())
    graphs.clear()
    return outputs, pool_bytes


class Decoding:
    def __init__(self, starts):
        self.starts, self.slots = starts, np.arange(len(starts))

    def __len__(self):
        return len(self.starts)


def test_captures_of_an_engine_in_any_order_give_the_same(engine):  # noqa: F811
    """40, with attention and its shared scratch."""
    import torch

    runtime = engine._runtime
    found = []
    for order in (SIZES[::-1], SIZES, (4, 12, 1, 7, 2)):
        with runtime.active():
            runtime.executor.graphs.clear()
            runtime.executor.prepare_graphs(SIZES, engine.plan.limits)
            captured_in(runtime.executor.graphs, order)
        steps = Steps(engine)  # draws the same rows each time
        found.append(
            [steps.replayed(steps.random.integers(0, 256, num), steps.rows(num)) for num in range(1, SIZES[-1] + 1)]
        )
    for other in found[1:]:
        for (hidden, pages), (same_hidden, same_pages) in zip(found[0], other, strict=True):
            assert torch.equal(hidden, same_hidden)
            assert torch.equal(pages, same_pages)


def test_a_batch_is_what_it_was_after_its_replay_and_after_one_that_failed(engine, monkeypatch):  # noqa: F811
    """37: padding is rows of the static inputs, and never of the batch."""
    import torch

    steps = Steps(engine)
    rows, ids = steps.rows(5), steps.random.integers(0, 256, 5)
    arrays = {"starts": rows.starts, "ends": rows.ends, "table": rows.table, "slots": rows.slots, "ids": ids}
    kept = copy.deepcopy(arrays)

    def is_as_before():
        return all(np.array_equal(arrays[name], kept[name]) for name in arrays) and len(rows) == 5

    wanted, pages = steps.replayed(ids, rows)
    assert is_as_before()
    backend = steps.executor.graphs._backend
    load = backend.load

    def fail(*step):
        load(*step)
        raise RuntimeError("on purpose")

    with monkeypatch.context() as patched:
        patched.setattr(backend, "load", fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            steps.replayed(ids, rows)
    assert is_as_before()
    found, same_pages = steps.replayed(ids, rows)
    assert torch.equal(found, wanted)
    assert torch.equal(same_pages, pages)


def test_scratch_stays_where_the_graphs_know_it(engine):  # noqa: F811
    """32 and 34: eager steps between replays, full ones and ones that fail among them, move nothing."""
    steps = Steps(engine)
    scratch = steps.executor._scratch
    address, graphs = scratch.address, steps.executor.graphs
    rows, ids = steps.rows(SIZES[-1]), steps.random.integers(0, 256, SIZES[-1])
    before, _ = steps.replayed(ids, rows)
    steps.eager(ids, rows)
    with pytest.raises(RuntimeError, match="on purpose"), scratch.step(graphs._shape(SIZES[-1])):
        raise RuntimeError("on purpose")
    after, _ = steps.replayed(ids, rows)
    assert scratch.address == address
    assert steps.torch.equal(before, after)
