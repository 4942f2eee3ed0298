"""What the sampler holds at its peak, against the formula that the planner charges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_sampling_filters import FILTERS, PROMPT, STOPS, tables

from tonnage.costs.activations import SAMPLER_TILE_ELEMENTS, sampler_bytes, sampler_scratch_bytes
from tonnage.costs.models import find_config
from tonnage.engine.sampling import Sampler, SamplingTable
from tonnage.engine.tracker import StorageTracker
from tonnage.sampling import SamplingParams

EVERYTHING = {**FILTERS["everything"], "min_tokens": 9, "logprobs": 20}
MIXES = {
    "everything": [EVERYTHING],
    "half without top_p": [EVERYTHING, {**EVERYTHING, "top_p": 1.0}],
    "one in eight greedy": [*[EVERYTHING] * 7, {}],
    "filters alone": [{"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01}],
}


def peak(logits: torch.Tensor, params: list[dict], *, tile_elements: int) -> int:
    num_rows, vocab_size = logits.shape
    table = SamplingTable(num_rows)
    for slot in range(num_rows):
        one = SamplingParams(**params[slot % len(params)])
        table.set(slot, one, seed=slot, stop_ids=STOPS, num_prompt_tokens=len(PROMPT))
    rows = table.rows(np.arange(num_rows), np.full(num_rows, len(PROMPT)))
    penalties = tables(vocab_size, num_slots=num_rows)
    with StorageTracker([logits, *penalties]) as tracker:
        Sampler(vocab_size, tile_elements=tile_elements).sample(logits, rows, penalties)
    assert tracker.live_bytes == 0
    return tracker.peak_bytes


SHAPES = [
    (8, 49_152, 2**22),
    (8, 49_152, 2**18),
    (1, 49_152, 2**22),
    (3, 50_257, 2**22),
    (8, 1000, 3000),
    (16, 130, 2**22),
]


@pytest.mark.parametrize(("num_rows", "vocab_size", "tile_elements"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("params", MIXES.values(), ids=MIXES.keys())
def test_the_formula_holds_every_feature(num_rows, vocab_size, tile_elements, dtype, params):
    logits = torch.randn(num_rows, vocab_size).to(dtype)
    measured = peak(logits, params, tile_elements=tile_elements)
    formula = sampler_scratch_bytes(num_rows, vocab_size, tile_elements=tile_elements)
    assert measured <= formula <= 1.5 * measured


@pytest.mark.parametrize(("num_rows", "vocab_size", "tile_elements"), SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_rows_take_a_fraction_of_it(num_rows, vocab_size, tile_elements, dtype):
    logits = torch.randn(num_rows, vocab_size).to(getattr(torch, dtype))
    measured = peak(logits, [{}], tile_elements=tile_elements)
    formula = sampler_scratch_bytes(num_rows, vocab_size, tile_elements=tile_elements, greedy_dtype=dtype)
    assert measured <= formula <= 1.5 * measured
    assert 3 * formula < sampler_scratch_bytes(num_rows, vocab_size, tile_elements=tile_elements)


def test_it_does_not_grow_with_the_rows_beyond_one_tile():
    logits = torch.randn(64, 5000)
    peaks = [peak(logits[:rows], [EVERYTHING], tile_elements=4 * 5000) for rows in (4, 16, 64)]
    told = 64 + EVERYTHING["logprobs"] * (8 + 4)  # some numbers a row, and its alternatives, until they are read
    assert max(peaks) - min(peaks) < 64 * told


def test_the_stage_of_a_plan_is_the_logits_and_one_tile_of_them():
    config, tile_elements = find_config("smollm2"), SAMPLER_TILE_ELEMENTS["host"]
    told = sampler_bytes(config, logits_rows=32, dtype="float32", device_kind="host")
    logits = torch.randn(32, config.vocab_size)
    measured = peak(logits, [EVERYTHING], tile_elements=tile_elements)
    assert measured <= told - logits.numel() * 4 <= 1.5 * measured
