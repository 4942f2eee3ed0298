"""The rooms that need torch, imported when a verb is about to use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tonnage.errors import UserError


def engine_room(verb: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``start`` and ``EngineOptions``. Raises ``UserError`` where the engine's libraries are not installed."""
    try:
        from tonnage.engine import EngineOptions, start
    except ImportError as missing:
        raise _told(verb, missing) from None
    return start, EngineOptions


def stub_room(verb: str) -> Callable[..., Any]:
    """``stub_engine``: an engine without a model. Raises ``UserError`` as ``engine_room`` does."""
    try:
        from tonnage.engine.stub import stub_engine
    except ImportError as missing:
        raise _told(verb, missing) from None
    return stub_engine


def exact_room(verb: str) -> Callable[..., Any]:
    """``FakeProbe``: forwards on fake tensors. Raises ``UserError`` as ``engine_room`` does."""
    try:
        from tonnage.engine.exact import FakeProbe
    except ImportError as missing:
        raise _told(verb, missing) from None
    return FakeProbe


def _told(verb: str, missing: ImportError) -> Exception:
    if missing.name is not None and missing.name.split(".")[0] == "tonnage":
        return missing
    remedy = "pip install 'tonnage[engine]' -c constraints.txt"
    if not isinstance(missing, ModuleNotFoundError):
        return UserError(f"tonnage {verb} cannot load the engine's libraries: {missing}", remedy=remedy)
    if missing.name is None:
        return missing
    return UserError(
        f"tonnage {verb} needs the engine's libraries, and {missing.name!r} is not installed",
        need="the extra tonnage[engine] (tonnage plan, report and diff work without it)",
        remedy=remedy,
    )
