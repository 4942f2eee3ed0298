"""From a model's attention to our backend: the function that transformers calls, and what it finds of the step.

The step is kept for the thread and not passed through the model: what a compiled layer is given becomes part of what
it is compiled for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tonnage.attention.base import Backend

#: Name of our attention function in transformers' registry. No mask is registered under it, so that none is made.
ATTENTION_NAME = "tonnage"

_here = threading.local()


def register_attention() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _attend)


@contextmanager
def attending(backend: Backend, prepared: Any) -> Iterator[None]:
    """Attention that this thread asks for is that of a step which ``backend`` has prepared."""
    _here.step = backend, prepared
    try:
        yield
    finally:
        del _here.step


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,  # noqa: ARG001 - causality and pages are in the step
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """By the names under which classes of transformers pass what a layer needs: a token sees ``sliding_window`` tokens,
    itself included; ``s_aux`` are sinks [Hq]."""
    layer: Any = module.layer_idx  # a tensor where layers are compiled
    if torch.compiler.is_compiling():
        return torch.ops.tonnage.attend(query, key, value, layer, scaling, sliding_window, softcap, s_aux), None
    return _forward(query, key, value, int(layer), scaling, sliding_window, softcap, s_aux), None


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    backend, prepared = _here.step
    out: torch.Tensor = backend.forward(
        prepared, layer, query, key, value, scaling=scaling, window=window, softcap=softcap, sinks=sinks
    )
    return out


@torch.library.custom_op("tonnage::attend", mutates_args=())
def _attend_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """``_forward`` as one operation that compiled code calls and does not look into. The pages that it writes are no
    argument of it: nobody else in a layer reads them. ``layer`` is one number, on the host; the numbers behind it are
    constants of the compiled code, of which there is one for each kind of layer."""
    return _forward(query, key, value, int(layer), scaling, window, softcap, sinks)


@_attend_op.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,  # noqa: ARG001
    value: torch.Tensor,
    layer: torch.Tensor,  # noqa: ARG001
    scaling: float,  # noqa: ARG001
    window: int | None,  # noqa: ARG001
    softcap: float | None,  # noqa: ARG001
    sinks: torch.Tensor | None,  # noqa: ARG001
) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
