"""Model families the engine runs: one record each, one row in ``FAMILIES``.

The architecture itself comes from transformers; a record says what the engine must know beyond it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.costs.config import ModelConfig
from tonnage.errors import UnsupportedModel
from tonnage.layout import KVGroupKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """``verified``: generation was compared with transformers on the same weights, test named in ``evidence``."""

    model_type: str
    cache: KVGroupKind
    verified: bool
    evidence: str


FAMILIES: dict[str, Family] = {
    "llama": Family(model_type="llama", cache=KVGroupKind.FULL, verified=True, evidence="tests/cpu/test_generation.py"),
}


def family_of(config: ModelConfig) -> Family:
    """The record for a model. Raises ``UnsupportedModel`` where there is none."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UnsupportedModel(
            f"Models of type {config.model_type!r} are not run by this release",
            knob="MODEL",
            value=config.name,
            need=f"one of the model types {', '.join(sorted(FAMILIES))}",
            have=f"{config.model_type} ({', '.join(config.architectures)})",
            remedy="run a model of a listed type; `tonnage plan` prices more families than the engine runs",
        )
    return family
