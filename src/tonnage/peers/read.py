"""Values as the other engines write them: their suffixes, their switches, their words for "as the model says".

Every reader takes the text and the name for errors, and returns our value, or None where the text says to leave our
knob as it is ("auto"). All raise ``InvalidSetting``.
"""

from __future__ import annotations

import re
from fractions import Fraction

from tonnage.costs.dtypes import parse_dtype
from tonnage.errors import InvalidSetting
from tonnage.units import GiB, exact, parse_count, parse_fraction

_SUFFIXED = re.compile(r"\s*(\d+(?:\.\d+)?)([kmgtKMGT])\s*")
_SI_OR_IEC = re.compile(r"\s*(\d+(?:\.\d+)?)(k|M|G|T|Ki|Mi|Gi|Ti)\s*")
_POWERS = "kmgt"
_DIGITS = re.compile(r"\+?\d+(_\d+)*")
#: Characters of a whole number; of a value that a message shows.
_MOST_DIGITS, _MOST_SHOWN = 40, 80
_WRITE_DIGITS = "write digits alone, such as 8192"
_YES, _NO = ("", "true", "1", "yes", "on"), ("false", "0", "no", "off")


def whole(text: str, knob: str, *, remedy: str = _WRITE_DIGITS) -> int:
    """A whole number of at least 0 as ``int`` reads it, for that is what the engines read most flags with: digits
    alone, neither suffixes nor commas."""
    plain = text.strip()
    if not _DIGITS.fullmatch(plain) or len(plain) > _MOST_DIGITS:
        is_suffixed = _SUFFIXED.fullmatch(plain) or _SI_OR_IEC.fullmatch(plain)
        what = "not a whole number in digits" + (", and the engine reads no such suffix here" if is_suffixed else "")
        raise InvalidSetting(knob, text[:_MOST_SHOWN], what, remedy=remedy)
    return parse_count(int(plain), knob=knob, allow_zero=True)


def count(text: str, knob: str, *, remedy: str = _WRITE_DIGITS) -> int | None:
    """A whole number of at least 1, in digits."""
    return parse_count(whole(text, knob, remedy=remedy), knob=knob)


def vllm_count(text: str, knob: str) -> int | None:
    """vLLM's notation of lengths: small suffixes are powers of 1,000 and capitals powers of 1,024, so 8k is 8,000 and
    8K is 8,192."""
    found = _SUFFIXED.fullmatch(text)
    remedy = f"{_WRITE_DIGITS}, or 8k (8,000) or 8K (8,192)"
    if found is None:
        return count(text, knob, remedy=remedy)
    return _scaled(found, text, knob, base=1000 if found[2].islower() else 1024, remedy=remedy)


def vllm_length(text: str, knob: str) -> int | None:
    """As ``vllm_count``; -1 and auto leave the length to be fitted."""
    return None if text.strip().lower() in ("-1", "auto") else vllm_count(text, knob)


def sglang_count(text: str, knob: str) -> int | None:
    """SGLang's notation of lengths: 8k is 8,000, 8Ki is 8,192, and 8K is nothing."""
    found = _SI_OR_IEC.fullmatch(text)
    remedy = f"{_WRITE_DIGITS}, or 8k (8,000) or 8Ki (8,192)"
    if found is None:
        return count(text, knob, remedy=remedy)
    return _scaled(found, text, knob, base=1024 if found[2].endswith("i") else 1000, remedy=remedy)


def size_or_unset(text: str, knob: str) -> int | None:
    """Bytes, in digits; 0 means that there is no such cap."""
    return whole(text, knob) or None


def gibibytes(text: str, knob: str) -> int | None:
    """A number of GiB, as a bare number; 0 is none at all, which is a value of ours too."""
    return _number_of(text, knob, GiB, "GiB")


def gigabytes(text: str, knob: str) -> int | None:
    """A number of GB of 1000^3 bytes, as a bare number; 0 means that it says nothing."""
    return _number_of(text, knob, 1000**3, "GB") or None


def chunk(text: str, knob: str) -> int | None:
    """Tokens of a prefill chunk; -1 (no chunks) has no counterpart."""
    if text.strip() == "-1":
        raise InvalidSetting(
            knob,
            text,
            "without chunks a step is as long as the longest prompt, and ours are always bounded",
            remedy="give the tokens of the longest step, such as 8192",
        )
    return count(text, knob)


def share(text: str, knob: str) -> Fraction | None:
    """An exact share above 0, at most 1."""
    return parse_fraction(text, knob=knob)


def dtype(text: str, knob: str) -> str | None:
    """An element type; "auto" leaves it to the weights."""
    return None if text.strip().lower() == "auto" else parse_dtype(text, knob=knob)


def eager(text: str, knob: str) -> str | None:
    """A switch that turns graphs off; alone it means yes."""
    return "none" if switch_on(text, knob) else None


def switch_on(text: str, knob: str) -> bool | None:
    """A switch of which ours says the same; alone it means yes."""
    word = text.strip().lower()
    if word not in (*_YES, *_NO):
        raise InvalidSetting(knob, text, "neither true nor false", remedy="write true or false")
    return word in _YES


def switch_off(text: str, knob: str) -> bool | None:
    """A switch of which ours says the opposite; alone it means yes."""
    return not switch_on(text, knob)


def graph_config(text: str, knob: str) -> str | None:
    """TensorRT-LLM turns graphs off by an empty configuration."""
    if text.strip().lower() not in ("null", "none", "~"):
        raise InvalidSetting(knob, text, "only null is understood", remedy="write null, or give batch_sizes")
    return "none"


def graph_mode(text: str, knob: str) -> str | None:
    """Which steps vLLM captures: none, or those of decodes, which is what we do anyway."""
    mode = text.strip().lower()
    if mode not in ("none", "full_decode_only"):
        raise InvalidSetting(
            knob, text, "only steps of decodes have graphs here", remedy="write FULL_DECODE_ONLY, or NONE"
        )
    return "none" if mode == "none" else None


def batch_sizes(text: str, knob: str) -> str | None:
    """A list of batch sizes, with or without brackets, between commas or spaces."""
    parts = [part for part in re.split(r"[\s,]+", text.strip().strip("[]()")) if part]
    if not parts:
        raise InvalidSetting(knob, text, "no sizes", remedy="write sizes such as 1,2,4,8")
    return ",".join(str(count(part, knob)) for part in parts)


def _number_of(text: str, knob: str, unit_bytes: int, unit: str) -> int:
    try:
        value = exact(text.strip()) * unit_bytes
    except (ValueError, ZeroDivisionError):
        value = Fraction(-1)
    if value < 0 or value.denominator != 1:
        raise InvalidSetting(knob, text, f"not a number of {unit}", remedy="write a number such as 4 or 1.5")
    return int(value)


def _scaled(found: re.Match[str], text: str, knob: str, *, base: int, remedy: str) -> int:
    """A number with a suffix. The engines take parts of a thousand, and none of 1,024."""
    if base == 1024 and "." in found[1]:
        raise InvalidSetting(knob, text, "the engine reads no decimals before a suffix of 1,024", remedy=remedy)
    value = Fraction(found[1]) * base ** (_POWERS.index(found[2][0].lower()) + 1)
    if value.denominator != 1 or value < 1:
        raise InvalidSetting(knob, text, "not a whole number of at least 1", remedy=remedy)
    return parse_count(int(value), knob=knob)
