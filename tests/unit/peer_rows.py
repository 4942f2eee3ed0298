"""Logged starts of vLLM as launches: the built-in shape, packed as the record says, and the flags, parsed."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from functools import cache

import shapes

from tonnage.costs.config import ModelConfig
from tonnage.costs.price import weights_price
from tonnage.costs.shapes import find_shape
from tonnage.hardware import CARDS, Card
from tonnage.peers.launch import Launch
from tonnage.peers.version import Version
from tonnage.terms import Quantity, Rank, Source
from tonnage.units import GiB

#: Models that see whose encoder is in their built-in shape; of others a text shape stands in.
ENCODERS = (
    "google/gemma-3-12b-it", "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506", "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "moonshotai/Kimi-VL-A3B-Instruct", "Qwen/Qwen2-VL-7B-Instruct",
)  # fmt: skip
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
    """The built-in shape of the model, encoder and all, packed as the record says."""
    model = row["model"]
    shape = find_shape(model) or find_shape(model.partition(" (")[0]) or find_shape(row["hf_config_key"])
    assert shape is not None, model
    raw = {name: value for name, value in shape.config.items() if name != "quantization_config"}
    if packing := PACKINGS.get(row["quant"]):
        raw["quantization_config"] = packing
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
