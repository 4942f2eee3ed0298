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
           5H + 2D + I               ... or the product and what the last projection makes of it
logits     H per token, H + V a row  final hidden, the selected rows of it, and the vocabulary projection

Compared with a tracker that counts storages over all families here; an 8B Llama with 8,192 tokens comes to 932.0
MiB, which is also what a card reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from tonnage.costs.config import ModelConfig
from tonnage.costs.ranks import RankShape, rank_shape
from tonnage.layout import DTYPE_BYTES
from tonnage.terms import Quantity, Rank, Source

#: Compiled layers fuse the copies away: 90,624 bytes a token where eager ones hold 119,296 (measured, 8B Llama).
COMPILED_FRACTION = Fraction(90_624, 119_296)
#: The closed form stays within this of the tracker over the families and shapes tested.
ERROR_FRACTION = Fraction(2, 100)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Bytes alive at the peak of one forward, and the phase that sets it."""

    phase: str
    bytes: int


def forward_peak(
    config: ModelConfig, *, num_tokens: int, logits_rows: int, dtype: str | None = None, rank: Rank | None = None
) -> Peak:
    """The largest phase of one eager forward over ``num_tokens`` tokens with ``logits_rows`` rows of logits.

    Only the last pipeline stage has a head: elsewhere no row of logits counts.
    """
    shape = rank_shape(config, rank or Rank())
    word = DTYPE_BYTES[dtype or config.dtype]
    phases = {name: num_tokens * each for name, each in _phase_bytes(config, shape, word=word).items()}
    hidden = config.hidden_size
    if shape.has_head:
        phases["logits"] = (num_tokens * hidden + logits_rows * (hidden + config.vocab_size)) * word
    phase = max(phases, key=lambda name: phases[name])
    return Peak(phase=phase, bytes=phases[phase])


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


def _phase_bytes(config: ModelConfig, shape: RankShape, *, word: int) -> dict[str, int]:
    """Bytes a token of every phase inside a layer; the table in the module's docstring, row by row."""
    hidden, inner, packed = config.hidden_size, shape.intermediate_size, config.family.packed
    query, key = shape.num_heads * config.head_dim, shape.num_kv_heads * config.head_dim
    rotary = max(4 * query + (3 if packed else 2) * key, 2 * query + 5 * key)
    always = 3 * hidden + 2 * config.head_dim
    phases = {
        "norm": always * word + 2 * hidden * _FLOAT,
        "rotary": (always + rotary) * word,
        "mlp": (always + hidden + max((4 if packed else 3) * inner, hidden + inner)) * word,
    }
    if config.qk_norm:
        phases["head norm"] = (always + query) * word + 2 * query * (_FLOAT if word < _FLOAT else 0)
    return phases
