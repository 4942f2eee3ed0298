"""Published shapes as config.json, and start-up figures that strangers logged: tests/data/shapes, made usable."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tonnage.costs.config import ModelConfig
from tonnage.units import GiB

DATA = Path(__file__).parents[1] / "data" / "shapes"

#: First letters of a shape's name -> model type; the longest that fits wins.
MODEL_TYPES = {
    "codellama": "llama", "deepseek-coder": "llama", "llama": "llama", "tinyllama": "llama",
    "llama-3.2-11b-vision": "mllama_text_model", "llama-4": "llama4_text",
    "deepseek-v2": "deepseek_v2", "deepseek-v3": "deepseek_v3", "deepseek-v4": "deepseek_v4",
    "kimi-k2": "deepseek_v3", "kimi-vl": "deepseek_v3", "kimi-linear": "kimi_linear",
    "gemma-2": "gemma2", "gemma-3": "gemma3_text", "gemma-4": "gemma4_text", "gemma-7b": "gemma",
    "glm-4.7": "glm4_moe", "glm-5": "glm_moe_dsa", "gpt-j": "gptj", "gpt-oss": "gpt_oss", "gpt2": "gpt2",
    "granite-3": "granite", "granite-4": "granitemoehybrid", "lfm2": "lfm2", "mimo": "mimo_v2_flash",
    "minimax": "minimax_m2", "mistral": "mistral", "mistral-small-4": "mistral4", "mixtral": "mixtral",
    "nemotron-3": "nemotron_h", "opt": "opt", "phi-2": "phi", "phi-4": "phi3", "qwen1.5": "qwen2",
    "qwen1.5-moe": "qwen2_moe", "qwen2.5": "qwen2", "qwen3-": "qwen3", "qwen3-30b": "qwen3_moe",
    "qwen3-235b": "qwen3_moe", "qwen3-coder": "qwen3_moe", "qwen3-next": "qwen3_next", "qwen3-vl": "qwen3_vl_text",
    "qwen3.5": "qwen3_5_text", "qwen3.6": "qwen3_5_text",
}  # fmt: skip
#: Shapes that lack layers or widths, and so are no config.json.
INCOMPLETE = ("ling-3.0-flash", "mistral-small-4-119b")

#: Facts that the abbreviated shapes leave out and the published files have.
MORE: dict[str, dict[str, object]] = {
    "gemma-4": {"attention_k_eq_v": True},
    "glm-5": {"qk_nope_head_dim": 192, "v_head_dim": 256},
    "kimi-linear": {"qk_nope_head_dim": 128, "v_head_dim": 128},
    "lfm2": {"conv_L_cache": 3},
    "mistral": {"sliding_window": None},
    "phi-4": {"sliding_window": None},
    "nemotron-3": {"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"},
}


@cache
def shapes() -> dict[str, dict[str, object]]:
    return json.loads((DATA / "model-configs.json").read_text(encoding="utf-8"))["configs"]


@cache
def starts() -> tuple[dict, ...]:
    lines = (DATA / "starts.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(line) for line in lines)


def complete() -> list[str]:
    return [key for key in shapes() if key not in INCOMPLETE]


def _longest(table: dict, key: str):
    fits = [name for name in table if key.startswith(name)]
    return table[max(fits, key=len)] if fits else None


def raw_config(key: str) -> dict[str, object]:
    """One shape as its config.json would have it."""
    shape = {name: value for name, value in shapes()[key].items() if value is not None}
    raw = {
        "model_type": _longest(MODEL_TYPES, key),
        "max_position_embeddings": 1_048_576,
        "torch_dtype": "bfloat16",
        **shape,
        **(_longest(MORE, key) or {}),
    }
    full = shape.get("full_attention_layers")
    if key.startswith(("kimi-linear", "granite-4", "lfm2")):
        raw["layer_types"] = _spread("linear_attention", "full_attention", shape["num_hidden_layers"], full)
    if counts := shape.get("compress_ratio_counts"):
        raw["compress_ratios"] = [int(ratio) for ratio, times in counts.items() for _ in range(times)]
    return raw


def _spread(most: str, few: str, num_layers: int, num_few: int) -> list[str]:
    """``num_few`` layers of one kind at even distances; where exactly does not matter to any sum."""
    places = {(i + 1) * num_layers // num_few - 1 for i in range(num_few)}
    return [few if i in places else most for i in range(num_layers)]


@cache
def config(key: str) -> ModelConfig:
    return ModelConfig.from_dict(raw_config(key), name=key)


@dataclass(frozen=True)
class Logged:
    """One start: bytes of the pool and tokens in it, as logged."""

    id: str
    engine: str
    key: str
    kv_dtype: str | None
    tp: int
    pool_bytes: float
    tokens: float
    why_not: str | None


_KV_DTYPES = {"auto": None, "bf16": "bf16", "fp16": "fp16", "f16": "fp16", "fp8": "fp8", "fp8_e4m3": "fp8",
              "fp8_e5m2": "fp8_e5m2"}  # fmt: skip


def logged_rates() -> list[Logged]:
    """Every start whose pool can be divided by its tokens."""
    rows = []
    for row in starts():
        for check in row["check"]:
            if check["rule"] == "kv_bytes_per_token":
                pool_bytes, tokens = _pool(row, check["token_source"])
                rows.append(
                    Logged(
                        id=row["id"], engine=row["engine"], key=row["hf_config_key"],
                        kv_dtype=_KV_DTYPES[row["kv_dtype"]], tp=row["tp"], pool_bytes=pool_bytes, tokens=tokens,
                        why_not=check.get("why"),
                    )
                )  # fmt: skip
    return rows


def _pool(row: dict, source: str) -> tuple[float, float]:
    logged = row["logged"]
    if source == "logged rate":
        return logged["kv_bytes_per_token"], 1
    if source == "concurrency":
        tokens = logged["max_concurrency"] * row["flags"]["max_model_len"]
    elif "kv_cache_tokens" in logged:
        tokens = logged["kv_cache_tokens"]
    else:
        tokens = logged["num_gpu_blocks"] * row["flags"].get("block_size", 16)
    if "kv_cache_bytes" in logged:
        return logged["kv_cache_bytes"], tokens
    if "kv_cache_gib" in logged:
        return logged["kv_cache_gib"] * GiB, tokens
    if "kv_total_gib" in logged:
        return logged["kv_total_gib"] * GiB, tokens
    return (logged["kv_k_gib"] + logged["kv_v_gib"]) * GiB, tokens
