"""What one forward holds at its peak, as a closed form: the largest of the phases of a dense decoder run eagerly.

Counted: every tensor alive at once when the library's model code runs line by line; attention itself is left out
(its scratch is declared by the backend). Elements per token, with H hidden, I intermediate, Q and K the widths of
all query and key heads, D one head, W the word of the weights' dtype:

attention  3H + 2D + 3Q + 2K         embeddings, residual, normed; cos and sin; q being rotated while k and v wait
mlp        4H + 2D + 3I              embeddings, layer input, residual, normed; gate, up and their product
           4H + 2D + 4I              ... where gate and up come out of one packed projection and stay whole
logits     2H per token, V per row   final hidden and its selected rows, then the vocabulary projection

Against a tracker that counts storages, and against a card's own peak: 932.0 MiB for an 8B Llama, 8,192 tokens.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Bytes alive at the peak of one forward, and the phase that sets it."""

    phase: str
    bytes: int


def forward_peak(
    config: ModelConfig, *, num_tokens: int, logits_rows: int, dtype: str | None = None, rank: Rank | None = None
) -> Peak:
    """The largest phase of one eager forward over ``num_tokens`` tokens with ``logits_rows`` rows of logits."""
    shape = rank_shape(config, rank or Rank())
    word = DTYPE_BYTES[dtype or config.dtype]
    phases = {
        "attention": num_tokens * _attention_elements(config, shape),
        "mlp": num_tokens * _mlp_elements(config, shape),
        "logits": num_tokens * config.hidden_size + logits_rows * (config.hidden_size + config.vocab_size),
    }
    phase = max(phases, key=lambda name: phases[name])
    return Peak(phase=phase, bytes=phases[phase] * word)


def sampler_bytes(config: ModelConfig, *, logits_rows: int, dtype: str | None = None) -> int:
    """Logits of every row, beside their log-softmax in float32 (and a float32 copy where they are narrower)."""
    word = DTYPE_BYTES[dtype or config.dtype]
    copies = 4 if word == 4 else 8
    return logits_rows * config.vocab_size * (word + copies)


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


def _attention_elements(config: ModelConfig, shape: RankShape) -> int:
    query, key = shape.num_heads * config.head_dim, shape.num_kv_heads * config.head_dim
    return 3 * config.hidden_size + 2 * config.head_dim + 3 * query + 2 * key


def _mlp_elements(config: ModelConfig, shape: RankShape) -> int:
    inner = (4 if config.family.packed else 3) * shape.intermediate_size
    return 4 * config.hidden_size + 2 * config.head_dim + inner
