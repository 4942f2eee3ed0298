"""The sampler on the card: the tokens of the CPU, the same at every repetition, and what a step of it costs."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.gpu

VOCAB, ROWS = 128_256, 64


def rows_of(params_of, num_rows):
    from tonnage.engine.sampling import SamplingTable

    table = SamplingTable(num_rows)
    for slot in range(num_rows):
        table.set(slot, params_of(slot), seed=1000 + slot, stop_ids=(7,), num_prompt_tokens=10)
    return table.rows(np.arange(num_rows), np.full(num_rows, 12))


def everything(slot):
    from tonnage.sampling import SamplingParams

    return SamplingParams(
        temperature=0.5 + slot % 5 / 4,
        top_k=(0, 5, 50, 4000)[slot % 4],
        top_p=(1.0, 0.5, 0.9, 0.999)[slot // 4 % 4],
        min_p=(0.0, 0.01)[slot % 2],
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={3: 5.0, 11: -100.0},
        min_tokens=9,
        logprobs=5,
    )


def inputs(num_rows):
    import torch

    from tonnage.resources.penalties import PenaltyTensors

    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(num_rows, VOCAB, generator=generator) * 3
    counts = (torch.rand(num_rows, VOCAB, generator=generator) < 0.01).int() * 2
    seen = torch.rand(num_rows, VOCAB, generator=generator) < 0.02
    return logits, PenaltyTensors(counts, seen)


def test_the_card_draws_what_the_cpu_draws_and_the_same_each_time():
    """Exponentials differ in the last bit between devices: a draw next to a border may fall on its other side."""
    from tonnage.engine.sampling import Sampler
    from tonnage.resources.penalties import PenaltyTensors

    logits, tables = inputs(ROWS)
    rows, sampler = rows_of(everything, ROWS), Sampler(VOCAB)
    cpu = sampler.sample(logits, rows, tables)
    on_card = PenaltyTensors(tables.counts.cuda(), tables.seen.cuda())
    first, second = (sampler.sample(logits.cuda(), rows, on_card) for _ in range(2))
    assert first == second
    same = sum(a == b for a, b in zip(cpu.tokens, first.tokens, strict=True))
    print(f"\n{same} of {ROWS} draws equal on CPU and card")
    assert same >= ROWS - 1
    assert first.finite == cpu.finite
    for row in range(ROWS):
        assert [token for token, _ in first.top[row]] == [token for token, _ in cpu.top[row]]
        assert [value for _, value in first.top[row]] == pytest.approx([value for _, value in cpu.top[row]], abs=1e-4)


@pytest.mark.parametrize("num_rows", [1, 32, 256])
def test_what_a_step_of_sampling_costs(num_rows):
    """Printed, not judged: microseconds of a step, by feature."""
    import torch

    from tonnage.engine.sampling import Sampler
    from tonnage.resources.penalties import PenaltyTensors
    from tonnage.sampling import SamplingParams

    logits, tables = inputs(num_rows)
    logits, tables = logits.cuda(), PenaltyTensors(tables.counts.cuda(), tables.seen.cuda())
    sampler = Sampler(VOCAB, tile_elements=2**22)
    kinds = {
        "greedy": lambda _: SamplingParams(),
        "temperature": lambda _: SamplingParams(temperature=0.8),
        "top_p": lambda _: SamplingParams(temperature=0.8, top_p=0.9),
        "everything": everything,
    }
    for name, params_of in kinds.items():
        rows = rows_of(params_of, num_rows)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(3):
            sampler.sample(logits, rows, tables)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        begin.record()
        for _ in range(10):
            sampled = sampler.sample(logits, rows, tables)
        end.record()
        torch.cuda.synchronize()
        assert len(sampled.tokens) == num_rows
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        print(f"\n{num_rows:4} rows {name:12} {begin.elapsed_time(end) * 100:8.0f} us, {peak:7.1f} MiB at the peak")
