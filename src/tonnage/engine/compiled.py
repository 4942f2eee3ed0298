"""Layers under ``torch.compile``: the small kernels between the matrix products become few."""

from __future__ import annotations

from typing import Any

import torch


def compile_layers(model: torch.nn.Module) -> None:
    """Compile each decoder layer for any number of tokens; all layers are one code and share what is compiled.

    A layer's number is an integer of its module, for which each would be compiled anew, and dynamo give up after a
    few: it becomes a tensor, of which nothing is compiled in. Doing it again changes nothing.
    """
    base: Any = model.base_model
    for layer in base.layers:
        for module in layer.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                number = torch.tensor(module.layer_idx)
                del module.layer_idx
                module.register_buffer("layer_idx", number, persistent=False)
        layer.compile(dynamic=True)
