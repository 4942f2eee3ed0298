"""Bytes a token of every phase inside a layer that is more than dense: experts, latent attention, recurrent state.

All are counted as ``activations`` counts: what is alive at once when the library's code runs line by line. ``low`` is
what kernels that fuse the phase hold, ``high`` what the plainest code holds. With H hidden, k experts a token, I one
expert's width, Q and V all query and value heads of one latent layer, N its nope and rope widths together:

experts     4H + k max(H + 4I, 4H)          rows sorted by expert, gate and up and a masked copy of both; or the rows,
                                            what comes out for each, weighted, and put back in order
            4H + k (H + 9I)                 ... where experts have biases, one row of them for every token
            4H + 6kH                        ... where the weights of experts are float32, and so all they touch
shared      5H + 3I                         beside what the routed experts gave
expanded    4H + 3Q + N + V + rotary        latent attention in prefill: queries twice, keys, keys and values in one
absorbed    4H + 2Q + heads (2L + R) + V    ... in decode: queries and results as wide as the latent, for every head
short conv  4H + 5C                         three branches, the convolution's output, the product
delta       3H + projections and windows of inputs; in float32 the values and keys of every head, several times over
mamba       3H + projection and window; chunk states in float32, one matrix a head for each chunk
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from tonnage.costs.layers import Experts, Latent, Recurrent
from tonnage.costs.recurrent import inner_channels
from tonnage.costs.tensors import Cut
from tonnage.costs.traits import Traits
from tonnage.layout import DTYPE_BYTES
from tonnage.units import ceil_div

_FLOAT, _LONG = DTYPE_BYTES["float32"], DTYPE_BYTES["int64"]
#: Tokens of one chunk of the scans that Mamba and gated delta kernels make.
_MAMBA_CHUNK, _DELTA_CHUNK = 256, 64
#: Counted exactly where the library's code runs; the rest of the bar is what an allocator's rounding adds.
_COUNTED = Fraction(102, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Bytes a token of one phase."""

    name: str
    bytes: int
    low: Fraction
    high: Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What every phase starts from: elements a token that live through a layer, and the size of one.

    always  embeddings, layer input and residual, cosines and sines
    """

    hidden: int
    always: int
    word: int
    cut: Cut
    traits: Traits


def _phase(name: str, best: int, low: int, high: Fraction | None = None) -> Phase:
    top = best * _COUNTED if high is None else high
    return Phase(name=name, bytes=best, low=Fraction(min(low, best)), high=max(top, Fraction(best)))


def expert_phases(part: Experts, at: Setting) -> Iterator[Phase]:
    """Rows of ``num_experts_per_token`` experts for every token, as if all of them were on this rank.

    Where ranks serve requests of their own, the tokens of all may choose the experts of one: the upper end.
    """
    hidden, word = at.hidden, at.word
    inner, each = ceil_div(part.intermediate_size, at.cut.expert_inner), part.num_experts_per_token
    base = (at.always + hidden) * word
    if at.traits.shared_gate:
        base += hidden * word  # these classes run the shared experts first and keep the result
    routing = part.num_experts * _FLOAT + each * (4 * _LONG + 2 * _FLOAT)
    ups = 2 if part.is_gated else 1
    sorted_rows = hidden + (ups + 2 if part.is_gated else 2) * inner
    if at.traits.expert_bias:
        sorted_rows = hidden + (2 * ups + 5) * inner
    has_floats = at.traits.router_correction or at.traits.float_routing
    ordered = 2 * hidden * word + 2 * hidden * (_FLOAT if has_floats else word)
    rows = each * max(sorted_rows * word, ordered)
    fused = at.always * word + each * (max(ups * inner, hidden) + inner) * word  # the normed input has gone by then
    most = each * max(sorted_rows * word, 2 * hidden * (word + _FLOAT))
    dealt = at.cut.inner if at.cut.attention < at.cut.inner else 1
    high = (base + routing + most * dealt) * _COUNTED
    yield _phase("experts", base + routing + rows, fused, high)
    if part.shared_intermediate_size:
        shared = ceil_div(part.shared_intermediate_size, at.cut.inner)
        best = base + (hidden + (ups + 1) * shared) * word
        yield _phase("shared experts", best, base + (hidden + shared) * word)


def latent_phase(mixer: Latent, at: Setting, *, is_decode: bool) -> Phase:
    """Prefill expands keys and values of every head; decode takes the queries into the latent instead, or expands as
    prefill does: its low end allows for either."""
    heads, word = at.cut.heads(mixer.num_heads), at.word
    query = heads * (mixer.qk_nope_head_dim + mixer.qk_rope_head_dim)
    value, latent = heads * mixer.v_head_dim, mixer.kv_lora_rank + mixer.qk_rope_head_dim
    base = at.always + at.hidden + 2 * latent
    rotary = heads * mixer.qk_rope_head_dim
    pair = heads * (mixer.qk_nope_head_dim + mixer.v_head_dim)
    expanded = base + 2 * query + pair
    if is_decode:
        wide = heads * (latent + mixer.kv_lora_rank)
        best = base + 2 * query + rotary + wide + value
        return _phase("absorbed attention", best * word, min(base + query + wide, expanded) * word)
    return _phase("expanded attention", (expanded + query + rotary + value) * word, expanded * word)


def recurrent_phase(mixer: Recurrent, at: Setting) -> Phase:
    """The mixer's own tensors; an unknown kind counts as Mamba2."""
    if mixer.kind in ("short_conv", "rg_lru"):
        channels = ceil_div(mixer.conv_channels, at.cut.attention)
        best = (at.always + at.hidden + 5 * channels) * at.word
        return _phase("short convolution", best, (at.always + 4 * channels) * at.word)
    build = _delta if mixer.kind in ("gated_delta", "kda", "linear") else _mamba
    return build(mixer, at)


def _delta(mixer: Recurrent, at: Setting) -> Phase:
    """Low: one pass of fused kernels. High: the reference in plain float32, twelve arrays as wide as the heads.

    Best: the kernels of the usual library, which keep the chunk's triangular system, two transformed copies of
    values and one of keys, and a state for each chunk.
    """
    word, heads = at.word, at.cut.heads(mixer.num_heads)
    value, shared = inner_channels(mixer, at.cut)
    key, window = heads * mixer.state_size, value + shared
    base = (at.always + 2 * value + shared + 2 * heads) * word
    states = ceil_div(heads * mixer.state_size * mixer.head_dim, _DELTA_CHUNK)
    kernels = (window + 3 * key + 4 * value + states) * word + heads * _DELTA_CHUNK * (word + _FLOAT)
    reference = (value + window + 2 * key) * word + (5 * value + 5 * key + 3 * heads * _DELTA_CHUNK) * _FLOAT
    low = base + (window + value) * word
    return _phase("linear attention", base + kernels, low, (base + reference) * Fraction(110, 100))


def _mamba(mixer: Recurrent, at: Setting) -> Phase:
    """Projection, convolution, the scan's chunk states (as they are and as the next chunk reads them), gated norm."""
    word, heads = at.word, at.cut.heads(mixer.num_heads)
    inner, shared = inner_channels(mixer, at.cut)
    base = (at.always + 2 * inner + shared + heads) * word
    states = 2 * ceil_div(inner * mixer.state_size, _MAMBA_CHUNK) * _FLOAT
    chunk = (max(1, mixer.num_groups) * _MAMBA_CHUNK + 2 * heads) * _FLOAT
    best = base + (2 * inner + shared) * word + states + chunk
    return _phase("scan", best, base + (inner + shared) * word, Fraction(2 * best))
