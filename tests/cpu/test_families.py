"""Every family that the engine runs against transformers on the same small random weights.

Rule in float32, as in test_generation.py: equal to ``generate`` up to the first position whose two best logits are less
than ``GAP`` apart, log-probabilities within ``GAP`` up to there. In bfloat16 rounding may turn any token, so that the
engine's own text is read by transformers: against float32 on the same rounded weights, its log-probabilities may be
off by ``COARSE`` times what transformers' own bfloat16 is off by at most, and its tokens behind the best ones too.
"""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_models import MODELS, library_config, library_model, save

from tonnage.attention.base import FEATURES
from tonnage.config import LimitKnobs, Setting
from tonnage.costs.config import ModelConfig
from tonnage.costs.price import weights_price
from tonnage.costs.traits import CLASS_SOFT_CAPS
from tonnage.engine import EngineOptions, family, features, start
from tonnage.engine.family import FAMILIES, family_of
from tonnage.engine.features import PASSED_ON, WORDS, needed_features, refuse_missing
from tonnage.engine.models import quiet_transformers
from tonnage.engine.weights import arena_layout, experts_implementation
from tonnage.errors import ModelConfigError, UnsupportedModel
from tonnage.sampling import SamplingParams
from tonnage.terms import Rank
from tonnage.units import MiB

GAP, COARSE = 1e-3, 2
NEW_TOKENS = 12
PROMPTS = [[7], list(range(30, 47)), [(11 * i) % 256 for i in range(60)]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder and its float32 model for each name, made when first asked for."""
    made = {}

    def of(name):
        if name not in made:
            model = library_model(name)
            made[name] = save(model, tmp_path_factory.mktemp(name.partition(",")[0])), model
        return made[name]

    return of


def serve(folder, *, dtype: str) -> list:
    """Greedy completions of ``PROMPTS`` at once, in chunks of 16 tokens beside decodes."""
    limits = LimitKnobs(max_seq_len=Setting(96), max_batch_size=Setting(4), max_num_tokens=Setting(64))
    options = EngineOptions(
        model=str(folder), memory_bytes=512 * MiB, limit_knobs=limits, dtype=dtype, chunk_tokens=16, fence=False
    )
    with start(options) as engine:
        for i, prompt in enumerate(PROMPTS):
            params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
            engine.submit(engine.request(f"p{i}", params, token_ids=prompt))
        done = {}
        while engine.has_work:
            done.update({completion.request_id: completion for completion in engine.step()})
    return [done[f"p{i}"] for i in range(len(PROMPTS))]


def require_equal_to_generate(model, completions) -> None:
    compared = 0
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        logits = torch.cat(list(out.logits))
        best = logits.topk(2, dim=-1).values
        for i, token in enumerate(out.sequences[0, len(prompt) :].tolist()):
            if completion.token_ids[i] != token:
                assert best[i, 0] - best[i, 1] < GAP, f"{len(prompt)} tokens: differs at {i}"
                break
            assert abs(completion.logprobs[i] - float(logits[i].log_softmax(-1)[token])) < GAP
            compared += 1
    assert compared >= 0.9 * NEW_TOKENS * len(PROMPTS)


def require_errors_of_rounding(model, completions) -> None:
    """``model`` holds weights in bfloat16."""
    exact = copy.deepcopy(model.requires_grad_(requires_grad=False)).float()
    engine = library = loss = 0.0
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        text = torch.tensor([[*prompt, *completion.token_ids[:-1]]])
        rounded, logits = (each(text, use_cache=False).logits[0, len(prompt) - 1 :].float() for each in (model, exact))
        places = torch.arange(NEW_TOKENS), torch.tensor(completion.token_ids)
        truth = logits.log_softmax(-1)[places]
        library = max(library, float((rounded - logits).abs().max()))
        engine = max(engine, float((torch.tensor(completion.logprobs) - truth).abs().max()))
        loss = max(loss, float((logits.max(-1).values - logits[places]).max()))
    print(f"\nerrors: engine {engine:.3f}, library {library:.3f}, behind the best token {loss:.3f}")
    assert engine <= COARSE * library
    assert loss <= COARSE * library


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_equals_generate_in_float32(folders, name):
    folder, model = folders(name)
    require_equal_to_generate(model, serve(folder, dtype="float32"))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_moe", "gemma", "gemma2", "gemma3", "phi", "phi3"])
def test_bfloat16_is_as_good_as_the_library_s_own(folders, tmp_path, name):
    folder, model = folders(name)
    with quiet_transformers():
        eager = {"experts_implementation": "eager", "attn_implementation": "eager"}
        model = type(model).from_pretrained(folder, dtype=torch.bfloat16, **eager).eval()
    require_errors_of_rounding(model, serve(folder, dtype="bfloat16"))


@pytest.mark.parametrize("name", ["llama, biases", "qwen2_moe"])
def test_text_is_the_same_without_packing(folders, monkeypatch, name):
    folder, model = folders(name)
    model_type = MODELS[name][0]
    monkeypatch.setattr(family, "FAMILIES", {model_type: replace(FAMILIES[model_type], packs=())})
    require_equal_to_generate(model, serve(folder, dtype="float32"))


def test_every_family_is_tried_here():
    assert {model_type for model_type, _ in MODELS.values()} == set(FAMILIES)


# -- what is allocated --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_the_arena_is_the_size_that_the_planner_prices(folders, name):
    """Rounding aside: each tensor of the arena begins at a multiple of 64 bytes."""
    folder, model = folders(name)
    config = ModelConfig.read(folder)
    layout = arena_layout(folder, config, FAMILIES[config.model_type], dtype="bfloat16", rank=Rank())
    assert layout.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    priced = weights_price(config, dtype="bfloat16").quantity.bytes
    assert 0 <= layout.total_bytes - priced <= 64 * len(layout.tensors)


def test_experts_are_one_product_where_their_rows_allow_it():
    config = library_config("qwen3_moe")
    assert experts_implementation(config, "float32") == experts_implementation(config, "bfloat16") == "grouped_mm"
    config.moe_intermediate_size = 20  # 40 bytes a row in bfloat16
    assert experts_implementation(config, "bfloat16") == "eager"
    assert experts_implementation(config, "float32") == "grouped_mm"
    assert experts_implementation(library_config("llama"), "bfloat16") is None


def test_experts_of_odd_rows_run_one_by_one(tmp_path):
    model = library_model("qwen3_moe", moe_intermediate_size=20).to(torch.bfloat16)
    save(model, tmp_path)
    require_errors_of_rounding(model, serve(tmp_path, dtype="bfloat16"))


def test_experts_kept_whole_in_the_file_are_read_too(folders, tmp_path):
    from safetensors.torch import save_file

    folder, model = folders("mixtral")
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file({name: each.contiguous() for name, each in model.state_dict().items()}, tmp_path / "model.safetensors")
    require_equal_to_generate(model, serve(tmp_path, dtype="float32"))


def test_a_missing_expert_is_told_by_the_array_that_lacks_it(folders, tmp_path):
    from safetensors.torch import load_file, save_file

    folder, _ = folders("mixtral")
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.3.w3.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelConfigError, match=r"lack 1 tensors, among them model\.layers\.1\.mlp\.experts\.gate_up"):
        serve(tmp_path, dtype="float32")


# -- what is refused ----------------------------------------------------------------------------------------------


LAYERS = {
    "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}  # fmt: skip
#: What a class needs beyond plain attention: model_type, config, feature, what is told. Backends have these ...
SERVED = [
    ("mistral", {"sliding_window": 512}, "window", "a window of 512 tokens in 4 of 4 layers"),
    ("phi3", {"sliding_window": 2047}, "window", "a window of 2047 tokens in 4 of 4 layers"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, "window", "in 2 of 4 layers"),
    ("gemma2", {}, "softcap", "attn_logit_softcapping = 50.0"),
    ("gemma3_text", {"head_dim": 16, "sliding_window": 512}, "window", "a window of 512 tokens"),
    ("cohere2", {"sliding_window": 512}, "window", "in 3 of 4 layers"),
    ("gpt_oss", {}, "sinks", "one learned sink a head in the class of gpt_oss"),
]  # fmt: skip
#: ... and these the engine would otherwise ignore without a word.
NEEDS = [
    ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional", "use_bidirectional_attention = True"),
    ("llama4_text", {"attention_chunk_size": 64}, "chunks", "attention_chunk_size = 64 in 3 of 4 layers"),
    ("bloom", {"n_layer": 4, "n_head": 4}, "alibi", "position biases in bloom"),
    ("mamba2", {"num_heads": 4, "head_dim": 32}, "state", "a mamba2 state in 4 of 4 layers"),
    ("deepseek_v3", {}, "latent", "a latent of 512 elements in 4 of 4 layers"),
    ("t5", {}, "encoder", "is_encoder_decoder"),
]  # fmt: skip


def config_of(model_type, changes) -> ModelConfig:
    from transformers import AutoConfig

    library = AutoConfig.for_model(model_type, **{**LAYERS, **changes})
    return ModelConfig.from_dict(library.to_dict(), name="tiny")


@pytest.mark.parametrize(("model_type", "changes", "feature", "told"), NEEDS)
def test_what_would_be_ignored_is_refused_by_name(model_type, changes, feature, told):
    config = config_of(model_type, changes)
    assert told in needed_features(config)[feature]
    with pytest.raises(
        UnsupportedModel, match=r"^tiny: this model needs .*, which the engine does not run yet\. Have: "
    ):
        family_of(config, attention="sdpa")


@pytest.mark.parametrize(("model_type", "changes", "feature", "told"), SERVED)
def test_what_backends_have_is_told_and_runs_where_the_family_does(model_type, changes, feature, told):
    config = config_of(model_type, changes)
    assert told in needed_features(config)[feature]
    assert set(needed_features(config)) <= PASSED_ON
    if model_type in FAMILIES:
        assert family_of(config, attention="sdpa") is family_of(config, attention="triton") is FAMILIES[model_type]
    else:
        with pytest.raises(UnsupportedModel, match=f"Models of type '{model_type}' are not run"):
            family_of(config, attention="sdpa")


def test_layers_whose_heads_differ_are_refused():
    config = config_of("llama", {})
    first, *others = config.layers
    (mixer,) = first.mixers
    config = replace(config, layers=(replace(first, mixer=replace(mixer, num_kv_heads=2)), *others))
    with pytest.raises(UnsupportedModel, match="needs layers whose heads differ"):
        family_of(config, attention="sdpa")


def test_a_feature_the_backend_lacks_is_refused_with_the_backends_that_have_it(monkeypatch):
    monkeypatch.setattr(features, "BACKENDS", {"sdpa": "", "triton": "", "flashinfer": ""})
    config = config_of("gemma2", {"layer_types": ["full_attention"] * 4})
    table = {"softcap": ("triton", "flashinfer")}
    with pytest.raises(UnsupportedModel) as caught:
        refuse_missing(config, attention="sdpa", table=table)
    assert str(caught.value) == (
        "tiny: the attention backend 'sdpa' has no soft-cap on attention scores, which this model needs. "
        "Need: a backend with it: triton or flashinfer. Have: attn_logit_softcapping = 50.0. "
        "To change: run with attention triton or flashinfer."
    )
    refuse_missing(config, attention="triton", table=table)
    with pytest.raises(UnsupportedModel, match="does not run yet"):
        refuse_missing(config, attention="triton", passed_on=set(), table=table)


def test_features_of_backends_have_words_and_only_backends_of_ours():
    assert set(FEATURES) <= set(WORDS)
    assert set(PASSED_ON) <= set(FEATURES)


@pytest.mark.parametrize("name", MODELS)
def test_the_families_here_need_nothing_that_backends_lack(name):
    needed = needed_features(ModelConfig.from_dict(library_config(name).to_dict()))
    assert ("window" in needed) == (name in WINDOWED)
    assert needed.keys() <= {"window", "softcap"}


#: Those of ``MODELS`` with layers that see a part of a text.
WINDOWED = [name for name in MODELS if "window" in name and "beyond" not in name] + ["gemma2", "gemma3"]


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
def test_soft_caps_that_a_class_assumes(model_type):
    from transformers import AutoConfig

    assert AutoConfig.for_model(model_type).attn_logit_softcapping == CLASS_SOFT_CAPS.get(model_type)


def test_packed_weights_and_towers_are_refused():
    raw = library_config("llama").to_dict()
    packed = ModelConfig.from_dict({**raw, "quantization_config": {"quant_method": "fp8"}})
    assert "fp8" in needed_features(packed)["packed weights"]
    with pytest.raises(UnsupportedModel, match="needs weights in a packed format"):
        family_of(packed, attention="sdpa")


def test_a_family_that_nobody_tried_is_refused_with_those_that_are():
    raw = {**library_config("llama").to_dict(), "model_type": "stablelm", "architectures": ["StableLmForCausalLM"]}
    with pytest.raises(UnsupportedModel, match=r"'stablelm' are not run.*gemma2.*qwen3_moe.*StableLmForCausalLM"):
        family_of(ModelConfig.from_dict(raw), attention="sdpa")


def test_the_page_on_models_lists_the_families():
    page = (Path(__file__).parents[2] / "docs/models.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", page, re.MULTILINE)
    assert rows.pop(0)[0] == "model_type"
    assert [name for name, _ in rows] == list(FAMILIES)
    for name, packed in rows:
        assert ("q k v" in packed, "gate up" in packed) == tuple(
            any(part in pack.parts for pack in FAMILIES[name].packs) for part in ("q_proj", "gate_proj")
        )
