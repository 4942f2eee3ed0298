"""Names of element types: what people write, and the one name the rest of the code uses."""

from __future__ import annotations

from collections.abc import Sequence

from tonnage.errors import InvalidSetting

#: Element types a weight may have here; packed weights are described by ``Quantisation``.
WEIGHT_DTYPES = ("float32", "bfloat16", "float16")
#: The cache in blocks of 16 four-bit elements that share an 8-bit scale: two elements a byte, scales in a pool beside.
NVFP4 = "float4_e2m1fn_x2"
#: Element types the KV cache may be allocated in.
KV_DTYPES = (*WEIGHT_DTYPES, "float8_e4m3fn", "float8_e5m2", NVFP4)
#: A record for sparse latent attention: the latent part in 8 bits with a scale per 128, the rotary part in 16.
FP8_DS_MLA = "fp8_ds_mla"
#: Element types a recurrent state may be kept in.
STATE_DTYPES = WEIGHT_DTYPES

_ALIASES = {
    "fp32": "float32", "f32": "float32", "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16", "f16": "float16", "half": "float16",
    "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2", "e5m2": "float8_e5m2",
    "nvfp4": NVFP4,
}  # fmt: skip


def parse_dtype(text: str, *, knob: str, allowed: Sequence[str] = KV_DTYPES) -> str:
    """``"bf16"``, ``"torch.bfloat16"`` or ``"bfloat16"`` as ``"bfloat16"``; raises ``InvalidSetting`` for the rest."""
    name = str(text).strip().lower().removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in allowed:
        raise InvalidSetting(knob, text, "not a dtype known here", remedy=f"use one of {', '.join(allowed)}")
    return name
