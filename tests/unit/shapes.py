"""The built-in shapes, what was recorded of them, and start-up figures that strangers logged (tests/data/shapes)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tonnage.costs.config import ModelConfig
from tonnage.costs.shapes import find_shape
from tonnage.units import GiB

DATA = Path(__file__).parents[1] / "data" / "shapes"

#: Recorded without the widths that a config.json has.
INCOMPLETE = ("ling-3.0-flash",)


@cache
def shapes() -> dict[str, dict[str, object]]:
    return json.loads((DATA / "model-configs.json").read_text(encoding="utf-8"))["configs"]


@cache
def starts() -> tuple[dict, ...]:
    lines = (DATA / "starts.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(line) for line in lines)


def complete() -> list[str]:
    return [key for key in shapes() if key not in INCOMPLETE]


def raw_config(key: str) -> dict[str, object]:
    """One built-in shape as its config.json has it."""
    shape = find_shape(key)
    assert shape is not None, key
    return dict(shape.config)


@cache
def config(key: str) -> ModelConfig:
    shape = find_shape(key)
    assert shape is not None, key
    return shape.read()


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
