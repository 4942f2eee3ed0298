"""Container images of the engines: which engine is in one, and which release of it."""

from __future__ import annotations

import re

#: The end of an image's name -> the engine inside.
_NAMES = (
    (re.compile(r"(^|/)vllm-openai(-\w+)?$|(^|/)vllm/vllm[\w-]*$|(^|/)vllm$"), "vllm"),
    (re.compile(r"(^|/)lmsysorg/sglang$|(^|/)sglang$"), "sglang"),
    (re.compile(r"(^|/)tensorrt-llm(/release|/devel)?$|(^|/)trtllm(-serve)?$"), "trtllm"),
)
_BUILT = re.compile(r"(^|[/_-])vllm([._-][\w.-]*)?$")
_RELEASE = re.compile(r"v?(\d+\.\d+(?:\.\d+)?(?:[._-]?(?:post|rc|dev)\d+)?)(?![\d.])")


def engine_of_image(image: str | None) -> str | None:
    """The engine in ``image``, None where its name says nothing."""
    if not image:
        return None
    name, _ = _parts(image)
    return next((engine for pattern, engine in _NAMES if pattern.search(name)), None)


def may_be_vllm(image: str | None) -> bool:
    """Whether somebody built vLLM into ``image``, by a name such as org/tgis-vllm; its entry point may be another."""
    return image is not None and _BUILT.search(_parts(image)[0]) is not None


def version_of_image(image: str | None) -> str | None:
    """The release that the tag of an engine's image names: v0.19.0 -> "0.19.0", v0.5.9-cu129 -> "0.5.9". None for
    ``latest``, for no tag, and for an image whose tags are not the engine's releases."""
    if engine_of_image(image) is None or not image:
        return None
    _, tag = _parts(image)
    found = _RELEASE.match(tag)
    return found[1] if found else None


def _parts(image: str) -> tuple[str, str]:
    """Name and tag, without a digest."""
    name = image.strip().partition("@")[0]
    head, colon, tag = name.rpartition(":")
    return (head, tag) if colon and "/" not in tag else (name, "")
