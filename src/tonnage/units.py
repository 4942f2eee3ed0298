"""Bytes, counts and exact fractions: read from what a person types, printed back for a person.

Binary suffixes (KiB, MiB, GiB, TiB) are powers of 1024, decimal ones (KB, MB, GB, TB) powers of 1000, as in
IEC 80000-13. All arithmetic is exact: "1.5GiB" goes through ``Fraction``, never through ``float``.
"""

from __future__ import annotations

import re
from fractions import Fraction

from tonnage.errors import InvalidSetting

KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40

_SUFFIXES = {
    "": 1, "b": 1,
    "kib": KiB, "mib": MiB, "gib": GiB, "tib": TiB,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_NUMBER = re.compile(r"^\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:e\d{1,2})?)\s*([a-z]*)\s*$", re.IGNORECASE)
_EXAMPLES = "write a whole number of bytes or a size such as 1500MiB, 80GiB or 64GB"


def parse_bytes(text: str | int, *, knob: str, allow_zero: bool = False) -> int:
    """Bytes from ``"4GiB"``, ``"1.5 GB"``, ``"1_000"`` or an ``int``.

    Raises ``InvalidSetting`` for anything that is not a size, is negative, is zero (unless ``allow_zero``), or
    does not come to a whole number of bytes.
    """
    if isinstance(text, bool):
        raise InvalidSetting(knob, text, "not a size", remedy=_EXAMPLES)
    if isinstance(text, int):
        value = Fraction(text)
    else:
        number, suffix = _split(text, knob=knob, remedy=_EXAMPLES)
        if suffix.lower() not in _SUFFIXES:
            raise InvalidSetting(
                knob, text, f"{suffix!r} is not a unit of size", remedy="use B, KiB, MiB, GiB, TiB, KB, MB, GB or TB"
            )
        value = number * _SUFFIXES[suffix.lower()]
        if value.denominator != 1:
            raise InvalidSetting(knob, text, "does not come to a whole number of bytes", remedy=_EXAMPLES)
    _check_sign(value, text, knob=knob, allow_zero=allow_zero, remedy=_EXAMPLES)
    return int(value)


def parse_count(text: str | int, *, knob: str, allow_zero: bool = False) -> int:
    """A whole number such as ``8192``, ``"8_192"``, ``"8,192"`` or ``"8k"`` (1,000) or ``"8Ki"`` (1,024)."""
    remedy = "write a whole number of at least " + ("0" if allow_zero else "1")
    if isinstance(text, bool) or not isinstance(text, int | str):
        raise InvalidSetting(knob, text, "not a whole number", remedy=remedy)
    if isinstance(text, int):
        value = Fraction(text)
    else:
        number, suffix = _split(text.replace(",", ""), knob=knob, remedy=remedy)
        scale = {"": 1, "k": 1000, "ki": 1024, "m": 10**6, "mi": MiB}.get(suffix.lower())
        if scale is None or (number * scale).denominator != 1:
            raise InvalidSetting(knob, text, "not a whole number", remedy=remedy)
        value = number * scale
    _check_sign(value, text, knob=knob, allow_zero=allow_zero, remedy=remedy)
    return int(value)


def parse_fraction(text: str | int | Fraction, *, knob: str) -> Fraction:
    """An exact share, 0 < f <= 1, from ``"0.9"``, ``"9/10"`` or ``"90%"``. A ``float`` is refused: it is not exact."""
    remedy = "write a share above 0 and at most 1, such as 0.9, 9/10 or 90%"
    if isinstance(text, (float, bool)):
        raise InvalidSetting(knob, text, "a float is not exact; pass the text that was typed", remedy=remedy)
    try:
        if isinstance(text, str) and text.strip().endswith("%"):
            value = Fraction(text.strip()[:-1]) / 100
        else:
            value = Fraction(text)
    except (ValueError, ZeroDivisionError, OverflowError):
        raise InvalidSetting(knob, text, "not a share", remedy=remedy) from None
    if not 0 < value <= 1:
        raise InvalidSetting(knob, text, "outside 0 < share <= 1", remedy=remedy)
    return value


def format_bytes(value: int) -> str:
    """``1610612736`` as ``1.50 GiB``; exact whole units lose their decimals (``80 GiB``)."""
    sign, size = ("-" if value < 0 else ""), abs(value)
    for unit, scale in (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if size >= scale:
            return f"{sign}{size // scale} {unit}" if size % scale == 0 else f"{sign}{size / scale:.2f} {unit}"
    return f"{sign}{size} B"


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is at least ``value``."""
    return ceil_div(value, multiple) * multiple


def round_down(value: int, multiple: int) -> int:
    """The largest multiple that is at most ``value``."""
    return value // multiple * multiple


def _split(text: str, *, knob: str, remedy: str) -> tuple[Fraction, str]:
    found = _NUMBER.match(text)
    if found is None:
        raise InvalidSetting(knob, text, "not a number", remedy=remedy)
    return Fraction(found[1].replace("_", "")), found[2]


def _check_sign(value: Fraction, text: object, *, knob: str, allow_zero: bool, remedy: str) -> None:
    if value < 0:
        raise InvalidSetting(knob, text, "negative", remedy=remedy)
    if value == 0 and not allow_zero:
        raise InvalidSetting(knob, text, "zero", remedy=remedy)


def decimal_text(value: Fraction) -> str:
    """A fraction of millionths as people write it: ``0.0245``, never ``2.45e-05``."""
    return f"{float(value):.6f}".rstrip("0").rstrip(".")
