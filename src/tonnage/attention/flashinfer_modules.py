"""The compiled kernels of FlashInfer: which file holds which, where they lie, and how they are loaded.

A module is a shared library of one kernel family for one dtype, head dim and set of features, made by
``scripts/build_flashinfer.py`` from the sources of one FlashInfer release. To run one takes ``apache-tvm-ffi`` and
nothing else of FlashInfer: its Python and the requirements of that are needed for building only.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tonnage.costs.config import ModelConfig
from tonnage.costs.layers import Attention
from tonnage.costs.traits import soft_cap
from tonnage.errors import InvalidSetting

#: What a module is called with may change with the release, so one of another release is not looked at.
VERSION = "0.6.14"
#: Package, its name for ``import``, and what it is for.
NEEDED_PACKAGES = (
    ("apache-tvm-ffi", "tvm_ffi", "loads its kernels"),
    ("triton", "triton", "compiles those that write pages and page lists"),
)
#: Names the folder of modules; else ``flashinfer`` in the cache of Tonnage.
FOLDER_VARIABLE = "TONNAGE_FLASHINFER"
HEAD_DIMS = (64, 128, 256)
DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What a layer's attention is compiled for. ``has_window`` and ``has_softcap`` are kernels of their own."""

    dtype: str
    head_dim: int
    has_window: bool = False
    has_softcap: bool = False

    def file_name(self, family: str) -> str:
        """Of the module of ``family`` "fa2" or "fa3", as in ``fa3-bfloat16-128-window.so``."""
        features = [name for name, has in (("window", self.has_window), ("softcap", self.has_softcap)) if has]
        return "-".join([family, self.dtype, str(self.head_dim), *features]) + ".so"

    @property
    def build_command(self) -> str:
        """Makes the modules of this variant."""
        features = (" --window" if self.has_window else "") + (" --softcap" if self.has_softcap else "")
        return f"python scripts/build_flashinfer.py --head-dim {self.head_dim} --dtype {self.dtype}{features}"


def modules_folder() -> Path:
    """``$TONNAGE_FLASHINFER``, or ``flashinfer`` in ``$TONNAGE_CACHE``, ``$XDG_CACHE_HOME/tonnage`` or
    ``~/.cache/tonnage``; in it the folder of the release."""
    if told := os.environ.get(FOLDER_VARIABLE):
        return Path(told) / VERSION
    cache = os.environ.get("TONNAGE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "tonnage"
    return Path(cache).expanduser() / "flashinfer" / VERSION


def find_module(family: str, variant: Variant) -> Path | None:
    """The file of a module, or None where it has not been built."""
    path = modules_folder() / variant.file_name(family)
    return path if path.is_file() else None


def is_built(variant: Variant) -> bool:
    """Whether layers of the variant can run here."""
    try:
        refuse_missing_modules(variant)
    except InvalidSetting:
        return False
    return True


def variants_of(config: ModelConfig, *, dtype: str) -> tuple[Variant, ...]:
    """What the attention layers of a model need, each once."""
    has_softcap = soft_cap(config) is not None
    mixers = [mixer for layer in config.layers for mixer in layer.mixers if isinstance(mixer, Attention)]
    kinds = [(mixer.head_dim, mixer.window is not None) for mixer in mixers] or [(config.head_dim, False)]
    return tuple(
        Variant(dtype=dtype, head_dim=head_dim, has_window=has_window, has_softcap=has_softcap)
        for head_dim, has_window in dict.fromkeys(kinds)
    )


def refuse_other_devices(device: str) -> None:
    """Raise ``InvalidSetting`` for a device, by its name, that is no card."""
    if not device.startswith("cuda"):
        raise InvalidSetting(
            "attention", "flashinfer", f"runs on a CUDA device, not on {device}", remedy="use sdpa, or device cuda"
        )


def refuse_other_heads(variant: Variant) -> None:
    """Raise ``InvalidSetting`` for heads or a dtype that FlashInfer has no kernels for."""
    if variant.head_dim not in HEAD_DIMS or variant.dtype not in DTYPES:
        what = f"has no heads of {variant.head_dim} elements in {variant.dtype}"
        sizes, dtypes = ", ".join(map(str, HEAD_DIMS)), " or ".join(DTYPES)
        remedy = f"use triton or sdpa; flashinfer takes heads of {sizes} in {dtypes}"
        raise InvalidSetting("attention", "flashinfer", what, remedy=remedy)


def refuse_missing_packages() -> None:
    """Raise ``InvalidSetting`` where a package is not there that compiled modules are run with."""
    for package, module, purpose in NEEDED_PACKAGES:
        if importlib.util.find_spec(module) is None:
            what = f"the package {package}, which {purpose}, is not installed"
            raise InvalidSetting("attention", "flashinfer", what, remedy=f"run `pip install {package}`, or use sdpa")


def refuse_missing_modules(variant: Variant) -> None:
    """Raise ``InvalidSetting`` where layers of the variant cannot run here: they need its module of "fa2" at least."""
    refuse_other_heads(variant)
    refuse_missing_packages()
    if find_module("fa2", variant) is None:
        raise InvalidSetting(
            "attention",
            "flashinfer",
            f"{variant.file_name('fa2')} is not in {modules_folder()}: these kernels have not been compiled",
            remedy=f"run `{variant.build_command}` where nvcc is (no GPU needed), point {FOLDER_VARIABLE} at the "
            "folder that it fills, or use triton",
        )


@lru_cache
def load_module(path: Path) -> Any:
    """The functions ``plan`` and ``paged_run`` of a module. Loaded once a process, and never unloaded."""
    import tvm_ffi

    return tvm_ffi.load_module(str(path))
