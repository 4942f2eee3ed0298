"""The benchmark of the step's bookkeeping: that its proof of constant work would notice work that is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tonnage.engine.stub import stub_engine


@pytest.fixture
def bookkeeping(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import bookkeeping

    yield bookkeeping
    for name in ("bookkeeping", "calibrate"):
        sys.modules.pop(name, None)


def growth_per_row(bookkeeping, rows=32):
    """Bytes more in a step, and a row, over 1,024 tokens of context than over 64: 60 pages more."""
    short, long = (bookkeeping.step_bytes(rows, prompt_tokens=tokens, steps=16) for tokens in (64, 1024))
    return (long - short) / rows


def test_a_step_takes_no_more_memory_over_long_contexts(bookkeeping):
    assert growth_per_row(bookkeeping) < bookkeeping.BAR_BYTES_PER_ROW


@pytest.mark.parametrize(
    "build",
    [lambda kv, names: [kv.block_ids(name).tolist() for name in names], lambda kv, _: kv.table.copy()],
    ids=["lists of pages", "a copy of the page table"],
)
def test_pages_made_anew_would_be_noticed(bookkeeping, monkeypatch, build):
    def wasteful(**sizes):
        engine = stub_engine(**sizes)
        kv, step = engine._runtime.managers.kv, engine.step

        def step_and_build():
            done = step()
            build(kv, [f"r{row}" for row in range(sizes["max_batch_size"])])
            return done

        engine.step = step_and_build
        return engine

    monkeypatch.setattr(bookkeeping, "stub_engine", wasteful)
    assert growth_per_row(bookkeeping) > 10 * bookkeeping.BAR_BYTES_PER_ROW


def test_a_pass_is_as_many_operations_as_rows(bookkeeping):
    import calibrate

    before = calibrate._TABLE.copy()
    calibrate.numpy_loop_pass(5)
    changed = calibrate._TABLE - before
    assert changed[:5, :8].min() == changed.sum() / 40 == 1
    assert calibrate.pass_ns(4, passes=3) > 0
