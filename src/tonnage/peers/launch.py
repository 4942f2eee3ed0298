"""A start of another engine as it is asked for: what its rules are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tonnage.costs.config import ModelConfig
from tonnage.hardware import Card
from tonnage.peers.version import Version
from tonnage.terms import Quantity, Rank

#: A value of one of the engine's own flags, parsed: sizes are bytes, lengths tokens, shares exact.
Value = object


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One rank of one start.

    engine, version   whose rules, and of which release
    config, dtype     the model, and the dtype it computes in where that is not the model's own
    weights           bytes of this rank's weights with their interval: from a checkpoint, a log, or predicted
    kv_dtype          of the cache; None: that of the model
    card              the device, its total with its interval
    rank              tensor, pipeline, expert and data parallelism, and which of the ranks
    settings          the engine's own knobs by their own names with underscores ("max_num_seqs"), parsed; one that is
                      left out takes the engine's default of that version
    draft             a smaller model that is loaded beside it and proposes tokens; its weights are part of ``weights``
    """

    engine: str
    version: Version
    config: ModelConfig
    weights: Quantity
    card: Card
    rank: Rank = field(default_factory=Rank)
    dtype: str | None = None
    kv_dtype: str | None = None
    settings: Mapping[str, Value] = field(default_factory=lambda: MappingProxyType({}))
    draft: ModelConfig | None = None

    def get(self, name: str, default: Value = None) -> Value:
        """The setting ``name`` as asked, or ``default``."""
        return self.settings.get(name, default)
