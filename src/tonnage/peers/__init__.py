"""Other engines' knobs: what theirs mean in ours, and which of theirs would give about the pool of a plan.

Facts about the engines (names, defaults, denominators of their fractions) are in this room alone, with the versions
they were read from.
"""

from tonnage.peers.engines import ENGINES, Engine
from tonnage.peers.equivalent import Equivalent, equivalents
from tonnage.peers.table import KNOBS, Match, PeerKnob, help_text
from tonnage.peers.translate import Translated, parse_like, translate

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
]
