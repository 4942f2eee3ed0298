"""Every tensor of one layer on one rank, by shape and component: what ``weights`` adds up.

Projections into heads are cut by whole heads (key heads fewer than ranks are replicated), feed-forward parts by
their inner size; what makes the latent of MLA, routers and norms lie on every rank. Experts are dealt out over
``ep`` ranks, and each one's inner size is cut over the ``tp / ep`` ranks that share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tonnage.costs.compressed import Compressed, compressed_tensors
from tonnage.costs.layers import Attention, Dense, Experts, FeedForward, Latent, Layer
from tonnage.costs.recurrent import recurrent_tensors
from tonnage.costs.tensors import Component, Cut, Tensor, matrix, vector
from tonnage.costs.traits import Traits
from tonnage.units import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What every layer needs to know: the model's width, its class's habits, and the rank's cut.

    expert_hidden  inputs of the routed experts where they work on a narrower vector than the model's, else 0
    compressed     the sizes of a model that keeps its past in compressed entries
    """

    hidden: int
    traits: Traits
    cut: Cut
    expert_hidden: int = 0
    compressed: Compressed | None = None


def layer_tensors(layer: Layer, build: Build) -> Iterator[Tensor]:
    """The tensors of one layer, norms last."""
    if build.compressed is not None:
        yield from compressed_tensors(layer, build.compressed, build.cut)
    for mixer in layer.mixers if build.compressed is None else ():
        if isinstance(mixer, Attention):
            yield from _attention(mixer, build)
        elif isinstance(mixer, Latent):
            yield from _latent(mixer, build)
        else:
            yield from recurrent_tensors(mixer, build.hidden, build.traits, build.cut)
    if layer.feed_forward is not None:
        yield from _feed_forward(layer.feed_forward, build)
    yield from _norms(layer, build)


def _norms(layer: Layer, build: Build) -> Iterator[Tensor]:
    """A norm before each part, or also after; a parallel layer reads one for both parts."""
    parts = bool(layer.mixers) + (layer.feed_forward is not None)
    if build.traits.is_parallel:
        parts = min(parts, 1)
    count = parts * build.traits.norms_per_part
    if count:
        yield vector(Component.NORMS, "input_layernorm", build.hidden, count=count)
        if build.traits.norm_bias:
            yield vector(Component.NORMS, "input_layernorm", build.hidden, count=count)


def _attention(mixer: Attention, build: Build) -> Iterator[Tensor]:
    """Query, key, value and output projections; a layer that reads another's cache has no keys of its own."""
    traits, part = build.traits, Component.ATTENTION
    heads, kv_heads = build.cut.heads(mixer.num_heads), build.cut.heads(mixer.num_kv_heads)
    query = heads * mixer.head_dim
    own = mixer.kv_from is None
    key = kv_heads * mixer.head_dim if own else 0
    value = kv_heads * mixer.v_head_dim if own else 0
    out = heads * (mixer.v_head_dim or mixer.head_dim)
    rows = {"q_proj": query + (out if traits.output_gate else 0), "k_proj": key, "v_proj": value}
    for name, size in rows.items():
        if size:
            yield matrix(part, f"self_attn.{name}", size, build.hidden)
            if traits.qkv_bias:
                yield vector(part, f"self_attn.{name}", size)
    yield matrix(part, "self_attn.o_proj", build.hidden, out)
    if traits.out_bias:
        yield vector(part, "self_attn.o_proj", build.hidden)
    if traits.qk_norm or mixer.is_cross:
        yield from _head_norms(mixer, build, query=query, key=key)
    if traits.sinks or (traits.window_sinks and mixer.window is not None):
        yield vector(part, "self_attn.sinks", heads)
    if mixer.is_cross:
        yield vector(part, "cross_attn_gates", 2)


def _head_norms(mixer: Attention, build: Build, *, query: int, key: int) -> Iterator[Tensor]:
    each_head = build.traits.norm_width == "head"
    yield vector(Component.NORMS, "self_attn.q_norm", mixer.head_dim if each_head else query)
    if key:
        yield vector(Component.NORMS, "self_attn.k_norm", mixer.head_dim if each_head else key)


def _latent(mixer: Latent, build: Build) -> Iterator[Tensor]:
    """MLA: projections down to the latents lie on every rank, those up from them are cut by heads."""
    hidden, part = build.hidden, Component.ATTENTION
    heads, bias = build.cut.heads(mixer.num_heads), build.traits.latent_bias
    query = heads * (mixer.qk_nope_head_dim + mixer.qk_rope_head_dim)
    latent = mixer.kv_lora_rank + mixer.qk_rope_head_dim
    out = heads * mixer.v_head_dim
    if mixer.q_lora_rank:
        yield matrix(part, "self_attn.q_a_proj", mixer.q_lora_rank, hidden)
        yield vector(Component.NORMS, "self_attn.q_a_layernorm", mixer.q_lora_rank)
        yield matrix(part, "self_attn.q_b_proj", query, mixer.q_lora_rank)
    else:
        yield matrix(part, "self_attn.q_proj", query, hidden)
    yield matrix(part, "self_attn.kv_a_proj_with_mqa", latent, hidden)
    yield vector(Component.NORMS, "self_attn.kv_a_layernorm", mixer.kv_lora_rank)
    yield matrix(part, "self_attn.kv_b_proj", heads * (mixer.qk_nope_head_dim + mixer.v_head_dim), mixer.kv_lora_rank)
    yield matrix(part, "self_attn.o_proj", hidden, out)
    if bias:
        yield vector(part, "self_attn.biases", (mixer.q_lora_rank or 0) + latent + hidden)
    if mixer.index_head_dim:
        yield from _indexer(mixer, hidden)


def _indexer(mixer: Latent, hidden: int) -> Iterator[Tensor]:
    """The sparse indexer, whole on every rank: its queries come from the query latent, its keys from the input."""
    part, size = Component.ATTENTION, mixer.index_head_dim
    yield matrix(part, "self_attn.indexer.wq_b", mixer.num_index_heads * size, mixer.q_lora_rank or hidden)
    yield matrix(part, "self_attn.indexer.wk", size, hidden)
    yield vector(Component.NORMS, "self_attn.indexer.k_norm", 2 * size)
    yield replace(matrix(part, "self_attn.indexer.weights_proj", mixer.num_index_heads, hidden), can_pack=False)


def _feed_forward(part: FeedForward, build: Build) -> Iterator[Tensor]:
    if isinstance(part, Dense):
        inner = ceil_div(part.intermediate_size, build.cut.inner)
        yield from _mlp(Component.FEED_FORWARD, "mlp", inner, build, is_gated=part.is_gated)
        return
    yield from _experts(part, build)
    if part.shared_intermediate_size:
        shared = ceil_div(part.shared_intermediate_size, build.cut.inner)
        yield from _mlp(Component.SHARED_EXPERTS, "mlp.shared_experts", shared, build, is_gated=part.is_gated)
        if build.traits.shared_gate:
            yield vector(Component.SHARED_EXPERTS, "mlp.shared_expert_gate", build.hidden)


def _mlp(component: Component, module: str, inner: int, build: Build, *, is_gated: bool) -> Iterator[Tensor]:
    hidden = build.hidden
    for name in ("gate_proj", "up_proj") if is_gated else ("up_proj",):
        yield matrix(component, f"{module}.{name}", inner, hidden)
        if build.traits.mlp_bias:
            yield vector(component, f"{module}.{name}", inner)
    yield matrix(component, f"{module}.down_proj", hidden, inner)
    if build.traits.mlp_bias:
        yield vector(component, f"{module}.down_proj", hidden)


def _experts(part: Experts, build: Build) -> Iterator[Tensor]:
    traits, hidden, component = build.traits, build.expert_hidden or build.hidden, Component.EXPERTS
    num_experts = ceil_div(part.num_experts, build.cut.experts)
    inner = ceil_div(part.intermediate_size, build.cut.expert_inner)
    ups = 2 if part.is_gated else 1
    yield matrix(component, "mlp.experts.up_proj", inner, hidden, count=ups * num_experts)
    yield matrix(component, "mlp.experts.down_proj", hidden, inner, count=num_experts)
    if traits.expert_bias:
        yield vector(component, "mlp.experts", ups * inner + hidden, count=num_experts)
    yield Tensor(component=Component.ROUTER, module="mlp.gate", rows=part.num_experts, columns=build.hidden)
    if traits.router_bias:
        yield vector(Component.ROUTER, "mlp.gate", part.num_experts)
    if traits.router_correction:
        yield replace(
            vector(Component.ROUTER, "mlp.gate", part.num_experts), is_buffer=True, counts=traits.correction_counts
        )
    if build.expert_hidden:
        yield matrix(Component.SHARED_EXPERTS, "mlp.fc1_latent_proj", build.expert_hidden, build.hidden)
        yield matrix(Component.SHARED_EXPERTS, "mlp.fc2_latent_proj", build.hidden, build.expert_hidden)
