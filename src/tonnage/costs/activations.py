"""What one forward holds at its peak, as a closed form: the largest of the phases of a dense decoder run eagerly.

Counted: every tensor alive at once when the library's model code runs line by line; attention itself is left out
(its scratch is declared by the backend). Elements per token, with H hidden, I intermediate, Q and K the widths of
all query and key heads, D one head; a word is an element of the weights' dtype:

norm       3H + 2D words, 2H floats  embeddings, layer input, residual; cos and sin; the float32 copy and its square
rotary     3H + 2D + 4Q + 2K         ... normed; q while it is rotated, k and v waiting (packed: 4Q + 3K)
           3H + 2D + 2Q + 5K         ... or k while it is rotated, q and v waiting
head norm  3H + 2D + Q words, 2Q floats   ... where query heads have a norm and the words are narrow
mlp        4H + 2D + 3I              embeddings, layer input, residual, normed; gate, up and their product
           4H + 2D + 4I              ... where gate and up come out of one packed projection and stay whole
           4H + 2D + 2I              ... where there is no gate, or 4I where the activation is computed in steps
           5H + 2D + I               ... or the product and what the last projection makes of it
logits     H per token, H + V a row  final hidden, the selected rows of it, and the vocabulary projection

Compared with a tracker that counts storages over all families here; an 8B Llama with 8,192 tokens comes to 932.0
MiB, which is also what a card reported. Compiled layers write the product of gate and up over one of them: 4H + 2D +
2I, or 3H + 2D + 3I where they are packed, or 5H + I without a gate: the low end. ``docs/activations.md`` has the error
of each family.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from tonnage.costs.config import ModelConfig
from tonnage.costs.extras import settled
from tonnage.costs.families import FAMILIES
from tonnage.costs.layers import Attention, Dense, Latent, Tower
from tonnage.costs.phases import Phase, Setting, expert_phases, latent_phase, recurrent_phase
from tonnage.costs.ranks import RankShape, rank_shape
from tonnage.costs.tensors import Cut
from tonnage.costs.traits import traits_of
from tonnage.layout import DTYPE_BYTES
from tonnage.terms import Quantity, Rank, Source
from tonnage.units import ceil_div

#: Compiled layers fuse the copies away: 90,624 bytes a token where eager ones hold 119,296 (measured, 8B Llama).
COMPILED_FRACTION = Fraction(90_624, 119_296)
#: The closed form stays within this of the tracker over the families and shapes tested.
ERROR_FRACTION = Fraction(2, 100)
#: What a tower holds over the closed form, (low, high): compiled, and with an activation function made in steps.
ENCODER_BOUNDS = (Fraction(60, 100), Fraction(140, 100))
#: What layers with several residual streams hold over the closed form, whose phases are those of one, (low, high).
STREAMS_BOUNDS = (Fraction(60, 100), Fraction(110, 100))
#: Bytes the allocator takes over bytes alive, (low, best, high), by kind of device. CUDA: 1.15 to 1.56 measured with
#: torch's caching allocator. Host: a heap whose large blocks are mapped one by one; glibc's default can double it.
RESERVED_OVER_ALLOCATED = {
    "cuda": (Fraction(115, 100), Fraction(125, 100), Fraction(156, 100)),
    "host": (Fraction(1), Fraction(105, 100), Fraction(110, 100)),
}


#: Logits that the sampler works on at once, by kind of device. A CPU is fastest while its temporaries stay in the
#: caches and in pages that the heap already has; a card wants enough work for each kernel.
SAMPLER_TILE_ELEMENTS = {"cuda": 2**22, "host": 2**18}

_FLOAT = DTYPE_BYTES["float32"]
#: Activations that the library computes in several steps: inner vectors alive at once. Others are one operation.
_STEPS = {"gelu_new": 4, "gelu_fast": 4, "gelu_python": 4, "quick_gelu": 3}
#: What families have where config.json does not say: residual streams, heads of a sparse indexer, activations.
_STREAMS, _INDEX_HEADS = {"deepseek_v4": 4}, 64
_ACTIVATIONS = {"gpt2": "gelu_new", "gptj": "gelu_new", "phi": "gelu_new"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Bytes alive at the peak of one forward, the phase that sets it, and between which bytes it lies."""

    phase: str
    bytes: int
    low: int
    high: int

    def quantity(self, *, ref: str) -> Quantity:
        return Quantity(bytes=self.bytes, low=self.low, high=self.high, source=Source.PREDICTED, ref=ref)


def forward_peak(
    config: ModelConfig, *, num_tokens: int, logits_rows: int, dtype: str | None = None, rank: Rank | None = None
) -> Peak:
    """The largest phase of one eager forward over ``num_tokens`` tokens with ``logits_rows`` rows of logits.

    Only the last pipeline stage has a head: elsewhere no row of logits counts. As many rows as tokens are a decode.
    The layers of this rank's stage count, whatever they are made of; ``low`` and ``high`` span compiled or fused
    layers and the plainest code (``phases`` has the formulas of everything that is not dense).
    """
    place = rank or Rank()
    shape = rank_shape(config, place)
    word = DTYPE_BYTES[dtype or config.dtype]
    each = _stage_phases(config, shape, place, word=word, is_decode=num_tokens <= logits_rows)
    phases = [_times(phase, num_tokens) for phase in each]
    hidden = config.hidden_size
    if shape.has_head:
        phases.append(_dense("logits", (num_tokens * hidden + logits_rows * (hidden + config.vocab_size)) * word))
    best = max(phases, key=lambda phase: phase.bytes)
    low, high = int(max(phase.low for phase in phases)), int(max(phase.high for phase in phases))
    high += _indexer_bytes(config, num_tokens)
    if _num_streams(config) > 1:
        low, high = int(low * STREAMS_BOUNDS[0]), int(high * STREAMS_BOUNDS[1])
    return Peak(phase=best.name, bytes=best.bytes, low=low, high=high)


def encoder_peak(tower: Tower, *, num_tokens: int, dtype: str = "bfloat16") -> Peak:
    """The largest phase of one tower over ``num_tokens`` patches (or frames), attention's own scratch left out.

    With H hidden and I intermediate, words a token: patches, their elements and H; norm, 4H and H floats twice;
    attention, 3H and eight more (queries, keys, values, two of them rotated, the result and what is made of it); mlp,
    4H and the inner vectors, two or three of them.
    """
    hidden, inner, word = tower.hidden_size, tower.intermediate_size, DTYPE_BYTES[dtype]
    words = {
        "patches": tower.patch_elements + 2 * hidden,
        "attention": 11 * hidden,
        "mlp": 4 * hidden + (3 if tower.is_gated else 2) * inner,
    }
    sizes = {name: num_tokens * each * word for name, each in words.items()}
    sizes["norm"] = num_tokens * (4 * hidden * word + 2 * hidden * _FLOAT)
    phase = max(sizes, key=lambda name: sizes[name])
    low, high = (int(sizes[phase] * bound) for bound in ENCODER_BOUNDS)
    return Peak(phase=phase, bytes=sizes[phase], low=low, high=high)


def encoder_output_bytes(config: ModelConfig, *, num_tokens: int, dtype: str | None = None) -> int:
    """What a tower hands to the text model: a vector of its width for every token, and one more for each level that
    is fed into deeper layers (``deepstack_visual_indexes``)."""
    vision = config.raw.get("vision_config")
    levels = vision.get("deepstack_visual_indexes") if isinstance(vision, Mapping) else None
    copies = 1 + (len(levels) if isinstance(levels, list) else 0)
    return num_tokens * copies * config.hidden_size * DTYPE_BYTES[dtype or config.dtype]


def sampler_bytes(config: ModelConfig, *, logits_rows: int, dtype: str | None = None, device_kind: str = "cuda") -> int:
    """Logits of every row, beside what the sampler holds while it works on one tile of them."""
    logits = logits_rows * config.vocab_size * DTYPE_BYTES[dtype or config.dtype]
    tile_elements = SAMPLER_TILE_ELEMENTS[device_kind]
    return logits + sampler_scratch_bytes(logits_rows, config.vocab_size, tile_elements=tile_elements)


def sampler_scratch_bytes(
    num_rows: int, vocab_size: int, *, tile_elements: int, greedy_dtype: str | None = None
) -> int:
    """Bytes the sampler holds beside ``num_rows`` rows of logits, whatever features the rows ask for.

    It works on as many rows at once as ``tile_elements`` logits have, at least one. Most is held while the limit of
    top-p is searched for. For each logit: its gap to the best token, float32, twice where only some rows have top-p;
    its weight, int64; a digit of the gap, int32, and the bin of that digit, int64. For each row: the sums of 2,050
    bins and the padding of the weights to blocks of 256, int64, and some single numbers.

    ``greedy_dtype``: of the logits, where every row takes the most probable token and asks for nothing else. Then it
    is their exponentials, float32, beside a float32 copy where the logits are narrower.
    """
    tile_rows = min(num_rows, max(1, tile_elements // vocab_size))
    num_floats, num_longs, row_longs = 3, 2, 2050 + 256
    if greedy_dtype is not None:
        num_floats, num_longs, row_longs = 2 if DTYPE_BYTES[greedy_dtype] < _FLOAT else 1, 0, 0
    long = DTYPE_BYTES["int64"]
    return tile_rows * (vocab_size * (num_floats * _FLOAT + num_longs * long) + (row_longs + 8) * long)


def predicted(num_bytes: int, *, ref: str) -> Quantity:
    """A peak with its error bar: below, layers that are compiled; above, the formula's own error."""
    return Quantity(
        bytes=num_bytes,
        low=int(num_bytes * COMPILED_FRACTION),
        high=int(num_bytes * (1 + ERROR_FRACTION)),
        source=Source.PREDICTED,
        ref=ref,
    )


def reserved_for(allocated: Quantity, *, device_kind: str) -> Quantity:
    """Bytes the allocator takes so that ``allocated`` bytes can live: segments, rounding, holes."""
    low, best, high = RESERVED_OVER_ALLOCATED[device_kind]
    return Quantity(
        bytes=int(allocated.bytes * best),
        low=int(allocated.low * low),
        high=int(allocated.high * high),
        source=Source.PREDICTED,
        ref=f"costs.activations: reserved over allocated {float(low):.2f} to {float(high):.2f} on {device_kind}",
    )


def _dense(name: str, num_bytes: int) -> Phase:
    """A phase of dense layers: below, layers that are compiled; above, the formula's own error."""
    return Phase(name=name, bytes=num_bytes, low=num_bytes * COMPILED_FRACTION, high=num_bytes * (1 + ERROR_FRACTION))


def _fused(name: str, num_bytes: int, fused_bytes: int) -> Phase:
    """As ``_dense``, of which compiled layers keep no more than ``fused_bytes``."""
    return replace(_dense(name, num_bytes), low=min(num_bytes * COMPILED_FRACTION, Fraction(fused_bytes)))


def _times(phase: Phase, count: int) -> Phase:
    return Phase(name=phase.name, bytes=phase.bytes * count, low=phase.low * count, high=phase.high * count)


def _stage_phases(config: ModelConfig, shape: RankShape, rank: Rank, *, word: int, is_decode: bool) -> Iterator[Phase]:
    """Bytes a token of every phase of every kind of layer on this stage."""
    traits, hidden = traits_of(config)[0], config.hidden_size
    always = 3 * hidden + 2 * _rotary_width(config) + 2 * hidden * (_num_streams(config) - 1)
    at = Setting(hidden=hidden, always=always, word=word, cut=Cut.of(rank), traits=traits)
    packed = config.model_type in FAMILIES and FAMILIES[config.model_type].packed
    for layer in {settled(config, config.layers[number]) for number in shape.layers}:
        yield _fused("norm", always * word + 2 * hidden * _FLOAT, always * word)
        for mixer in layer.mixers:
            if isinstance(mixer, Attention):
                yield from _attention_phases(mixer, at, is_packed=packed)
            elif isinstance(mixer, Latent):
                yield latent_phase(mixer, at, is_decode=is_decode)
            else:
                yield recurrent_phase(mixer, at)
        part = layer.feed_forward
        if isinstance(part, Dense):
            yield _mlp_phase(part, at, is_packed=packed, num_steps=_STEPS.get(_activation(config), 2))
        elif part is not None:
            yield from expert_phases(part, at)


def _rotary_width(config: ModelConfig) -> int:
    """Elements of the cosines: one head's, or the rotary part of a latent's; none where positions are learned."""
    if traits_of(config)[0].num_positions:
        return 0
    latents = [mixer.qk_rope_head_dim for layer in config.layers for mixer in layer.mixers if isinstance(mixer, Latent)]
    return max(latents) if latents else config.head_dim


def _attention_phases(mixer: Attention, at: Setting, *, is_packed: bool) -> Iterator[Phase]:
    query, key = at.cut.heads(mixer.num_heads) * mixer.head_dim, at.cut.heads(mixer.num_kv_heads) * mixer.head_dim
    gate = 2 * query if at.traits.output_gate else 0
    rotary = max(4 * query + (3 if is_packed else 2) * key, 2 * query + 5 * key) + gate
    # Compiled, the most is alive where attention makes its result; the layer's normed input has gone by then.
    called = at.always - at.hidden + 2 * query + 2 * key
    yield _fused("rotary", (at.always + rotary) * at.word, called * at.word)
    if at.traits.qk_norm:
        floats = 2 * query * (_FLOAT if at.word < _FLOAT else 0)
        best = (at.always + query + gate) * at.word + floats
        yield _fused("head norm", best, best - floats)


def _mlp_phase(part: Dense, at: Setting, *, is_packed: bool, num_steps: int) -> Phase:
    inner = ceil_div(part.intermediate_size, at.cut.inner)
    count = (4 if is_packed else 3) if part.is_gated else num_steps
    best = (at.always + at.hidden + max(count * inner, at.hidden + inner)) * at.word
    fused = at.always + min(2 * inner + at.hidden, 3 * inner) if part.is_gated else 5 * at.hidden + inner
    high = (best + (2 * at.hidden * at.word if at.traits.num_positions else 0)) * (1 + ERROR_FRACTION)
    low = min(best * COMPILED_FRACTION, Fraction(fused * at.word))
    return Phase(name="mlp", bytes=best, low=low, high=high)


def _activation(config: ModelConfig) -> str:
    """Its name in the library's table."""
    named = config.raw.get("hidden_act") or config.raw.get("activation_function")
    return str(named or _ACTIVATIONS.get(config.model_type, ""))


def _num_streams(config: ModelConfig) -> int:
    """Residual streams side by side (``hc_mult``): 1 in all but a few families."""
    streams = config.raw.get("hc_mult", _STREAMS.get(config.model_type, 1))
    return streams if isinstance(streams, int) and streams > 0 else 1


def _indexer_bytes(config: ModelConfig, num_tokens: int) -> int:
    """Scores of a sparse indexer written out: three float32 arrays of every token against every entry, for each head.

    No engine does that; the library's class does, so they are in the bar and not in the figure.
    """
    mixers = [mixer for layer in config.layers for mixer in layer.mixers if isinstance(mixer, Attention | Latent)]
    if not any(mixer.index_head_dim for mixer in mixers):
        return 0
    named = config.raw.get("index_n_heads")
    heads = named if isinstance(named, int) else _INDEX_HEADS
    ratios = [mixer.compress_ratio for mixer in mixers if isinstance(mixer, Attention) and mixer.compress_ratio > 1]
    return 3 * num_tokens * ceil_div(num_tokens, min(ratios, default=1)) * heads * _FLOAT
