"""How a checkpoint packs its matrices, from ``quantization_config`` in the spellings of the tools that write it."""

from __future__ import annotations

from collections.abc import Mapping

from tonnage.costs.layers import Quantisation
from tonnage.costs.reading import Fields, objects, whole
from tonnage.errors import ModelConfigError

#: Where a config.json keeps it: the usual name, and an older one of compressed-tensors.
SECTIONS = ("quantization_config", "compression_config")
#: Where each method lists the modules that it leaves alone.
_KEPT = ("ignore", "modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules", "exclude_modules")

_REMEDY = (
    "plan a checkpoint of the model that is not packed, or one packed by fp8, awq, gptq, bitsandbytes, "
    "compressed-tensors, modelopt or mxfp4"
)


def packing_section(*sources: Mapping[str, object]) -> Mapping[str, object]:
    """What the first of ``sources`` that speaks of it says about packing; empty where none does."""
    found = (part for source in sources for _, part in objects(source, SECTIONS))
    return next(found, {})


def quantisation(fields: Fields) -> Quantisation | None:
    """None where the weights are plain. Raises ``ModelConfigError`` naming ``quantization_config`` where the format
    cannot be told from it."""
    raw = packing_section(fields.outer, fields.own)
    if not raw:
        return None
    method = str(raw.get("quant_method") or raw.get("quant_library") or raw.get("producer") or "").lower()
    if not method and "quant_algo" in raw:
        method = "modelopt"
    elif not method and raw.get("config_groups"):
        method = "compressed-tensors"
    _note_cache(fields, raw)
    name, group = _format(fields, raw, method)
    return Quantisation(method=method, format=name, group_size=group, kept=_kept(raw))


def _note_cache(fields: Fields, raw: Mapping[str, object]) -> None:
    """Some checkpoints bring scales for a narrow cache. Using them stays the user's choice, as with every dtype."""
    inner = raw.get("quantization")
    for part in (raw, inner if isinstance(inner, Mapping) else {}):
        if part.get("kv_cache_scheme") or part.get("kv_cache_quant_algo"):
            fields.note("quantization_config has scales for an 8-bit or narrower KV cache: --kv-dtype fp8 uses them")


def _format(fields: Fields, raw: Mapping[str, object], method: str) -> tuple[str, int | None]:
    """(what lies in memory, elements that share a scale)."""
    if method in ("awq", "gptq", "auto-round", "autoround", "auto_awq", "gptqmodel", "intel/auto-round"):
        bits = whole(raw, "bits", "w_bit", default=4)
        group = whole(raw, "group_size", "q_group_size", default=128)
        return _integers(fields, bits), group if group > 0 else None
    if method in ("fp8", "fbgemm_fp8", "finegrained_fp8"):
        block = raw.get("weight_block_size")
        # Rows and columns of a block: along a matrix row the elements that share a scale are the last number.
        return "fp8", block[-1] if isinstance(block, list) and block and isinstance(block[-1], int) else None
    if method == "bitsandbytes":
        if raw.get("load_in_4bit") or raw.get("_load_in_4bit"):
            return "nf4", 64
        return "int8", None
    if method == "mxfp4":
        return "mxfp4", 32
    if method.startswith("modelopt") or "quant_algo" in raw:
        return _modelopt(fields, raw)
    if method == "compressed-tensors":
        return _compressed_tensors(fields, raw)
    if method == "gguf":
        return "gguf", None
    raise _unknown(fields, f"names a packing that this release does not know (quant_method {method or 'missing'!r})")


def _modelopt(fields: Fields, raw: Mapping[str, object]) -> tuple[str, int | None]:
    inner = raw.get("quantization")
    part = inner if isinstance(inner, Mapping) else raw
    algorithm = str(part.get("quant_algo") or "").upper()
    if "NVFP4" in algorithm or algorithm == "FP4":
        return "nvfp4", whole(part, "group_size", default=16)
    if "W4A16" in algorithm or "W4A8" in algorithm:
        return "int4", whole(part, "group_size", default=128)
    if algorithm.startswith(("W8A16", "W8A8_SQ", "INT8")):
        return "int8", None
    if "MXFP4" in algorithm:
        return "mxfp4", 32
    if "FP8" in algorithm or algorithm == "MIXED_PRECISION":
        if algorithm == "MIXED_PRECISION":
            fields.note("quantization_config mixes formats: fp8 assumed for every packed matrix")
        return "fp8", None
    if part.get("config_groups"):
        return _compressed_tensors(fields, part)
    raise _unknown(fields, f"with quant_algo {algorithm or 'missing'!r} is not known")


def _compressed_tensors(fields: Fields, raw: Mapping[str, object]) -> tuple[str, int | None]:
    """The format of the first group that packs weights; others are noted."""
    groups = raw.get("config_groups")
    packed = [
        group["weights"]
        for group in (groups.values() if isinstance(groups, Mapping) else ())
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping)
    ]
    if not packed:
        raise _unknown(fields, "has no config_groups with weights")
    kinds = {(str(part.get("type", "int")), whole(part, "num_bits", default=8)) for part in packed}
    if len(kinds) > 1:
        fields.note("quantization_config has groups of several formats: the first assumed for every packed matrix")
    first = packed[0]
    bits, is_float = whole(first, "num_bits", default=8), str(first.get("type", "int")) == "float"
    group = whole(first, "group_size", default=0)
    if is_float and bits == 4:
        text = str(raw.get("format") or "")
        return ("mxfp4", 32) if "mxfp4" in text or group == 32 else ("nvfp4", group or 16)
    if is_float and bits == 8:
        return "fp8", group if group > 0 else None
    return _integers(fields, bits), group if group > 0 else None


def _integers(fields: Fields, bits: int) -> str:
    if bits not in (4, 8):
        raise _unknown(fields, f"packs weights in {bits} bits, and only 4 and 8 are known")
    return f"int{bits}"


def _kept(raw: Mapping[str, object]) -> tuple[str, ...]:
    inner = raw.get("quantization")
    for source in (raw, inner if isinstance(inner, Mapping) else {}):
        for key in _KEPT:
            names = source.get(key)
            if isinstance(names, list) and names:
                return tuple(str(name) for name in names)
    return ()


def _unknown(fields: Fields, what: str) -> ModelConfigError:
    return fields.error("quantization_config", what, remedy=_REMEDY)
