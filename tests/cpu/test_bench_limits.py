"""What a card allows, against the table of the speed of light that was worked out by hand, and what it must obey."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.bench.limits import RATES, Limits, Work, decode_step_s, limits_of, prefill_s
from tonnage.bench.workloads import Span, workload
from tonnage.costs.config import ModelConfig

CONFIG = ModelConfig.read(Path(__file__).parents[2] / "examples" / "configs" / "llama-3.1-8b")
WORK, H200 = Work.of(CONFIG), RATES["H200"]


def test_what_an_8b_llama_asks_of_a_card():
    """Of the model's shape by hand: 32 layers, 4,096 wide, 32 heads and 8 of K and V of 128, 14,336 inside, 128,256."""
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336
    assert WORK.matrix_elements == 32 * layer == 6_979_321_856
    assert WORK.head_elements == 128_256 * 4096
    norms = (2 * 32 + 1) * 4096
    assert WORK.read_bytes == 2 * (32 * layer + 128_256 * 4096 + norms)
    assert WORK.kv_bytes == 131_072
    assert WORK.attention_operations == 32 * 4 * 32 * 128


#: Batch, context 1,024 -> tokens a second, at 4.3 TB/s and 790 TFLOP/s.
DECODES = {1: 284, 8: 2139, 32: 7128, 64: 11_661, 128: 17_099, 256: 19_915, 512: 19_915}


@pytest.mark.parametrize("num_rows", DECODES)
def test_decodes_of_the_table(num_rows):
    step = decode_step_s(WORK, H200, num_rows=num_rows, context_tokens=1024)
    assert round(num_rows / step) == DECODES[num_rows]


@pytest.mark.parametrize(("num_tokens", "per_second"), [(1024, 55.5e3), (2048, 54.5e3), (8192, 49.0e3)])
def test_prompts_of_the_table(num_tokens, per_second):
    assert num_tokens / prefill_s(WORK, H200, num_tokens=num_tokens) == pytest.approx(per_second, rel=2e-3)


@pytest.mark.parametrize(
    ("lengths", "per_second"),
    [((128, 128), 23.5e3), ((128, 2048), 18.1e3), ((500, 2000), 14.5e3), ((1000, 1000), 12.1e3), ((2048, 128), 2.65e3)],
)
def test_mixes_of_the_table(lengths, per_second):
    prompt, output = (Span(length, length) for length in lengths)
    drawn = workload("long", input_tokens=prompt, output_tokens=output)
    found = limits_of(drawn, CONFIG, card="H200", dtype="bfloat16", max_batch_size=256)
    assert found.output_tokens == pytest.approx(per_second, rel=8e-3)


def test_the_bars_of_the_card():
    def found(name):
        return limits_of(workload(name), CONFIG, card="H200", dtype="bfloat16", max_batch_size=256)

    assert found("single").decode_tokens == pytest.approx(284, rel=2e-3)
    assert found("prefill").input_tokens == pytest.approx(55_500, rel=2e-3)
    assert found("uniform").output_tokens == pytest.approx(16_000, rel=0.03)  # the draw is no mean
    assert found("long").output_tokens == pytest.approx(12_100, rel=2e-3)


@pytest.mark.parametrize(("card", "dtype"), [("H100-80GB", "bfloat16"), ("H200", "float32")])
def test_what_is_not_known_has_no_limit(card, dtype):
    assert limits_of(workload("single"), CONFIG, card=card, dtype=dtype, max_batch_size=256) is None


def test_a_model_of_another_kind_has_no_limit():
    raw = {**CONFIG.raw, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 8,
           "num_experts_per_tok": 2}  # fmt: skip
    assert Work.of(ModelConfig.from_dict(raw, name="moe")) is None


def test_a_head_that_is_the_embedding_is_read_once():
    tied = Work.of(ModelConfig.from_dict({**CONFIG.raw, "tie_word_embeddings": True}, name="tied"))
    assert tied == WORK


@given(prompt=st.integers(1, 3000), output=st.integers(1, 3000), more=st.integers(1, 500), batch=st.integers(1, 256))
def test_longer_or_fewer_is_never_faster(prompt, output, more, batch):
    def per_request(prompt, output, batch):
        drawn = workload("long", input_tokens=Span(prompt, prompt), output_tokens=Span(output, output))
        return output / Limits.of(drawn, WORK, H200, max_batch_size=batch).output_tokens

    seconds = per_request(prompt, output, batch)
    assert per_request(prompt + more, output, batch) >= seconds
    assert per_request(prompt, output + more, batch) >= seconds
    assert per_request(prompt, output, batch + 1) <= seconds * (1 + 1e-9)
