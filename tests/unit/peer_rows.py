"""Logged starts of vLLM as launches: published facts that the abbreviated shapes leave out, and the flags, parsed."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from functools import cache

import shapes

from tonnage.costs.config import ModelConfig
from tonnage.costs.price import weights_price
from tonnage.hardware import CARDS, Card
from tonnage.peers.launch import Launch
from tonnage.peers.version import Version
from tonnage.terms import Quantity, Rank, Source
from tonnage.units import GiB

#: By shape: fields of the published config.json that tests/data/shapes/model-configs.json leaves out.
PUBLISHED: dict[str, dict[str, object]] = {
    "codellama": {"max_position_embeddings": 16_384},
    "deepseek-v2-lite": {"first_k_dense_replace": 1, "q_lora_rank": None, "max_position_embeddings": 163_840},
    "deepseek-v3": {"first_k_dense_replace": 3, "max_position_embeddings": 163_840},
    "gemma-2": {"max_position_embeddings": 8192},
    "gemma-3": {"max_position_embeddings": 131_072},
    "gemma-4": {"max_position_embeddings": 262_144},
    "glm-5": {"first_k_dense_replace": 3, "max_position_embeddings": 202_752},
    "gpt-oss": {"max_position_embeddings": 131_072, "attention_bias": True},
    "granite-3.1": {"max_position_embeddings": 131_072},
    "kimi-vl": {"first_k_dense_replace": 1, "q_lora_rank": None, "max_position_embeddings": 131_072},
    "llama-2": {"max_position_embeddings": 4096},
    "llama-3": {"max_position_embeddings": 131_072},
    "llama-4": {"max_position_embeddings": 10_485_760},
    "mistral-small-3.1": {"max_position_embeddings": 131_072},
    "mixtral": {"max_position_embeddings": 32_768},
    "opt-125m": {"max_position_embeddings": 2048},
    "phi-4": {"max_position_embeddings": 16_384},
    "qwen1.5": {"max_position_embeddings": 32_768},
    "qwen2.5": {"max_position_embeddings": 32_768, "sliding_window": None, "use_sliding_window": False},
    "qwen3-": {"max_position_embeddings": 40_960},
    "qwen3-coder": {"max_position_embeddings": 262_144},
    "qwen3.6": {"max_position_embeddings": 262_144, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1},
}
#: By model, where it differs from others of its shape.
OF_MODEL: dict[str, dict[str, object]] = {
    "meta-llama/Meta-Llama-3-8B": {"max_position_embeddings": 8192},
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": {"max_position_embeddings": 131_072},
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": {"max_position_embeddings": 131_072},
    "Qwen/Qwen2.5-Math-1.5B": {"max_position_embeddings": 4096},
    "moonshotai/Kimi-Dev-72B": {"max_position_embeddings": 131_072},
}
_SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
    "num_attention_heads": 16, "patch_size": 14, "image_size": 896, "vision_use_head": False,
}  # fmt: skip
_PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "patch_size": 14, "image_size": 1540,
}  # fmt: skip
_LLAMA4 = {
    "model_type": "llama4_vision_model", "hidden_size": 1408, "intermediate_size": 5632, "num_hidden_layers": 34,
    "num_attention_heads": 16, "patch_size": 14, "image_size": 336, "vision_output_dim": 4096,
    "projector_input_dim": 4096, "projector_output_dim": 4096, "pixel_shuffle_ratio": 0.5,
}  # fmt: skip
_MOONVIT = {
    "model_type": "moonvit", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
    "num_attention_heads": 16, "patch_size": 14, "init_pos_emb_height": 64, "init_pos_emb_width": 64,
}  # fmt: skip
_QWEN2 = {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "num_heads": 16, "patch_size": 14}
#: Models that see: the class of the whole, and its encoder.
ENCODERS: dict[str, tuple[str, dict[str, object]]] = {
    "google/gemma-3-12b-it": ("gemma3", _SIGLIP),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": ("mistral3", _PIXTRAL),
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": ("mistral3", _PIXTRAL),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": ("llama4", _LLAMA4),
    "moonshotai/Kimi-VL-A3B-Instruct": ("kimi_vl", _MOONVIT),
    "Qwen/Qwen2-VL-7B-Instruct": ("qwen2_vl", _QWEN2),
}
_GROUPS_128 = {"bits": 4, "group_size": 128}
#: What a record calls its packing, as config.json would have it; None: not packed. Others are not determined.
PACKINGS: dict[str, dict[str, object] | None] = {
    "none": None,
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "fp8-dynamic": {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"],
                                      "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
    },
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]},
    "awq": {"quant_method": "awq", **_GROUPS_128},
    "gptq-int4": {"quant_method": "gptq", **_GROUPS_128},
    "4bit": {"quant_method": "gptq", **_GROUPS_128},
}  # fmt: skip
_KV = {"auto": None, "fp8": "fp8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8_e5m2"}
#: A kind of card in the records whose total stands for a class.
CLASSES = {"141GB-class": 139.81, "H20-141GB": 139.81, "80GB-class": 79.15, "48GB-class": 44.39, "24GB-class": 23.55}
#: Settings of a record that are not the engine's, or that carry nothing here.
_NOT_SETTINGS = ("dtype", "nvlink", "load_format", "model_max_len")


@cache
def records() -> dict[str, dict]:
    return {row["id"]: row for row in shapes.starts() if row["engine"] == "vllm"}


@cache
def later() -> dict[str, dict]:
    """Starts that were found after the rules had been written: in no fit and in no list."""
    lines = (shapes.DATA / "later-starts.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["id"]: row for row in map(json.loads, lines)}


@cache
def eligible() -> dict:
    return json.loads((shapes.DATA / "eligible.json").read_text(encoding="utf-8"))


def config_of(row: dict) -> ModelConfig:
    """The shape with what is published of it: encoder, packing and all."""
    key, model = row["hf_config_key"], row["model"]
    text = {**shapes.raw_config(key), **(shapes._longest(PUBLISHED, key) or {}), **OF_MODEL.get(model, {})}
    packing = PACKINGS.get(row["quant"])
    raw: dict[str, object] = text
    if model in ENCODERS:
        kind, vision = ENCODERS[model]
        tied = text.get("tie_word_embeddings", False)
        raw = {"model_type": kind, "text_config": text, "vision_config": vision, "torch_dtype": "bfloat16",
               "tie_word_embeddings": tied}  # fmt: skip
    if packing:
        raw = {**raw, "quantization_config": packing}
    return ModelConfig.from_dict(raw, name=model)


def card_of(row: dict) -> Card:
    """The card by its kind, with the total that the record has."""
    name = row["gpu"]
    known = next((card for card in CARDS if name in (card.name, *card.aliases)), None)
    total = row["gpu_mem_gib"] or CLASSES.get(name) or (known.total_bytes / GiB if known else None)
    quantity = Quantity.exact(round((total or 0) * GiB), Source.ASKED, "the record")
    if known is not None:
        return replace(known, name=name, total=quantity)
    return Card(name=name, kind="cuda", sm=0, num_sms=0, total=quantity)


def rank_of(row: dict, index: int = 0) -> Rank:
    flags = row["flags"]
    ranks = flags.get("data_parallel_size", 1) if flags.get("enable_expert_parallel") else 1
    if ranks > 1:  # experts over all ranks, attention whole on each
        return Rank(index=index, size=ranks, tp=ranks, ep=ranks, attention_dp=True)
    return Rank(index=index, size=row["tp"] * row["pp"], tp=row["tp"], pp=row["pp"])


def launch_of(row: dict) -> Launch:
    """The first rank; weights are predicted, never those of the log."""
    config, rank = config_of(row), rank_of(row)
    flags = {name: value for name, value in row["flags"].items() if name not in _NOT_SETTINGS}
    if "gpu_memory_utilization" in flags:
        flags["gpu_memory_utilization"] = Fraction(str(flags["gpu_memory_utilization"]))
    return Launch(
        engine="vllm",
        version=Version.read(row["engine_version"]),
        config=config,
        weights=weights_price(config, rank=rank, dtype=row["flags"].get("dtype")).quantity,
        card=card_of(row),
        rank=rank,
        dtype=row["flags"].get("dtype"),
        kv_dtype=_KV.get(row["kv_dtype"]),
        settings=flags,
    )


def is_known(row: dict) -> bool:
    """Whether shape and packing are determined: a text shape that stands for a model that sees is not enough."""
    key = row["hf_config_key"]
    if key is None or key in shapes.INCOMPLETE or row["quant"] not in PACKINGS:
        return False
    sees = any(word in row["model"] for word in ("-VL-", "Vision"))
    return not sees or row["model"] in ENCODERS


def with_settings(launch: Launch, **settings: object) -> Launch:
    return replace(launch, settings={**launch.settings, **settings})
