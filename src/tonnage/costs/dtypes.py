"""Names of element types: what people write, and the one name the rest of the code uses."""

from __future__ import annotations

from collections.abc import Sequence

from tonnage.errors import InvalidSetting

#: Element types a weight may have here. Packed (quantised) weights are a later release.
WEIGHT_DTYPES = ("float32", "bfloat16", "float16")
#: Element types the KV cache may be allocated in.
KV_DTYPES = (*WEIGHT_DTYPES, "float8_e4m3fn", "float8_e5m2")

_ALIASES = {
    "fp32": "float32", "f32": "float32", "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16", "f16": "float16", "half": "float16",
    "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2", "e5m2": "float8_e5m2",
}  # fmt: skip


def parse_dtype(text: str, *, knob: str, allowed: Sequence[str] = KV_DTYPES) -> str:
    """``"bf16"``, ``"torch.bfloat16"`` or ``"bfloat16"`` as ``"bfloat16"``; raises ``InvalidSetting`` for the rest."""
    name = str(text).strip().lower().removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in allowed:
        raise InvalidSetting(knob, text, "not a dtype known here", remedy=f"use one of {', '.join(allowed)}")
    return name
