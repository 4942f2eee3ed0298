"""Weights drawn at random, for measuring a model of which only the config is at hand."""

from __future__ import annotations

from collections.abc import Mapping

import torch

#: Of matrices, as most decoders are initialised: activations stay finite through any depth.
DEVIATION = 0.02
SEED = 0


def fill_random(views: Mapping[str, torch.Tensor]) -> None:
    """Matrices from a normal distribution around 0, vectors 1, biases 0; equal on each start on one kind of device."""
    generators: dict[torch.device, torch.Generator] = {}
    for name, view in views.items():
        if name.endswith("bias"):
            view.zero_()
        elif view.dim() == 1:
            view.fill_(1)
        else:
            device = view.device
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(SEED)
            view.normal_(0, DEVIATION, generator=generators[device])
