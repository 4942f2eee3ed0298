"""Vision parts that leave out their class, or sizes that their class assumes, against the library's own models."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from tonnage.costs.config import ModelConfig
from tonnage.costs.encoders import _CLASS_SIZES
from tonnage.costs.price import weights_price
from tonnage.costs.reading import LIKE_BART, LIKE_T5
from tonnage.terms import Source

TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 1003,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
VIT = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80}
PATCHES = {"patch_size": 14, "image_size": 56}
QWEN = {"hidden_size": 48, "depth": 2, "num_heads": 4, "intermediate_size": 80, "out_hidden_size": 64}
LLAMA4 = {**VIT, **PATCHES, "vision_output_dim": 40, "projector_input_dim": 40, "projector_output_dim": 40}
MLLAMA = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_global_layers": 1,
    "attention_heads": 4,
    "intermediate_size": 80,
    "vision_output_dim": 96,
    "image_size": 56,
    "intermediate_layers_indices": [0],
}
LLAMA, MISTRAL = {**TEXT, "model_type": "llama"}, {**TEXT, "model_type": "mistral", "head_dim": 16}
UNTIED = {"tie_word_embeddings": False}

#: As published files have it: no ``model_type`` in the vision part, or the type and hardly a size.
CASES: list[tuple[str, dict[str, object], dict[str, object], dict[str, object]]] = [
    ("qwen2_vl", TEXT, {"embed_dim": 48, "depth": 2, "num_heads": 4, "hidden_size": 64, "in_chans": 3}, {}),
    ("qwen2_vl", TEXT, {"depth": 2, "hidden_size": 64}, {}),
    ("qwen2_5_vl", TEXT, {**QWEN, "in_chans": 3}, {}),
    ("qwen2_5_vl", TEXT, {"hidden_size": 48, "depth": 2, "out_hidden_size": 64, "num_heads": 4}, {}),
    ("qwen3_vl", {**TEXT, "head_dim": 16}, {**QWEN, "deepstack_visual_indexes": [1]}, {}),
    ("gemma3", {**TEXT, "head_dim": 16}, {**VIT, **PATCHES}, {"mm_tokens_per_image": 4}),
    ("llava", LLAMA, {**VIT, **PATCHES}, UNTIED),
    ("llava", LLAMA, {"model_type": "clip_vision_model", "num_hidden_layers": 3}, UNTIED),
    ("llava", MISTRAL, {"model_type": "pixtral", "head_dim": 64, "image_size": 1024, "patch_size": 16}, UNTIED),
    ("mistral3", MISTRAL, {**VIT, **PATCHES}, UNTIED),
    ("llama4", {**TEXT, "head_dim": 16, "intermediate_size_mlp": 80, "num_local_experts": 4}, LLAMA4, {}),
    ("mllama", {**TEXT, "cross_attention_layers": [1]}, MLLAMA, {}),
]


@pytest.mark.parametrize(("model_type", "text", "vision", "changes"), CASES)
def test_a_vision_part_of_few_words(model_type, text, vision, changes):
    raw = {"model_type": model_type, "text_config": text, "vision_config": vision, **changes}
    library = transformers.AutoConfig.for_model(**copy.deepcopy(raw))
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(library)
    # The text model's own defaults are another test's matter: its part is given as the library completes it.
    priced = weights_price(ModelConfig.from_dict({**raw, "text_config": library.text_config.to_dict()}))
    assert priced.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert priced.quantity.source == Source.DERIVED


@pytest.mark.parametrize("kind", sorted(_CLASS_SIZES))
def test_sizes_are_those_that_the_class_assumes(kind):
    library = transformers.AutoConfig.for_model(kind).to_dict()
    assert {key: library[key] for key in _CLASS_SIZES[kind]} == _CLASS_SIZES[kind]


@pytest.mark.parametrize("model_type", sorted({*LIKE_T5, *LIKE_BART}))
def test_encoders_and_decoders_are_priced_within_their_bar(model_type):
    """Relative positions, norms and a few biases are what the arithmetic leaves out: below 2 %."""
    library = transformers.AutoConfig.for_model(model_type)
    with torch.device("meta"):
        model = transformers.AutoModelForSeq2SeqLM.from_config(library)
    num_bytes = 2 * sum(parameter.numel() for parameter in model.parameters())
    quantity = weights_price(ModelConfig.from_dict(library.to_dict()), dtype="bf16").quantity
    assert quantity.source == Source.PREDICTED
    assert quantity.low < num_bytes < quantity.high
    if model_type != "led":  # its encoder has a second set of projections, for global attention
        assert abs(quantity.bytes - num_bytes) * 50 < num_bytes
