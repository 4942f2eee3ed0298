"""YAML as a launch may be written in: read without objects, of bounded size, and whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonnage.errors import InputError, UserError

#: Characters of a file, and values in it once every alias is followed: a manifest has some hundred.
MOST_CHARACTERS = 2_000_000
MOST_VALUES = 100_000
#: No whole number in a manifest is as large; Python would not turn one of thousands of digits into text.
_TOO_LARGE = 10**40


def documents(text: str, *, name: str) -> list[Any]:
    """Every document of a YAML text; JSON is YAML. ``name``: the file's, for messages.

    Raises ``InputError`` for what is no YAML, is too large, or refers to itself; ``UserError`` where PyYAML is not
    installed.
    """
    if len(text) > MOST_CHARACTERS:
        told = f"{name}: {len(text):,} characters are too many for a manifest"
        raise InputError(told, value=name, remedy=f"cut out the part that matters: at most {MOST_CHARACTERS:,}")
    try:
        import yaml  # an extra: the planner itself needs no YAML
    except ModuleNotFoundError:
        raise UserError(
            f"{name} is YAML, and PyYAML is not installed",
            need="the extra tonnage[yaml] (launch commands are read without it)",
            remedy="pip install 'tonnage[yaml]'",
        ) from None
    try:
        found = list(yaml.load_all(text, Loader=_loader(yaml.SafeLoader)))
    except yaml.YAMLError as fault:
        raise InputError(f"{name} is not YAML: {_told(fault)}", value=name, remedy=_remedy(text)) from None
    except (ValueError, OverflowError, RecursionError, TypeError, AttributeError, LookupError) as fault:
        why = "it is nested too deep" if isinstance(fault, RecursionError) else "a value in it cannot be read"
        raise InputError(f"{name} cannot be read as YAML: {why}", value=name, remedy=_remedy(text)) from None
    sizes: dict[int, int | None] = {}
    if sum(_size(document, sizes, name) for document in found) > MOST_VALUES:
        raise InputError(
            f"{name} holds more than {MOST_VALUES:,} values once its aliases are followed",
            value=name,
            remedy="give a manifest of launches alone",
        )
    return [document for document in found if document is not None]


def _loader(safe: Any) -> Any:
    """The safe loader, which gives up on mappings that are merged into one another (``<<``) until they are vast: some
    releases of PyYAML write every one of their pairs down."""

    def flatten(self: Any, node: Any) -> None:
        safe.flatten_mapping(self, node)
        if len(node.value) > MOST_VALUES:
            raise ValueError("merged without end")

    return type("Loader", (safe,), {"flatten_mapping": flatten})


def mapping(value: object) -> Mapping[str, Any]:
    """``value`` where it is a mapping with names as keys, else an empty one."""
    return {str(key): inside for key, inside in value.items()} if isinstance(value, Mapping) else {}


def sequence(value: object) -> list[Any]:
    """``value`` where it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def _told(fault: Exception) -> str:
    mark = getattr(fault, "problem_mark", None)
    what = " ".join(str(getattr(fault, "problem", None) or "it cannot be parsed").split())[:200]
    return what if mark is None else f"line {mark.line + 1}: {what}"


def _remedy(text: str) -> str:
    return "render the template first (helm template ...)" if "{{" in text else "give a manifest, or launch commands"


def _size(value: object, sizes: dict[int, int | None], name: str) -> int:
    """Values in it with aliases followed, each counted once; a walk of its own stack, for it may be deep."""
    stack = [(value, False)]
    while stack:
        now, is_done = stack.pop()
        inside = list(now.values()) if isinstance(now, dict) else now if isinstance(now, list) else []
        if is_done:
            sizes[id(now)] = 1 + sum(
                sizes.get(id(each)) or 1 if isinstance(each, dict | list) else 1 for each in inside
            )
            continue
        if not isinstance(now, dict | list) or sizes.get(id(now)):
            continue
        if id(now) in sizes:
            raise InputError(f"{name} refers to itself", value=name, remedy="write the value out")
        if any(isinstance(each, int) and abs(each) >= _TOO_LARGE for each in (*now, *inside)):
            told = f"{name} cannot be read as YAML: a number in it is too large"
            raise InputError(told, value=name, remedy="write it with fewer digits, or as text in quotes")
        sizes[id(now)] = None
        stack.append((now, True))
        stack.extend((each, False) for each in inside)
    return sizes.get(id(value)) or 1
