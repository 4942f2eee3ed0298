"""Buffers of adapters: slots of the largest rank beside every adapted matrix, made while the model is loaded.

vLLM makes them before its dry run, full of zeros, whether an adapter is loaded or not. ``max_cpu_loras`` decides about
host memory alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tonnage.costs.layers import Experts
from tonnage.costs.ranks import attention_ranks, rank_shape
from tonnage.errors import InvalidSetting
from tonnage.layout import DTYPE_BYTES
from tonnage.peers.start import Rule
from tonnage.peers.vllm import eras
from tonnage.peers.vllm.adapted import Cut, Pair, adapts_vocabulary, pairs_of_layer
from tonnage.peers.vllm.resident import is_logged
from tonnage.peers.vllm.setup import Setup, count, switch
from tonnage.terms import Quantity, Source
from tonnage.units import round_up

#: What is taken where the flags are left out.
DEFAULT_ADAPTERS, DEFAULT_RANK = 1, 16
#: Tokens that an adapter may add to the vocabulary, and what the head's outputs were filled up to, before 0.12.
DEFAULT_EXTRA_TOKENS, VOCABULARY_STEP = 256, 256
#: Ranks that the engine reads, with the release that first reads them.
_RANKS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((8, 16, 32, 64), eras.ADAPTERS),
    ((128, 256), (0, 5)),
    ((320, 512), (0, 8)),
    ((1,), (0, 11, 1)),
)

RULE = Rule(
    name="adapters", since=eras.ADAPTERS,
    says="max_loras x bytes x (rank x inputs + outputs x rank) of every adapted matrix of the rank: the split side of "
    "a matrix is split, the other factor is whole on every rank unless fully_sharded_loras",
    source="vllm/lora/layers of 0.3.0 to 0.33.0 (create_lora_weights)",
)  # fmt: skip
EXPERTS_SPREAD = Rule(
    name="adapters of experts", since=eras.EXPERTS_ADAPTED, before=eras.EXPERTS_ADAPTED_SPREAD,
    says="experts that are spread over the ranks cannot be adapted",
    source="vllm/lora/layers/fused_moe.py of 0.11.1 to 0.20.0",
)  # fmt: skip


def rule(setup: Setup) -> Rule:
    """Dated where the model has experts: from a release on they are adapted too, and take most of it."""
    if not any(isinstance(layer.feed_forward, Experts) for layer in setup.launch.config.layers):
        return RULE
    if eras.is_from(setup.launch.version, eras.EXPERTS_ADAPTED):
        return replace(RULE, since=eras.EXPERTS_ADAPTED, says=f"{RULE.says}; each routed expert has its own")
    return replace(RULE, before=eras.EXPERTS_ADAPTED, says=f"{RULE.says}; routed experts have none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """``num_adapters`` of rank ``rank``; ``num_extra_tokens`` that each may add to the vocabulary. ``is_sharded``: both
    factors of a pair are split."""

    num_adapters: int
    rank: int
    element_bytes: int
    num_extra_tokens: int
    is_sharded: bool


def slots_of(setup: Setup) -> Slots | None:
    """None where adapters are not enabled. Raises ``InvalidSetting`` for what the engine would refuse."""
    launch = setup.launch
    if not switch(launch, "enable_lora"):
        return None
    if not eras.is_from(launch.version, eras.ADAPTERS):
        raise InvalidSetting(
            "enable_lora", "true", f"vLLM {launch.version} has no adapters: 0.3 is the first that does",
            remedy="leave it out",
        )  # fmt: skip
    adapters = count(launch, "max_loras") or DEFAULT_ADAPTERS
    rank = count(launch, "max_lora_rank") or DEFAULT_RANK
    kept = count(launch, "max_cpu_loras")
    if kept is not None and kept < adapters:
        raise InvalidSetting(
            "max_cpu_loras", kept, f"fewer than the {adapters} of max_loras", remedy=f"write {adapters} or more"
        )
    _check_rank(setup, rank)
    is_sharded = bool(switch(launch, "fully_sharded_loras"))
    tp = attention_ranks(launch.rank)
    if is_sharded and rank % tp:
        raise InvalidSetting(
            "max_lora_rank", rank, f"{tp} tensor-parallel ranks do not divide it, and fully_sharded_loras "
            "splits it over them", remedy="leave fully_sharded_loras out, or choose a rank that they divide",
        )  # fmt: skip
    return Slots(
        num_adapters=adapters,
        rank=rank,
        element_bytes=DTYPE_BYTES[_dtype(setup)],
        num_extra_tokens=_extra_tokens(setup),
        is_sharded=is_sharded,
    )


def _check_rank(setup: Setup, rank: int) -> None:
    read = sorted(each for ranks, since in _RANKS if eras.is_from(setup.launch.version, since) for each in ranks)
    if rank not in read:
        more = [each for each in read if each >= rank]
        raise InvalidSetting(
            "max_lora_rank", rank, f"vLLM {setup.launch.version} reads {', '.join(map(str, read))}",
            remedy=f"write {more[0] if more else read[-1]}",
        )  # fmt: skip


def _dtype(setup: Setup) -> str:
    own = setup.launch.dtype or setup.launch.config.dtype
    asked = str(setup.launch.get("lora_dtype") or "auto")
    return {"auto": own, "half": "float16"}.get(asked, asked if asked in DTYPE_BYTES else own)


def _extra_tokens(setup: Setup) -> int:
    if eras.is_from(setup.launch.version, eras.NO_EXTRA_TOKENS):
        return 0
    asked = count(setup.launch, "lora_extra_vocab_size", allow_zero=True)
    return DEFAULT_EXTRA_TOKENS if asked is None else asked


def adapter_bytes(setup: Setup) -> Quantity | None:
    """Bytes of all slots on this rank; None without adapters. Low and high: what may be adapted is left out, or is
    counted, and so is a vocabulary of a family that was not read."""
    slots = slots_of(setup)
    if slots is None:
        return None
    if is_logged(setup.launch.weights) and setup.is_v1:
        return Quantity.exact(0, setup.launch.weights.source, "in the weights that were logged")
    sure, maybe = 0, 0
    for number in rank_shape(setup.launch.config, setup.launch.rank).layers:
        for pair in pairs_of_layer(setup, number):
            size = pair_elements(pair, slots, tp=attention_ranks(setup.launch.rank))
            sure, maybe = (sure + size, maybe) if pair.is_sure else (sure, maybe + size)
    words, adapts = _vocabulary_elements(setup, slots), adapts_vocabulary(setup)
    each = slots.num_adapters * slots.element_bytes
    low, high = sure + (words if adapts else 0), sure + maybe + (0 if adapts is False else words)
    best = sure + maybe + (words if adapts else 0)
    return Quantity(
        bytes=each * best, low=each * low, high=each * high, source=Source.PREDICTED,
        ref=f"{slots.num_adapters} adapters of rank {slots.rank}",
    )  # fmt: skip


def pair_elements(pair: Pair, slots: Slots, *, tp: int) -> int:
    """Elements of one adapter beside one matrix: rank x inputs, outputs x rank."""
    is_split = slots.is_sharded and pair.cut is not Cut.NOTHING
    first = slots.rank // (tp if is_split and pair.cut is Cut.OUTPUTS else 1) * pair.num_in
    second = pair.num_out // (tp if is_split and pair.cut is Cut.INPUTS else 1) * slots.rank
    return pair.num_copies * (first + second)


def _vocabulary_elements(setup: Setup, slots: Slots) -> int:
    """Of the embeddings on the first stage and the head on the last, whole on every rank of it."""
    config, shape = setup.launch.config, rank_shape(setup.launch.config, setup.launch.rank)
    tokens, extra = config.vocab_size + slots.num_extra_tokens, slots.num_extra_tokens * config.hidden_size
    outputs = round_up(tokens, VOCABULARY_STEP) if slots.num_extra_tokens else tokens
    embeddings = (tokens + config.hidden_size) * slots.rank + extra
    head = (outputs + config.hidden_size) * slots.rank + extra
    return embeddings * shape.has_embeddings + head * shape.has_head
