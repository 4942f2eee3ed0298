"""An engine's own knobs as its start reads them: by its own names, each with what its value is.

``--like vllm:max_num_seqs=256`` sets that knob of that engine where a start is asked for, and is translated into ours
(``tonnage.peers.table``) where a plan is. This table is the longer one: it has knobs that have no counterpart here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from tonnage.costs.dtypes import FP8_DS_MLA, KV_DTYPES, parse_dtype
from tonnage.errors import InvalidSetting, UserError
from tonnage.peers import read
from tonnage.peers.engines import close_to, write_near
from tonnage.peers.launch import Value
from tonnage.peers.table import KNOBS as TRANSLATED
from tonnage.peers.which import KNOWN, Known, find_known
from tonnage.units import MiB, exact, parse_fraction

#: Where the value goes that is no setting of the engine but a field of the launch.
KV_DTYPE, DTYPE = "kv_dtype", "dtype"
#: How plain weights are packed as they are loaded.
QUANTIZATION = "quantization"
#: The largest ratio that anybody would mean.
_MOST_RATIO = 1000

Reader = Callable[[str, str], Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnKnob:
    """One knob. ``field``: the launch's own field that it sets; empty: a setting. ``is_switch``: its name alone is
    enough."""

    name: str
    read: Reader
    aliases: tuple[str, ...] = ()
    field: str = ""

    @property
    def is_switch(self) -> bool:
        return self.read is read.switch_on


def sizes(text: str, knob: str) -> Value:
    """A list of sizes, in order."""
    return tuple(sorted({int(part) for part in (read.batch_sizes(text, knob) or "").split(",")}))


def windows(text: str, knob: str) -> Value:
    """Windows of layers in turn; negative ones stand for states."""
    parts = [part for part in re.split(r"[\s,]+", text.strip().strip("[]()")) if part]
    return tuple(-read.whole(p[1:], knob) if p.startswith("-") else read.whole(p, knob) for p in parts)


def ratio(text: str, knob: str) -> Value:
    """A number above 0, which may be above 1."""
    try:
        value = exact(text.strip())
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if not 0 < value <= _MOST_RATIO:
        raise InvalidSetting(knob, text, "not a number above 0", remedy="write one such as 0.9")
    return value


def share(text: str, knob: str) -> Value:
    return parse_fraction(text, knob=knob)


def chunk(text: str, knob: str) -> Value:
    """Tokens of a chunk; -1 is none at all."""
    return -1 if text.strip() == "-1" else read.count(text, knob)


def length(text: str, knob: str) -> Value:
    """vLLM's length; "auto" stays -1, which is fitted and no default."""
    value = read.vllm_length(text, knob)
    return -1 if value is None else value


def mebibytes(text: str, knob: str) -> Value:
    """A bare number of MiB."""
    return read.whole(text, knob) * MiB


def word(text: str, knob: str) -> Value:
    if not text.strip():
        raise InvalidSetting(knob, text, "nothing", remedy="write a value")
    return text.strip()


def cache_dtype(text: str, knob: str) -> Value:
    """None for "auto"."""
    return None if text.strip().lower() == "auto" else parse_dtype(text, knob=knob, allowed=(*KV_DTYPES, FP8_DS_MLA))


def _knob(name: str, reader: Reader, *aliases: str, field: str = "") -> OwnKnob:
    return OwnKnob(name=name, read=reader, aliases=aliases, field=field)


_VLLM = (
    _knob("gpu_memory_utilization", share, "memory_utilization"),
    _knob("kv_cache_memory_bytes", read.vllm_count, "kv_cache_memory"),
    _knob("num_gpu_blocks_override", read.count),
    _knob("max_model_len", length),
    _knob("max_num_seqs", read.count),
    _knob("max_num_batched_tokens", read.vllm_count),
    _knob("block_size", read.count),
    _knob("kv_cache_dtype", cache_dtype, field=KV_DTYPE),
    _knob("dtype", read.dtype, field=DTYPE),
    _knob(QUANTIZATION, word),
    _knob("enforce_eager", read.switch_on),
    _knob("cudagraph_capture_sizes", sizes, "cuda_graph_sizes"),
    _knob("max_cudagraph_capture_size", read.count, "max_capture_size"),
    _knob("cudagraph_mode", word),
    _knob("enable_lora", read.switch_on),
    _knob("max_loras", read.count),
    _knob("max_lora_rank", read.count),
    _knob("max_cpu_loras", read.count),
    _knob("fully_sharded_loras", read.switch_on),
    _knob("lora_dtype", word),
    _knob("lora_extra_vocab_size", read.count),
    _knob("decode_context_parallel_size", read.count, "dcp"),
    _knob("enable_prefix_caching", read.switch_on),
    _knob("enable_chunked_prefill", read.switch_on),
    _knob("num_speculative_tokens", read.whole),
    _knob("speculative_method", word),
    _knob("mamba_ssm_cache_dtype", read.dtype),
    _knob("mamba_cache_mode", word),
    _knob("limit_mm_per_prompt", word),
    _knob("skip_mm_profiling", read.switch_on),
    _knob("disable_hybrid_kv_cache_manager", read.switch_on),
    _knob("cpu_offload_gb", read.gibibytes),
    _knob("cudagraph_mem_estimate_enabled", read.switch_on),
    _knob("engine_core", lambda text, knob: str(word(text, knob)).upper()),
)
_SGLANG = (
    _knob("mem_fraction_static", share),
    _knob("max_total_tokens", read.sglang_count),
    _knob("chunked_prefill_size", chunk),
    _knob("max_prefill_tokens", read.sglang_count),
    _knob("max_running_requests", read.count),
    _knob("context_length", read.sglang_count, "context_len"),
    _knob("page_size", read.count),
    _knob("kv_cache_dtype", cache_dtype, field=KV_DTYPE),
    _knob("dtype", read.dtype, field=DTYPE),
    _knob(QUANTIZATION, word),
    _knob("disable_cuda_graph", read.switch_on),
    _knob("disable_prefill_cuda_graph", read.switch_on, "disable_piecewise_cuda_graph"),
    _knob("cuda_graph_bs", sizes, "cuda_graph_bs_decode"),
    _knob("cuda_graph_max_bs", read.count, "cuda_graph_max_bs_decode"),
    _knob("disable_radix_cache", read.switch_on),
    _knob("max_mamba_cache_size", read.count),
    _knob("mamba_full_memory_ratio", ratio),
    _knob("mamba_ssm_dtype", read.dtype),
    _knob("swa_full_tokens_ratio", ratio),
    _knob("disable_hybrid_swa_memory", read.switch_on),
    _knob("speculative_algorithm", word),
    _knob("speculative_num_draft_tokens", read.whole),
    _knob("moe_a2a_backend", word),
)
_TRTLLM = (
    _knob("free_gpu_memory_fraction", share, "kv_cache_free_gpu_memory_fraction"),
    _knob("max_tokens", read.count),
    _knob("max_gpu_total_bytes", read.size_or_unset),
    _knob("max_batch_size", read.count),
    _knob("max_num_tokens", read.count),
    _knob("max_seq_len", read.count),
    _knob("max_beam_width", read.count),
    _knob("tokens_per_block", read.count),
    _knob("kv_cache_dtype", cache_dtype, "dtype", field=KV_DTYPE),
    _knob("mamba_ssm_cache_dtype", read.dtype),
    _knob("cuda_graph_config", word),
    _knob("batch_sizes", sizes, "cuda_graph_batch_sizes"),
    _knob("enable_block_reuse", read.switch_on),
    _knob("enable_chunked_prefill", read.switch_on),
    _knob("max_attention_window", windows),
    _knob("host_cache_size", read.size_or_unset),
    _knob("max_draft_len", read.whole),
    _knob("fp8_context_mla_kv_len_cap", read.count),
    _knob("cross_kv_cache_fraction", share),
    _knob("max_util_for_resume", share),
    _knob("manager", lambda text, knob: str(word(text, knob)).upper()),
)
_LLAMACPP = (
    _knob("ctx_size", read.whole, "c", "n_ctx"),
    _knob("n_gpu_layers", read.whole, "ngl", "gpu_layers"),
    _knob("parallel", read.count, "np", "n_parallel"),
    _knob("kv_unified", read.switch_on, "kvu"),
    _knob("ubatch_size", read.count, "ub"),
    _knob("cache_type_k", word, "ctk"),
    _knob("cache_type_v", word, "ctv"),
    _knob("flash_attn", word, "fa"),
    _knob("swa_full", read.switch_on),
    _knob("fit", read.switch_on),
    _knob("fit_target", mebibytes, "fitt"),
    _knob("fit_ctx", read.count, "fitc"),
)
OWN: Mapping[str, tuple[OwnKnob, ...]] = {
    "vllm": _VLLM, "sglang": _SGLANG, "trtllm": _TRTLLM, "llamacpp": _LLAMACPP,
}  # fmt: skip
#: Our limits and knobs in the words of each engine; what is missing there has no counterpart.
OURS: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        "max_seq_len": "max_model_len", "max_batch_size": "max_num_seqs", "max_num_tokens": "max_num_batched_tokens",
        "block_tokens": "block_size", "kv_bytes": "kv_cache_memory_bytes", "prefix_caching": "enable_prefix_caching",
        "max_draft_tokens": "num_speculative_tokens", "kv_dtype": KV_DTYPE,
    },
    "sglang": {
        "max_seq_len": "context_length", "max_batch_size": "max_running_requests",
        "max_num_tokens": "chunked_prefill_size", "kv_tokens": "max_total_tokens", "block_tokens": "page_size",
        "max_draft_tokens": "speculative_num_draft_tokens", "kv_dtype": KV_DTYPE,
    },
    "trtllm": {
        "max_seq_len": "max_seq_len", "max_batch_size": "max_batch_size", "max_num_tokens": "max_num_tokens",
        "kv_tokens": "max_tokens", "kv_bytes": "max_gpu_total_bytes", "block_tokens": "tokens_per_block",
        "kv_fraction": "free_gpu_memory_fraction", "prefix_caching": "enable_block_reuse",
        "max_draft_tokens": "max_draft_len", "kv_dtype": KV_DTYPE,
    },
    "llamacpp": {"max_seq_len": "ctx_size", "max_batch_size": "parallel", "kv_dtype": KV_DTYPE},
}  # fmt: skip


def read_settings(likes: Iterable[str], *, engines: Iterable[str]) -> dict[str, dict[str, Value]]:
    """{engine: {knob: value}} of everything typed as ``ENGINE:KNOB=VALUE``; every one must belong to an engine asked.

    Raises ``UserError`` naming what is close, and ``InvalidSetting`` for a value that the engine would not read.
    """
    found: dict[str, dict[str, Value]] = {name: {} for name in engines}
    for typed in likes:
        known, name, text = _parts(typed)
        if known.name not in found:
            raise UserError(
                f"--like {typed} is a knob of {known.title}, and no start of it is asked for",
                need=f"--engine {known.name}", remedy=f"leave it out, or add --engine {known.name} --compare",
            )  # fmt: skip
        knob = _find(known, name, typed)
        if text is None and not knob.is_switch:
            raise UserError(f"--like {typed} has no value", remedy=f"write --like {known.name}:{knob.name}=VALUE")
        key = knob.field or knob.name
        if key in found[known.name]:
            raise UserError(f"--like {typed}: {knob.name} is set twice", remedy="keep one of them")
        value = knob.read(text or "", f"--like {known.name}:{knob.name}")
        is_off = name.strip().lstrip("-").replace("-", "_").startswith("no_") and isinstance(value, bool)
        found[known.name][key] = not value if is_off else value
    return found


def own_help() -> str:
    """Every engine's own knobs: what ``--like help`` adds for starts."""
    rows = [f"{known.name}: {', '.join(knob.name for knob in OWN[known.name])}" for known in KNOWN]
    return "\nWith --engine, that engine's own:\n" + "\n".join(rows) + "\n"


def ours_as_theirs(engine: str, given: Mapping[str, Value]) -> tuple[dict[str, Value], tuple[str, ...]]:
    """({their knob or field: value}, names of ours that have no counterpart there)."""
    words = OURS[engine]
    theirs = {words[name]: value for name, value in given.items() if name in words}
    length, rows = theirs.get("ctx_size"), theirs.get("parallel")
    if isinstance(length, int) and isinstance(rows, int):
        theirs["ctx_size"] = length * rows  # llama.cpp's context is that of all its slots together
    graphs = _graphs(engine, given.get("graphs"))
    without = [name for name in given if name not in words and not (name == "graphs" and graphs)]
    return theirs | graphs, tuple(without)


def _graphs(engine: str, value: Value) -> dict[str, Value]:
    """Our knob ``graphs``: none, or a list; words of ours for a list have no counterpart."""
    off: dict[str, tuple[str, Value]] = {
        "vllm": ("enforce_eager", True), "sglang": ("disable_cuda_graph", True),
        "trtllm": ("cuda_graph_config", "null"),
    }  # fmt: skip
    lists = {"vllm": "cudagraph_capture_sizes", "sglang": "cuda_graph_bs", "trtllm": "batch_sizes"}
    if engine not in off or not isinstance(value, str):
        return {}
    if value == "none":
        return dict([off[engine]])
    return {lists[engine]: sizes(value, "graphs")} if value[:1].isdigit() else {}


def _parts(typed: str) -> tuple[Known, str, str | None]:
    engine, colon, rest = typed.strip().partition(":")
    if not colon:
        raise UserError(
            f"--like {typed} names no engine", need="ENGINE:KNOB=VALUE",
            remedy="write for example --like vllm:gpu_memory_utilization=0.9",
        )  # fmt: skip
    name, equals, text = rest.partition("=")
    return find_known(engine, typed=f"--like {typed}"), name, text.strip() if equals else None


def _find(known: Known, name: str, typed: str) -> OwnKnob:
    plain = name.strip().lower().lstrip("-").replace("-", "_").rsplit(".", 1)[-1]
    spellings = {each: knob for knob in OWN[known.name] for each in (knob.name, *knob.aliases)}
    found = spellings.get(plain) or spellings.get(plain.removeprefix("no_"))
    if found is not None:
        return found
    ranks = next((k for k in TRANSLATED if k.instead and k.engine.name == known.name and plain in (k.name, *k.aliases)),
                 None)  # fmt: skip
    names = [knob.name for knob in OWN[known.name]]
    raise UserError(
        f"--like {typed}: no knob {plain!r} of {known.title} decides a start here{close_to(plain, spellings)}",
        need="one of " + ", ".join(names),
        remedy=f"use {ranks.instead} N" if ranks else write_near(known.name, plain, names),
    )
