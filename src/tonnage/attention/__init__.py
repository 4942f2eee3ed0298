"""Attention kernels over paged KV: one file per backend, one row in ``BACKENDS``.

The scratch of each is declared, without torch, in ``tonnage.declarations`` under the same name.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING

from tonnage.errors import InvalidSetting

if TYPE_CHECKING:
    import torch

    from tonnage.attention.base import Backend
    from tonnage.attention.pages import Pages

BACKENDS: dict[str, str] = {
    "sdpa": "tonnage.attention.sdpa:SdpaBackend",
    "triton": "tonnage.attention.triton:TritonBackend",
    "flashinfer": "tonnage.attention.flashinfer:FlashInferBackend",
    "paired": "tonnage.attention.paired:PairedBackend",
}
#: Backends whose kernels are Triton's, and those whose are FlashInfer's, compiled.
TRITON, FLASHINFER = ("triton", "paired"), ("flashinfer", "paired")


def check_backend(name: str) -> None:
    """Raise ``InvalidSetting`` where no backend has that name: before anything is loaded for it."""
    if name not in BACKENDS:
        raise InvalidSetting("attention", name, "no such backend", remedy=f"use one of {', '.join(BACKENDS)}")


def require_triton(name: str, device_kind: str) -> None:
    """Raise ``InvalidSetting`` where Triton's kernels cannot run: before a byte of the model is read."""
    if device_kind == "host" and os.environ.get("TRITON_INTERPRET") != "1":
        raise InvalidSetting("attention", name, "runs on a CUDA device, not on cpu", remedy="use sdpa")
    if importlib.util.find_spec("triton") is None:
        raise InvalidSetting("attention", name, "the package triton is not installed", remedy="use sdpa, or install it")


def make_backend(name: str, pool: torch.Tensor | Pages) -> Backend:
    """The backend ``name`` over ``pool``: ``Pages``, or [num_slabs, layers, 2, B, Hkv, D] of one group of layers.

    Raises ``InvalidSetting`` if unknown.
    """
    check_backend(name)
    module, _, attribute = BACKENDS[name].partition(":")
    backend: Backend = getattr(importlib.import_module(module), attribute)(pool)
    return backend
