"""What captured decodes read: written in one copy, at places that stay, for every group of layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tonnage.attention.base import Rows
from tonnage.attention.triton_inputs import ALIGNMENT, StaticInputs

BLOCK = 16


def rows_of(random, num, *, num_groups, width, longest):
    tables = random.integers(1, 1000, (num_groups, 9, width)).astype(np.int32)
    starts = random.integers(1, longest - 1, num)
    return Rows(
        starts=starts, ends=starts + 1, table=tables[0], slots=random.permutation(9)[:num], further=list(tables[1:])
    )


@pytest.mark.parametrize("num_groups", [1, 2, 5])
@pytest.mark.parametrize(("max_rows", "max_blocks"), [(8, 12), (7, 9), (5, 1)])
def test_each_group_finds_its_slots_and_pages_where_they_were_before(num_groups, max_rows, max_blocks):
    static = StaticInputs(max_rows=max_rows, max_blocks=max_blocks, device=torch.device("cpu"), num_groups=num_groups)
    tensors = [static.lengths, static.tokens, *static.slots, *static.tables]
    places = [tensor.data_ptr() for tensor in tensors]
    assert not any((place - places[0]) % ALIGNMENT for place in [*places[:1], *places[2:]])
    assert all((slots == -1).all() for slots in static.slots)
    random = np.random.default_rng(0)
    for num in (max_rows, 1, 3, max_rows - 1):
        longest = max_blocks * BLOCK
        rows = rows_of(random, num, num_groups=num_groups, width=max_blocks, longest=longest)
        slots = [rows.of_group(group).token_slots(block_tokens=BLOCK, slab_tokens=96) for group in range(num_groups)]
        static.load(rows, slots, block_tokens=BLOCK)
        assert static.lengths.tolist() == [*rows.ends.tolist(), *[0] * (max_rows - num)]
        for group in range(num_groups):
            assert static.slots[group].tolist() == [*slots[group].tolist(), *[-1] * (max_rows - num)]
            for row, (slot, end) in enumerate(zip(rows.slots, rows.ends, strict=True)):
                used = -(-int(end) // BLOCK)
                assert static.tables[group][row, :used].tolist() == rows.tables[group][slot, :used].tolist()
    assert places == [tensor.data_ptr() for tensor in tensors]
    assert {table.stride(1) for table in static.tables} == {1}
