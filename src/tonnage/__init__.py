"""Tonnage: one memory budget for an LLM inference engine.

The budget is a pure function from what the user allows, what was measured and what was declared to one
partition of the device; the engine is built from that partition; the ledger checks reality against it.

``LLM`` and ``AsyncLLM`` need the engine's libraries and are imported when they are first asked for, so that
``import tonnage`` needs neither torch nor numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tonnage.caching import CacheParams
from tonnage.sampling import SamplingParams

if TYPE_CHECKING:
    from tonnage.engine.async_llm import AsyncLLM
    from tonnage.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "CacheParams", "SamplingParams", "__version__"]

_LATER = {"LLM": "tonnage.engine.llm", "AsyncLLM": "tonnage.engine.async_llm"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = getattr(importlib.import_module(_LATER[name]), name)
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.split(".")[0] == __name__:
            raise
        raise ModuleNotFoundError(
            f"tonnage.{name} needs the engine's libraries, and {missing.name!r} is not installed. "
            "To change: pip install 'tonnage[engine]' -c constraints.txt.",
            name=missing.name,
        ) from None
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
