"""The flags that would give another engine about the pool of a plan: pure functions of the plan alone.

Each engine gets two ways to say it. ``exact`` names the size of the pool (with a fraction that is rounded up where
one is needed beside it, so that the size decides); ``fraction`` says it by the engine's own share alone, rounded down
to ``DIGITS`` digits so that it never asks for more than the plan gives.

Translated back, beside the knobs of ours that have no word there, ``exact`` gives the plan's pool to within one block,
and ``fraction`` a pool that is no larger, and smaller by no more than one block, whole pages and a unit of the last
printed digit. Where so much less would no longer hold one sequence, there is no ``fraction``, and a note says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.config import DEFAULT_BLOCK_TOKENS
from tonnage.hardware import CUDA_PAGE_BYTES
from tonnage.layout import KVGroupKind, KVLayout
from tonnage.peers.engines import SGLANG, TRTLLM, VLLM, Engine
from tonnage.peers.facts import PlanFacts
from tonnage.terms import MemoryPlan
from tonnage.units import ceil_div

#: Digits of a printed fraction: 0.0001 of an 80 GiB device are 8 MiB.
DIGITS = 4
ONE = 10**DIGITS
#: What whole pages may round away, of the pool and of scratch that grows with it.
PAGES_BYTES = 2 * CUDA_PAGE_BYTES
#: Why a plan has no share that could be printed alone.
NO_SHARE = "no share alone: the pool holds hardly more than it must, and a share cut to so few digits may hold less"

#: Our names of the cache's element types in theirs; what is missing can only be had through weights of that type.
_FP8 = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}
_DTYPES = {
    VLLM.name: {**_FP8, "bfloat16": "bfloat16"},
    SGLANG.name: {**_FP8, "bfloat16": "bfloat16"},
    TRTLLM.name: {"float8_e4m3fn": "fp8", "bfloat16": "bfloat16", "float16": "float16"},
}

Flag = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalent:
    """One engine's flags, as (knob, value) in the order they are printed; all values are text.

    limits    shapes, dtype and block, needed with either of the two below
    exact     the pool by its size
    fraction  the pool by a share; empty where the plan has none that could be printed
    notes     what these flags cannot say
    """

    engine: Engine
    limits: tuple[Flag, ...]
    exact: tuple[Flag, ...]
    fraction: tuple[Flag, ...]
    notes: tuple[str, ...] = ()

    def likes(self, *, by_fraction: bool = False) -> list[str]:
        """The same flags as ``--like`` takes them."""
        pool = self.fraction if by_fraction else self.exact
        return [f"{self.engine.name}:{name}={value}" for name, value in (*self.limits, *pool)]


def equivalents(plan: MemoryPlan) -> tuple[Equivalent, ...]:
    """For every engine that is known, in the order of ``ENGINES``."""
    facts = PlanFacts.of(plan)
    return _vllm(plan, facts), _sglang(plan, facts), _trtllm(plan, facts)


def _vllm(plan: MemoryPlan, facts: PlanFacts) -> Equivalent:
    limits = plan.limits
    dtype, notes = _dtype(plan, VLLM)
    down, why = _alone(plan, facts, _share(facts.taken - facts.outside, facts.device), facts.device)
    return Equivalent(
        engine=VLLM,
        limits=(
            ("max_model_len", str(limits.max_seq_len)),
            ("max_num_seqs", str(limits.max_batch_size)),
            ("max_num_batched_tokens", str(limits.max_num_tokens)),
            ("block_size", str(_block_tokens(plan))),
            *dtype,
            *([("enforce_eager", "true")] if not limits.graph_batch_sizes else []),
            *([("no_enable_prefix_caching", "true")] if not limits.prefix_caching else []),
        ),
        exact=(("kv_cache_memory_bytes", str(plan.kv.bytes)),) if plan.kv.bytes else (),
        fraction=(("gpu_memory_utilization", down),) if down else (),
        notes=(*notes, *why, *_several_kinds(plan, VLLM)),
    )


def _sglang(plan: MemoryPlan, facts: PlanFacts) -> Equivalent:
    limits = plan.limits
    dtype, notes = _dtype(plan, SGLANG)
    down, why = _alone(plan, facts, _share(facts.weights + facts.kv, facts.before), facts.before)
    up = _share(facts.weights + facts.kv, facts.before, up=True)
    return Equivalent(
        engine=SGLANG,
        limits=(
            ("context_length", str(limits.max_seq_len)),
            ("max_running_requests", str(limits.max_batch_size)),
            ("chunked_prefill_size", str(limits.max_num_tokens)),
            ("page_size", str(_block_tokens(plan))),
            *dtype,
            *([("disable_cuda_graph", "true")] if not limits.graph_batch_sizes else []),
            *([("disable_radix_cache", "true")] if not limits.prefix_caching else []),
        ),
        exact=(("mem_fraction_static", up), ("max_total_tokens", str(plan.kv.tokens))) if up and plan.kv.tokens else (),
        fraction=(("mem_fraction_static", down),) if down else (),
        notes=(*notes, *why, *_several_kinds(plan, SGLANG)),
    )


def _trtllm(plan: MemoryPlan, facts: PlanFacts) -> Equivalent:
    limits, block = plan.limits, _block_tokens(plan)
    dtype, notes = _dtype(plan, TRTLLM)
    down, why = _alone(plan, facts, _share(facts.pool, facts.rest), facts.rest)
    up = _share(facts.pool, facts.rest, up=True)
    size = (("max_tokens", str(plan.kv.tokens)), ("max_gpu_total_bytes", str(plan.kv.bytes)))
    if block & (block - 1) or block == 1:
        notes = (*notes, f"tokens_per_block must be a power of two above 1, and this plan has {block}")
    return Equivalent(
        engine=TRTLLM,
        limits=(
            ("max_seq_len", str(limits.max_seq_len)),
            ("max_batch_size", str(limits.max_batch_size)),
            ("max_num_tokens", str(limits.max_num_tokens)),
            *([("cuda_graph_config", "null")] if not limits.graph_batch_sizes else []),
            ("tokens_per_block", str(block)),
            *([("enable_block_reuse", "false")] if not limits.prefix_caching else []),
            *dtype,
        ),
        exact=(("free_gpu_memory_fraction", up), *size) if up and plan.kv.tokens and plan.kv.bytes else (),
        fraction=(("free_gpu_memory_fraction", down),) if down else (),
        notes=(*notes, *why, *_several_kinds(plan, TRTLLM)),
    )


def _share(part: int, whole: int, *, up: bool = False) -> str:
    """``part / whole`` with ``DIGITS`` digits, at most 1; empty where nothing above 0 comes out."""
    if part <= 0 or whole <= 0:
        return ""
    units = min(ceil_div(part * ONE, whole) if up else part * ONE // whole, ONE)
    if units == 0:
        return ""
    return f"{units // ONE}.{units % ONE:0{DIGITS}d}"


def _alone(plan: MemoryPlan, facts: PlanFacts, share: str, whole: int) -> tuple[str, tuple[str, ...]]:
    """The share of ``whole``, unless typed back it may give less than the smallest pool there can be; and why not."""
    if not facts.kv:
        return "", ()
    lost = whole // ONE + 1 + _unit_bytes(plan.kv.layout) + PAGES_BYTES
    return (share, ()) if share and facts.kv - lost >= facts.least else ("", (NO_SHARE,))


def _unit_bytes(layout: KVLayout) -> int:
    """What a pool grows by at once: as many tokens as the largest block holds, in blocks of every group."""
    tokens = max((group.block_tokens for group in layout.groups), default=0)
    return layout.slab_bytes * sum(ceil_div(tokens, group.block_tokens or tokens or 1) for group in layout.groups)


def _block_tokens(plan: MemoryPlan) -> int:
    return plan.knobs.block_tokens.or_else(DEFAULT_BLOCK_TOKENS)


def _dtype(plan: MemoryPlan, engine: Engine) -> tuple[tuple[Flag, ...], tuple[str, ...]]:
    """The cache's element type where it was asked for; otherwise every engine follows the weights, as we do."""
    wanted = plan.knobs.kv_dtype.value
    if wanted is None:
        return (), ()
    theirs = _DTYPES[engine.name].get(wanted)
    name = "dtype" if engine is TRTLLM else "kv_cache_dtype"
    if theirs is not None:
        return ((name, theirs),), ()
    return (), (f"a cache in {wanted} has no name here: it takes weights of that type",)


def _several_kinds(plan: MemoryPlan, engine: Engine) -> tuple[str, ...]:
    """Models whose layers keep different things are divided by each engine in its own way."""
    groups = plan.kv.layout.groups
    if len(groups) <= 1 and all(group.kind in (KVGroupKind.FULL, KVGroupKind.LATENT) for group in groups):
        return ()
    how = {
        VLLM.name: "pages of one size for all kinds of layers",
        SGLANG.name: "a share for each kind of layers",
        TRTLLM.name: "a pool for each window, or a share of bytes",
    }[engine.name]
    return (f"layers of this model keep different things; {engine.title} has {how}, so its tokens may differ",)
