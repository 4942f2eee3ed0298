"""From what a user types for MODEL to a ``ModelConfig``: a folder, a config.json, a built-in shape, or a hub id."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tonnage.costs.config import ModelConfig
from tonnage.costs.gguf import gguf_files
from tonnage.costs.shapes import close_shapes, find_shape
from tonnage.errors import ModelNotFound

#: The model whose whole config.json comes with the package: alias -> (file under costs/data, name shown).
EMBEDDED = {"smollm2": ("smollm2-135m-instruct.json", "SmolLM2-135M-Instruct")}
_EMBEDDED_IDS = {"huggingfacetb/smollm2-135m-instruct": "smollm2"}

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")
#: A model's page, as it is copied from a browser: the id is in it.
_HUB_PAGE = re.compile(r"https?://[\w.-]+/([A-Za-z0-9][\w.-]*/[\w.-]+)/?(?:(?:tree|blob|resolve)/\S*)?")
_HUB_ID_LENGTH = 96  # the hub's own limit
_HUB_SECONDS = 5
_REMEDY = "check the name, or download the model where there is a network and give its folder"
_UNNAMED_REMEDY = "name a folder, a config.json, a built-in shape such as llama-3.1-8b, or a hub id"


def find_config(model: str | os.PathLike[str]) -> ModelConfig:
    """The shape of MODEL. A path that exists wins over a built-in shape, and that over the hub and its cache.

    Raises ``ModelNotFound`` where nothing of that name is within reach, ``ModelConfigError`` where its config.json
    cannot be used. Nothing but config.json is downloaded.
    """
    text = os.fspath(model)
    path, is_folder = _path(text)
    if path is not None:
        return ModelConfig.read(path)
    if page := _HUB_PAGE.fullmatch(text.strip()):
        text = page[1]
    alias = _EMBEDDED_IDS.get(text.lower(), text.lower())
    if alias in EMBEDDED:
        return embedded_config(alias)
    if not is_folder and (shape := find_shape(text)) is not None:
        return shape.read()
    if not text.strip():
        raise ModelNotFound("no model is named", knob="model", value=text, remedy=_UNNAMED_REMEDY)
    if is_folder:
        raise ModelNotFound(f"{text}: the folder holds no config.json", knob="model", value=text, remedy=_REMEDY)
    if not _HUB_ID.match(text) or len(text) > _HUB_ID_LENGTH or text.endswith(".json"):
        raise ModelNotFound(
            f"{text[:200]!r}: no such folder or file{_close(text)}", knob="model", value=text, remedy=_REMEDY
        )
    return ModelConfig.read(_hub_config(text), name=text)


def _path(text: str) -> tuple[Path | None, bool]:
    """The path if it leads to a config.json or a GGUF file, and whether it is a folder at all."""
    try:
        path = Path(text).expanduser()
        found = path.is_file() or (path / "config.json").is_file() or bool(text and path.is_dir() and gguf_files(path))
        return path if text and found else None, bool(text) and path.is_dir()
    except (OSError, ValueError, RuntimeError):
        return None, False  # too long, a NUL in it, no such home: no path


def embedded_config(alias: str) -> ModelConfig:
    """The shape of a model that ships with the package, by alias."""
    file, name = EMBEDDED[alias]
    return ModelConfig.read(Path(__file__).parent / "data" / file, name=name)


def _hub_config(model: str) -> str:
    """The path of config.json in the hub client's cache, downloaded if need be."""
    try:
        import huggingface_hub  # a quarter of a second: only where the hub is asked
    except ImportError:
        raise ModelNotFound(
            f"{model}: no such folder or built-in shape, and huggingface_hub is not installed{_close(model)}",
            knob="model",
            value=model,
            remedy=_REMEDY,
        ) from None
    with _silence():
        try:
            cached = huggingface_hub.try_to_load_from_cache(model, "config.json")
            if isinstance(cached, str):
                return cached
            # One plain request first: the download call retries for half a minute where there is no network.
            url = huggingface_hub.hf_hub_url(model, "config.json")
            huggingface_hub.get_session().head(url, timeout=_HUB_SECONDS)
            return str(huggingface_hub.hf_hub_download(model, "config.json", etag_timeout=_HUB_SECONDS))
        except Exception as error:  # noqa: BLE001 - the client raises a dozen unrelated types; all mean the same here
            raise ModelNotFound(
                f"{model}: no such folder or built-in shape, and the hub did not give its config.json ({_why(error)})"
                + _close(model),
                knob="model",
                value=model,
                remedy=_REMEDY,
            ) from None


def _close(text: str) -> str:
    """Built-in shapes that are spelt much like it."""
    near = close_shapes(text[:_HUB_ID_LENGTH])
    return f"; close: {', '.join(near)}" if near else ""


def _why(error: Exception) -> str:
    known = {
        "GatedRepoError": "access to it must be asked for",
        "RepositoryNotFoundError": "there is no such model, or it is private",
        "EntryNotFoundError": "it has no config.json",
        "RemoteEntryNotFoundError": "it has no config.json",
        "HFValidationError": "not a model id",
        "OfflineModeIsEnabled": "the client is set to offline",
    }
    return known.get(type(error).__name__, "it cannot be reached")


@contextmanager
def _silence() -> Iterator[None]:
    """Keep the client's log lines and warnings out of our output."""
    import logging
    import warnings

    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
