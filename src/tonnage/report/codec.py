"""Frozen data classes to JSON and back, driven by their type hints: one codec for every file that Tonnage writes.

Canonical JSON: sorted keys, whole numbers only, fractions as ``"9/10"``, enums as their values, tuples as arrays.
Keys that the types do not know are set aside by path (``Unknown``) and put back when the file is written again, so
that an older Tonnage does not strip what a newer one wrote.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import StrEnum
from fractions import Fraction
from functools import cache
from typing import Any, NoReturn, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from tonnage.errors import InputError
from tonnage.units import exact

T = TypeVar("T")
Path = tuple[str | int, ...]
Unknown = dict[Path, object]

REMEDY = "give a file that tonnage wrote with --output, --run-file or --json"
#: Objects and arrays inside one another: four times what a run needs, far below what Python can recurse into.
MAX_DEPTH = 48
#: No number of bytes, tokens or milliseconds reaches this.
NUMBERS_END = 2**63


def to_json(value: object) -> Any:
    """Plain dicts, lists, strings, ints, bools and None. Raises ``TypeError`` for anything else: a defect of ours."""
    if isinstance(value, StrEnum):
        return value.value
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Fraction):
        return str(value)
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if isinstance(value, frozenset):
        return sorted(to_json(item) for item in value)
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
    raise TypeError(f"{type(value).__name__} has no place in a Tonnage file")


def dumps(document: object) -> str:
    """Canonical text, ending in a newline."""
    return json.dumps(document, sort_keys=True, indent=2, allow_nan=False) + "\n"


def loads(text: str, *, file: str) -> dict[str, Any]:
    """The JSON object in ``text``. Raises ``InputError`` naming ``file`` and the place of the first fault."""
    try:
        document = json.loads(text, parse_float=_refuse_float, parse_constant=_refuse_float)
    except json.JSONDecodeError as fault:
        raise InputError(f"{file} {_fault(text, fault)}", value=file, remedy=REMEDY) from None
    except (ValueError, RecursionError) as fault:
        raise InputError(f"{file} is not a Tonnage file: {fault}", value=file, remedy=REMEDY) from None
    if not isinstance(document, dict):
        raise InputError(f"{file} holds {_kind(document)}, not an object", value=file, remedy=REMEDY)
    _check_depth(document, file)
    return document


def _check_depth(document: object, file: str) -> None:
    """Every later walk recurses. This one does not, and so says where the nesting is instead of failing on it."""
    left: list[tuple[object, Path]] = [(document, ())]
    while left:
        value, at = left.pop()
        if len(at) > MAX_DEPTH:
            where = path_text(at[:4])
            raise InputError(f"{file}: {where}: is nested more than {MAX_DEPTH} deep", value=file, remedy=REMEDY)
        inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        left += [(item, (*at, key)) for key, item in inside]


def check_schema(document: Mapping[str, object], *, expected: str, file: str) -> None:
    """Refuse another kind of file and a major version that this release does not know."""
    found, (kind, major) = document.get("schema"), expected.split("/")
    if found == expected:
        return
    if isinstance(found, str) and found.split("/")[0] == kind:
        raise InputError(
            f"{file} has schema {found!r}; this release reads {kind}/{major}",
            value=file,
            remedy="use the release that wrote it, or write the file again with this one",
        )
    raise InputError(
        f"{file} has schema {found!r}, not {expected!r}",
        value=file,
        remedy=REMEDY,
    )


def overlay(document: dict[str, Any], unknown: Unknown) -> dict[str, Any]:
    """Put keys that were set aside back in their places. Places that no longer exist are passed over."""
    for path, value in unknown.items():
        place: Any = document
        for step in path[:-1]:
            inside = isinstance(step, int) and isinstance(place, list) and step < len(place)
            place = place[step] if inside or (isinstance(place, dict) and step in place) else None
        if isinstance(place, dict):
            place.setdefault(cast(str, path[-1]), value)
    return document


class Reader:
    """Builds values from one file's JSON. ``unknown`` collects the keys that no type has a field for.

    Raises ``InputError`` with the file, the path inside it (``lines[3].bytes``) and what was found there.
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self.unknown: Unknown = {}

    def read(self, hint: type[T], value: object, at: Path = ()) -> T:
        return cast(T, self._any(hint, value, at))

    def fail(self, at: Path, what: str) -> NoReturn:
        place = path_text(at)
        raise InputError(f"{self.file}: {place + ': ' if place else ''}{what}", value=self.file, remedy=REMEDY)

    def _any(self, hint: Any, value: object, at: Path) -> object:
        origin = get_origin(hint)
        if origin in (Union, types.UnionType):
            return None if value is None else self._any(_without_none(hint), value, at)
        if origin in (tuple, frozenset):
            if not isinstance(value, list):
                self.fail(at, f"expected an array, found {_kind(value)}")
            items = (self._any(get_args(hint)[0], item, (*at, place)) for place, item in enumerate(value))
            return origin(items)
        if is_dataclass(origin or hint):
            return self._object(hint, value, at)
        return self._scalar(hint, value, at)

    def _object(self, hint: Any, value: object, at: Path) -> object:
        if not isinstance(value, dict):
            self.fail(at, f"expected an object, found {_kind(value)}")
        known = _fields(hint)
        for key in value.keys() - known.keys():
            self.unknown[(*at, key)] = value[key]
        given: dict[str, object] = {}
        for name, (entry, kind) in known.items():
            if name in value:
                given[name] = self._any(kind, value[name], (*at, name))
            elif entry.default is MISSING and entry.default_factory is MISSING:
                self.fail((*at, name), "is missing")
        return (get_origin(hint) or hint)(**given)

    def _scalar(self, hint: Any, value: object, at: Path) -> object:
        if hint is Fraction:
            return self._fraction(value, at)
        if issubclass(hint, StrEnum):
            if value not in list(hint):
                self.fail(at, f"expected one of {', '.join(hint)}, found {_kind(value)}")
            return hint(value)
        # bool is an int to Python, not to a reader of the file
        if isinstance(value, hint) and isinstance(value, bool) == (hint is bool):
            if isinstance(value, int) and abs(value) >= NUMBERS_END:
                self.fail(at, f"is too large a number: {_kind(value)}")
            return value
        return self.fail(at, f"expected {_NAMES[hint]}, found {_kind(value)}")

    def _fraction(self, value: object, at: Path) -> Fraction:
        try:
            if isinstance(value, str):
                return exact(value)
        except (ValueError, ZeroDivisionError):
            pass
        return self.fail(at, f'expected a fraction such as "9/10", found {_kind(value)}')


_NAMES = {int: "a whole number", str: "text", bool: "true or false"}


def path_text(at: Path) -> str:
    """``("lines", 3, "bytes")`` as ``lines[3].bytes``."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in at).lstrip(".")


@cache
def _fields(hint: Any) -> dict[str, tuple[Field[Any], Any]]:
    """A data class's fields with their types; ``Setting[int]`` puts ``int`` in place of its type variable."""
    made = get_origin(hint) or hint
    filled = dict(zip(getattr(made, "__parameters__", ()), get_args(hint), strict=False))
    hints = get_type_hints(made)
    return {f.name: (f, _fill(hints[f.name], filled)) for f in fields(made)}


def _fill(hint: Any, filled: Mapping[Any, Any]) -> Any:
    variables = getattr(hint, "__parameters__", ())
    return hint[tuple(filled[variable] for variable in variables)] if variables and filled else hint


def _without_none(hint: Any) -> Any:
    (kind,) = (part for part in get_args(hint) if part is not type(None))
    return kind


def _kind(value: object) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _fault(text: str, fault: json.JSONDecodeError) -> str:
    if not text.strip():
        return "is empty"
    if fault.pos >= len(text.rstrip()) or fault.msg.startswith("Unterminated string"):
        return "ends too early: it was cut short"
    return f"is not JSON at line {fault.lineno}, column {fault.colno} ({fault.msg})"


def _refuse_float(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a whole number")
