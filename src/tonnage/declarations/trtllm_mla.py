"""What the reference's latent attention expands beside its cache, for every token that a step attends to.

Its cache holds one compressed vector a token. Where a kernel cannot read it as it lies, the whole attended past is
expanded first, once for all layers. Two declarations, which live at the same time, so their bytes add up:

context dequantisation   what the reference declares (H: query heads of this rank; nope, rope, v: parts of a head):
    fp8 cache, SM 90, 100, 103, 107, 120   H * (nope + rope + v), one byte each
    ... of a sparse model, SM 100, 103, 107, with no short-context path   0: the kernel reads the pages
    nvfp4 cache, "dsa", SM 100 and above   kv_lora_rank + rope + 64: the picked tokens as fp8, and index arrays
    anything else                          0
context gather           what it leaves out: on the path with a cached prefix the expanded keys and values also lie
    there in 16 bits, H * (nope + rope) * 2 + H * (nope + v) * 2, unless the kernel reads the pages or picks tokens

How many tokens those are depends on the step. With nothing cached and nothing cut into chunks, the step's own. Where
prefills are cut into chunks, from SM 100 on, a dense prefix is expanded piece by piece and two pieces may be alive.
Otherwise all that is attended to, which a probe cannot show. The reference takes any chunking for such a bound, but
for the nvfp4 gather; before SM 100 that is not so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tonnage.config import Limits
from tonnage.declarations.shape import AttentionShape
from tonnage.terms import Chip, Scratch, StepShape

#: Where an fp8 cache is expanded before a dense kernel reads it; and where a sparse kernel reads it as it lies.
DEQUANTISING_SMS = frozenset({90, 100, 103, 107, 120})
DIRECT_SMS = frozenset({100, 103, 107})
#: The gather of picked tokens from an nvfp4 cache, and prefixes expanded piece by piece, exist from here on.
FIRST_BLACKWELL_SM = 100
#: Beside each picked token of the nvfp4 gather: three int32 arrays, the storage of a scan, and alignment.
GATHER_INDEX_BYTES = 64
#: Chunks that one piece of a prefix holds, and pieces alive at once.
CHUNKS_PER_PIECE, LIVE_PIECES = 4, 2
_HALF_BYTES = 2


def reference_rate(shape: AttentionShape, sm: int) -> int:
    """Bytes per attended token that the reference declares; its predicate, clause by clause."""
    if not shape.is_latent:
        return 0
    if gathers_nvfp4(shape, sm):
        return shape.kv_lora_rank + shape.qk_rope_head_dim + GATHER_INDEX_BYTES
    if not shape.is_fp8 or sm not in DEQUANTISING_SMS or reads_pages(shape, sm):
        return 0
    return shape.num_heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim + shape.v_head_dim)


def reference_chunk_bounded(shape: AttentionShape, sm: int) -> bool:
    """What the reference answers when asked whether chunks bound the buffer: yes, but for the nvfp4 gather."""
    return not gathers_nvfp4(shape, sm)


def gather_rate(shape: AttentionShape, sm: int) -> int:
    """Bytes per attended token of the two 16-bit buffers, which the reference does not declare."""
    expands = shape.is_latent and sm in DEQUANTISING_SMS and not shape.is_nvfp4 and not reads_pages(shape, sm)
    if not expands:
        return 0
    keys = shape.num_heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim)
    values = shape.num_heads * (shape.qk_nope_head_dim + shape.v_head_dim)
    return (keys + values) * _HALF_BYTES


def gathers_nvfp4(shape: AttentionShape, sm: int) -> bool:
    return shape.is_latent and shape.is_nvfp4 and shape.algorithm == "dsa" and sm >= FIRST_BLACKWELL_SM


def reads_pages(shape: AttentionShape, sm: int) -> bool:
    """Whether the kernel reads the paged cache directly: a sparse one, on chips that have it, with no other path."""
    return shape.is_sparse and sm in DIRECT_SMS and not shape.has_short_mha


def staged_prefix_tokens(shape: AttentionShape, limits: Limits, chip: Chip | None) -> int | None:
    """The most cached tokens that lie expanded beside the step's own; None: all there are."""
    if not limits.prefix_caching and not limits.chunked_prefill:
        return 0
    in_pieces = chip is not None and chip.sm >= FIRST_BLACKWELL_SM and not shape.is_sparse
    if limits.chunked_prefill and in_pieces:
        return LIVE_PIECES * CHUNKS_PER_PIECE * limits.max_num_tokens
    return None


#: The two rates, by the name of the declaration.
RATES: Mapping[str, tuple[str, bool]] = {
    "context dequantisation": ("the reference's declared rate", True),
    "context gather": ("two 16-bit buffers that the reference leaves undeclared", False),
}


@dataclass(frozen=True, kw_only=True)
class LatentContext(Scratch):
    """Bytes = rate * tokens expanded. Each of the two has a memory of its own: they live at the same time.

    prefix_tokens      see ``staged_prefix_tokens``; None makes the declaration one that grows with attended tokens
    in_reference       whether the reference declares it
    An unknown card (SM 0) is charged like those that need the most.
    """

    backend: str = "trtllm"
    keeps_state: bool = False
    shape: AttentionShape
    prefix_tokens: int | None = None
    in_reference: bool

    def rate(self, chip: Chip) -> int:
        formula = reference_rate if self.in_reference else gather_rate
        return max(formula(self.shape, sm) for sm in (_UNKNOWN_SMS if chip.sm == 0 else (chip.sm,)))

    def bytes_at(self, shape: StepShape, chip: Chip) -> int:
        tokens = shape.attended_tokens
        if self.prefix_tokens is not None:
            tokens = min(tokens, shape.num_tokens + self.prefix_tokens)
        return self.rate(chip) * tokens


_UNKNOWN_SMS = tuple(sorted(DEQUANTISING_SMS))


def declare(shape: AttentionShape, *, prefix_tokens: int | None = None) -> tuple[Scratch, ...]:
    """Both declarations of a latent layer; the second only where a cached prefix is possible. Others need none."""
    if not shape.is_latent:
        return ()
    found = [_declaration("context dequantisation", shape, prefix_tokens)]
    if prefix_tokens != 0:
        found.append(_declaration("context gather", shape, prefix_tokens))
    return tuple(found)


def _declaration(name: str, shape: AttentionShape, prefix_tokens: int | None) -> LatentContext:
    about, in_reference = RATES[name]
    return LatentContext(
        name=name,
        share=name,
        source=about,
        chunk_bounded=prefix_tokens is not None,
        shape=shape,
        prefix_tokens=prefix_tokens,
        in_reference=in_reference,
    )
