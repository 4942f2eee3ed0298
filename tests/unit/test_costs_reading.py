"""Published files that say less than the classes know: positions, towers, encoders, families, packings."""

from __future__ import annotations

import pytest

from tonnage.config import LimitKnobs, Setting
from tonnage.costs.config import ASSUMED_POSITIONS, ModelConfig
from tonnage.costs.price import weights_price
from tonnage.costs.quantised import Packing, Span
from tonnage.errors import InvalidSetting, ModelConfigError, UnsupportedModel
from tonnage.planner.limits import resolve_limits
from tonnage.terms import Source

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}
MAMBA2 = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "hidden_size": 4096,
    "num_hidden_layers": 64,
    "num_heads": 128,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 8,
    "expand": 2,
    "conv_kernel": 4,
    "vocab_size": 32768,
    "torch_dtype": "bfloat16",
}
T5_SMALL = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "d_ff": 2048,
    "d_kv": 64,
    "d_model": 512,
    "n_positions": 512,
    "num_heads": 8,
    "num_layers": 6,
    "is_encoder_decoder": True,
    "vocab_size": 32128,
}
BART = {
    "architectures": ["BartForConditionalGeneration"],
    "model_type": "bart",
    "d_model": 1024,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
    "max_position_embeddings": 1024,
    "vocab_size": 50264,
    "is_encoder_decoder": True,
}
WHISPER = {
    **BART,
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "num_mel_bins": 128,
}
MLLAMA = {
    "architectures": ["MllamaForConditionalGeneration"],
    "model_type": "mllama",
    "text_config": {"model_type": "mllama_text_model", "cross_attention_layers": [3, 8], "num_hidden_layers": 10},
    "vision_config": {
        "model_type": "mllama_vision_model",
        "hidden_size": 1280,
        "image_size": 560,
        "patch_size": 14,
        "max_num_tiles": 4,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
    },
}
QWEN_TEXT = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 152064,
}
QWEN_VISION = {"depth": 32, "num_heads": 16, "in_chans": 3, "patch_size": 14, "spatial_patch_size": 14,
               "spatial_merge_size": 2, "temporal_patch_size": 2}  # fmt: skip
#: The two published 7B files: the vision part names no model_type.
QWEN2_VL = {
    **QWEN_TEXT,
    "model_type": "qwen2_vl",
    "vision_config": {**QWEN_VISION, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4},
}
QWEN2_5_VL = {
    **QWEN_TEXT,
    "model_type": "qwen2_5_vl",
    "vision_config": {**QWEN_VISION, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584},
}


def read(raw, **changes):
    return ModelConfig.from_dict({**raw, **changes}, name="tiny")


def limits(config, **asked):
    return resolve_limits(config, LimitKnobs(**{key: Setting(value) for key, value in asked.items()}))[0]


def test_a_model_without_positions_takes_long_sequences():
    config = read(MAMBA2)
    assert config.max_position_embeddings == ASSUMED_POSITIONS == 1_048_576
    assert any("1,048,576 are our own limit" in note for note in config.notes)
    assert limits(config, max_seq_len=262_144).max_seq_len == 262_144
    with pytest.raises(InvalidSetting, match="1,048,576"):
        limits(config, max_seq_len=ASSUMED_POSITIONS + 1)


@pytest.mark.parametrize(
    ("raw", "num_bytes"), [(QWEN2_VL, 16_582_751_232), (QWEN2_5_VL, 16_584_333_312)], ids=["qwen2_vl", "qwen2_5_vl"]
)
def test_a_silent_vision_part_is_of_the_class_that_the_model_has(raw, num_bytes):
    """What the index files published with the two models state."""
    quantity = weights_price(read(raw)).quantity
    assert (quantity.bytes, quantity.low, quantity.high) == (num_bytes, num_bytes, num_bytes)
    assert quantity.source == Source.DERIVED


@pytest.mark.parametrize("raw", [QWEN2_VL, QWEN2_5_VL], ids=["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("key", ["depth", "num_heads", "patch_size", "temporal_patch_size"])
def test_sizes_that_a_vision_part_leaves_out_are_those_of_its_class(raw, key):
    vision = {name: value for name, value in raw["vision_config"].items() if name != key}
    config = read(raw, vision_config=vision)
    assert weights_price(config).quantity.bytes == weights_price(read(raw)).quantity.bytes
    assert any(key in note for note in config.notes)


@pytest.mark.parametrize(
    ("model_type", "kind"), [("llava", "some_tower"), ("internvl", None), ("qwen2_audio", None), ("new_vl", None)]
)
def test_a_tower_whose_class_is_a_guess_has_a_bar(model_type, kind):
    vision = {"hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 96, "patch_size": 14, "image_size": 56}
    if kind:
        vision["model_type"] = kind
    quantity = weights_price(read(LLAMA, model_type=model_type, text_config=LLAMA, vision_config=vision)).quantity
    assert quantity.source == Source.PREDICTED
    assert quantity.low < quantity.bytes < quantity.high


@pytest.mark.parametrize(
    ("raw", "tokens"), [(WHISPER, 1500), (BART, 1024), (T5_SMALL, 512), (MLLAMA, 4 * (40 * 40 + 1))]
)
def test_cross_attention_keeps_what_the_encoder_gives(raw, tokens):
    config = read(raw)
    assert config.encoder_tokens == tokens
    assert limits(config).max_encoder_tokens == tokens
    assert limits(config, max_encoder_tokens=100).max_encoder_tokens == 100


@pytest.mark.parametrize(("raw", "tokens"), [(QWEN2_5_VL, 8192), (LLAMA, 0)])
def test_a_tower_beside_the_text_runs_in_the_step(raw, tokens):
    config = read(raw)
    assert config.encoder_tokens is None
    assert limits(config).max_encoder_tokens == tokens


def test_t5_ties_its_embeddings_unless_the_file_says_no():
    """60,506,624 parameters published; the relative positions and missing biases are within the bar."""
    quantity = weights_price(read(T5_SMALL)).quantity
    assert quantity.low < 4 * 60_506_624 < quantity.high
    assert abs(quantity.bytes - 4 * 60_506_624) < 4 * 60_506_624 // 1000
    untied = weights_price(read(T5_SMALL, tie_word_embeddings=False)).quantity
    assert untied.bytes - quantity.bytes == 4 * 512 * 32128


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({**LLAMA, "model_type": "bert", "architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ({**LLAMA, "model_type": "bert", "architectures": ["BertModel"]}, "BertModel"),
        ({**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"model_type": "vit", "architectures": ["ViTForImageClassification"]}, "ViTForImageClassification"),
        ({"model_type": "clip", "architectures": ["CLIPModel"]}, "CLIPModel"),
        ({"model_type": "roberta"}, "the family 'roberta'"),
        ({"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"]}, "Wav2Vec2ForCTC"),
        ({**T5_SMALL, "architectures": ["T5EncoderModel"]}, "T5EncoderModel"),
        ({"model_type": "esm", "architectures": ["EsmForTokenClassification"]}, "EsmForTokenClassification"),
        ({"_class_name": "UNet2DConditionModel"}, "UNet2DConditionModel, a part of a diffusion pipeline"),
    ],
)
def test_models_that_write_no_text_are_refused_as_such(raw, told):
    with pytest.raises(UnsupportedModel, match="is not a model that generates text") as caught:
        read(raw)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "classes", [None, [], ["LlamaModel"], ["LlamaForCausalLM"], ["LlamaLMHeadModel"], ["XForCausalLM", "XForMaskedLM"]]
)
def test_models_that_write_are_read(classes):
    assert read(LLAMA, architectures=classes).num_layers == 4


def test_an_unknown_model_type_is_read_like_a_llama():
    known, unknown = read(LLAMA), read(LLAMA, model_type="llama9")
    assert "model_type 'llama9' is not known to this release: read like a Llama" in unknown.notes
    assert unknown.layers == known.layers
    quantity, exact = weights_price(unknown).quantity, weights_price(known).quantity
    assert (quantity.bytes, quantity.source) == (exact.bytes, Source.PREDICTED)
    assert quantity.low * 5 < quantity.bytes * 4 < quantity.high * 4
    with pytest.raises(ModelConfigError, match="num_hidden_layers is missing") as caught:
        ModelConfig.from_dict({"model_type": "llama9", "hidden_size": 64})
    assert "not known to this release" in str(caught.value)


@pytest.mark.parametrize(
    "packing",
    [
        {"quant_method": "hqq"},
        {"quant_method": "quanto", "weights": "int8"},
        {"bits": 4},
        {"quant_method": "gptq", "bits": 3},
        {"quant_method": "modelopt", "quant_algo": "W2A2"},
    ],
)
def test_an_unknown_packing_is_told_without_blaming_the_file(packing):
    with pytest.raises(ModelConfigError, match="quantization_config") as caught:
        read(LLAMA, quantization_config=packing)
    assert "that was published" not in str(caught.value)
    assert "plan a checkpoint of the model that is not packed" in str(caught.value)


@pytest.mark.parametrize(
    ("packing", "bytes_each"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1),
        ({"quant_method": "fp8", "activation_scheme": "static"}, 1),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 1),
    ],
)
def test_one_byte_an_element_and_few_for_scales(packing, bytes_each):
    """A layer's matrices of 64 x (64 + 16 + 16 + 64) and 3 x 64 x 128 elements; the vocabulary stays wide."""
    matrices = 4 * (64 * 160 + 3 * 64 * 128)
    rest = 2 * 2 * 64_000 + 2 * (4 * 2 + 1) * 64
    quantity = weights_price(read(LLAMA, quantization_config=packing)).quantity
    scales = quantity.bytes - rest - matrices * bytes_each
    assert 0 < scales < matrices // 10


@pytest.mark.parametrize(
    ("block", "scales"), [([128, 128], 2 * 3), ([1, 128], 200 * 3), ([64, 128], 4 * 3), ([128, 64], 2 * 5)]
)
def test_a_block_of_any_shape_has_one_scale(block, scales):
    config = read(LLAMA, quantization_config={"quant_method": "fp8", "weight_block_size": block})
    assert Packing.of(config).span(200, 300) == Span.exact(200 * 300 + 4 * scales)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("part", [None, "text_config", "llm_config"])
def test_a_packing_is_the_same_wherever_it_is_written(key, part):
    packing = {"quant_method": "fp8", "weight_block_size": [64, 128]}
    config = read({"model_type": "outer", part: {**LLAMA, key: packing}} if part else {**LLAMA, key: packing})
    assert Packing.of(config).span(200, 300) == Span.exact(200 * 300 + 4 * 4 * 3)


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [("W8A16", "int8"), ("W8A8_SQ_PER_CHANNEL", "int8"), ("FP8", "fp8"), ("NVFP4", "nvfp4"), ("W4A16_AWQ", "int4")],
)
def test_what_the_algorithms_of_one_tool_keep_in_memory(algorithm, name):
    packing = {"quant_method": "modelopt", "quant_algo": algorithm}
    assert read(LLAMA, quantization_config=packing).quantisation.format == name


def test_relative_positions_are_none():
    """mT5's published files give no length at all."""
    raw = {key: value for key, value in T5_SMALL.items() if key != "n_positions"}
    config = read(raw, model_type="mt5", feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    assert (config.max_position_embeddings, config.encoder_tokens) == (ASSUMED_POSITIONS, None)
    assert limits(config, max_seq_len=4096).max_encoder_tokens == 8192


def test_nllb_is_read_like_bart():
    """NLLB-200-distilled-600M: 615,073,792 parameters published."""
    raw = {**BART, "model_type": "m2m_100", "vocab_size": 256_206}
    quantity = weights_price(read(raw)).quantity
    assert quantity.low < 4 * 615_073_792 < quantity.high
    assert abs(quantity.bytes - 4 * 615_073_792) * 100 < quantity.bytes
