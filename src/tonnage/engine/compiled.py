"""Layers under ``torch.compile``: the small kernels between the matrix products become few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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
        layer.compile(dynamic=True, backend=backend)
