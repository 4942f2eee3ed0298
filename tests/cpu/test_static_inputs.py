"""What captured decodes read: written in one copy, at places that stay, for every group of layers."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tonnage.attention.base import Rows
from tonnage.attention.triton_inputs import ALIGNMENT, StaticInputs

BLOCK = 16
MAX_ROWS, MAX_BLOCKS, SMALL = 6, 5, 4


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


@given(st.lists(st.lists(st.integers(1, MAX_BLOCKS * SMALL), max_size=MAX_ROWS), min_size=1, max_size=6))
def test_padding_is_of_the_inputs_and_never_of_the_batch(steps):
    """Invariants 37 and 39: after any steps rows are those of this one, the others padding, addresses as they were,
    and the batch what it was."""
    inputs = StaticInputs(max_rows=MAX_ROWS, max_blocks=MAX_BLOCKS, device=torch.device("cpu"), num_groups=1)
    tensors = (*inputs.slots, inputs.lengths, *inputs.tables, inputs.tokens)
    places = [tensor.data_ptr() for tensor in tensors]
    random = np.random.default_rng(0)
    for lengths in steps:
        num, ends = len(lengths), np.array(lengths, np.int64)
        table = random.integers(0, 1000, (9, MAX_BLOCKS)).astype(np.int32)
        rows = Rows(starts=ends - 1, ends=ends, table=table, slots=random.permutation(9)[:num])
        token_slots = random.integers(0, 10**6, num)
        before = copy.deepcopy((rows.starts, rows.ends, rows.table, rows.slots, token_slots))
        inputs.load(rows, [token_slots], block_tokens=SMALL)
        assert all(map(np.array_equal, before, (rows.starts, rows.ends, rows.table, rows.slots, token_slots)))
        assert inputs.slots[0].tolist() == [*token_slots.tolist(), *[-1] * (MAX_ROWS - num)]
        assert inputs.lengths.tolist() == [*lengths, *[0] * (MAX_ROWS - num)]
        for row, length in enumerate(lengths):
            used = -(-length // SMALL)
            assert inputs.tables[0][row, :used].tolist() == table[rows.slots[row], :used].tolist()
        assert [tensor.data_ptr() for tensor in tensors] == places
