"""Options in groups: a verb takes a dataclass of options as one parameter, and the command line sees its fields."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints


def grouped(verb: Callable[..., Any]) -> Callable[..., Any]:
    """``verb`` with every parameter whose type is a dataclass replaced by the dataclass's fields, in their order.

    The fields are ``Annotated`` options with defaults. Several verbs share a group, and each declares it in one line.
    """
    hints = get_type_hints(verb, include_extras=True)
    parameters = inspect.signature(verb).parameters
    groups = {name: hints[name] for name in parameters if is_dataclass(hints[name])}

    @functools.wraps(verb)
    def flat(**given: Any) -> Any:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        return verb(**given)

    spread = [option for p in parameters.values() for option in _spread(p, hints[p.name])]
    flat.__signature__ = inspect.Signature(spread)  # type: ignore[attr-defined]
    flat.__annotations__ = {option.name: option.annotation for option in spread}
    return flat


def _spread(parameter: inspect.Parameter, hint: Any) -> Iterator[inspect.Parameter]:
    if not is_dataclass(hint):
        yield parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY)
        return
    hints = get_type_hints(hint, include_extras=True)
    for field in fields(hint):
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
