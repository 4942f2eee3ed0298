"""Two backends over one pool: who does which step. What they compute is tested where both run, on a card."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tonnage.attention import FLASHINFER, TRITON, make_backend, paired
from tonnage.attention.base import Row, Rows
from tonnage.config import Limits
from tonnage.engine.target import CAPTURING


class Half:
    """Notes what it is asked for."""

    def __init__(self, name, pages):
        self.name, self.pages, self.asked = name, pages, []

    def prepare(self, rows, scratch):
        self.asked.append(("prepare", rows.starts.tolist(), scratch))
        return f"{self.name} step"

    def forward(self, step, layer, query, key, value, **how):
        self.asked.append((step, layer, how))
        return query

    def static_inputs(self, limits):
        return f"{self.name} inputs"

    def load(self, inputs, rows, num_rows):
        self.asked.append(("load", inputs, len(rows), num_rows))

    def rest(self, inputs, num_rows):
        self.asked.append(("rest", inputs, num_rows))

    def captured(self, inputs, num_rows, scratch):
        return f"{self.name} captured {num_rows}"


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.setattr(paired, "TritonBackend", lambda pages: Half("ours", pages))
    monkeypatch.setattr(paired, "FlashInferBackend", lambda pages: Half("theirs", pages))
    return make_backend("paired", torch.zeros(4, 2, 2, 16, 1, 128))


def rows(*spans):
    made, offset = [], 0
    for start, end in spans:
        made.append(Row(start=start, end=end, offset=offset, blocks=np.zeros(4, np.int32)))
        offset += end - start
    return made


@pytest.mark.parametrize(
    ("spans", "whose"),
    [
        ([(5, 6), (9, 10)], "ours"),
        ([(5, 6), (0, 7)], "theirs"),  # a prompt beside a decode
        ([(0, 1)], "theirs"),  # the first token of a text is no decode
        ([(8, 12)], "theirs"),
    ],
)
def test_a_step_is_done_by_one_of_the_two(backend, spans, whose):
    step = backend.prepare(rows(*spans), "scratch")
    query = torch.ones(1)
    assert backend.forward(step, 1, query, query, query, scaling=0.5, window=3) is query
    halves = {half.name: half for half in (backend._decodes, backend._others)}
    asked = [("prepare", [start for start, _ in spans], "scratch"),
             (f"{whose} step", 1, {"scaling": 0.5, "window": 3, "softcap": None, "sinks": None})]  # fmt: skip
    assert halves.pop(whose).asked == asked
    (other,) = halves.values()
    assert other.asked == []
    assert other.pages is backend._decodes.pages, "both read the same pages"


def test_what_is_captured_is_ours(backend):
    limits = Limits(max_seq_len=64, max_batch_size=2, max_num_tokens=8, max_logits_rows=2)
    assert backend.static_inputs(limits) == "ours inputs"
    step = backend.captured("inputs", 2, "scratch")
    assert (step.by, step.step) == (backend._decodes, "ours captured 2")
    backend.load("inputs", Rows.of(rows((3, 4))), 2)
    backend.rest("inputs", 2)
    assert backend._decodes.asked == [("load", "inputs", 1, 2), ("rest", "inputs", 2)]
    assert backend._others.asked == []


def test_it_needs_what_both_need_and_is_captured():
    assert "paired" in TRITON
    assert "paired" in FLASHINFER
    assert "paired" in CAPTURING
