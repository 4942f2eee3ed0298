"""How the Triton kernels cut their work: tile sizes, warps and stages of the pipeline, by what a tile weighs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Keys, and values, that a decode program reads in one trip. Of four stages three are buffered: 96 KiB of K and V a
#: program and little more, so that two programs, as many as the split rule counts on, fill the 227 KiB of shared memory
#: of a multiprocessor of an H100 or H200. The two trips in flight are more than bandwidth times latency asks for
#: (4.5 TB/s * 1 us / 132 = 34 KB a multiprocessor).
DECODE_TILE_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """``keys`` in a tile, ``queries`` in a program (prefill only); warps of a program, stages of its pipeline."""

    keys: int
    num_warps: int
    num_stages: int
    queries: int = 1

    @property
    def launch(self) -> dict[str, Any]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


#: Found by benchmarks/attention_decode.py --sweep to be faster than the rule below, by (head dim padded to a power of
#: two, bytes of an element, tokens of a page).
MEASURED: dict[tuple[int, int, int], Tuning] = {}


def decode_tuning(dim_pad: int, element_bytes: int, block_tokens: int) -> Tuning:
    """A tile of ``DECODE_TILE_BYTES`` of keys, but 16 to 128 of them (a dot product has at least 16)."""
    keys = min(128, max(16, DECODE_TILE_BYTES // (dim_pad * element_bytes)))
    rule = Tuning(keys=keys, num_warps=4, num_stages=4)
    return MEASURED.get((dim_pad, element_bytes, block_tokens), rule)


def prefill_tuning(dim_pad: int, element_bytes: int) -> Tuning:
    """As many queries as registers hold the float32 outputs of: 128 x 128 are 128 a thread of 4 warps, 64 of 8.

    Sizes are the largest at which the compiler for sm_90 spills no registers to speak of; float32 operands take three
    times the registers, being split for the tensor cores. For heads of 128 few keys and few warps are the fastest for
    prompts of 1,024 tokens, and as fast as any but the largest tile for long ones (docs/on-a-card.md): two programs
    share a multiprocessor then (80 KiB of its memory each), and one computes products while the other makes weights.
    """
    if element_bytes == 4:
        return Tuning(keys=32, queries=64 if dim_pad <= 128 else 32, num_warps=4, num_stages=2)
    if dim_pad > 128:
        return Tuning(keys=32, queries=128, num_warps=8, num_stages=2)
    if dim_pad == 128:
        return Tuning(keys=32, queries=128, num_warps=4, num_stages=3)
    return Tuning(keys=64, queries=128, num_warps=8, num_stages=3)
