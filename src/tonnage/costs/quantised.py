"""Bytes of one packed matrix: its elements, its scales and zero points, for the formats that checkpoints come in.

A matrix has ``rows`` outputs and ``columns`` inputs; scales follow the inputs. Where a format leaves something free
(one scale a matrix or one a row, zero points or none, padding that kernels ask for) the answer carries low and high.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import translate
from fractions import Fraction

from tonnage.costs.config import ModelConfig
from tonnage.costs.layers import Quantisation
from tonnage.costs.packing import packing_section
from tonnage.costs.tensors import Component
from tonnage.costs.traits import inner_raw
from tonnage.errors import UnsupportedModel
from tonnage.units import ceil_div, round_up

_FLOAT32, _FLOAT16 = 4, 2
_NUMBERED = re.compile(r"\.(\d+)(?:\.(.*))?$")
#: Methods that store what GPTQ and what AWQ store, by the names that config.json uses.
_GPTQ = ("gptq", "gptqmodel", "auto-round", "autoround", "intel/auto-round")
_AWQ = ("awq", "auto_awq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A number of bytes, and the least and the most it can be."""

    bytes: int
    low: int
    high: int

    @classmethod
    def exact(cls, num_bytes: int) -> Span:
        return cls(bytes=num_bytes, low=num_bytes, high=num_bytes)

    def __add__(self, other: Span) -> Span:
        return Span(bytes=self.bytes + other.bytes, low=self.low + other.low, high=self.high + other.high)

    def times(self, count: int) -> Span:
        return Span(bytes=self.bytes * count, low=self.low * count, high=self.high * count)


NOTHING = Span.exact(0)


@dataclass(frozen=True, slots=True)
class Packing:
    """How one checkpoint packs: ``Packing.of(config)``, then ``keeps(module)`` and ``span(rows, columns)``.

    options  the raw section of config.json, for what the common fields do not tell
    expert_scheme  how routed experts are packed where config.json has an ``expert_dtype`` for them alone
    """

    scheme: Quantisation
    options: Mapping[str, object]
    names: frozenset[str]
    pattern: re.Pattern[str] | None
    expert_scheme: Quantisation | None = None

    @classmethod
    def of(cls, config: ModelConfig) -> Packing | None:
        """None where the checkpoint packs nothing. Raises ``UnsupportedModel`` for a format without a formula."""
        if config.quantisation is None:
            return None
        if config.quantisation.format not in _FORMATS:
            raise UnsupportedModel(
                f"{config.name}: weights packed as {config.quantisation.format!r} have no price here",
                remedy=f"use a checkpoint packed as {', '.join(_FORMATS)}, or one that is not packed",
            )
        names, pattern = _kept(config.quantisation.kept)
        raw = inner_raw(config)
        # Two elements a byte, and an exponent of one byte for every 32 of them.
        narrow = (
            Quantisation(method="mxfp4", format="mxfp4", group_size=32) if raw.get("expert_dtype") == "fp4" else None
        )
        return cls(config.quantisation, packing_section(config.raw, raw), names, pattern, narrow)

    def of_part(self, component: Component) -> Packing:
        """The packing of one component: a checkpoint may have its experts narrower than everything else."""
        if component is not Component.EXPERTS or self.expert_scheme is None:
            return self
        return replace(self, scheme=self.expert_scheme)

    @property
    def packs_towers(self) -> bool:
        """Only bitsandbytes packs whatever is a matrix; the other methods calibrate the text model alone."""
        return self.scheme.method == "bitsandbytes"

    @property
    def packs_experts_only(self) -> bool:
        return self.scheme.method == "mxfp4"

    @property
    def packs_head(self) -> bool:
        return self.packs_embeddings or self.options.get("lm_head") is True

    @property
    def packs_embeddings(self) -> bool:
        """GGUF files pack every matrix, the two of the vocabulary too."""
        return self.scheme.format == "gguf"

    @property
    def is_symmetric(self) -> bool:
        """Whether groups have scales alone, as most do where it is left open, or zero points too."""
        groups = self.options.get("config_groups")
        for group in groups.values() if isinstance(groups, Mapping) else ():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if isinstance(weights, Mapping) and weights.get("symmetric") is False:
                return False
        return True

    def named(self) -> dict[int, frozenset[str]]:
        """Modules of single layers that stay wide, by the layer's number: layers with the same ones are alike."""
        found: dict[int, set[str]] = {}
        for name in self.names:
            if match := _NUMBERED.search(name):
                found.setdefault(int(match.group(1)), set()).add(match.group(2) or "")
        return {number: frozenset(names) for number, names in found.items()}

    @property
    def tells_layers_apart(self) -> bool:
        """Whether a pattern names a layer by its number: then no two layers are taken to be alike."""
        return self.pattern is not None and re.search(r"\d", self.pattern.pattern) is not None

    def keeps(self, module: str) -> bool:
        """Whether a module stays wide: its name, the name of one it lies in, or the end of one, is listed."""
        parts = module.split(".")
        for first in range(len(parts)):
            for last in range(first + 1, len(parts) + 1):
                if ".".join(parts[first:last]) in self.names:
                    return True
        return self.pattern is not None and self.pattern.search(module) is not None

    def span(self, rows: int, columns: int) -> Span:
        """Bytes of one matrix."""
        return _FORMATS[self.scheme.format](self, rows, columns)


def _kept(patterns: tuple[str, ...]) -> tuple[frozenset[str], re.Pattern[str] | None]:
    """Plain names, and one expression for all patterns (``re:`` as compressed-tensors writes, ``*`` as others do)."""
    plain, odd = set(), []
    for text in patterns:
        if text.startswith("re:"):
            odd.append(f"^(?:{text[3:]})")
        elif "*" in text or "?" in text:
            odd.append(rf"(?:^|\.){translate(text)[: -len(chr(92) + 'Z')]}(?:\.|$)")
        else:
            plain.add(text)
    return frozenset(plain), re.compile("|".join(odd)) if odd else None


def _groups(packing: Packing, columns: int) -> int:
    size = packing.scheme.group_size
    return ceil_div(columns, size) if size and size > 0 else 1


def _fp8(packing: Packing, rows: int, columns: int) -> Span:
    """One byte an element. Block scales: float32 for every 128 x 128 (DeepSeek's ``weight_scale_inv``). Else one
    float32 a row (dynamic, compressed-tensors and fbgemm) or one a matrix and one for its inputs (static).

    compressed-tensors may give a row several scales, one for each group: of 16 bits, of one byte for groups of 32.
    """
    elements, size, method = rows * columns, packing.scheme.group_size, packing.scheme.method
    if size and method == "compressed-tensors":
        scales = rows * ceil_div(columns, size)
        each = 1 if size == 32 else _FLOAT16
        return Span(bytes=elements + scales * each, low=elements + scales, high=elements + scales * _FLOAT32)
    if size:
        return Span.exact(elements + ceil_div(rows, _block_rows(packing, size)) * ceil_div(columns, size) * _FLOAT32)
    per_matrix, per_row = elements + 2 * _FLOAT32, elements + rows * _FLOAT32
    best = per_row if method in ("compressed-tensors", "fbgemm_fp8") else per_matrix
    return Span(bytes=best, low=elements + _FLOAT32, high=per_row + 2 * _FLOAT32)


def _block_rows(packing: Packing, columns: int) -> int:
    """Rows of a block that has one scale: as the file says, or as many as columns."""
    block = packing.options.get("weight_block_size")
    first = block[0] if isinstance(block, list) and len(block) > 1 else columns
    return first if isinstance(first, int) and first > 0 else columns


def _int8(packing: Packing, rows: int, columns: int) -> Span:
    """One byte an element and a scale a row: float32, or of 16 bits in some checkpoints. bitsandbytes: float32.

    GPTQ with 8 bits has groups and zero points like its 4-bit form.
    """
    elements = rows * columns
    if packing.scheme.method in (*_GPTQ, *_AWQ):
        return _grouped(packing, rows, columns, bits=8)
    best = elements + rows * _FLOAT32
    low = best if packing.scheme.method == "bitsandbytes" else elements + rows * _FLOAT16
    return Span(bytes=best, low=low, high=best)


def _int4(packing: Packing, rows: int, columns: int) -> Span:
    return _grouped(packing, rows, columns, bits=4)


def _grouped(packing: Packing, rows: int, columns: int, *, bits: int) -> Span:
    """Elements packed into int32 words, a 16-bit scale a row and group, and zero points packed like the elements.

    AWQ and GPTQ always carry zero points. GPTQ has the group of every input beside them (``g_idx``, int32), which
    engines drop unless the order was changed. compressed-tensors carries zero points only where asymmetric.
    """
    groups = _groups(packing, columns)
    elements = ceil_div(rows * columns * bits, 32) * 4
    scales, zeros = groups * rows * _FLOAT16, ceil_div(groups * rows * bits, 32) * 4
    total = elements + scales + zeros
    if packing.scheme.method in _GPTQ:
        index = columns * 4
        return Span(bytes=total + index, low=total, high=total + index)
    if packing.scheme.method in _AWQ:
        return Span.exact(total)
    best = total - zeros if packing.is_symmetric else total
    return Span(bytes=best, low=best, high=best + 16)  # the shape, two int64, where it is kept


def _nf4(packing: Packing, rows: int, columns: int) -> Span:
    """Two elements a byte and the largest of every 64, float32. With double quantisation those become one byte each,
    with a float32 for every 256 of them; then the code of 16 float32, one of 256, and an offset, which may be shared.
    """
    elements = rows * columns
    blocks = ceil_div(elements, packing.scheme.group_size or 64)
    packed = ceil_div(elements, 2)
    if packing.options.get("bnb_4bit_use_double_quant"):
        total = packed + blocks + ceil_div(blocks, 256) * _FLOAT32
        return Span(bytes=total, low=total, high=total + (16 + 256 + 1) * _FLOAT32)
    total = packed + blocks * _FLOAT32
    return Span(bytes=total, low=total, high=total + 16 * _FLOAT32)


def _nvfp4(packing: Packing, rows: int, columns: int) -> Span:
    """Two elements a byte, an fp8 scale for 16 of them along a row, a float32 for the matrix and one for its inputs.

    Kernels want the scales in tiles of 128 x 4: the upper end pads them.
    """
    packed, groups = ceil_div(rows * columns, 2), ceil_div(columns, packing.scheme.group_size or 16)
    total = packed + rows * groups + 2 * _FLOAT32
    padded = packed + round_up(rows, 128) * round_up(groups, 4) + 2 * _FLOAT32
    return Span(bytes=total, low=total, high=padded)


def _mxfp4(packing: Packing, rows: int, columns: int) -> Span:
    """Two elements a byte and a byte of exponent for 32 of them along a row. Kernels pad both sides, up to 256."""
    size = packing.scheme.group_size or 32
    total = rows * ceil_div(columns, size) * (size // 2 + 1)
    padded = round_up(rows, 256) * (round_up(columns, 256) // size) * (size // 2 + 1)
    return Span(bytes=total, low=total, high=padded)


def _gguf(packing: Packing, rows: int, columns: int) -> Span:
    """The mean of the file, whose tensors are packed in several ways: the headers alone tell each one's."""
    stored, elements = (packing.options.get(key) for key in ("stored_bytes", "stored_elements"))
    mean = Fraction(9, 16)  # of 4 bits and a 16-bit scale for 32 of them, where the header was not read
    if isinstance(stored, int) and isinstance(elements, int) and stored > 0 and elements > 0:
        mean = Fraction(stored, elements)
    total = rows * columns * mean
    return Span(bytes=int(total), low=int(total * Fraction(9, 10)), high=int(total * Fraction(11, 10)))


_FORMATS: dict[str, Callable[[Packing, int, int], Span]] = {
    "fp8": _fp8,
    "int8": _int8,
    "int4": _int4,
    "nf4": _nf4,
    "nvfp4": _nvfp4,
    "mxfp4": _mxfp4,
    "gguf": _gguf,
}
