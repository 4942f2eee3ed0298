"""Forwards on fake tensors: peaks that a card and a host measured, layers left out, what fusion keeps, and stages."""

from __future__ import annotations

import io
import json
import logging
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from shapes_of_cases import CASES, DEEPSEEK_V2, GEMMA3, LLAMA, QWEN3_MOE, config_of

from tonnage.config import Limits
from tonnage.costs.activations import forward_peak, sampler_bytes
from tonnage.costs.config import ModelConfig
from tonnage.engine.attend import ATTENTION_NAME, attending, register_attention
from tonnage.engine.exact import FakeProbe
from tonnage.engine.exact import probe as probes
from tonnage.engine.exact.coefficients import records
from tonnage.engine.exact.fusion import compiled_events
from tonnage.engine.exact.probe import reserved_by, seen_step
from tonnage.engine.exact.skeleton import Skeleton
from tonnage.engine.exact.steps import forward, prompt_logprobs, sampling
from tonnage.engine.exact.trace import Region, Tracer, top_of
from tonnage.engine.family import FAMILIES
from tonnage.engine.sampling import Sampler
from tonnage.hardware import find_card, host_card
from tonnage.terms import Rank, Source, StepShape
from tonnage.units import GiB, MiB

ROOT = Path(__file__).parents[2]
LLAMA_8B = ModelConfig.read(ROOT / "examples/configs/llama-3.1-8b")
H200 = find_card("H200")


def trace_of(config: ModelConfig, tokens: int, rows: int = 0, *, packed: bool = False, most: int = 3):
    family = FAMILIES[config.model_type] if packed else None
    skeleton = Skeleton(config, dtype="bfloat16", layers=range(config.num_layers), family=family, layers_of_a_kind=most)
    return forward(skeleton, num_tokens=tokens, logits_rows=rows)


def limits(tokens: int, **changes: object) -> Limits:
    return Limits(
        **{"max_seq_len": 4096, "max_batch_size": 256, "max_num_tokens": tokens, "max_logits_rows": 256, **changes}
    )


@pytest.mark.parametrize(("tokens", "eager", "compiled"), [(2048, 233, 177), (8192, 932, 708), (16_384, 1864, 1416)])
def test_the_peaks_that_a_card_measured(tokens, eager, compiled):
    """MiB, on an H200: benchmarks/results/2026-11-29-h200-activations.md."""
    trace = trace_of(LLAMA_8B, tokens, 256)
    assert abs(top_of(trace.events).num_bytes - eager * MiB) <= 0.01 * eager * MiB
    assert abs(top_of(compiled_events(trace)[0]).num_bytes - compiled * MiB) <= 0.01 * compiled * MiB
    (record,) = (each for each in records() if f"operation by operation, {tokens:,} tokens" in each.case)
    assert (record.kind, record.estimated_bytes) == ("reserved", reserved_by([trace.events]))


class ResultAlone:
    def forward(self, prepared, layer, query, key, value, **_):
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe", "deepseek_v2"])
def test_fake_tensors_take_what_real_ones_take(name):
    """The library's own model with weights, on the host, under the same tracker."""
    shape, _ = CASES[name]
    config = config_of({**shape, "num_hidden_layers": 3})
    fake = top_of(trace_of(config, 32, 8).events).num_bytes
    library = transformers.CONFIG_MAPPING[config.model_type].from_dict(dict(config.raw))
    register_attention()
    model = transformers.AutoModelForCausalLM.from_config(
        library, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME
    ).eval()
    ids, positions, places = torch.zeros(1, 32).long(), torch.arange(32)[None], torch.arange(8)
    tracer = Tracer([*model.parameters(), *model.buffers(), ids, positions, places])
    with torch.no_grad(), attending(ResultAlone(), None), tracer:
        hidden = model.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state[0]
        logits = model.lm_head(hidden.index_select(0, places))
        del hidden, logits
    assert top_of(tracer.trace.events).num_bytes == pytest.approx(fake, rel=0.01)


@pytest.mark.parametrize("name", CASES)
def test_more_layers_change_nothing(name):
    """Peaks and reserved bytes of all layers are those of the few of each kind that are run."""
    shape, num_layers = CASES[name]
    config = config_of({**shape, "num_hidden_layers": num_layers})
    packed = bool(config.model_type in FAMILIES)
    few, all_ = (trace_of(config, 64, 8, packed=packed, most=most) for most in (3, 1000))
    assert len(few.ops) < len(all_.ops)
    for events, every in ((few.events, all_.events), (compiled_events(few)[0], compiled_events(all_)[0])):
        assert top_of(events).num_bytes == top_of(every).num_bytes
        assert reserved_by([events]) == reserved_by([every])


def test_what_is_filed_is_what_comes_out_today():
    """Estimates beside the host's measurements, and the records made of both."""
    filed = json.loads((ROOT / "benchmarks/results/2026-11-30-cpu-exact-peaks.json").read_text())["rows"]
    on_host = [record for record in records() if record.on == "host" and not record.kind.startswith("reserved")]
    assert len(on_host) == len(filed)
    for row, record in zip(filed, on_host, strict=True):
        seen, estimate = row["compiled"], row["compiled"]["estimate"]
        assert row["eager"]["allocated"] == pytest.approx(row["eager"]["estimate"]["allocated"], rel=2e-4)
        assert (record.measured_bytes, record.estimated_bytes) == (seen["allocated"], estimate["allocated"])
    filed_case = next(row for row in filed if row["case"] == "qwen3_moe" and row["packed"])
    config = config_of({**QWEN3_MOE, **SMALL_QWEN3_MOE})
    trace = trace_of(config, 1000, packed=True)
    shape = StepShape(num_tokens=1000)
    for mode, is_compiled in (("eager", False), ("compiled", True)):
        seen = seen_step("", shape, trace, config, is_compiled=is_compiled)
        assert seen.peak_bytes == filed_case[mode]["estimate"]["allocated"]


CODE = json.loads((ROOT / "benchmarks/results/2026-11-30-code-for-h200.json").read_text())["rows"]


@pytest.mark.parametrize(
    ("name", "shape", "packed"),
    [
        ("Llama-3.1-8B", LLAMA, True),
        ("Gemma-3-12B", GEMMA3, False),
        ("Qwen3-30B-A3B", QWEN3_MOE, True),
        ("DeepSeek-V2-Lite", DEEPSEEK_V2, False),
    ],
)
def test_the_rules_say_what_the_compiler_writes_for_a_card(name, shape, packed):
    """Within 0.2 % of the highest of its layers, by what Inductor wrote for an H200."""
    written = max(row["written"] for row in CODE if (row["case"], row["packed"]) == (name, packed))
    trace = trace_of(config_of(shape), 8192, packed=packed)
    assert top_of(compiled_events(trace)[0]).num_bytes == pytest.approx(written, rel=2e-3)


SMALL_QWEN3_MOE = {
    "hidden_size": 512, "head_dim": 32, "moe_intermediate_size": 192, "num_experts": 32, "num_hidden_layers": 3,
    "vocab_size": 1000,
}  # fmt: skip


def played(run, *known: torch.Tensor):
    """The trace of ``run(*known)`` as one region, its result returned."""
    tracer = Tracer(known)
    with torch.no_grad(), tracer:
        result = run(*known)
        tracer.trace.regions.append(
            Region(begin=0, first_op=0, end=len(tracer.trace.events), last_op=len(tracer.trace.ops))
        )
        del result
    return [num_bytes for _, num_bytes in compiled_events(tracer.trace)[0]]


def test_a_chain_of_pointwise_operations_is_one_tensor():
    x = torch.zeros(256)
    assert played(lambda x: ((x + 1) * 2).relu().exp(), x) == [1024, -1024]


def test_a_fused_kernel_writes_over_an_input_that_dies():
    x, w = torch.zeros(16, 16), torch.zeros(16, 16)
    # Two products, then one kernel over both: its result takes the place of the first.
    assert played(lambda x, w: (x @ w).relu() * (x @ w), x, w) == [1024, 1024, -1024, -1024]


def test_what_a_called_kernel_reads_is_kept():
    x, w = torch.zeros(16, 16), torch.zeros(16, 32)
    assert played(lambda x, w: (x + 1) @ w, x, w) == [1024, 2048, -1024, -2048]


def test_what_a_later_kernel_reads_is_kept_until_then():
    x, w = torch.zeros(16, 16), torch.zeros(16, 16)

    def run(x, w):
        kept = x @ w
        return (kept.relu() @ w) + kept

    # The product, what goes into the next, the next; the sum takes the place of the first that dies.
    assert played(run, x, w) == [1024, 1024, 1024, -1024, -1024, -1024]


def test_the_norm_of_a_residual_keeps_the_residual():
    x, w = torch.zeros(16, 16), torch.zeros(16, 64)

    def run(x, w):
        residual = x @ w[:, :16]
        normed = residual / residual.pow(2).mean(-1, keepdim=True).sqrt()
        return (normed @ w)[:, :16] + residual

    assert max_of(played(run, x, w)) == 1024 + 1024 + 4096


def test_what_took_the_place_of_an_unaligned_buffer_waits_for_nobody():
    """As Inductor writes both: a sort makes its own result, which it takes for unaligned, and a sum over it is."""
    x, w = torch.zeros(16, 16), torch.zeros(16, 16)

    def products(first):
        return ((first.relu() + 1) @ w) @ w

    assert played(lambda x, w: products(x @ w), x, w) == [1024, 1024, -1024, -1024]
    sorted_one = played(lambda x, w: products(torch.ops.aten.sort.default(x)[0]), x, w)
    assert [size for size in sorted_one if abs(size) == 1024] == [1024, 1024, -1024, 1024, -1024, -1024]


def max_of(sizes: list[int]) -> int:
    live = best = 0
    for size in sizes:
        live += size
        best = max(best, live)
    return best


BAR = {"llama": LLAMA_8B, "qwen3_moe": QWEN3_MOE, "gemma3": GEMMA3, "deepseek_v2": DEEPSEEK_V2}


@pytest.mark.parametrize("name", BAR)
def test_intervals_are_narrow_and_below_what_runs_uncompiled(name):
    config = BAR[name] if isinstance(BAR[name], ModelConfig) else config_of(BAR[name])
    probe = FakeProbe()
    for tokens in (2048, 8192, 16_384):
        stages = probe.stages(config, card=H200, limits=limits(tokens), rank=Rank(), dtype="bfloat16")
        assert [stage.stage for stage in stages] == ["prefill", "decode", "sampler"]
        for stage in stages:
            allocated, reserved = stage.allocated, stage.reserved
            assert allocated.source == reserved.source == Source.SIMULATED
            assert 0 < allocated.high - allocated.low <= 0.15 * allocated.bytes
            assert allocated.low <= allocated.bytes <= allocated.high
            assert reserved.low <= reserved.bytes <= reserved.high
            assert allocated.bytes <= reserved.bytes
        prefill = stages[0]
        assert prefill.allocated.high <= prefill.uncompiled_bytes
        if config.model_type in FAMILIES:
            assert prefill.reserved.high - prefill.reserved.low <= 0.15 * prefill.reserved.bytes
    assert probe.notes == []


def test_limits_that_a_step_does_not_feel_are_not_run_again():
    probe = FakeProbe()
    found = [
        probe.stages(LLAMA_8B, card=H200, limits=limits(64, max_seq_len=length), rank=Rank(), dtype="bfloat16")
        for length in (100, 200)
    ]
    assert found[0] is found[1]


def test_a_search_for_fewer_tokens_runs_the_prefill_alone(monkeypatch):
    """Of decodes and draws nothing changes."""
    run, drawn = [], []

    def watched(*given, num_tokens, **how):
        run.append(num_tokens)
        return forward(*given, num_tokens=num_tokens, **how)

    monkeypatch.setattr(probes, "forward", watched)
    monkeypatch.setattr(Sampler, "draw", lambda *given, real=Sampler.draw: drawn.append(1) or real(*given))
    probe = FakeProbe()
    for tokens in (200, 100):
        probe.stages(LLAMA_8B, card=H200, limits=limits(tokens, max_logits_rows=7), rank=Rank(), dtype="bfloat16")
    assert run == [200, 7, 100]
    assert len(drawn) == 1


def test_prompts_may_want_logprobs():
    probe = FakeProbe()
    asked = limits(2048, prompt_logprobs=True, max_logprobs=20, penalties=True)
    stages = probe.stages(LLAMA_8B, card=H200, limits=asked, rank=Rank(), dtype="bfloat16")
    assert [stage.stage for stage in stages] == ["prefill", "decode", "prompt log-probs", "sampler"]


def test_the_sampler_stays_below_its_formula():
    trace = sampling(
        hidden_bytes=64 * 4096 * 2,
        logits_rows=64,
        vocab_size=32_000,
        dtype="bfloat16",
        num_logprobs=20,
        penalties=True,
        tile_elements=2**22,
    )
    config = replace(LLAMA_8B, vocab_size=32_000)
    formula = sampler_bytes(config, logits_rows=64)
    assert 0.85 * formula <= top_of(trace.events).num_bytes <= formula


def test_draws_hold_the_hidden_states_of_their_rows():
    asked = {"logits_rows": 8, "vocab_size": 1000, "dtype": "bfloat16", "num_logprobs": 5, "tile_elements": 2**22}
    for is_plain in (True, False):
        with_, without = (
            top_of(sampling(hidden_bytes=size, penalties=False, is_plain=is_plain, **asked).events)
            for size in (10 * MiB, 512)
        )
        assert with_.num_bytes - without.num_bytes == 10 * MiB - 512


def test_logprobs_of_a_prompt_hold_its_hidden_states():
    common = {"logits_rows": 8, "vocab_size": 1000, "dtype": "bfloat16", "num_logprobs": 5, "tile_elements": 2**22}
    with_, without = (top_of(prompt_logprobs(hidden_bytes=size, **common).events) for size in (10 * MiB, 512))
    assert with_.num_bytes - without.num_bytes == 10 * MiB - 512


def test_a_host_runs_its_layers_as_they_are():
    stages = FakeProbe().stages(
        LLAMA_8B, card=host_card(64 * GiB), limits=limits(512, max_logits_rows=8), rank=Rank(), dtype="bfloat16"
    )
    packed = top_of(trace_of(LLAMA_8B, 512, 8, packed=True).events).num_bytes
    assert stages[0].allocated.bytes == packed == stages[0].uncompiled_bytes


def test_tensor_parallel_ranks_share_heads_and_widths():
    """Beside the closed form of the same rank, which counts projections apart."""
    skeleton = Skeleton(LLAMA_8B, dtype="bfloat16", layers=range(32), family=None, tp=8)
    counted = top_of(forward(skeleton, num_tokens=8192, logits_rows=256).events).num_bytes
    closed = forward_peak(LLAMA_8B, num_tokens=8192, logits_rows=256, rank=Rank(size=8, tp=8)).bytes
    assert abs(counted - closed) <= 0.02 * closed


def test_a_stage_without_a_head_has_no_logits():
    probe = FakeProbe()
    first, last = (Rank(index=index, size=2, pp=2) for index in range(2))
    on_first, on_last = (
        probe.stages(LLAMA_8B, card=H200, limits=limits(512), rank=rank, dtype="bfloat16") for rank in (first, last)
    )
    assert [stage.stage for stage in on_first] == ["prefill", "decode"]
    assert [stage.stage for stage in on_last] == ["prefill", "decode", "sampler"]
    assert on_first[1].allocated.bytes < on_last[1].allocated.bytes


@pytest.mark.parametrize(
    ("raw", "rank", "said"),
    [
        ({**LLAMA, "model_type": "llama_of_tomorrow"}, Rank(), "no class for the model type"),
        ({**LLAMA, "intermediate_size": 14_338}, Rank(size=8, tp=8), "cannot be shared by 8 ranks"),
        ({"model_type": "gpt2"}, Rank(size=4, tp=4), "it makes heads of 512 where 128 is asked"),
        (LLAMA, Rank(size=2, cp=2), "no config.json describes"),
        ({**LLAMA, "num_attention_heads": 7, "num_key_value_heads": 3}, Rank(), "its class stopped"),
    ],
)
def test_what_cannot_be_run_is_told_and_left_to_closed_forms(raw, rank, said):
    probe = FakeProbe()
    config = replace(LLAMA_8B, raw={**LLAMA_8B.raw, **raw}, model_type=raw["model_type"])
    for _ in range(2):
        assert probe.stages(config, card=H200, limits=limits(512), rank=rank, dtype="bfloat16") is None
    (note,) = probe.notes
    assert said in note
    assert "closed forms" in note


def test_a_class_that_logs_its_failure_is_told_once():
    """By the warning alone; logs, warnings and torch's defaults are as they were afterwards."""
    log, said = logging.getLogger("transformers"), logging.StreamHandler(io.StringIO())

    def state():
        return log.level, list(warnings.filters), torch.get_default_dtype(), torch.get_default_device()

    before = state()
    raw = {**LLAMA_8B.raw, "model_type": "mllama", "vision_config": {"max_aspect_ratio_id": 8}}
    probe = FakeProbe()
    log.addHandler(said)
    try:
        found = probe.stages(
            replace(LLAMA_8B, raw=raw, model_type="mllama"),
            card=H200,
            limits=limits(512),
            rank=Rank(),
            dtype="bfloat16",
        )
    finally:
        log.removeHandler(said)
    assert found is None
    assert "max_aspect_ratio_id" in probe.notes[0]
    assert said.stream.getvalue() == ""
    assert state() == before


def test_quantised_weights_are_run_as_plain_ones_and_told():
    probe = FakeProbe()
    config = replace(LLAMA_8B, raw={**LLAMA_8B.raw, "quantization_config": {"quant_method": "fp8"}})
    plain, quantised = (
        FakeProbe().stages(LLAMA_8B, card=H200, limits=limits(64), rank=Rank(), dtype="bfloat16"),
        probe.stages(config, card=H200, limits=limits(64), rank=Rank(), dtype="bfloat16"),
    )
    assert plain == quantised
    (note,) = probe.notes
    assert "as if its weights were plain" in note


def test_recurrent_layers_are_left_to_closed_forms():
    config = ModelConfig.from_dict({"model_type": "lfm2", "hidden_size": 64, "num_hidden_layers": 3,
                                    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
                                    "vocab_size": 100, "max_position_embeddings": 64,
                                    "layer_types": ["conv", "full_attention", "conv"]}, name="lfm2")  # fmt: skip
    probe = FakeProbe()
    assert probe.stages(config, card=H200, limits=limits(32), rank=Rank(), dtype="bfloat16") is None
    assert "recurrent" in probe.notes[0]
