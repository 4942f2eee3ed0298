"""A model of which nothing is real: built from config.json alone, with a few layers of each kind.

Layers of one kind take the same of a step, one after the other, so that the peak does not depend on how many there are
beyond the first ones: the first layer reads the embeddings themselves, later ones hold them beside what they read.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tonnage.costs.config import ModelConfig
from tonnage.engine.compiled import compiled_parts
from tonnage.engine.family import Family
from tonnage.engine.models import quiet_transformers
from tonnage.engine.packing import packed_order
from tonnage.engine.weights import class_layout, experts_implementation, place_parameters

#: Layers of each kind that are run: with the first two everything that is alive beside a layer is there.
LAYERS_OF_A_KIND = 3
#: Name of the attention that only makes its result.
_ATTENTION_NAME = "tonnage_exact"
#: What tensor-parallel ranks share, by the names of configs.
_SHARED = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


class Unrunnable(Exception):
    """The library's class cannot be run this way; the message says why."""


class Skeleton:
    """``model`` under ``mode``, its parameters without bytes, and ``known``: all that is there before a step.

    ``family``: projections are packed as the engine packs them; None: as the class has them. ``tp`` ranks share heads
    and inner widths.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: str,
        layers: Sequence[int],
        family: Family | None,
        tp: int = 1,
        layers_of_a_kind: int = LAYERS_OF_A_KIND,
    ) -> None:
        with _quiet():
            self.model = _on_meta(config, dtype=dtype, tp=tp)
            self.layers = _drop_layers(self.model, layers, most=layers_of_a_kind)
            self.mode = FakeTensorMode()
            with self.mode:
                _fill(self.model)
                if family is not None and family.packs:
                    _pack(self.model, family)
                self._number = torch.zeros((), dtype=torch.int64)
                self._head = torch.nn.Linear(
                    config.hidden_size, config.vocab_size, bias=False, dtype=getattr(torch, dtype)
                )
        self.known = [*self.model.parameters(), *self.model.buffers(), *self._head.parameters(), self._number]

    @property
    def base(self) -> Any:
        """The decoder without its vocabulary projection; a few classes do not say by which name they keep it."""
        base: Any = self.model.base_model
        return getattr(base, "model", base) if base is self.model else base

    @property
    def head(self) -> Any:
        """The vocabulary projection: the class's own, or one of its shape where the class has none."""
        return self.model.get_output_embeddings() or self._head  # type: ignore[operator]

    @property
    def compiled_parts(self) -> list[torch.nn.Module]:
        """What runs as one compiled function each."""
        is_usual = hasattr(self.model.base_model, "layers")
        return compiled_parts(self.model) if is_usual else list(self.layers)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around a forward: nothing computes, and attention leaves its result alone."""
        attention.number = self._number
        with _quiet(), self.mode, torch.no_grad():
            yield


class _Attention:
    """Attention as the compiled engine calls it: one operation that nothing looks into."""

    number: torch.Tensor

    def __call__(
        self,
        _: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,  # noqa: ARG002 - causality and pages are in the step
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **__: Any,
    ) -> tuple[torch.Tensor, None]:
        made = torch.ops.tonnage.attend(query, key, value, self.number, scaling or 1.0, sliding_window, softcap, s_aux)
        return made, None


#: The one that every skeleton registers.
attention = _Attention()


def _on_meta(config: ModelConfig, *, dtype: str, tp: int) -> torch.nn.Module:
    """Every layer, on ``meta``: nothing is allocated and nothing initialised."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, AutoModel, AutoModelForCausalLM

    AttentionInterface.register(_ATTENTION_NAME, attention)
    text = _cut(_text_config(config.raw), tp)
    # The text part of some models has no class with a vocabulary projection of its own.
    kind: Any = AutoModelForCausalLM if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel
    asked: dict[str, Any] = {"dtype": getattr(torch, dtype), "attn_implementation": _ATTENTION_NAME}
    experts = experts_implementation(text, dtype)
    with torch.device("meta"):
        try:
            model: torch.nn.Module = kind.from_config(text, **asked, experts_implementation=experts)
        except ValueError as error:
            if "experts implementation" not in str(error):
                raise
            raise Unrunnable("its class runs every expert over every token, which no engine does") from None
    if tp > 1:
        _check_heads(model, text.head_dim, tp)
    for module in model.modules():
        # Embeddings that look at how long a text is would ask a tensor; they keep what they have.
        if isinstance(getattr(module, "rope_type", None), str):
            module.rope_type = "default"  # type: ignore[assignment]
    return model.eval().requires_grad_(requires_grad=False)


def _text_config(raw: Mapping[str, object]) -> Any:
    from transformers import CONFIG_MAPPING

    model_type = str(raw.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise Unrunnable(f"transformers has no class for the model type {model_type!r}")
    plain = {key: value for key, value in raw.items() if key != "quantization_config"}
    return CONFIG_MAPPING[model_type].from_dict(plain).get_text_config(decoder=True)


def _cut(text: Any, tp: int) -> Any:
    """One rank's share: heads, and the inner widths of dense parts and experts, over ``tp``."""
    if tp == 1:
        return text
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    for name in _SHARED:
        width = getattr(text, name, None)
        if width is None:
            continue
        if width % tp and name != "num_key_value_heads":
            raise Unrunnable(f"{name} {width} cannot be shared by {tp} ranks")
        setattr(text, name, max(1, width // tp))
    text.head_dim = head_dim
    return text


def _check_heads(model: torch.nn.Module, head_dim: int, tp: int) -> None:
    """Older classes make heads of the hidden size alone: with fewer of them, each is wider, and nothing is shared."""
    for name, module in model.named_modules():
        found = getattr(module, "head_dim", getattr(module, "head_size", None))
        last = name.rpartition(".")[2]
        if ("attn" in last or "attention" in last) and isinstance(found, int) and found != head_dim:
            raise Unrunnable(
                f"its class cannot be shared by {tp} ranks: it makes heads of {found} where {head_dim} is asked"
            )


def _drop_layers(model: Any, numbers: Sequence[int], *, most: int) -> torch.nn.ModuleList:
    """Keep the first ``most`` of ``numbers`` of each kind, in order; returns what is left."""
    base, config = model.base_model, model.base_model.config
    name, layers = _layers_of(base, config.num_hidden_layers)
    if len(layers) <= max(numbers):
        raise Unrunnable(f"{type(model).__name__} has {len(layers)} layers, not {max(numbers) + 1}")
    chosen = chosen_layers([_kind(layers[number]) for number in numbers], most=most)
    kept = torch.nn.ModuleList([layers[numbers[place]] for place in chosen])
    parent, _, last = name.rpartition(".")
    setattr(base.get_submodule(parent), last, kept)
    for entry, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == len(layers):
            setattr(config, entry, [value[numbers[place]] for place in chosen])
    config.num_hidden_layers = len(chosen)
    return kept


def _layers_of(base: torch.nn.Module, num_layers: int) -> tuple[str, torch.nn.ModuleList]:
    """The first list of so many modules: ``layers`` in most classes."""
    for name, module in base.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers:
            return name, module
    raise Unrunnable(f"{type(base).__name__} keeps its layers where nobody looks for them")


def chosen_layers(kinds: Sequence[object], *, most: int) -> list[int]:
    """Places of the first ``most`` of each kind."""
    seen: dict[object, int] = {}
    found = []
    for place, kind in enumerate(kinds):
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= most:
            found.append(place)
    return found


def _kind(layer: torch.nn.Module) -> tuple[object, ...]:
    """Equal for layers that are made of the same modules with parameters of the same shapes."""
    modules = tuple((name, type(module).__name__) for name, module in layer.named_modules())
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    windows = tuple(str(getattr(module, "sliding_window", None)) for module in layer.modules())
    return modules, shapes, windows


def _fill(model: torch.nn.Module) -> None:
    """Parameters and buffers of ``meta`` become fake ones, tied ones stay tied."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    fake = torch.empty(parameter.shape, dtype=parameter.dtype)
                    made[id(parameter)] = torch.nn.Parameter(fake, requires_grad=False)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _pack(model: torch.nn.Module, family: Family) -> None:
    layout = packed_order(class_layout(model), family.packs)
    arena = torch.empty(layout.total_bytes, dtype=torch.uint8)
    place_parameters(model, layout, arena, family)


@contextmanager
def _quiet() -> Iterator[None]:
    """Neither warnings nor the logs of what cannot be built or run: a failure is told by what is raised."""
    with warnings.catch_warnings(), quiet_transformers():
        warnings.simplefilter("ignore")
        logs = [logging.getLogger(name) for name in ("torch._subclasses.fake_tensor", "transformers")]
        levels = [log.level for log in logs]
        try:
            for log in logs:
                log.setLevel(logging.CRITICAL)
            yield
        finally:
            for log, level in zip(logs, levels, strict=True):
                log.setLevel(level)
