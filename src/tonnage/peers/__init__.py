"""Other engines' knobs: what theirs mean in ours, and which of theirs would give about the pool of a plan.

Facts about the engines (names, defaults, denominators of their fractions) are in this room alone, with the versions
they were read from. Names are looked up when they are first used: a report needs the second half, not the first.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tonnage.peers.engines import ENGINES, Engine
    from tonnage.peers.equivalent import Equivalent, equivalents
    from tonnage.peers.padding import vllm_padded_bytes_per_token
    from tonnage.peers.table import KNOBS, Match, PeerKnob, help_text
    from tonnage.peers.translation import Translated, parse_like, translate

_ROOMS = {
    "engines": ("ENGINES", "Engine"),
    "equivalent": ("Equivalent", "equivalents"),
    "padding": ("vllm_padded_bytes_per_token",),
    "table": ("KNOBS", "Match", "PeerKnob", "help_text"),
    "translation": ("Translated", "parse_like", "translate"),
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [
    "ENGINES",
    "KNOBS",
    "Engine",
    "Equivalent",
    "Match",
    "PeerKnob",
    "Translated",
    "equivalents",
    "help_text",
    "parse_like",
    "translate",
    "vllm_padded_bytes_per_token",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
