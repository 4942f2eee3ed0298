"""``--reference KNOB=VALUE``: the reference policy's knobs by the reference's own names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from difflib import get_close_matches
from fractions import Fraction
from typing import Any, get_type_hints

from tonnage.budget.reference.environment import VARIABLES, Environment
from tonnage.budget.reference.knobs import ReferenceKnobs
from tonnage.errors import InvalidSetting
from tonnage.units import parse_bytes, parse_count, parse_fraction

FLAG = "--reference"
#: Knobs that are not one value: the command line has no words for them.
_STRUCTURED = ("speculation", "snapshots", "environment")


def reference_knobs(texts: Iterable[str]) -> ReferenceKnobs:
    """The knobs that ``texts`` set, the reference's defaults for the rest. Raises ``InvalidSetting``.

    Names in capitals are its environment variables (``TRTLLM_SKIP_KV_CACHE_ESTIMATION=1``).
    """
    given: dict[str, Any] = {}
    variables: dict[str, str] = {}
    for text in texts:
        name, is_assigned, value = (part.strip() for part in text.partition("="))
        if not is_assigned or not value:
            raise InvalidSetting(FLAG, text, "not a knob and its value", remedy="write KNOB=VALUE")
        is_variable = name.isupper()
        name = name if is_variable else name.replace("-", "_").lower()
        if name in given or name in variables:
            raise InvalidSetting(FLAG, text, f"{name} is given twice", remedy="keep one of them")
        if not is_variable:
            given[name] = _value(name, value)
        elif name in VARIABLES.values():
            variables[name] = value
        else:
            remedy = f"use one of {', '.join(VARIABLES.values())}"
            raise InvalidSetting(FLAG, name, "the reference reads no such variable", remedy=remedy)
    return ReferenceKnobs(**given, environment=Environment.read(variables))


def knob_names() -> tuple[str, ...]:
    """The knobs that one text can set."""
    return tuple(field.name for field in fields(ReferenceKnobs) if field.name not in _STRUCTURED)


def _value(name: str, text: str) -> Any:
    if name in _STRUCTURED:
        raise InvalidSetting(
            FLAG, name, "it is no single value, and no plan follows it in this release", remedy=f"leave {name} out"
        )
    if name not in knob_names():
        near = get_close_matches(name, knob_names(), n=1)
        raise InvalidSetting(
            FLAG,
            name,
            "the reference has no such knob" + (f"; did you mean {near[0]}?" if near else ""),
            remedy=f"use one of {', '.join(knob_names())}",
        )
    return _parser(name)(text)


def _parser(name: str) -> Callable[[str], Any]:
    knob, hint = f"{FLAG} {name}", str(get_type_hints(ReferenceKnobs)[name])
    if "tuple" in hint:
        one = _fraction if "Fraction" in hint else _whole
        return lambda text: tuple(one(part, knob) for part in text.split(","))
    if "Fraction" in hint:
        return lambda text: _fraction(text, knob)
    if hint == str(bool):
        return lambda text: _flag(text, knob)
    if "int" in hint and "bytes" in name:
        return lambda text: parse_bytes(text, knob=knob, allow_zero=True)
    if "int" in hint:
        return lambda text: parse_count(text, knob=knob, allow_zero=True)
    return lambda text: text.upper() if name == "manager" else text


def _fraction(text: str, knob: str) -> Fraction:
    return parse_fraction(text.strip(), knob=knob)


def _whole(text: str, knob: str) -> int:
    """A whole number, negative ones too: they stand for recurrent states among windows."""
    negative = text.strip().startswith("-")
    number = parse_count(text.strip().removeprefix("-"), knob=knob, allow_zero=True)
    return -number if negative else number


def _flag(text: str, knob: str) -> bool:
    values = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in values:
        raise InvalidSetting(knob, text, "neither true nor false", remedy="write true or false")
    return values[text.lower()]
