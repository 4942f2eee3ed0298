"""Layers under ``torch.compile``: the small kernels between the matrix products become few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: What a base model does behind its layers, by the names that classes give it.
_BESIDE_LAYERS = ("norm", "final_layernorm")
#: Kinds of rotary embeddings that do not look at how long a text has become.
_FIXED_ROPES = ("default", "linear", "llama3")


def compile_layers(model: torch.nn.Module, *, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each decoder layer for any number of tokens; all layers are one code and share what is compiled.

    Layers that differ in what they ask of attention, a window say, are compiled once for each kind: there are two in
    the models that we run. A layer's number is an integer of its module, for which each would be compiled anew, and
    dynamo give up after a few: it becomes a tensor, of which nothing is compiled in. Doing it again changes nothing.
    """
    base: Any = model.base_model
    for layer in base.layers:
        for module in layer.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                number = torch.tensor(module.layer_idx)
                del module.layer_idx
                module.register_buffer("layer_idx", number, persistent=False)
    for part in compiled_parts(model):
        part.compile(dynamic=True, backend=backend)


def compiled_parts(model: torch.nn.Module) -> list[torch.nn.Module]:
    """What ``compile_layers`` makes a compiled function of: each layer, what is behind them, and rotary embeddings."""
    base: Any = model.base_model
    beside = [getattr(base, name, None) for name in _BESIDE_LAYERS]
    rotary = getattr(base, "rotary_emb", None)
    if getattr(rotary, "rope_type", None) in _FIXED_ROPES:
        beside.append(rotary)
    return [*base.layers, *(part for part in beside if isinstance(part, torch.nn.Module))]
