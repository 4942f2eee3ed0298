"""TensorRT-LLM's flags as the reference policy's knobs and as limits of a plan."""

from __future__ import annotations

from typing import Any

from tonnage.budget.reference.knobs import ReferenceKnobs
from tonnage.config import LimitKnobs, Origin, Setting
from tonnage.peers.asked_settings import Settings
from tonnage.peers.launch import Launch, Value

#: Sequences of a step, and tokens of it, where they are left out.
MAX_BATCH_SIZE, MAX_NUM_TOKENS = 2048, 8192
#: Decode batches with a graph where no list is given.
GRAPH_SIZES = (1, 2, 4, *range(8, 129, 8))
#: Its switches, as the reference's knobs have them.
_SWITCHES = ("enable_block_reuse", "enable_chunked_prefill", "has_seat_headroom", "is_overlapped")
#: Names that are the same in both.
_SAME = (
    *("free_gpu_memory_fraction", "max_tokens", "max_gpu_total_bytes", "tokens_per_block", "max_beam_width"),
    *("max_attention_window", "state_dtype", "fp8_context_mla_kv_len_cap", "max_util_for_resume", "host_cache_bytes"),
    *("encoder_cache_max_bytes", "encoder_max_num_tokens", "cross_kv_cache_fraction", "manager"),
)
_RENAMED = {"host_cache_size": "host_cache_bytes", "mamba_ssm_cache_dtype": "state_dtype"}
_KV_NAMES = {"float8_e4m3fn": "fp8", "float4_e2m1fn_x2": "nvfp4"}


def reference_knobs(launch: Launch, settings: Settings) -> ReferenceKnobs:
    """The knobs of the derivation. Raises ``InvalidSetting`` as the reference does."""
    given: dict[str, Any] = {name: settings.get(name) for name in _SAME if settings.has(name)}
    given |= {ours: settings.get(name) for name, ours in _RENAMED.items() if settings.has(name)}
    given |= {name: settings.switch(name) for name in _SWITCHES if settings.has(name)}
    if "max_attention_window" in given:
        given["max_attention_window"] = _windows(given["max_attention_window"])
    if launch.kv_dtype is not None:
        given["kv_dtype"] = _KV_NAMES.get(launch.kv_dtype, launch.kv_dtype)
    if "free_gpu_memory_fraction" not in given:
        settings.took("free_gpu_memory_fraction", None, "0.9", "of what is left beside the measured peak")
    if "tokens_per_block" not in given:
        settings.took("tokens_per_block", None, "32", "tokens of a page")
    return ReferenceKnobs(**given)


def _windows(value: Value) -> tuple[Value, ...]:
    """One window, or a list of them: an options file may write both. The reference says what is no window."""
    if isinstance(value, str):
        return tuple(int(part) if part.lstrip("-").isdecimal() else part for part in value.split(",")[:MAX_BATCH_SIZE])
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def limit_knobs(launch: Launch, settings: Settings) -> LimitKnobs:
    """Shapes as asked, and this engine's own defaults for what was left out; ``max_seq_len`` stays open."""
    length = settings.maybe("max_seq_len")
    drafts = settings.maybe("max_draft_len", least=0)
    tokens = settings.whole("max_num_tokens", MAX_NUM_TOKENS, "tokens of a step")
    rows = settings.whole("max_batch_size", min(MAX_BATCH_SIZE, tokens), "sequences of a step")
    if length is None:
        settings.took("max_seq_len", None, f"{launch.config.max_position_embeddings:,}", "the model's own length")
    return LimitKnobs(
        max_batch_size=_setting(rows),
        max_num_tokens=_setting(tokens),
        max_seq_len=_setting(length),
        max_draft_tokens=_setting(drafts),
    )


def graphs_knob(settings: Settings, *, max_batch_size: int) -> Setting[str]:
    """The list of decode batches, cut at the largest step."""
    config = settings.get("cuda_graph_config")
    if config is not None and str(config).lower() in ("null", "none", "~"):
        return Setting("none", "none", Origin.PEER, "cuda_graph_config")
    sizes = settings.sizes("batch_sizes") or GRAPH_SIZES
    if not settings.has("batch_sizes"):
        settings.took("batch_sizes", None, "1 to 128", "decode batches with a graph")
    text = ",".join(str(size) for size in sizes if size <= max_batch_size) or "1"
    return Setting(text, text, Origin.PEER, "batch_sizes")


def _setting(value: int | None) -> Setting[int]:
    return Setting() if value is None else Setting(value, str(value), Origin.PEER, "trtllm")
