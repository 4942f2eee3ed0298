"""Bytes, counts and exact fractions: read from what a person types, checked, printed back for a person.

Binary suffixes (KiB, MiB, GiB, TiB) are powers of 1024, decimal ones (KB, MB, GB, TB) powers of 1000, as in
IEC 80000-13. All arithmetic is exact: "1.5GiB" goes through ``Fraction``, never through ``float``.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from numbers import Number

from tonnage.errors import InvalidSetting

KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40

#: No size in bytes and no count of anything is larger: it would not fit into 64 bits.
LARGEST = 2**63 - 1

_SUFFIXES = {
    "": 1, "b": 1,
    "kib": KiB, "mib": MiB, "gib": GiB, "tib": TiB,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
#: Characters of a number that somebody may have typed; of a value that a message shows; digits of a number in one.
_MOST_TYPED, _MOST_SHOWN, _MOST_DIGITS = 1000, 80, 40
_NUMBER = re.compile(r"^\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:e\d{1,2})?)\s*([a-z]*)\s*$", re.IGNORECASE)
#: An exponent of thousands: as an exact number that would be digits without end.
_VAST = re.compile(r"e[+-]?[\d_]{4,}", re.IGNORECASE)
_EXAMPLES = "write a whole number of bytes or a size such as 1500MiB, 80GiB or 64GB"


def parse_bytes(text: str | int, *, knob: str, allow_zero: bool = False) -> int:
    """Bytes from ``"4GiB"``, ``"1.5 GB"``, ``"1_000"`` or an ``int``.

    Raises ``InvalidSetting`` for anything that is not a size, is negative, is zero (unless ``allow_zero``), is above
    ``LARGEST``, or is not a whole number of bytes where no larger unit is named; with one, a part of a byte is dropped.
    """
    if isinstance(text, bool) or not isinstance(text, int | str):
        raise InvalidSetting(knob, shown(text), "not a size", remedy=_EXAMPLES)
    if isinstance(text, int):
        value = Fraction(text)
    else:
        number, suffix = _split(text, knob=knob, remedy=_EXAMPLES)
        if suffix.lower() not in _SUFFIXES:
            remedy = "use B, KiB, MiB, GiB, TiB, KB, MB, GB or TB"
            raise InvalidSetting(knob, shown(text), f"{shown(suffix)!r} is not a unit of size", remedy=remedy)
        value = number * _SUFFIXES[suffix.lower()]
        if suffix.lower() not in ("", "b"):
            value = Fraction(
                math.floor(value)
            )  # "79.11GiB" is as exact as a log prints it: parts of a byte say nothing
        if value.denominator != 1:
            raise InvalidSetting(knob, shown(text), "does not come to a whole number of bytes", remedy=_EXAMPLES)
    _check_range(value, text, knob=knob, allow_zero=allow_zero, remedy=_EXAMPLES)
    return int(value)


def parse_count(text: str | int, *, knob: str, allow_zero: bool = False) -> int:
    """A whole number such as ``8192``, ``"8_192"``, ``"8,192"`` or ``"8k"`` (1,000) or ``"8Ki"`` (1,024)."""
    remedy = "write a whole number of at least " + ("0" if allow_zero else "1")
    if isinstance(text, bool) or not isinstance(text, int | str):
        raise InvalidSetting(knob, shown(text), "not a whole number", remedy=remedy)
    if isinstance(text, int):
        value = Fraction(text)
    else:
        number, suffix = _split(text.replace(",", ""), knob=knob, remedy=remedy)
        scale = {"": 1, "k": 1000, "ki": 1024, "m": 10**6, "mi": MiB}.get(suffix.lower())
        if scale is None or (number * scale).denominator != 1:
            raise InvalidSetting(knob, shown(text), "not a whole number", remedy=remedy)
        value = number * scale
    _check_range(value, text, knob=knob, allow_zero=allow_zero, remedy=remedy)
    return int(value)


def exact(text: str) -> Fraction:
    """``Fraction(text)`` of a text from outside. Raises ``ValueError`` or ``ZeroDivisionError`` for what is no number,
    is too long, or has an exponent whose digits no memory would hold."""
    if len(text) > _MOST_TYPED or _VAST.search(text):
        raise ValueError("too large a number")
    return Fraction(text)


def parse_fraction(text: str | int | Fraction, *, knob: str) -> Fraction:
    """An exact share, 0 < f <= 1, from ``"0.9"``, ``"9/10"`` or ``"90%"``. A ``float`` is refused: it is not exact."""
    remedy = "write a share above 0 and at most 1, such as 0.9, 9/10 or 90%"
    if isinstance(text, (float, bool)):
        raise InvalidSetting(knob, shown(text), "a float is not exact; pass the text that was typed", remedy=remedy)
    try:
        if isinstance(text, str) and text.strip().endswith("%"):
            value = exact(text.strip()[:-1]) / 100
        else:
            value = exact(text) if isinstance(text, str) else Fraction(text)
    except (TypeError, ValueError, ZeroDivisionError, OverflowError):
        raise InvalidSetting(knob, shown(text), "not a share", remedy=remedy) from None
    if not 0 < value <= 1:
        raise InvalidSetting(knob, shown(text), "outside 0 < share <= 1", remedy=remedy)
    return value


class Told(str):
    """What a message says in place of a value: a text that is its own ``repr``, without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def shown(value: object) -> object:
    """The value as a message can show it: itself, or, where it is long, its beginning and how much there is."""
    if isinstance(value, int) and abs(value) >= 10**_MOST_DIGITS:
        return Told(_long_number(value))
    if isinstance(value, str):
        return value if len(value) <= _MOST_SHOWN else Told(f"{value[:_MOST_SHOWN]!r}... ({len(value):,} characters)")
    try:
        text = repr(value)
    except ValueError:  # a number with more digits than Python turns into text, somewhere inside
        return Told(f"a {type(value).__name__}")
    return value if len(text) <= _MOST_SHOWN else Told(f"{text[:_MOST_SHOWN]}... (a {type(value).__name__})")


def _long_number(value: int) -> str:
    """Its first digits, without ``str``, which refuses numbers of a few thousand."""
    size = abs(value)
    digits = int(math.log10(size)) + 1
    digits += (size >= 10**digits) - (size < 10 ** (digits - 1))  # the logarithm is a float
    first = size // 10 ** (digits - 12)
    return f"{'-' if value < 0 else ''}{first}... ({digits:,} digits)"


def check_whole(knob: str, value: object, low: int, high: int = LARGEST) -> None:
    """Raises ``InvalidSetting`` for all but an ``int`` of at least ``low`` and at most ``high``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidSetting(knob, shown(value), "not a whole number", remedy=_range(low, high))
    if not low <= value <= high:
        raise InvalidSetting(knob, shown(value), "out of range", remedy=_range(low, high))


def check_number(knob: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    """Raises ``InvalidSetting`` for all but an ``int`` or ``float`` in ``[low, high]``; ``above``: above ``low``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        is_other = isinstance(value, Number) and not isinstance(value, int | float)
        what = f"a {type(value).__name__}, and neither an int nor a float" if is_other else "not a number"
        raise InvalidSetting(knob, shown(value), what, remedy=_range(low, high, above=above))
    # Compared, not converted: a float of an int above 1e308 would be an OverflowError. Neither end admits an infinity.
    if not low <= value <= high or (above and value == low) or value in (math.inf, -math.inf):
        raise InvalidSetting(knob, shown(value), "out of range", remedy=_range(low, high, above=above))


def _range(low: float, high: float, *, above: bool = False) -> str:
    least = f"more than {low}" if above else f"at least {low}"
    return f"write {least}" + (f" and at most {high}" if high not in (LARGEST, math.inf) else "")


def format_bytes(value: int) -> str:
    """``1610612736`` as ``1.50 GiB``; exact whole units lose their decimals (``80 GiB``)."""
    sign, size = ("-" if value < 0 else ""), abs(value)
    for unit, scale in (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if size >= scale:
            return f"{sign}{size // scale} {unit}" if size % scale == 0 else f"{sign}{_hundredths(size, scale)} {unit}"
    return f"{sign}{size} B"


def _hundredths(size: int, scale: int) -> str:
    """``size / scale`` with two decimals, a tie to the even one. In whole numbers: a float ends at 1e308."""
    found, rest = divmod(100 * size, scale)
    found += 2 * rest > scale or (2 * rest == scale and found % 2)
    return f"{found // 100}.{found % 100:02}"


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is at least ``value``."""
    return ceil_div(value, multiple) * multiple


def round_down(value: int, multiple: int) -> int:
    """The largest multiple that is at most ``value``."""
    return value // multiple * multiple


def _split(text: str, *, knob: str, remedy: str) -> tuple[Fraction, str]:
    found = _NUMBER.match(text) if len(text) <= _MOST_TYPED else None
    if found is None:
        raise InvalidSetting(knob, shown(text), "not a number", remedy=remedy)
    return Fraction(found[1].replace("_", "")), found[2]


def _check_range(value: Fraction, text: object, *, knob: str, allow_zero: bool, remedy: str) -> None:
    if value < 0:
        raise InvalidSetting(knob, shown(text), "negative", remedy=remedy)
    if value == 0 and not allow_zero:
        raise InvalidSetting(knob, shown(text), "zero", remedy=remedy)
    if value > LARGEST:
        raise InvalidSetting(knob, shown(text), "larger than any there is", remedy=remedy)


def decimal_text(value: Fraction) -> str:
    """A fraction of millionths as people write it: ``0.0245``, never ``2.45e-05``."""
    return f"{float(value):.6f}".rstrip("0").rstrip(".")
