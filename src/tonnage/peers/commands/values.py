"""The text of a flag as a value: sizes in bytes, lengths in tokens, shares exact. All raise ``InvalidSetting``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from tonnage.errors import InvalidSetting
from tonnage.peers import read
from tonnage.peers.commands.command import Command, Flag
from tonnage.peers.commands.kinds import Kind, kind_of
from tonnage.units import LARGEST, exact

#: Characters of JSON in a flag.
_MOST_JSON = 100_000
_FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,2})?", re.IGNORECASE)


def settings_of(command: Command) -> tuple[dict[str, object], list[InvalidSetting]]:
    """The flags of ``command`` that decide about memory, parsed, and an error for each that its engine would not
    read. A flag whose value holds an unknown variable is in neither."""
    found: dict[str, object] = {}
    wrong = []
    for flag in command.flags:
        if flag.unknown:
            continue
        name, dot, key = flag.name.partition(".")
        try:
            if dot:
                inside = found.get(name)
                found[name] = {**(inside if isinstance(inside, dict) else {}), **_nested(key, flag.text)}
            elif (kind := kind_of(command.engine, name)) is not None:
                found[name] = value_of(command.engine, flag, kind)
        except InvalidSetting as fault:
            wrong.append(fault)
    return {name: value for name, value in found.items() if value is not None}, wrong


def value_of(engine: str, flag: Flag, kind: Kind) -> object:
    """The value of one flag; None where the text says to leave the engine's default. A length that is to be fitted to
    the pool ("auto") is -1, which is no default."""
    if kind is Kind.SWITCH:
        return read.switch_on(flag.text or "", flag.written) is not flag.is_off
    if flag.text is None:
        raise InvalidSetting(flag.written, "", "no value is given", remedy=f"write {flag.written} VALUE")
    return (
        _READERS[kind](flag.text, flag.written)
        if engine == "vllm" or kind not in _PLAIN
        else _PLAIN[kind](flag.text, flag.written)
    )


def _number(text: str, knob: str) -> int:
    if not re.fullmatch(r"\s*[+-]?\d{1,19}\s*", text) or abs(int(text)) > LARGEST:
        raise InvalidSetting(knob, text, "not a whole number", remedy="write a whole number")
    return int(text)


def _length(text: str, knob: str) -> int:
    value = read.vllm_length(text, knob)
    return -1 if value is None else value


def _vllm_count(text: str, knob: str) -> int | None:
    return 0 if text.strip() == "0" else read.vllm_count(text, knob)


def _sglang_count(text: str, knob: str) -> int | None:
    return 0 if text.strip() == "0" else read.sglang_count(text, knob)


def _ratio(text: str, knob: str) -> Fraction:
    try:
        value = exact(text.strip()) if len(text) < 40 else None
    except (ValueError, ZeroDivisionError):
        value = None
    if value is None or value < 0:
        raise InvalidSetting(knob, text[:80], "not a number", remedy="write a number such as 0.9")
    return value


def _share(text: str, knob: str) -> Fraction:
    """A share as the engines read it: ``float()`` of the text, so neither 9/10 nor 90%."""
    value = _ratio(text, knob) if _FLOAT.fullmatch(text.strip()) else None
    if value is None or not 0 < value <= 1:
        what = "not a number" if value is None else "outside 0 < share <= 1"
        raise InvalidSetting(knob, text[:80], what, remedy="write a number above 0 and at most 1, such as 0.9")
    return value


def _word(text: str, knob: str) -> str:
    del knob
    return text.strip()


def _counts(text: str, knob: str) -> tuple[int, ...]:
    parts = [part for part in re.split(r"[\s,]+", text.strip().strip("[]()")) if part]
    return tuple(read.whole(part, knob) for part in parts)


def _json(text: str, knob: str) -> object:
    """JSON, or the one word that some flags take as well. Fractions of numbers are exact."""
    if len(text) > _MOST_JSON:
        raise InvalidSetting(knob, text[:40], "too long", remedy="give a shorter text")
    if text.strip()[:1] not in ("{", "["):
        plain = text.strip()
        return None if plain.lower() in ("null", "none", "~", "") else int(plain) if plain.isdecimal() else plain
    try:
        return json.loads(text, parse_float=exact)
    except (ValueError, RecursionError, ZeroDivisionError) as fault:
        why = fault.msg if isinstance(fault, json.JSONDecodeError) else "it cannot be read"
        raise InvalidSetting(knob, text[:80], f"not JSON ({why})", remedy="quote it as one word of JSON") from None


def _nested(key: str, text: str | None) -> dict[str, Any]:
    """``a.b`` and its text as vLLM reads ``--flag.a.b text``."""
    value: Any = True if text is None else _scalar(text)
    for part in reversed(key.split(".")[:8]):
        value = {part: value}
    return {str(k): v for k, v in value.items()} if isinstance(value, dict) else {}


def _scalar(text: str) -> object:
    try:
        return json.loads(text, parse_float=exact) if len(text) < _MOST_JSON else text
    except (ValueError, RecursionError, ZeroDivisionError):
        return {"True": True, "False": False, "None": None}.get(text, text)


_READERS: Mapping[Kind, Callable[[str, str], object]] = {
    Kind.COUNT: read.whole,
    Kind.TOKENS: _vllm_count,
    Kind.NUMBER: _number,
    Kind.LENGTH: _length,
    Kind.SHARE: _share,
    Kind.RATIO: _ratio,
    Kind.BYTES: read.vllm_count,
    Kind.GIB: read.gibibytes,
    Kind.WORD: _word,
    Kind.JSON: _json,
    Kind.COUNTS: _counts,
}
_PLAIN: Mapping[Kind, Callable[[str, str], object]] = {
    **_READERS,
    Kind.BYTES: read.size_or_unset,
    Kind.TOKENS: _sglang_count,
}
