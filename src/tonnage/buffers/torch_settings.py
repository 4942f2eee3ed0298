"""Whether torch's settings let its segments come from us, and in which words to say that they do not."""

from __future__ import annotations

from collections.abc import Mapping

from tonnage.buffers.torch_memory import TorchAllocator
from tonnage.errors import InvalidSetting

#: Torch reads the first of these that is set, and no other (seen with torch 2.13: both set, the first one counts).
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
#: Set to anything, torch asks the driver for every tensor and keeps no segment.
NO_CACHE = "PYTORCH_NO_CUDA_MEMORY_CACHING"

_EXPANDABLE = (
    "torch grows its segments by itself then and takes none from a pool with an allocator of its own: activations and "
    "graphs would stay outside their arenas, and the ledger would not be told of them"
)
_ELSEWHERE = "pools with an allocator of their own exist in torch's native backend only"


def parse_alloc_conf(text: str) -> dict[str, str]:
    """Keys and values of an allocator setting as torch reads it: ``a:1,b:[x:2,y:3]``, spaces nowhere meaningful.

    A list keeps its brackets; of a key that comes twice the last counts. What has no value is left out: torch itself
    refuses it.
    """
    found: dict[str, str] = {}
    depth, item = 0, ""
    for letter in "".join(text.split()) + ",":
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth <= 0:
            key, colon, value = item.partition(":")
            if colon:
                found[key] = value
            item = ""
        else:
            item += letter
    return found


def environment_problem(environ: Mapping[str, str]) -> InvalidSetting | None:
    """What in the environment keeps torch's segments from coming from us; None: nothing does. Needs no torch."""
    if NO_CACHE in environ:
        return InvalidSetting(
            NO_CACHE,
            environ[NO_CACHE],
            "torch keeps no segments then, and pools have no effect",
            remedy=f"unset {NO_CACHE}",
        )
    name = next((name for name in VARIABLES if name in environ), None)
    if name is None:
        return None
    said = parse_alloc_conf(environ[name])
    if said.get("expandable_segments") == "True":
        return InvalidSetting(
            name, environ[name], _EXPANDABLE, remedy=f"take expandable_segments:True out of {name} and start again"
        )
    if said.get("backend", "native") != "native":
        return InvalidSetting(
            name, environ[name], _ELSEWHERE, remedy=f"take backend:{said['backend']} out of {name} and start again"
        )
    return None


def settings_problem(torch_memory: TorchAllocator, environ: Mapping[str, str]) -> InvalidSetting | None:
    """The same, asked of torch too: a program may have changed its settings since it was started."""
    problem = environment_problem(environ)
    if problem is not None:
        return problem
    if torch_memory.settings().get("expandable_segments"):
        return InvalidSetting(
            "torch's allocator settings",
            "expandable_segments:True",
            f"the program has set it, the environment does not; {_EXPANDABLE}",
            remedy="do not set it, or set expandable_segments:False before the engine starts",
        )
    backend = torch_memory.backend()
    if backend != "native":
        return InvalidSetting(
            "torch's allocator", backend, _ELSEWHERE, remedy="leave torch's own allocator in place for this process"
        )
    return None
