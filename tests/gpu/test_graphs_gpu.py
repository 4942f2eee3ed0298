"""Captured decodes on the card: what a replay gives, what its padding touches, and where its inputs lie."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

from tiny import save_tiny_llama

from tonnage.attention.base import Rows
from tonnage.buffers.torch_copies import upload
from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.engine import EngineOptions, start
from tonnage.terms import StepShape

pytestmark = pytest.mark.gpu

SIZES = (1, 2, 4, 7, 12)
MAX_SEQ_LEN = 200


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = save_tiny_llama(
        tmp_path_factory.mktemp("small"), hidden_size=256, intermediate_size=384, num_hidden_layers=3
    )
    options = EngineOptions(
        model=str(folder), device="cuda", attention="triton", compile=False,
        knobs=Knobs(kv_tokens=Setting(4096), graphs=Setting(",".join(map(str, SIZES)))),
        limit_knobs=LimitKnobs(
            max_batch_size=Setting(SIZES[-1]), max_num_tokens=Setting(256), max_seq_len=Setting(MAX_SEQ_LEN)
        ),
    )  # fmt: skip
    with start(options) as engine:
        yield engine


class Steps:
    """The same decodes, eagerly and replayed, over a pool that holds random numbers."""

    def __init__(self, engine):
        import torch

        self.torch, self.runtime = torch, engine._runtime
        self.executor = self.runtime.executor
        self.pool = self.executor._backend._pool[: engine.plan.kv.num_slabs]
        self.random = np.random.default_rng(0)
        with self.runtime.active():
            self.pool.normal_(generator=torch.Generator("cuda").manual_seed(1))
            self.before = self.pool.cpu()

    def rows(self, num):
        """Rows of any length, with blocks of their own in every group of layers."""
        blocks, groups = -(-MAX_SEQ_LEN // 16), len(self.runtime.plan.kv.layout.groups)
        slabs = self.random.permutation(len(self.pool))[: groups * num * blocks].astype(np.int32)
        table, *further = slabs.reshape(groups, num, blocks)
        starts = self.random.integers(1, MAX_SEQ_LEN - 1, num)
        return Rows(starts=starts, ends=starts + 1, table=table, slots=np.arange(num), further=further)

    def eager(self, ids, rows):
        shape = StepShape(num_tokens=len(rows), decode_rows=len(rows), attended_tokens=int(rows.ends.sum()))
        with self.runtime.active(), self.torch.inference_mode(), self.executor._scratch.step(shape) as scratch:
            prepared = self.executor._backend.prepare(rows, scratch)
            ids, positions = upload([ids, rows.starts], self.executor._device)
            hidden = self.executor._forward(ids[None], positions[None], prepared)
            return hidden.cpu(), self._pages()

    def replayed(self, ids, rows):
        graphs = self.executor.graphs
        with self.runtime.active(), self.torch.inference_mode():
            hidden = graphs.replay(graphs.bucket(len(rows)), ids, rows)
            return hidden.cpu(), self._pages()

    def _pages(self):
        after = self.pool.cpu()  # torch is capped: the card has no room for copies
        self.pool.copy_(self.before)
        return after


def test_a_replay_gives_what_an_eager_step_gives_for_every_batch_below_every_bucket(engine):
    """35, and 36 for what a step writes: the pages of its own rows, and no others."""
    steps = Steps(engine)
    for num in [*range(1, SIZES[-1] + 1), *range(SIZES[-1], 0, -1)]:
        rows, ids = steps.rows(num), steps.random.integers(0, 256, num)
        wanted, pages = steps.eager(ids, rows)
        found, same_pages = steps.replayed(ids, rows)
        steps.torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)
        steps.torch.testing.assert_close(same_pages, pages, rtol=2e-4, atol=2e-4)
        is_changed = (same_pages != steps.before).any(-1).numpy()
        own = {int(table[row, start // 16]) for table in rows.tables for row, start in enumerate(rows.starts.tolist())}
        assert set(np.flatnonzero(is_changed).tolist()) <= own


def test_inputs_stay_where_they_are(engine):
    """39."""
    steps = Steps(engine)
    graphs = steps.executor.graphs

    def addresses():
        inputs = graphs._inputs
        tensors = (graphs._feed._all, graphs._hidden, inputs.lengths, *inputs.slots, *inputs.tables)
        return [tensor.data_ptr() for tensor in tensors]

    before = addresses()
    for num in (3, 12, 1):
        steps.replayed(steps.random.integers(0, 256, num), steps.rows(num))
    assert addresses() == before
    assert sum(graphs.num_replays.values()) >= 3


def test_a_batch_above_the_largest_graph_has_none(engine):
    graphs = engine._runtime.executor.graphs
    assert [graphs.bucket(num) for num in (1, 3, 5, 12, 13)] == [1, 4, 7, 12, None]


def test_clearing_gives_the_memory_of_the_graphs_back(engine):
    """The last of this file: the engine has no graphs afterwards."""
    import torch

    executor, held = engine._runtime.executor, torch.cuda.memory_reserved()
    with engine._runtime.active():
        executor.graphs.clear()
    assert executor.graphs.bucket(1) is None
    assert torch.cuda.memory_reserved() < held
