"""A forward captured with extra inputs: every replay computes with what was written for it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from test_graph_padding_gpu import Decoding, NoBackend, NoScratch  # noqa: E402

from tonnage.errors import GraphInputError  # noqa: E402
from tonnage.graphs.extra_inputs import ExtraInput, ExtraInputs  # noqa: E402
from tonnage.graphs.runner import DecodeGraphs  # noqa: E402
from tonnage.graphs.token_feed import TokenFeed  # noqa: E402

pytestmark = pytest.mark.gpu

SIZES, WIDTH = (1, 4, 16), 64
DECLARED = (
    ExtraInput(name="rows_of", padding=0),
    ExtraInput(name="shift", dtype=torch.float32, row_shape=(WIDTH,), padding=0.0),
)


def forward(table, *, rows_of, shift):
    """[n, WIDTH]: a row of the table for each row, shifted."""
    return torch.nn.functional.silu(table[rows_of]) + shift


@pytest.fixture(name="captured")
def captured_fixture():
    """The forward in a graph for each size, all in one pool and over the same inputs; what each gives."""
    device = torch.device("cuda")
    table = torch.randn((100, WIDTH), device=device)
    extra = ExtraInputs(DECLARED, max_rows=SIZES[-1], device=device)
    graphs, outputs, pool = {}, {}, torch.cuda.graph_pool_handle()
    for size in reversed(SIZES):
        forward(table, **extra.views(size))
        torch.cuda.synchronize()
        graphs[size] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[size], pool=pool):
            outputs[size] = forward(table, **extra.views(size))
    return table, extra, graphs, outputs


def values(num_rows, random):
    return {
        "rows_of": random.integers(0, 100, num_rows),
        "shift": random.standard_normal((num_rows, WIDTH), dtype=np.float32),
    }


def test_every_replay_computes_with_its_own_values_and_padding_behind_them(captured):
    table, extra, graphs, outputs = captured
    random = np.random.default_rng(0)
    places = {name: tensor.data_ptr() for name, tensor in extra.tensors.items()}
    for num_rows in [*range(1, SIZES[-1] + 1), *range(SIZES[-1], 0, -1)]:
        size = min(each for each in SIZES if each >= num_rows)
        given = values(num_rows, random)
        extra.load(given, num_rows=num_rows, size=size)
        graphs[size].replay()
        wanted = forward(table, **extra.eager(given, num_rows=num_rows))
        assert torch.equal(outputs[size][:num_rows], wanted)
        padding = torch.nn.functional.silu(table[:1]).expand(size - num_rows, WIDTH)
        assert torch.equal(outputs[size][num_rows:], padding)
    assert {name: tensor.data_ptr() for name, tensor in extra.tensors.items()} == places


def test_steps_may_be_written_while_older_ones_run(captured):
    """The arrays given are pageable and are overwritten at once: what a replay reads was copied before."""
    table, extra, graphs, outputs = captured
    random = np.random.default_rng(1)
    given, kept, found = values(16, random), [], []
    work = torch.randn((4096, 4096), device="cuda")
    for _ in range(20):
        for _ in range(4):
            work @ work  # the device is behind the host
        for name, value in values(16, random).items():
            given[name][:] = value
        kept.append({name: value.copy() for name, value in given.items()})
        extra.load(given, num_rows=16, size=16)
        graphs[16].replay()
        found.append(outputs[16].clone())
    for each, output in zip(kept, found, strict=True):
        assert torch.equal(output, forward(table, **extra.eager(each, num_rows=16)))


def test_what_is_pinned_already_is_copied_all_the_same(captured):
    table, extra, graphs, outputs = captured
    given = {name: torch.from_numpy(each).pin_memory() for name, each in values(16, np.random.default_rng(3)).items()}
    wanted = forward(table, **extra.eager(given, num_rows=16)).clone()
    work = torch.randn((8192, 8192), device="cuda")
    for _ in range(8):
        work @ work
    extra.load(given, num_rows=16, size=16)
    graphs[16].replay()
    given["shift"].zero_()
    assert torch.equal(outputs[16], wanted)


def test_values_of_the_device_need_no_host(captured):
    table, extra, graphs, outputs = captured
    given = {name: torch.from_numpy(value).cuda() for name, value in values(3, np.random.default_rng(2)).items()}
    extra.load(given, num_rows=3, size=4)
    graphs[4].replay()
    assert torch.equal(outputs[4][:3], forward(table, **given))


def test_the_graphs_of_an_engine_take_what_was_declared():
    device, random = torch.device("cuda"), np.random.default_rng(4)
    with torch.cuda.stream(torch.cuda.Stream()), torch.inference_mode():
        table = torch.randn((100, WIDTH), device=device)

        def whole(ids, positions, step, *, rows_of, shift):
            return table[ids[0]] * positions[0, :, None] + forward(table, rows_of=rows_of, shift=shift)

        graphs = DecodeGraphs(
            whole, NoBackend(), NoScratch(), TokenFeed(SIZES[-1], device), sizes=SIZES,
            limits=SimpleNamespace(max_seq_len=8), device=device, extra_inputs=DECLARED,
        )  # fmt: skip
        graphs.warm_up()
        graphs.capture()
        for num_rows in (3, 16, 1, 4):
            ids, starts = random.integers(0, 100, num_rows), random.integers(0, 8, num_rows)
            given = values(num_rows, random)
            found = graphs.replay(graphs.bucket(num_rows), ids, Decoding(starts), extra=given)
            on_device = {name: torch.from_numpy(value).to(device) for name, value in given.items()}
            there = [torch.from_numpy(each).to(device)[None] for each in (ids, starts)]
            assert torch.equal(found, whole(*there, None, **on_device))
        with pytest.raises(GraphInputError, match="rows_of is missing, shift is missing"):
            graphs.replay(4, ids, Decoding(starts))
        graphs.clear()
