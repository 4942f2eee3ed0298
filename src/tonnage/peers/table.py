"""Every knob of another engine that is understood: one row each, with what it becomes and how well that matches.

The page docs/peers.md shows the same rows; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from tonnage.errors import UserError
from tonnage.peers import read
from tonnage.peers.engines import SGLANG, TRTLLM, VLLM, Engine, close_to, write_near


class Match(StrEnum):
    """How well a knob translates."""

    EXACT = "exact"  # both engines mean the same thing
    ABOUT = "approximate"  # ``differs`` says what is not the same, and reports repeat it
    NONE = "none"  # known, and refused with the reason in ``differs``


class By(StrEnum):
    """What a translation needs to know beside the value."""

    VALUE = "value"
    BLOCK = "tokens in a block"
    PLAN = "sums of a plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerKnob:
    """One knob of one engine.

    ours      our knob that gets the value; empty where there is none
    differs   one sentence, without the names of the knobs: what is not the same; empty for an exact match
    read      from the text to our value, None where the text leaves our knob alone
    instead   our flag, which takes the same value, where that is no knob; empty: there is none
    takes_all the pool is to be this large whatever is kept free, so keep_free_bytes becomes 0 unless it is asked for
    is_switch its name alone is enough
    """

    engine: Engine
    name: str
    ours: str = ""
    match: Match = Match.EXACT
    differs: str = ""
    read: Callable[[str, str], object] = read.count
    by: By = By.VALUE
    takes_all: bool = False
    is_switch: bool = False
    aliases: tuple[str, ...] = ()
    instead: str = ""

    @property
    def full_name(self) -> str:
        return f"{self.engine.name}:{self.name}"


#: Why graphs of prompts are no knob here.
PIECES = "only steps of decodes have graphs here; those of prompts would need a memory pool and a line of their own"
#: Why a number of ranks is no knob of the budget.
RANKS = "it splits the model and not the money of one rank"


def _vllm() -> tuple[PeerKnob, ...]:
    def row(name: str, ours: str = "", differs: str = "", **fields: object) -> PeerKnob:
        return _row(VLLM, name, ours, differs, **fields)

    return (
        row("gpu_memory_utilization", "total_bytes",
            "a share of the whole device that leaves out the context and library handles made before vLLM's first "
            "look, so their bytes are added; activations and graphs are those of this plan, not of vLLM's own dry run",
            read=read.share, by=By.PLAN, takes_all=True, aliases=("memory_utilization",)),
        row("kv_cache_memory_bytes", "kv_bytes",
            "vLLM takes it without looking at what is left, and never uses one of its blocks; here it is a cap",
            read=read.vllm_count, takes_all=True, aliases=("kv_cache_memory",)),
        row("num_gpu_blocks_override", "kv_tokens",
            "vLLM takes it without looking at what is left, and never uses one of its blocks; here it is a cap, and "
            "a block holds block_tokens tokens of every layer",
            by=By.BLOCK, takes_all=True),
        row("max_model_len", "max_seq_len", read=read.vllm_length),
        row("max_num_seqs", "max_batch_size"),
        row("max_num_batched_tokens", "max_num_tokens", read=read.vllm_count),
        row("block_size", "block_tokens",
            "vLLM raises it for models with recurrent states or several kinds of layers until pages are equal; "
            "here equal slabs hold blocks of that many tokens"),
        row("kv_cache_dtype", "kv_dtype", read=read.dtype),
        row("enforce_eager", "graphs", read=read.eager, is_switch=True),
        row("cudagraph_capture_sizes", "graphs",
            "vLLM captures mixed batches too; here only decode batches have graphs", read=read.batch_sizes,
            aliases=("cuda_graph_sizes",)),
        row("cudagraph_mode", "graphs", read=read.graph_mode),
        row("max_loras", "max_adapters"),
        row("max_lora_rank", "max_adapter_rank"),
        row("enable_prefix_caching", "prefix_caching", read=read.switch_on, is_switch=True),
        row("no_enable_prefix_caching", "prefix_caching", read=read.switch_off, is_switch=True),
        row("kv_offloading_size", "host_kv_bytes", read=read.gibibytes),
        row("cpu_offload_gb", differs="weights stay on the device here"),
        row("tensor_parallel_size", differs=RANKS, instead="--tp"),
        row("pipeline_parallel_size", differs=RANKS, instead="--pp"),
    )  # fmt: skip


def _sglang() -> tuple[PeerKnob, ...]:
    def row(name: str, ours: str = "", differs: str = "", **fields: object) -> PeerKnob:
        return _row(SGLANG, name, ours, differs, **fields)

    return (
        row("mem_fraction_static", "kv_bytes",
            "a share of what is free before weights, for weights and pools; SGLang trusts the rest to be enough for "
            "activations and graphs, while here a pool that leaves them too little is made smaller",
            read=read.share, by=By.PLAN, takes_all=True),
        row("max_total_tokens", "kv_tokens", read=read.sglang_count),
        row("chunked_prefill_size", "max_num_tokens",
            "SGLang counts prompt tokens alone; here a step has room for decoding sequences in the same number, which "
            "is at least max_batch_size",
            read=read.chunk),
        row("max_running_requests", "max_batch_size"),
        row("context_length", "max_seq_len", read=read.sglang_count),
        row("page_size", "block_tokens"),
        row("kv_cache_dtype", "kv_dtype", read=read.dtype),
        row("disable_cuda_graph", "graphs", read=read.eager, is_switch=True),
        row("cuda_graph_bs", "graphs", read=read.batch_sizes),
        row("enable_piecewise_cuda_graph", differs=PIECES, aliases=("enforce_piecewise_cuda_graph",)),
        row("max_loras_per_batch", "max_adapters"),
        row("max_lora_rank", "max_adapter_rank"),
        row("disable_radix_cache", "prefix_caching", read=read.switch_off, is_switch=True),
        row("hicache_size", "host_kv_bytes", "GB of 1000^3 bytes for each rank; here it is for all together",
            read=read.gigabytes),
        row("swa_full_tokens_ratio", differs="window layers get what their windows need here, not a share"),
        row("mamba_full_memory_ratio", differs="recurrent states get what max_batch_size needs here, not a share"),
        row("tp_size", differs=RANKS, instead="--tp", aliases=("tp", "tensor_parallel_size")),
        row("pp_size", differs=RANKS, instead="--pp", aliases=("pp", "pipeline_parallel_size")),
    )  # fmt: skip


def _trtllm() -> tuple[PeerKnob, ...]:
    def row(name: str, ours: str = "", differs: str = "", **fields: object) -> PeerKnob:
        return _row(TRTLLM, name, ours, differs, **fields)

    return (
        row("free_gpu_memory_fraction", "kv_fraction",
            "a share of what remains beside the measured peak, where some reserves are deducted after the fraction; "
            "here all are deducted before it",
            read=read.share, takes_all=True, aliases=("kv_cache_free_gpu_memory_fraction",)),
        row("max_tokens", "kv_tokens",
            "the newer of its two cache managers divides it by max_util_for_resume (0.95), for a larger pool"),
        row("max_gpu_total_bytes", "kv_bytes",
            "the older of its two cache managers ignores it for models whose layers are all alike; 0 is no cap",
            read=read.size_or_unset),
        row("max_batch_size", "max_batch_size"),
        row("max_num_tokens", "max_num_tokens"),
        row("max_seq_len", "max_seq_len"),
        row("tokens_per_block", "block_tokens"),
        row("dtype", "kv_dtype", "auto follows the checkpoint's own quantisation of the cache, here the weights",
            read=read.dtype),
        row("mamba_ssm_cache_dtype", "state_dtype", read=read.dtype),
        row("cuda_graph_config", "graphs", read=read.graph_config),
        row("batch_sizes", "graphs", read=read.batch_sizes, aliases=("cuda_graph_batch_sizes",)),
        row("enable_piecewise_cuda_graph", differs=PIECES, aliases=("prefill_cuda_graph_backend",)),
        row("max_loras", "max_adapters"),
        row("max_lora_rank", "max_adapter_rank"),
        row("enable_block_reuse", "prefix_caching", read=read.switch_on),
        row("host_cache_size", "host_kv_bytes", "a size for each rank; here it is for all together",
            read=read.size_or_unset),
        row("max_attention_window", differs="windows are those of the model here"),
        row("cross_kv_cache_fraction", differs="cross attention gets what max_batch_size needs here, not a share"),
        row("fp8_context_mla_kv_len_cap", differs="attended_tokens is ours, in tokens of a step, not of a sequence"),
        row("tensor_parallel_size", differs=RANKS, instead="--tp", aliases=("tp_size",)),
        row("pipeline_parallel_size", differs=RANKS, instead="--pp", aliases=("pp_size",)),
    )  # fmt: skip


def _row(engine: Engine, name: str, ours: str, differs: str, **fields: object) -> PeerKnob:
    match = Match.NONE if not ours else Match.ABOUT if differs else Match.EXACT
    return PeerKnob(engine=engine, name=name, ours=ours, differs=differs, match=match, **fields)  # type: ignore[arg-type]


KNOBS: tuple[PeerKnob, ...] = (*_vllm(), *_sglang(), *_trtllm())


def find_knob(engine: Engine, name: str, *, typed: str) -> PeerKnob:
    """The knob called ``name``, with dashes or underscores. Raises ``UserError`` with the closest name and the list."""
    plain = name.strip().lower().lstrip("-").replace("-", "_").rsplit(".", 1)[-1]
    known = {s: knob for knob in KNOBS if knob.engine is engine for s in (knob.name, *knob.aliases)}
    if plain not in known:
        able = [k.name for k in KNOBS if k.engine is engine and k.match is not Match.NONE]
        raise UserError(
            f"--like {typed}: no knob {plain!r} of {engine.title} is known here{close_to(plain, known)}",
            need="one of " + ", ".join(able),
            remedy=write_near(engine.name, plain, able),
        )
    knob = known[plain]
    if knob.match is Match.NONE:
        raise UserError(
            f"--like {typed}: {knob.name} of {engine.title} has no counterpart: {knob.differs}",
            remedy=_instead(knob, typed),
        )
    return knob


def _instead(knob: PeerKnob, typed: str) -> str:
    if not knob.instead:
        return "leave it out"
    value = typed.partition("=")[2].strip() or "N"
    return f"use {knob.instead} {value}"


def help_text() -> str:
    """Every mapping, a row each: what ``--like help`` prints."""
    width = max(len(knob.full_name) for knob in KNOBS)
    ours = max(len(knob.ours) for knob in KNOBS)
    rows = []
    for knob in KNOBS:
        row = f"{knob.full_name:<{width}}  {knob.ours or '-':<{ours}}  {knob.match.value:<{len(Match.ABOUT)}}"
        rows.append(f"{row}  {knob.differs}".rstrip())
    return "\n".join(rows) + "\n"
