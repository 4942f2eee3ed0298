"""The kernel for the most probable tokens, against torch in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tonnage.engine.sampling import Sampler, SamplingTable
from tonnage.sampling import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.shares_card]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 128_256), (7, 49_152), (256, 128_256), (3, 300), (2, 8192)])
def test_it_is_what_torch_finds(rows, vocab_size, dtype):
    torch.manual_seed(rows)
    logits = (4 * torch.randn(rows, vocab_size, device="cuda")).to(dtype)
    found = Sampler(vocab_size).sample(logits, SamplingTable(rows).rows(np.arange(rows), np.zeros(rows, np.int64)))
    exact = logits.double().log_softmax(-1)
    best = logits.double().amax(-1, keepdim=True)
    # Of equal logits the first.
    first = (logits.double() == best).int().argmax(-1)
    assert found.tokens == first.tolist()
    assert found.logprobs == pytest.approx(exact.gather(1, first[:, None])[:, 0].tolist(), abs=2e-5)
    assert all(found.finite)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "all"])
def test_a_row_without_numbers_says_so_and_hurts_nobody(bad):
    logits = torch.randn(4, 20_000, device="cuda", dtype=torch.bfloat16)
    rows = SamplingTable(4).rows(np.arange(4), np.zeros(4, np.int64))
    before = Sampler(20_000).sample(logits, rows)
    if bad == "all":
        logits[2] = float("-inf")
    else:
        logits[2, 12_345] = bad
    after = Sampler(20_000).sample(logits, rows)
    assert after.finite == [True, True, False, True]
    assert after.tokens[2] == 0
    for row in (0, 1, 3):
        assert (after.tokens[row], after.logprobs[row]) == (before.tokens[row], before.logprobs[row])


def test_it_agrees_with_the_general_way():
    """A batch in which somebody draws goes the other way: nobody else's token may change by it."""
    logits = torch.randn(64, 50_000, device="cuda", dtype=torch.bfloat16)
    table = SamplingTable(64)
    plain = Sampler(50_000).sample(logits, table.rows(np.arange(64), np.zeros(64, np.int64)))
    table.set(63, SamplingParams(temperature=1.0), seed=1, stop_ids=(), num_prompt_tokens=1)
    mixed = Sampler(50_000).sample(logits, table.rows(np.arange(64), np.zeros(64, np.int64)))
    assert plain.tokens[:63] == mixed.tokens[:63]
    assert plain.logprobs[:63] == pytest.approx(mixed.logprobs[:63], abs=1e-5)
