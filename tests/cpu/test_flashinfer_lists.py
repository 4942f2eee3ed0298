"""The kernel that makes page lists of a page table, against a loop; on a card, and under Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os

import numpy as np
import pytest
import torch

from tonnage.attention.flashinfer_inputs import COMPACT_TILE, HostLists, StaticLists
from tonnage.config import Limits

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICES = [
    pytest.param(
        "cpu",
        marks=[
            pytest.mark.skipif(not IS_INTERPRETED, reason="triton on a CPU: needs TRITON_INTERPRET=1, numpy < 2.4"),
            pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
        ],
    ),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.shares_card]),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_rows", "num_live"), [(1, 1), (1, 0), (5, 5), (7, 3), (32, 20), (200, 131)])
@pytest.mark.parametrize("block_tokens", [16, 64])
def test_page_lists_are_those_of_a_loop(device, num_rows, num_live, block_tokens):
    random = np.random.default_rng(num_rows)
    longest = block_tokens * (COMPACT_TILE + 44)
    limits = Limits(max_seq_len=longest, max_batch_size=num_rows + 3, max_num_tokens=512, max_logits_rows=1)
    made = StaticLists(limits, block_tokens=block_tokens, device=torch.device(device), num_groups=2)
    static = made.inputs
    lengths = np.zeros(num_rows, np.int32)
    lengths[:num_live] = random.integers(1, longest + 1, num_live)
    lengths[: min(3, num_live)] = (longest, block_tokens, block_tokens + 1)[: min(3, num_live)]
    tables = [random.integers(0, 2**20, table.shape, np.int32) for table in static.tables]
    static.lengths[:num_rows] = torch.from_numpy(lengths)
    for there, table in zip(static.tables, tables, strict=True):
        there.copy_(torch.from_numpy(table))
    before = [pages.fill_(-7).data_ptr() for pages in made._lists.pages]
    for _ in range(2):
        lists = made.compact(num_rows)
    pages, expected = [0], ([], [])
    for row, length in enumerate(lengths.tolist()):
        count = -(-length // block_tokens)
        pages.append(pages[-1] + count)
        for table, wanted in zip(tables, expected, strict=True):
            wanted += table[row, :count].tolist()
    assert lists.page_indptr.tolist() == pages
    assert lists.query_indptr.tolist() == [min(row, num_live) for row in range(num_rows + 1)]
    for found, wanted in zip(lists.pages, expected, strict=True):
        assert found[: pages[-1]].tolist() == wanted
        assert set(found[pages[-1] :].tolist()) <= {-7}
    assert [found.data_ptr() for found in lists.pages] == before
    counts, ends = np.ones(num_live, np.int64), lengths[:num_live].astype(np.int64)
    host = HostLists.of(counts, ends, block_tokens=block_tokens, num_rows=num_rows)
    assert lists.last_page_tokens.tolist() == host.last_page_tokens.tolist()
    assert lists.query_indptr.tolist() == host.query_indptr.tolist()
    assert lists.page_indptr.tolist() == host.page_indptr.tolist()
