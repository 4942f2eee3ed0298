"""Model families the engine runs: one record each, one row in ``FAMILIES``.

The architecture itself comes from transformers; a record says what the engine must know beyond it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from tonnage.costs.config import ModelConfig
from tonnage.engine.features import refuse_missing
from tonnage.errors import UnsupportedModel
from tonnage.layout import KVGroupKind

if TYPE_CHECKING:
    import torch

#: What a class does to the rows of logits behind its vocabulary projection, in place; made from transformers' config,
#: None where this model does nothing.
Finish: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Projections ``parts``, in this order, of every module named one of ``modules``: all that reads its input."""

    modules: tuple[str, ...]
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """How files call what the class keeps as one array a layer.

    The class has ``experts.gate_up_proj`` [experts, 2 * inner, hidden], gate above up, and ``experts.down_proj``
    [experts, hidden, inner]; files have a matrix for each expert. ``module`` is what they call the class's ``mlp``.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    module: str = "mlp"

    def pieces(self, name: str, view: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parameter ``name`` by the names that files may give it or its pieces."""
        stored = name.replace(".mlp.", f".{self.module}.")
        stem, _, last = stored.rpartition(".")
        if not stem.endswith(".experts"):
            return {stored: view}
        if last == "down_proj":
            return {f"{stem}.{expert}.{self.down}.weight": view[expert] for expert in range(len(view))}
        inner = view.shape[1] // 2
        gates = {f"{stem}.{expert}.{self.gate}.weight": view[expert, :inner] for expert in range(len(view))}
        return gates | {f"{stem}.{expert}.{self.up}.weight": view[expert, inner:] for expert in range(len(view))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """``verified``: generation was compared with transformers on the same weights, test named in ``evidence``.

    packs    projections that are one matrix in memory
    experts  how files name routed experts, None where there are none
    finish   what is done to logits behind the vocabulary projection, None where nothing is
    """

    model_type: str
    cache: KVGroupKind = KVGroupKind.FULL
    verified: bool = True
    evidence: str = "tests/cpu/test_families.py"
    packs: tuple[Pack, ...] = ()
    experts: ExpertNames | None = None
    finish: Callable[[Any], Finish | None] | None = None


def _soft_cap(config: Any) -> Finish | None:
    """Gemma: logits x become cap * tanh(x / cap)."""
    cap = config.final_logit_softcapping
    return None if cap is None else lambda logits: logits.div_(cap).tanh_().mul_(cap)


def _divide(config: Any) -> Finish | None:
    """Granite: logits are divided by a number of the config."""
    return lambda logits: logits.div_(config.logits_scaling)


_QKV = Pack(modules=("self_attn",), parts=("q_proj", "k_proj", "v_proj"))
_GATE_UP = Pack(modules=("mlp", "shared_expert"), parts=("gate_proj", "up_proj"))
_BOTH = (_QKV, _GATE_UP)

FAMILIES: Mapping[str, Family] = {
    row.model_type: row
    for row in (
        Family(model_type="llama", packs=_BOTH, evidence="tests/cpu/test_generation.py"),
        Family(model_type="mistral", packs=_BOTH),
        Family(
            model_type="mixtral",
            packs=(_QKV,),
            experts=ExpertNames(gate="w1", up="w3", down="w2", module="block_sparse_moe"),
        ),
        Family(model_type="qwen2", packs=_BOTH),
        Family(model_type="qwen2_moe", packs=_BOTH, experts=ExpertNames()),
        Family(model_type="qwen3", packs=_BOTH),
        Family(model_type="qwen3_moe", packs=_BOTH, experts=ExpertNames()),
        Family(model_type="gemma", packs=_BOTH),
        Family(model_type="gemma2", packs=_BOTH, finish=_soft_cap),
        Family(model_type="gemma3_text", packs=_BOTH, finish=_soft_cap),
        Family(model_type="granite", packs=_BOTH, finish=_divide),
        Family(model_type="phi", packs=(_QKV,)),
        Family(model_type="phi3"),  # its class packs by itself
    )
}


def family_of(config: ModelConfig, *, attention: str) -> Family:
    """The record for a model, to be run with the backend ``attention``.

    Raises ``UnsupportedModel`` where there is none, and for what the model needs and engine or backend lack.
    """
    refuse_missing(config, attention=attention)
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
