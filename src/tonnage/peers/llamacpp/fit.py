"""``--fit``: the context shrinks first, then layers go to the host. Pure arithmetic of one device."""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.peers.asked_settings import Settings
from tonnage.peers.launch import Launch
from tonnage.peers.llamacpp.sizes import CELLS, Model
from tonnage.units import MiB, round_down

#: Free memory that must stay on each device, and the context below which it is not cut.
MARGIN_BYTES, LEAST_CONTEXT = 1024 * MiB, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """``context`` None: left to the fit. ``layers`` None: all of them, and fewer where they do not fit."""

    context: int | None
    longest: int
    layers: int | None
    margin_bytes: int
    least_context: int
    is_on: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """What is decided, in bytes of the device. ``device_layers`` whole layers, ``expert_layers`` with their experts."""

    context: int
    device_layers: int
    expert_layers: int
    weights: int
    kv: int
    states: int
    compute: int

    @property
    def used(self) -> int:
        return self.weights + self.kv + self.states + self.compute


def wanted(launch: Launch, settings: Settings, model: Model) -> Wanted:
    streams = 1 if model.is_unified else model.num_sequences
    margin = settings.maybe("fit_target", least=0)
    context = settings.maybe("ctx_size", least=0) or None
    if context is None:
        settings.took("ctx_size", None, "the model's, or less", "left to --fit, not below 4,096")
    if margin is None:
        settings.took("fit_target", None, "1,024 MiB", "kept free on every device")
    return Wanted(
        context=context,
        longest=launch.config.max_position_embeddings * streams,
        layers=settings.maybe("n_gpu_layers", least=0),
        margin_bytes=MARGIN_BYTES if margin is None else margin,
        least_context=settings.maybe("fit_ctx") or LEAST_CONTEXT,
        is_on=settings.switch("fit") if settings.has("fit") else True,
    )


def fit(model: Model, asked: Wanted, *, free: int, weights: int, compute: int) -> Fitted:
    """The decision at one point of the inputs. What does not fit at all comes back as it would be allocated."""
    context = asked.context or asked.longest
    full = model.used(context, weights=weights, compute=compute)
    target = free - asked.margin_bytes
    if not asked.is_on or full <= target:
        return _placed(model, context, _layers(model, asked), model.num_layers, weights=weights, compute=compute)
    if asked.context is None:
        context = _shorter(model, asked, target, full=full, weights=weights, compute=compute)
    fits = model.used(context, weights=weights, compute=compute) <= target
    if fits or asked.layers is not None:
        return _placed(model, context, _layers(model, asked), model.num_layers, weights=weights, compute=compute)
    return _fewer_layers(model, context, target, weights=weights, compute=compute)


def _layers(model: Model, asked: Wanted) -> int:
    return model.num_layers if asked.layers is None else min(asked.layers, model.num_layers)


def _shorter(model: Model, asked: Wanted, target: int, *, full: int, weights: int, compute: int) -> int:
    """Between the least and the longest context in a straight line, in whole groups of cells."""
    least = asked.least_context
    if asked.longest <= least:
        return asked.longest
    at_least = model.used(least, weights=weights, compute=compute)
    if target <= at_least or full <= at_least:
        return least
    reached = least + (asked.longest - least) * (target - at_least) // (full - at_least)
    return max(round_down(reached, CELLS), least)


def _fewer_layers(model: Model, context: int, target: int, *, weights: int, compute: int) -> Fitted:
    """As many layers as fit, the output with them; of a mixture all dense parts first, then experts."""
    if model.expert_share:
        dense = _placed(model, context, model.num_layers, 0, weights=weights, compute=compute)
        if dense.used <= target:
            for count in range(model.num_layers - 1, -1, -1):
                tried = _placed(model, context, model.num_layers, count, weights=weights, compute=compute)
                if tried.used <= target:
                    return tried
            return dense
    experts = 0 if model.expert_share else model.num_layers
    for count in range(model.num_layers - 1, 0, -1):
        tried = _placed(model, context, count, min(count, experts), weights=weights, compute=compute)
        if tried.used <= target:
            return tried
    return _placed(model, context, 0, 0, weights=weights, compute=compute)


def _placed(model: Model, context: int, layers: int, experts: int, *, weights: int, compute: int) -> Fitted:
    """``layers`` of the device with their share of cache, ``experts`` of them with their experts."""
    output = min(model.output_bytes, weights)
    inside = weights - output
    total = max(model.num_layers, 1)
    on_device = inside * layers // total
    moved = int(inside * model.expert_share) * max(layers - experts, 0) // total if model.expert_share else 0
    return Fitted(
        context=context,
        device_layers=layers,
        expert_layers=experts if model.expert_share else layers,
        weights=(output if layers else 0) + on_device - moved,
        kv=model.kv_bytes(context) * layers // total,
        states=model.state * model.num_sequences * layers // total,
        compute=compute + model.score * context,
    )
