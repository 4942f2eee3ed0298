"""Which attention backend runs where none was asked for: the fastest of those that can, by what was measured.

``RATES`` keeps the measurements, of Llama-3.1-8B's heads (32 query heads over 8, of 128) in bfloat16 with pages of 16
tokens on one H200; no other card has been measured. They are weighed by ``LOAD``, leaving out what has not been
measured of all that are compared: who is faster at decoding is not slower for want of a figure elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from tonnage.attention.flashinfer_modules import Variant, find_module, is_built
from tonnage.declarations.flashinfer import FA3_SM

HEAD_DIM = 128
#: Bytes of keys and values of a token in one layer, and operations of a query with one key in it, of those heads.
TOKEN_BYTES, PAIR_OPERATIONS = 2 * 8 * HEAD_DIM * 2, 4 * 32 * HEAD_DIM


@dataclass(frozen=True, slots=True)
class Point:
    """Steps of ``rows`` sequences with ``tokens`` each: decodes on top of so many, or prompts of so many."""

    stage: str
    rows: int
    tokens: int


#: Those that need FlashInfer's modules.
WITH_FLASHINFER = ("flashinfer", "paired")
#: Seconds are work over rate: GB/s of keys and values for "decode", TFLOP/s of the causal half for "prefill".
UNITS = {"decode": 10**9, "prefill": 10**12}
#: What is weighed, as work in one layer: 256 sequences of 1,024 prompt tokens with 256 more.
LOAD: Mapping[Point, int] = {
    Point("decode", 256, 1024): 256 * 256 * (1024 + 128) * TOKEN_BYTES,
    Point("prefill", 8, 1024): 256 * PAIR_OPERATIONS * 1024 * 1024 // 2,
}

#: Decodes of "triton", and prompts of both: benchmarks/results/2026-11-30-h200-attention-decode.json and
#: 2026-11-30-h200-attention-prefill.json ("triton", "flashinfer fa3"). Decodes of FlashInfer 0.6.14: on the
#: same kind of card on 2026-11-29, on tensor cores in a graph.
_TRITON = {
    Point("decode", 1, 1024): 616,
    Point("decode", 32, 1024): 3119,
    Point("decode", 128, 1024): 4022,
    Point("decode", 256, 1024): 4161,
    Point("decode", 32, 8192): 4259,
    Point("prefill", 8, 1024): 254,
    Point("prefill", 1, 8192): 374,
}
_FLASHINFER = {
    Point("decode", 1, 1024): 390,
    Point("decode", 32, 1024): 3124,
    Point("decode", 128, 1024): 3719,
    Point("decode", 256, 1024): 3939,
    Point("decode", 32, 8192): 4227,
    Point("prefill", 8, 1024): 336,
    Point("prefill", 1, 8192): 490,
}
#: Steps of decodes alone by the one, all others by the other.
_PAIRED = {point: (_TRITON if point.stage == "decode" else _FLASHINFER)[point] for point in _TRITON}
RATES: Mapping[str, Mapping[Point, int]] = {"triton": _TRITON, "flashinfer": _FLASHINFER, "paired": _PAIRED}


def choose(
    device_kind: str, variants: Collection[Variant] = (), *, sm: int = 0, among: Collection[str] = WITH_FLASHINFER
) -> str:
    """The backend for a device of ``device_kind`` "host" or "cuda", of compute capability ``sm`` (90 for 9.0).

    ``variants`` are what the model's layers need of FlashInfer's kernels; with none the model is not known yet. The
    backends with these kernels, of those ``among`` that have what else the layers need, are considered for what was
    measured of them, and where all of it has been compiled.
    """
    if device_kind != "cuda" or find_spec("triton") is None:
        return "sdpa"
    names = ["triton"]
    if sm == FA3_SM and variants and all(_is_measured(variant) for variant in variants):
        names += [name for name in WITH_FLASHINFER if name in among]
    return fastest(names)


def _is_measured(variant: Variant) -> bool:
    """Layers like those of ``RATES``, whose modules are there."""
    is_like = variant.head_dim == HEAD_DIM and not (variant.has_window or variant.has_softcap)
    return is_like and is_built(variant) and find_module("fa3", variant) is not None


def fastest(names: Iterable[str], rates: Mapping[str, Mapping[Point, int]] | None = None) -> str:
    """The one that computes ``LOAD`` in the least time by ``rates`` (default: ``RATES``), as far as all of them were
    measured; the first of equals."""
    compared, known = list(names), RATES if rates is None else rates
    points = [point for point in LOAD if all(point in known[name] for name in compared)]

    def seconds(name: str) -> float:
        return sum(LOAD[point] / (known[name][point] * UNITS[point.stage]) for point in points)

    return min(compared, key=seconds)
