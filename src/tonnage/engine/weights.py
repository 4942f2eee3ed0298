"""The model built on ``meta``, its parameters views into one arena, the shards copied straight in.

The arena is laid out by ``costs.weights`` before a byte is read: no load peak, no fragmentation, an exact line.
transformers is the architecture and the oracle; it does not load anything here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tonnage.buffers.torch_view import typed_view
from tonnage.costs.weights import WeightsLayout
from tonnage.engine.executor import ATTENTION_NAME, register_attention
from tonnage.errors import ModelConfigError, UnsupportedModel


def build_skeleton(folder: Path, dtype: str) -> torch.nn.Module:
    """The transformers model of ``folder`` with every parameter on ``meta``; small buffers are real."""
    from transformers import AutoConfig, AutoModelForCausalLM

    register_attention()
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation=ATTENTION_NAME
        )
    _make_rotary_real(model, config)
    leftover = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if leftover:
        raise UnsupportedModel(
            f"The model computes buffers that the engine does not know how to make: {', '.join(leftover)}",
            knob="MODEL",
            value=str(folder),
            remedy="run a model whose only buffers are rotary frequencies",
        )
    return model.eval().requires_grad_(requires_grad=False)


def _make_rotary_real(model: torch.nn.Module, config: Any) -> None:
    """Rotary frequencies are computed, never stored: make those modules again, off ``meta``."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RotaryEmbedding") and any(b.is_meta for b in module.buffers()):
            parent = model.get_submodule(name.rpartition(".")[0])
            with torch.device("cpu"):
                setattr(parent, name.rpartition(".")[2], type(module)(config=config))


def place_parameters(model: torch.nn.Module, layout: WeightsLayout, arena: torch.Tensor) -> dict[str, torch.Tensor]:
    """Make every parameter of ``model`` a view into ``arena`` (uint8). Returns the views by name.

    Tied parameters stay tied. Raises ``UnsupportedModel`` if the model and its price list disagree.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    priced = {tensor.name: tensor.shape for tensor in layout.tensors}
    if shapes != priced:
        wrong = sorted(set(shapes.items()) ^ set(priced.items()))
        raise UnsupportedModel(
            f"The model's parameters differ from its price list, first at {wrong[0][0]}",
            knob="MODEL",
            need=f"{len(priced)} tensors as costs.weights lists them",
            have=f"{len(shapes)} tensors in the model",
            remedy="report this model: its family needs its own list in costs.weights",
        )
    views = {t.name: typed_view(arena, t.offset_bytes, t.shape, t.dtype) for t in layout.tensors}
    # Without removing duplicates: a tied parameter must be replaced under each of its names.
    originals = {id(parameter): name for name, parameter in model.named_parameters()}
    fresh = {name: torch.nn.Parameter(view, requires_grad=False) for name, view in views.items()}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        module = model.get_submodule(name.rpartition(".")[0])
        module.register_parameter(name.rpartition(".")[2], fresh[originals[id(parameter)]])
    return views


def load_shards(
    folder: Path, views: Mapping[str, torch.Tensor], *, on_bytes: Callable[[int], None] | None = None
) -> None:
    """Copy each tensor of the safetensors shards into its view, converting the dtype on the way.

    ``on_bytes`` hears the running total. Raises ``ModelConfigError`` for missing tensors and wrong shapes.
    """
    missing, done = set(views), 0
    for name, tensor in _stored(folder):
        view = views.get(name)
        if view is None:
            continue  # a tied copy, or a stored buffer such as old rotary frequencies
        if tuple(tensor.shape) != tuple(view.shape):
            raise ModelConfigError(
                f"Tensor {name} in {folder} does not fit the model's config",
                knob="MODEL",
                value=str(folder),
                need=f"shape {tuple(view.shape)}",
                have=f"shape {tuple(tensor.shape)}",
                remedy="use the config.json that belongs to these weights",
            )
        view.copy_(tensor)
        missing.discard(name)
        done += view.numel() * view.element_size()
        if on_bytes:
            on_bytes(done)
    if missing:
        raise ModelConfigError(
            f"The weights in {folder} lack {len(missing)} tensors, among them {sorted(missing)[0]}",
            knob="MODEL",
            value=str(folder),
            remedy="download the model again; a shard is missing or belongs to another model",
        )


def _stored(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    for shard in _shards(folder):
        try:
            with safe_open(shard, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise ModelConfigError(
                f"{shard} cannot be read ({error})", knob="MODEL", value=str(folder), remedy="download the file again"
            ) from None


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
