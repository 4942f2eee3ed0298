"""Compile the FlashInfer kernels that a run needs, on a machine with or without a GPU.

What is compiled depends on dtype, head dim and on whether layers have a window or a soft-cap, not on the page size or
on how many heads there are. Name a model and all of that is read from its config.json, or give it:

    python scripts/build_flashinfer.py path/to/model
    python scripts/build_flashinfer.py --head-dim 128 --dtype bfloat16 [--window] [--softcap]

It takes nvcc of CUDA 12.8 or newer with the headers of cuRAND (``pip install nvidia-curand`` has them), ninja, a C++
compiler, and ``pip install tonnage[flashinfer]``. On two cores "fa2" takes half a minute and "fa3" one. Modules go to
``$TONNAGE_FLASHINFER``, or to Tonnage's cache: the folder may be carried to another machine of the same architecture
with the same major release of CUDA, where running them needs ``apache-tvm-ffi`` alone.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from tonnage.attention.flashinfer_modules import (
    DTYPES,
    HEAD_DIMS,
    VERSION,
    Variant,
    modules_folder,
    refuse_other_heads,
    variants_of,
)
from tonnage.costs.config import ModelConfig
from tonnage.errors import InvalidSetting, UserError

#: Kernel family -> the masks that it is called with (0: none, 1: causal); kernels for others are not compiled. "fa3"
#: runs prompts on a Hopper, in layers without a window; "fa2" runs all else.
FAMILIES = {"fa2": (0, 1), "fa3": (1,)}


def main() -> int:
    asked = _arguments().parse_args()
    try:
        variants = _variants(asked)
        for variant in variants:
            refuse_other_heads(variant)
        folder = modules_folder()
        folder.mkdir(parents=True, exist_ok=True)
        families = asked.family or (["fa2", "fa3"] if asked.arch.startswith("9.0") else ["fa2"])
        with tempfile.TemporaryDirectory(prefix="tonnage-flashinfer-") as build:
            _set_up_compiler(asked, Path(build))
            for family, variant in product(families, variants):
                if family == "fa2" or not variant.has_window:
                    _build(family, variant, folder, is_forced=asked.force)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _arguments() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model", nargs="?", help="a folder with config.json")
    made.add_argument("--head-dim", type=int, choices=HEAD_DIMS)
    made.add_argument("--dtype", choices=DTYPES, default=None)
    made.add_argument("--window", action="store_true", help="layers with a sliding window")
    made.add_argument("--softcap", action="store_true", help="layers with a soft-cap on scores")
    made.add_argument("--family", action="append", choices=tuple(FAMILIES), help="default: fa2, and fa3 for 9.0a")
    made.add_argument("--arch", default="9.0a", help="compute capability, as nvcc knows it")
    made.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    made.add_argument("--include", action="append", default=[], help="a folder with headers of CUDA libraries")
    made.add_argument("--force", action="store_true", help="compile what is there already")
    return made


def _variants(asked: argparse.Namespace) -> list[Variant]:
    if asked.model is None and asked.head_dim is None:
        raise InvalidSetting("MODEL", None, "nothing says what to compile", remedy="name a model, or give --head-dim")
    if asked.model is None:
        features = {"has_window": asked.window, "has_softcap": asked.softcap}
        return [Variant(dtype=asked.dtype or "bfloat16", head_dim=asked.head_dim, **features)]
    config = ModelConfig.read(Path(asked.model))
    return list(variants_of(config, dtype=asked.dtype or config.dtype))


def _set_up_compiler(asked: argparse.Namespace, build: Path) -> None:
    """FlashInfer's own build reads all of this from the environment, some of it when it is imported."""
    if importlib.util.find_spec("flashinfer") is None or importlib.metadata.version("flashinfer-python") != VERSION:
        what = f"flashinfer-python {VERSION}, whose sources are compiled, is not installed"
        raise InvalidSetting("attention", "flashinfer", what, remedy="install tonnage[flashinfer]")
    if not (shutil.which("nvcc") and shutil.which("ninja")):
        what = "nvcc and ninja must be in PATH to compile its kernels"
        raise InvalidSetting("attention", "flashinfer", what, remedy="install the CUDA toolkit and ninja")
    told = subprocess.run(["nvcc", "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True)
    top = re.search(r"^#\$ TOP=(.+)$", told.stderr, re.MULTILINE)
    cuda = Path(os.environ.get("CUDA_HOME") or (top[1] if top else "/usr/local/cuda")).resolve()
    includes = [Path(folder) for folder in asked.include]
    if not any((folder / "curand_kernel.h").is_file() for folder in [cuda / "include", *includes]):
        includes.append(_packaged_headers())
    os.environ |= {
        "CUDA_HOME": str(cuda),
        "FLASHINFER_WORKSPACE_BASE": str(build),
        "FLASHINFER_CUDA_ARCH_LIST": asked.arch,
        "FLASHINFER_EXTRA_CUDAFLAGS": " ".join(f"-isystem {folder}" for folder in includes),
        # Functions for masks that are not compiled are never called, and must not be looked for at loading.
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{_stub_folder(build)} -Wl,-z,lazy",
        "MAX_JOBS": str(asked.jobs),
    }


def _packaged_headers() -> Path:
    """The headers of cuRAND in the package of NVIDIA's that has them."""
    found = importlib.util.find_spec("nvidia")
    for root in (found.submodule_search_locations or []) if found else []:
        for name in ("cu13", "curand"):
            if (Path(root) / name / "include" / "curand_kernel.h").is_file():
                return Path(root) / name / "include"
    what = "curand_kernel.h, which its sources include, is neither in the CUDA toolkit nor in a package"
    raise InvalidSetting("attention", "flashinfer", what, remedy="run `pip install nvidia-curand`, or give --include")


def _stub_folder(build: Path) -> Path:
    """With an empty library in place of the driver's: where there is no GPU the linker has none to look at."""
    folder = build / "stub"
    folder.mkdir(exist_ok=True)
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, "-shared", "-x", "c++", os.devnull, "-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so"]
    subprocess.run(command, check=True)
    return folder


def _build(family: str, variant: Variant, folder: Path, *, is_forced: bool) -> None:
    target = folder / variant.file_name(family)
    if target.is_file() and not is_forced:
        print(f"{target} is there")
        return
    import torch
    from flashinfer.jit.attention.modules import gen_batch_prefill_module

    started = time.monotonic()
    dtype = getattr(torch, variant.dtype)
    spec = gen_batch_prefill_module(
        backend=family, dtype_q=dtype, dtype_kv=dtype, dtype_o=dtype, dtype_idx=torch.int32,
        head_dim_qk=variant.head_dim, head_dim_vo=variant.head_dim, pos_encoding_mode=0,
        use_sliding_window=variant.has_window, use_logits_soft_cap=variant.has_softcap, use_fp16_qk_reduction=False,
    )  # fmt: skip
    spec.sources = list(_needed(spec.sources, FAMILIES[family]))
    print(f"compiling {target.name} ({len(spec.sources)} sources)", flush=True)
    spec.build(verbose=False)
    partial = target.with_suffix(".partial")
    shutil.copyfile(spec.jit_library_path, partial)
    partial.rename(target)
    print(f"{target}: {target.stat().st_size:,} bytes in {time.monotonic() - started:.0f} s", flush=True)


def _needed(sources: list[Path], masks: tuple[int, ...]) -> Iterator[Path]:
    """Without the kernels over unpaged keys and those for other masks: three quarters of the work."""
    for source in sources:
        kernel = re.search(r"(paged|ragged)_(?:sm90_)?kernel_mask_(\d)", source.name)
        if kernel is None or (kernel[1] == "paged" and int(kernel[2]) in masks):
            yield source


if __name__ == "__main__":
    sys.exit(main())
