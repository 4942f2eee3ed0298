"""What a captured decode reads of a batch: written in place, padded, and the batch left alone."""

from __future__ import annotations

import copy

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tonnage.attention.base import Rows
from tonnage.attention.triton_inputs import StaticInputs

MAX_ROWS, MAX_BLOCKS, BLOCK = 6, 5, 4


@given(st.lists(st.lists(st.integers(1, MAX_BLOCKS * BLOCK), max_size=MAX_ROWS), min_size=1, max_size=6))
def test_padding_is_of_the_inputs_and_never_of_the_batch(steps):
    """Invariants 37 and 39: after any steps rows are those of this one, the others padding, addresses as they were,
    and the batch what it was."""
    inputs = StaticInputs(max_rows=MAX_ROWS, max_blocks=MAX_BLOCKS, device=torch.device("cpu"))
    tensors = (inputs.slots, inputs.lengths, inputs.table, inputs.tokens)
    places = [tensor.data_ptr() for tensor in tensors]
    random = np.random.default_rng(0)
    for lengths in steps:
        num, ends = len(lengths), np.array(lengths, np.int64)
        table = random.integers(0, 1000, (9, MAX_BLOCKS)).astype(np.int32)
        rows = Rows(starts=ends - 1, ends=ends, table=table, slots=random.permutation(9)[:num])
        token_slots = random.integers(0, 10**6, num)
        before = copy.deepcopy((rows.starts, rows.ends, rows.table, rows.slots, token_slots))
        inputs.load(rows, token_slots, block_tokens=BLOCK)
        assert all(map(np.array_equal, before, (rows.starts, rows.ends, rows.table, rows.slots, token_slots)))
        assert inputs.slots.tolist() == [*token_slots.tolist(), *[-1] * (MAX_ROWS - num)]
        assert inputs.lengths.tolist() == [*lengths, *[0] * (MAX_ROWS - num)]
        for row, length in enumerate(lengths):
            used = -(-length // BLOCK)
            assert inputs.table[row, :used].tolist() == table[rows.slots[row], :used].tolist()
        assert [tensor.data_ptr() for tensor in tensors] == places
