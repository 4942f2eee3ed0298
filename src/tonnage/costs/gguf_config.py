"""A GGUF file's own metadata as a config.json, for the architectures whose keys say all that a plan needs.

The keys are ``general.architecture`` and, behind its value and a dot, those of ``_KEYS``, as the format's description
names them. Dtypes and sizes of the tensors come from the same header; no weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tonnage.costs.gguf import model_names, model_parts, read_gguf, read_metadata
from tonnage.costs.stored import StoredTensor
from tonnage.errors import InputError, ModelConfigError, UnsupportedModel

#: The architecture's name -> the model_type whose layers it has, without and with experts.
_FAMILIES = {
    "llama": ("llama", "mixtral"), "qwen2": ("qwen2", None), "qwen3": ("qwen3", None),
    "qwen2moe": (None, "qwen2_moe"), "qwen3moe": (None, "qwen3_moe"), "phi3": ("phi3", None),
    "gemma": ("gemma", None), "gemma2": ("gemma2", None), "gemma3": ("gemma3_text", None),
    "granite": ("granite", None), "starcoder2": ("starcoder2", None), "olmo2": ("olmo2", None),
    "smollm3": ("smollm3", None), "gpt-oss": (None, "gpt_oss"),
}  # fmt: skip
_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_WIDE = ("F32", "F16", "BF16", "F64")


def only_model(files: Sequence[Path]) -> Path:
    """The first file of the one model among them. Raises ``InputError`` where they are several models."""
    models = model_names(files)
    if len(models) > 1:
        raise InputError(
            f"the folder holds no config.json and {len(models)} GGUF models: {', '.join(models)}",
            remedy="name one file",
        )
    return files[0]


def gguf_config(file: Path) -> Mapping[str, object]:
    """What a config.json of the model would say. ``file`` is the first where the model lies in several.

    Raises ``InputError`` for a broken header, ``UnsupportedModel`` for an architecture that is not listed here, and
    ``ModelConfigError`` where a key is missing.
    """
    found = _header(file)
    architecture = str(found.get("general.architecture") or "")
    own = {key: found.get(f"{architecture}.{key}") for key in _KEYS}
    num_experts = own["expert_count"]
    has_experts = isinstance(num_experts, int) and num_experts > 1
    model_type = _FAMILIES.get(architecture, (None, None))[has_experts]
    if model_type is None:
        raise UnsupportedModel(
            f"{file.name}: plans need the config.json of the model: the metadata of a GGUF file are not read for the "
            f"architecture {architecture or 'missing'!r}",
            remedy="put the config.json that was published with the model beside the file, and name the folder",
        )
    if not isinstance(own["block_count"], int):
        raise ModelConfigError(
            f"{file.name}: {architecture}.block_count is missing in its metadata",
            remedy="name the first file where the model lies in several, or give the model's config.json",
        )
    tensors = [tensor for part in model_parts(file) for tensor in read_gguf(part)]
    raw: dict[str, object] = {"sliding_window": None, "torch_dtype": _dtype(tensors), "model_type": model_type}
    raw |= {_KEYS[key]: value for key, value in own.items() if value is not None}
    raw.setdefault("vocab_size", found.get("tokenizer.ggml.tokens"))
    raw["tie_word_embeddings"] = not any(tensor.name == "output.weight" for tensor in tensors)
    return {key: value for key, value in raw.items() if value is not None or key == "sliding_window"} | _packing(
        tensors
    )


def _header(file: Path) -> dict[str, object]:
    try:
        return read_metadata(file)
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}", remedy="check its permissions") from None


def _dtype(tensors: Sequence[StoredTensor]) -> str:
    """What packed tensors are unpacked to, and what the cache is in: float16 unless the matrices are bfloat16."""
    matrices = [tensor.dtype for tensor in tensors if len(tensor.shape) > 1]
    if matrices and set(matrices) == {"F32"}:
        return "float32"
    return "bfloat16" if "BF16" in matrices else "float16"


def _packing(tensors: Sequence[StoredTensor]) -> dict[str, object]:
    """Bytes and elements of the matrices, where any is packed."""
    matrices = [tensor for tensor in tensors if len(tensor.shape) > 1]
    if all(tensor.dtype in _WIDE for tensor in matrices):
        return {}
    stored = {
        "quant_method": "gguf",
        "stored_bytes": sum(tensor.num_bytes for tensor in matrices),
        "stored_elements": sum(tensor.num_elements for tensor in matrices),
    }
    return {"quantization_config": stored}
