"""The tensors of layers whose memory is a state: Mamba, gated delta, linear attention, short convolution.

Heads and their channels are cut over ranks like attention heads; groups that several heads share (B and C, or keys
and queries) are replicated where there are fewer than ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from tonnage.costs.layers import Recurrent
from tonnage.costs.tensors import Component, Cut, Tensor, matrix, vector
from tonnage.costs.traits import Traits
from tonnage.units import ceil_div

_PART = Component.RECURRENT


def recurrent_tensors(mixer: Recurrent, hidden: int, traits: Traits, cut: Cut) -> Iterator[Tensor]:
    """All tensors of one such mixer. An unknown kind is priced as Mamba2, the nearest in size."""
    build = {
        "gated_delta": _gated_delta,
        "kda": _kda,
        "linear": _linear,
        "short_conv": _short_conv,
        "mamba1": _mamba1,
        "rg_lru": _rg_lru,
    }.get(mixer.kind, _mamba2)
    yield from build(mixer, hidden, traits, cut)


def inner_channels(mixer: Recurrent, cut: Cut) -> tuple[int, int]:
    """(channels of the heads, channels of the groups that they share) on one rank."""
    heads = cut.heads(mixer.num_heads) * mixer.head_dim
    shared = mixer.conv_channels - mixer.num_heads * mixer.head_dim
    each = ceil_div(shared, max(1, mixer.num_groups))
    return heads, max(0, each * cut.heads(max(1, mixer.num_groups)))


def _projection(name: str, rows: int, columns: int, *, bias: bool) -> Iterator[Tensor]:
    yield matrix(_PART, f"mixer.{name}", rows, columns)
    if bias:
        yield vector(_PART, f"mixer.{name}", rows)


def _convolution(channels: int, kernel: int, *, bias: bool) -> Iterator[Tensor]:
    """One filter a channel; never packed."""
    yield Tensor(component=_PART, module="mixer.conv1d", rows=channels, columns=kernel)
    if bias:
        yield vector(_PART, "mixer.conv1d", channels)


def _mamba2(mixer: Recurrent, hidden: int, traits: Traits, cut: Cut) -> Iterator[Tensor]:
    """One projection makes the gate, the inputs, B, C and the step of every head."""
    heads = cut.heads(mixer.num_heads)
    inner, shared = inner_channels(mixer, cut)
    yield from _projection("in_proj", 2 * inner + shared + heads, hidden, bias=bool(traits.inner_bias))
    yield from _convolution(inner + shared, mixer.conv_kernel, bias=bool(traits.conv_bias))
    yield vector(_PART, "mixer.A_log_D_dt_bias", 3 * heads)
    if traits.inner_norm:
        yield vector(Component.NORMS, "mixer.norm", inner)
    yield from _projection("out_proj", hidden, inner, bias=bool(traits.inner_bias))


def _mamba1(mixer: Recurrent, hidden: int, traits: Traits, cut: Cut) -> Iterator[Tensor]:
    """The step comes through a narrow projection (hidden / 16), every channel has its own A."""
    inner, state, narrow = cut.heads(mixer.num_heads) * mixer.head_dim, mixer.state_size, ceil_div(hidden, 16)
    yield from _projection("in_proj", 2 * inner, hidden, bias=bool(traits.inner_bias))
    yield from _convolution(inner, mixer.conv_kernel, bias=bool(traits.conv_bias))
    yield matrix(_PART, "mixer.x_proj", narrow + 2 * state, inner)
    yield from _projection("dt_proj", inner, narrow, bias=True)
    yield vector(_PART, "mixer.A_log_D", inner * (state + 1))
    yield vector(Component.NORMS, "mixer.layernorms", narrow + 2 * state)
    yield from _projection("out_proj", hidden, inner, bias=bool(traits.inner_bias))


def _gated_delta(mixer: Recurrent, hidden: int, traits: Traits, cut: Cut) -> Iterator[Tensor]:
    """Queries, keys and values go through the convolution, a gate beside it; two numbers a head say how to forget."""
    heads = cut.heads(mixer.num_heads)
    inner, shared = inner_channels(mixer, cut)
    yield matrix(_PART, "linear_attn.in_proj_qkvz", 2 * inner + shared, hidden)
    yield matrix(_PART, "linear_attn.in_proj_ba", 2 * heads, hidden)
    yield from _convolution(inner + shared, mixer.conv_kernel, bias=bool(traits.conv_bias))
    yield vector(_PART, "linear_attn.A_log_dt_bias", 2 * heads)
    yield vector(Component.NORMS, "linear_attn.norm", mixer.head_dim)
    yield matrix(_PART, "linear_attn.out_proj", hidden, inner)


def _kda(mixer: Recurrent, hidden: int, traits: Traits, cut: Cut) -> Iterator[Tensor]:
    """Queries, keys and values with a convolution each; forgetting and the gate come through one head's width."""
    heads, size = cut.heads(mixer.num_heads), mixer.head_dim
    inner, shared = inner_channels(mixer, cut)
    yield matrix(_PART, "self_attn.qkv_proj", inner + shared, hidden)
    yield from _convolution(inner + shared, mixer.conv_kernel, bias=bool(traits.conv_bias))
    for name in ("f", "g"):
        yield matrix(_PART, f"self_attn.{name}_a_proj", size, hidden)
        yield matrix(_PART, f"self_attn.{name}_b_proj", inner, size)
    yield matrix(_PART, "self_attn.b_proj", heads, hidden)
    yield vector(_PART, "self_attn.A_log_dt_bias", heads + inner)
    yield vector(Component.NORMS, "self_attn.o_norm", size)
    yield matrix(_PART, "self_attn.o_proj", hidden, inner)


def _linear(mixer: Recurrent, hidden: int, _traits: Traits, cut: Cut) -> Iterator[Tensor]:
    """Linear attention with a fixed decay: queries, keys and values, an output gate and a norm over all heads."""
    inner = cut.heads(mixer.num_heads) * mixer.head_dim
    yield matrix(_PART, "self_attn.qkv_proj", 3 * inner, hidden)
    yield matrix(_PART, "self_attn.output_gate", inner, hidden)
    yield matrix(_PART, "self_attn.out_proj", hidden, inner)
    yield vector(Component.NORMS, "self_attn.norm", inner)


def _short_conv(mixer: Recurrent, hidden: int, traits: Traits, cut: Cut) -> Iterator[Tensor]:
    """Two gates and the input of a short convolution, and the way back."""
    channels = ceil_div(mixer.conv_channels, cut.attention)
    yield from _projection("in_proj", 3 * channels, hidden, bias=bool(traits.inner_bias))
    yield from _convolution(channels, mixer.conv_kernel, bias=bool(traits.conv_bias))
    yield from _projection("out_proj", hidden, channels, bias=bool(traits.inner_bias))


def _rg_lru(mixer: Recurrent, hidden: int, _traits: Traits, cut: Cut) -> Iterator[Tensor]:
    """Two branches, a convolution, and gates that are block-diagonal with one block a head."""
    channels = ceil_div(mixer.conv_channels, cut.attention)
    heads = cut.heads(max(1, mixer.num_heads))
    for name in ("linear_x", "linear_y"):
        yield from _projection(name, channels, hidden, bias=True)
    yield from _convolution(channels, mixer.conv_kernel, bias=True)
    yield vector(_PART, "mixer.gates", heads * 2 * (channels // heads) * (channels // heads + 1) + channels)
    yield from _projection("linear_out", hidden, channels, bias=True)
