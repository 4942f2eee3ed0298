"""Layers under ``torch.compile``: the small kernels between the matrix products become few."""

from __future__ import annotations

from typing import Any

import torch

#: Graphs of one layer's code: symbolic numbers of tokens and 1, in and out of a capture.
MOST_VARIANTS = 16


def compile_layers(model: torch.nn.Module) -> None:
    """Compile each decoder layer for any number of tokens; all layers are one code and share what is compiled.

    A layer's number is an integer of its module, for which dynamo would compile it anew, and give up after a few.
    """
    dynamo: Any = torch._dynamo
    dynamo.config.allow_unspec_int_on_nn_module = True
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, MOST_VARIANTS)
    base: Any = model.base_model
    for layer in base.layers:
        layer.compile(dynamic=True)
