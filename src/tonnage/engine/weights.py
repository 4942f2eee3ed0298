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
from tonnage.costs.config import ModelConfig
from tonnage.costs.families import FAMILIES as LAID_OUT
from tonnage.costs.weights import ALIGNMENT_BYTES, TensorSpec, WeightsLayout, weights_layout
from tonnage.engine.attend import ATTENTION_NAME, register_attention
from tonnage.engine.family import ExpertNames, Family, Finish
from tonnage.engine.packing import pack, packed_order
from tonnage.errors import ModelConfigError, UnsupportedModel
from tonnage.layout import DTYPE_BYTES
from tonnage.terms import Rank
from tonnage.units import round_up

#: Grouped products read rows at multiples of this many bytes; torch refuses others.
GROUPED_ROW_BYTES = 16


def build_skeleton(folder: Path, dtype: str, *, device: torch.device | str = "cpu") -> torch.nn.Module:
    """The transformers model of ``folder`` with every parameter on ``meta``; its small buffers are real, on ``device``.

    Raises ``UnsupportedModel`` for buffers that the engine does not know how to make.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    register_attention()
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(
            config,
            dtype=getattr(torch, dtype),
            attn_implementation=ATTENTION_NAME,
            experts_implementation=experts_implementation(config, dtype),
        )
    _make_buffers_real(model, config, device)
    leftover = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if leftover:
        raise UnsupportedModel(
            f"The model computes buffers that the engine does not know how to make: {', '.join(leftover)}",
            knob="MODEL",
            value=str(folder),
            remedy="run a model whose only buffers are rotary frequencies and the scale of its embeddings",
        )
    return model.eval().requires_grad_(requires_grad=False)


def experts_implementation(config: Any, dtype: str) -> str | None:
    """How routed experts are computed, by transformers' names; None for a model that has none.

    ``grouped_mm`` is one product for all experts: what it takes and which kernels run do not depend on where tokens
    go, so that probes show its memory and graphs can hold it. ``eager`` goes expert by expert, where a row of either
    matrix is no multiple of 16 bytes.
    """
    if not (getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)):
        return None
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    rows = (config.hidden_size * DTYPE_BYTES[dtype], inner * DTYPE_BYTES[dtype])
    return "eager" if any(row % GROUPED_ROW_BYTES for row in rows) else "grouped_mm"


def _make_buffers_real(model: torch.nn.Module, config: Any, device: torch.device | str) -> None:
    """Rotary frequencies and the scale of Gemma's embeddings are computed, never stored: make them again."""
    for name, module in list(model.named_modules()):
        if not any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            continue
        if type(module).__name__.endswith("RotaryEmbedding"):
            parent = model.get_submodule(name.rpartition(".")[0])
            with torch.device("cpu"):
                setattr(parent, name.rpartition(".")[2], type(module)(config=config).to(device))
        elif hasattr(module, "scalar_embed_scale"):
            module.embed_scale = torch.tensor(module.scalar_embed_scale, device=device)


def arena_layout(folder: Path, config: ModelConfig, family: Family, *, dtype: str, rank: Rank) -> WeightsLayout:
    """Every tensor of the model in the order of the arena, packed projections side by side.

    Families that ``costs.weights`` lays out cost what it says; the tensors of the others are those of their class.
    """
    if config.model_type in LAID_OUT and not config.unsupported:
        layout = weights_layout(config, dtype=dtype, rank=rank)
    else:
        assert rank.size == 1
        layout = class_layout(build_skeleton(folder, dtype))
    return packed_order(layout, family.packs)


def class_layout(model: torch.nn.Module) -> WeightsLayout:
    """The parameters of a model in the order of ``named_parameters()``, each at a multiple of 64 bytes."""
    tensors, offset, owners = [], 0, {}
    for name, parameter in model.named_parameters():
        tensor = TensorSpec(
            name=name,
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            offset_bytes=offset,
        )
        tensors.append(tensor)
        owners[id(parameter)] = name
        offset = round_up(offset + tensor.num_bytes, ALIGNMENT_BYTES)
    every = model.named_parameters(remove_duplicate=False)
    tied = tuple((name, owners[id(each)]) for name, each in every if owners[id(each)] != name)
    return WeightsLayout(tensors=tuple(tensors), tied=tied, total_bytes=offset, alignment_bytes=ALIGNMENT_BYTES)


def place_parameters(
    model: torch.nn.Module, layout: WeightsLayout, arena: torch.Tensor, family: Family
) -> dict[str, torch.Tensor]:
    """Make every parameter of ``model`` a view into ``arena`` (uint8), then pack what ``family`` packs.

    Returns the views by name: of the class's own tensors, packed or not. Tied parameters stay tied. Raises
    ``UnsupportedModel`` if the model and its price list disagree.
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
    pack(model, layout, arena, family.packs)
    _finish_logits(model, family)
    return views


class Head(torch.nn.Module):
    """The vocabulary projection with what its class does to the logits behind it, in place: the product is fresh."""

    def __init__(self, projection: torch.nn.Module, finish: Finish) -> None:
        super().__init__()
        self.projection, self._finish = projection, finish

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._finish(self.projection(hidden))


def _finish_logits(model: Any, family: Family) -> None:
    """From here on ``get_output_embeddings`` gives the logits that the class's forward would, for any rows."""
    finish = family.finish(model.config) if family.finish else None
    if finish is not None:
        model.set_output_embeddings(Head(model.get_output_embeddings(), finish))


def load_shards(
    folder: Path,
    views: Mapping[str, torch.Tensor],
    *,
    experts: ExpertNames | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Copy each tensor of the safetensors shards into its view, converting the dtype on the way.

    ``experts`` says how files name the pieces of arrays that the class keeps whole; files that have them whole are
    read too. ``on_bytes`` hears the running total. Raises ``ModelConfigError`` for missing tensors and wrong shapes.
    """
    places = _places(views, experts)
    missing, done = {name: view.numel() for name, view in views.items()}, 0
    for stored, tensor in _stored(folder):
        if stored not in places:
            continue  # a tied copy, or a stored buffer such as old rotary frequencies
        name, view = places[stored]
        if tuple(tensor.shape) != tuple(view.shape):
            raise ModelConfigError(
                f"Tensor {stored} in {folder} does not fit the model's config",
                knob="MODEL",
                value=str(folder),
                need=f"shape {tuple(view.shape)}",
                have=f"shape {tuple(tensor.shape)}",
                remedy="use the config.json that belongs to these weights",
            )
        view.copy_(tensor)
        missing[name] -= view.numel()
        done += view.numel() * view.element_size()
        if on_bytes:
            on_bytes(done)
    absent = sorted(name for name, count in missing.items() if count > 0)
    if absent:
        raise ModelConfigError(
            f"The weights in {folder} lack {len(absent)} tensors, among them {absent[0]}",
            knob="MODEL",
            value=str(folder),
            remedy="download the model again; a shard is missing or belongs to another model",
        )


def _places(views: Mapping[str, torch.Tensor], experts: ExpertNames | None) -> dict[str, tuple[str, torch.Tensor]]:
    """Name in the files -> the parameter, and its view or that of the piece."""
    places = {name: (name, view) for name, view in views.items()}
    for name, view in views.items() if experts else ():
        assert experts is not None
        places.update((stored, (name, piece)) for stored, piece in experts.pieces(name, view).items())
    return places


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
