"""What a caller asks of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from tonnage.config import Knobs, LimitKnobs


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """``model``: a folder, a .gguf file, ``smollm2`` or a hub id. ``memory_bytes``: the size of the device.

    On the host device ``memory_bytes`` is a hard cap on what the process may take beyond what it held after its
    imports; None takes what the system has available. ``dtype`` of weights and compute: default the model's own.

    ``fence`` makes that cap hard for the whole process: an allocation past it fails. Switch it off where the same
    process holds other large things of its own; the ledger then still reports what passes the cap.
    """

    model: str
    memory_bytes: int | None = None
    knobs: Knobs = field(default_factory=Knobs)
    limit_knobs: LimitKnobs = field(default_factory=LimitKnobs)
    dtype: str | None = None
    attention: str = "sdpa"
    fence: bool = True
