"""Prompts from their first token: neighbours of one length are one call, and each attends to itself alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tonnage.attention.fresh import Run, attend, runs_of


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2)), max_size=12))
def test_runs_are_the_rows_in_their_order(rows):
    """(tokens, gap before it) of each row: runs hold all rows, join neighbours of one length, and nothing else."""
    spans, at = [], 0
    for length, gap in rows:
        spans.append((at + gap, at + gap + length))
        at += gap + length
    runs = runs_of(spans)
    told = [(run.begin + i * run.length, run.begin + (i + 1) * run.length) for run in runs for i in range(run.num)]
    assert told == spans
    for one, after in pairwise(runs):
        assert one.length != after.length or one.end != after.begin


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=str)
def test_each_prompt_attends_to_itself(heads):
    num_heads, kv_heads, dim, run = *heads, 8, Run(begin=3, num=3, length=5)
    packed = torch.randn(1, 20, num_heads + 2 * kv_heads, dim).transpose(1, 2)
    query, key, value = packed.split([num_heads, kv_heads, kv_heads], dim=1)
    found = attend(run, query, key, value, scaling=0.3)
    assert found.shape == (3, 5, num_heads, dim)
    for i in range(run.num):
        here = slice(run.begin + i * run.length, run.begin + (i + 1) * run.length)
        keys, values = (part[0, :, here].repeat_interleave(num_heads // kv_heads, 0) for part in (key, value))
        scores = (query[0, :, here] @ keys.transpose(1, 2)).double() * 0.3
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        wanted = (scores.softmax(-1) @ values.double()).transpose(0, 1)
        torch.testing.assert_close(found[i].double(), wanted, rtol=1e-4, atol=1e-5)
