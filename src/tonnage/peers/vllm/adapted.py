"""The matrices of a rank that vLLM adapts: every linear layer, and of some families the vocabulary.

Read in the sources of the releases: vllm/lora/utils.py and vllm/lora/layers of 0.3.0 to 0.33.0, and what each class in
vllm/model_executor/models names as its ``embedding_modules``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from tonnage.costs.extras import expert_hidden
from tonnage.costs.layers import Attention, Dense, Experts, FeedForward, Latent, Mixer, Recurrent
from tonnage.costs.ranks import attention_ranks, rank_kv_heads
from tonnage.peers.vllm import eras
from tonnage.peers.vllm.setup import Setup
from tonnage.units import ceil_div

#: Families whose classes name their embeddings and their head, so that both are adapted; and since when others do.
_WITH_VOCABULARY = (
    "apertus", "aya", "cohere", "cohere2", "exaone", "exaone4", "falcon_h1", "granite", "granitemoe",
    "granitemoehybrid", "granitemoeshared", "jamba", "lfm2", "llama", "minicpm", "mistral", "mixtral", "nemotron",
    "nemotron_h", "phi3", "phimoe", "solar",
)  # fmt: skip
_WITH_VOCABULARY_LATER = {
    "qwen3": eras.QWEN3_VOCABULARY_ADAPTED, "qwen3_moe": eras.QWEN3_VOCABULARY_ADAPTED,
    "qwen3_5": eras.QWEN35_VOCABULARY_ADAPTED, "qwen3_5_text": eras.QWEN35_VOCABULARY_ADAPTED,
    "qwen3_5_moe": eras.QWEN35_VOCABULARY_ADAPTED, "qwen3_5_moe_text": eras.QWEN35_VOCABULARY_ADAPTED,
}  # fmt: skip
#: Families whose classes name none.
_WITHOUT_VOCABULARY = (
    "baichuan", "deepseek_v2", "deepseek_v3", "deepseek_v32", "gemma", "gemma2", "gemma3", "gemma3_text", "glm4_moe",
    "glm_moe_dsa", "gpt_oss", "internlm2", "qwen2", "qwen2_moe",
)  # fmt: skip
#: Families whose experts keep gate and up in one matrix: one first factor for both, from 0.12 on.
_GATE_AND_UP_AS_ONE = ("gpt_oss", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_vl_moe", "qwen3_vl_moe_text")


class Cut(StrEnum):
    """What tensor parallelism splits of a matrix; the factor at that side of a pair is split with it."""

    OUTPUTS = "outputs"
    INPUTS = "inputs"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A matrix as this rank holds it: ``num_copies`` of ``num_in`` x ``num_out``. One adapter of rank r keeps r x
    ``num_in`` and ``num_out`` x r beside each. ``is_sure``: whether it is known to be adapted, or may be."""

    module: str
    num_in: int
    num_out: int
    cut: Cut = Cut.NOTHING
    num_copies: int = 1
    is_sure: bool = True


def pairs_of_layer(setup: Setup, number: int) -> Iterator[Pair]:
    """Those of one layer, by its number in the model."""
    layer = setup.launch.config.layers[number]
    for mixer in layer.mixers:
        yield from _of_mixer(setup, mixer)
    yield from _of_feed_forward(setup, layer.feed_forward)


def _of_mixer(setup: Setup, mixer: Mixer) -> Iterator[Pair]:
    hidden, rank = setup.launch.config.hidden_size, setup.launch.rank
    ranks = attention_ranks(rank)
    if isinstance(mixer, Attention):
        heads, kv_heads = mixer.num_heads // ranks, rank_kv_heads(mixer.num_kv_heads, rank)
        value = mixer.v_head_dim or mixer.head_dim
        yield Pair(module="q_proj", num_in=hidden, num_out=heads * mixer.head_dim, cut=Cut.OUTPUTS)
        yield Pair(module="k_proj", num_in=hidden, num_out=kv_heads * mixer.head_dim, cut=Cut.OUTPUTS)
        yield Pair(module="v_proj", num_in=hidden, num_out=kv_heads * value, cut=Cut.OUTPUTS)
        yield Pair(module="o_proj", num_in=heads * value, num_out=hidden, cut=Cut.INPUTS)
    elif isinstance(mixer, Latent):
        yield from _of_latent(hidden, mixer, mixer.num_heads // ranks)
    else:
        yield from _of_recurrent(hidden, mixer, ranks)


def _of_latent(hidden: int, mixer: Latent, heads: int) -> Iterator[Pair]:
    """What leads to the latents is whole on every rank."""
    query = heads * (mixer.qk_nope_head_dim + mixer.qk_rope_head_dim)
    if mixer.q_lora_rank:
        yield Pair(module="q_a_proj", num_in=hidden, num_out=mixer.q_lora_rank)
        yield Pair(module="q_b_proj", num_in=mixer.q_lora_rank, num_out=query, cut=Cut.OUTPUTS)
    else:
        yield Pair(module="q_proj", num_in=hidden, num_out=query, cut=Cut.OUTPUTS)
    yield Pair(module="kv_a_proj_with_mqa", num_in=hidden, num_out=mixer.kv_lora_rank + mixer.qk_rope_head_dim)
    if mixer.index_head_dim:
        yield from _of_indexer(hidden, mixer)
    keys_and_values = heads * (mixer.qk_nope_head_dim + mixer.v_head_dim)
    yield Pair(module="kv_b_proj", num_in=mixer.kv_lora_rank, num_out=keys_and_values, cut=Cut.OUTPUTS)
    yield Pair(module="o_proj", num_in=heads * mixer.v_head_dim, num_out=hidden, cut=Cut.INPUTS)


def _of_indexer(hidden: int, mixer: Latent) -> Iterator[Pair]:
    """Whole on every rank. Releases fuse what reads the hidden state, so it is not sure."""
    queries = mixer.num_index_heads * mixer.index_head_dim
    yield Pair(module="wq_b", num_in=mixer.q_lora_rank or hidden, num_out=queries, is_sure=False)
    yield Pair(module="wk", num_in=hidden, num_out=mixer.index_head_dim, is_sure=False)
    yield Pair(module="weights_proj", num_in=hidden, num_out=mixer.num_index_heads, is_sure=False)


def _of_recurrent(hidden: int, mixer: Recurrent, ranks: int) -> Iterator[Pair]:
    """Into the state and out of it. Releases fuse the projections in different ways, so none is sure."""
    values = mixer.num_heads * mixer.head_dim
    inputs = ceil_div(mixer.conv_channels + values + 2 * mixer.num_heads, ranks)
    yield Pair(module="in_proj", num_in=hidden, num_out=inputs, cut=Cut.OUTPUTS, is_sure=False)
    yield Pair(module="out_proj", num_in=ceil_div(values, ranks), num_out=hidden, cut=Cut.INPUTS, is_sure=False)


def _of_feed_forward(setup: Setup, part: FeedForward | None) -> Iterator[Pair]:
    hidden, tp, version = setup.launch.config.hidden_size, setup.launch.rank.tp, setup.launch.version
    if isinstance(part, Dense):
        yield from _gated(hidden, ceil_div(part.intermediate_size, tp), is_gated=part.is_gated)
    elif isinstance(part, Experts):
        if part.shared_intermediate_size:
            yield from _gated(hidden, ceil_div(part.shared_intermediate_size, tp), is_gated=part.is_gated)
        if part.is_gated and eras.is_from(version, eras.ALL_LINEAR_ADAPTED):
            yield Pair(module="gate", num_in=hidden, num_out=part.num_experts)
        if eras.is_from(version, eras.EXPERTS_ADAPTED):
            yield from _of_experts(setup, part)


def _gated(hidden: int, inner: int, *, is_gated: bool) -> Iterator[Pair]:
    if is_gated:
        yield Pair(module="gate_proj", num_in=hidden, num_out=inner, cut=Cut.OUTPUTS)
    yield Pair(module="up_proj", num_in=hidden, num_out=inner, cut=Cut.OUTPUTS)
    yield Pair(module="down_proj", num_in=inner, num_out=hidden, cut=Cut.INPUTS)


def _of_experts(setup: Setup, part: Experts) -> Iterator[Pair]:
    """A pair for each expert of the rank and each of its matrices."""
    config, rank = setup.launch.config, setup.launch.rank
    copies, latent = part.num_experts // rank.ep, expert_hidden(config)
    if latent:
        yield Pair(module="fc1_latent_proj", num_in=config.hidden_size, num_out=latent)
        yield Pair(module="fc2_latent_proj", num_in=latent, num_out=config.hidden_size)
    width = latent or config.hidden_size
    inner = ceil_div(part.intermediate_size * rank.ep, rank.tp)
    is_later = eras.is_from(setup.launch.version, eras.EXPERTS_SHARDED)
    as_one = is_later and part.is_gated and config.model_type in _GATE_AND_UP_AS_ONE
    into, out_of = (Cut.OUTPUTS, Cut.INPUTS) if is_later else (Cut.NOTHING, Cut.NOTHING)
    outputs = [2 * inner] if as_one else [inner] * (2 if part.is_gated else 1)
    for num_out in outputs:
        yield Pair(module="experts", num_in=width, num_out=num_out, cut=into, num_copies=copies)
    yield Pair(module="experts", num_in=inner, num_out=width, cut=out_of, num_copies=copies)


def adapts_vocabulary(setup: Setup) -> bool | None:
    """Whether this family's embeddings and head are adapted too; None where its class was not read."""
    family = setup.launch.config.model_type
    if family in _WITH_VOCABULARY:
        return True
    if family in _WITH_VOCABULARY_LATER:
        return eras.is_from(setup.launch.version, _WITH_VOCABULARY_LATER[family])
    return False if family in _WITHOUT_VOCABULARY else None
