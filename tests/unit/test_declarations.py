"""The declarations of attention backends: pure, monotone, and found by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.config import Limits
from tonnage.declarations import BACKENDS, declare
from tonnage.errors import InvalidSetting
from tonnage.terms import Chip, StepShape, worst_shape

CHIP = Chip(name="host", sm=0, num_sms=0, total_bytes=2**30)
SHAPE = {"kv_heads": 3, "head_dim": 64, "kv_dtype": "float32", "block_tokens": 16}


def limits(seq_len, batch, tokens):
    return Limits(max_seq_len=seq_len, max_batch_size=batch, max_num_tokens=tokens, max_logits_rows=min(batch, tokens))


@pytest.mark.parametrize("backend", BACKENDS)
@given(seq=st.integers(1, 10**5), batch=st.integers(1, 512), tokens=st.integers(1, 10**4), more=st.integers(1, 1000))
def test_never_less_at_higher_limits(backend, seq, batch, tokens, more):
    def at(*sizes):
        return sum(d.bytes_at(worst_shape(limits(*sizes)), CHIP) for d in declare(backend, **SHAPE))

    base = at(seq, batch, tokens)
    assert base > 0
    assert base <= min(at(seq + more, batch, tokens), at(seq, batch + more, tokens), at(seq, batch, tokens + more))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_step_needs_nothing(backend):
    assert all(declaration.bytes_at(StepShape(), CHIP) == 0 for declaration in declare(backend, **SHAPE))


def test_an_unknown_backend_lists_the_known():
    with pytest.raises(InvalidSetting, match="sdpa"):
        declare("flash9", **SHAPE)
