"""The keywords of ``LLM`` and ``AsyncLLM``, and what the engine makes of them."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from tonnage.config import Knobs, LimitKnobs, Origin, Setting, parse_admission
from tonnage.costs.dtypes import WEIGHT_DTYPES, parse_dtype
from tonnage.engine.options import AUTO, EngineOptions
from tonnage.errors import InvalidSetting
from tonnage.planner.graphs import read_graphs
from tonnage.units import parse_bytes, parse_count, parse_fraction

if TYPE_CHECKING:
    import torch

#: "4GiB", or bytes.
Size: TypeAlias = str | int | None
#: "8k", or a number.
Count: TypeAlias = str | int | None


class Options(TypedDict, total=False):
    """What may be set when an engine is made; names, texts and meanings are those of the command line.

    device            "cpu", "cuda" or "cuda:1"
    memory            size of the host device, a hard cap on what the process takes (default: what is free)
    max_seq_len       tokens of one sequence, prompt and output; default: the model's length, or what fits
    max_batch_size    sequences running at once; max_num_tokens: tokens computed in one step
    kv_tokens, kv_bytes, total_bytes   caps on the KV cache, and on everything together
    keep_free_bytes   left alone on the device
    kv_fraction       share of what the fixed lines leave, for the KV cache
    kv_dtype, dtype   of the KV cache, and of the weights and all computing
    block_tokens      tokens in one KV block
    disabled_claims   claims switched off by name
    attention         the attention backend, or "auto"
    admission         "optimistic" or "reserve_all"
    chunk_tokens      prefill tokens in one step at most, or "none": prompts are not cut
    graphs            on a card, batch sizes with a CUDA graph: "none", "default", "x2", "+64", "+8", "1,2,4,8", or a
                      file that ``tonnage buckets --output`` wrote
    host_kv_bytes     host memory for evicted blocks, beside the device
    prefix_caching    False: nothing is used again for texts that begin alike
    plan_file         what the start measures is kept there; a later start that would measure the same runs no probes
    fence             False: the cap on the host is watched and not enforced, for a process with other large things
    overlap           whether a step is launched before the one before it has been looked at; default: on a card
    """

    device: str | None
    memory: Size
    max_seq_len: Count
    max_batch_size: Count
    max_num_tokens: Count
    kv_tokens: Count
    kv_bytes: Size
    total_bytes: Size
    keep_free_bytes: Size
    kv_fraction: str | float | Fraction | None
    kv_dtype: str | torch.dtype | None
    dtype: str | torch.dtype | None
    block_tokens: Count
    disabled_claims: str | Iterable[str] | None
    attention: str | None
    admission: str | None
    chunk_tokens: Count
    graphs: str | None
    host_kv_bytes: Size
    prefix_caching: bool | None
    plan_file: str | Path | None
    fence: bool | None
    overlap: bool | None


_KNOBS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "total_bytes": parse_bytes,
        "keep_free_bytes": functools.partial(parse_bytes, allow_zero=True),
        "kv_fraction": parse_fraction,
        "kv_bytes": parse_bytes,
        "kv_tokens": parse_count,
        "host_kv_bytes": parse_bytes,
        "kv_dtype": parse_dtype,
        "block_tokens": parse_count,
        "admission": parse_admission,
        "graphs": read_graphs,
    }
)
_LIMITS = ("max_seq_len", "max_batch_size", "max_num_tokens")


def engine_options(model: str | Path, options: Options) -> EngineOptions:
    """Checked and read. Raises ``InvalidSetting`` for an option that there is not and a value that cannot be read."""
    for name, value in options.items():
        if name not in Options.__annotations__:
            near = difflib.get_close_matches(name, Options.__annotations__, n=1)
            raise InvalidSetting(name, value, "no such option", remedy=f"write {near[0]}" if near else "leave it out")
    knobs = {name: _setting(options, name, parse) for name, parse in _KNOBS.items()}
    chunk_tokens = options.get("chunk_tokens")
    return EngineOptions(
        model=str(model),
        device=_device(options.get("device")),
        memory_bytes=_read(options, "memory", parse_bytes),
        knobs=Knobs(**knobs, disabled_claims=_names(options.get("disabled_claims"))),
        limit_knobs=LimitKnobs(
            **{name: _setting(options, name, parse_count) for name in _LIMITS},
            prefix_caching=_switch(options, "prefix_caching"),
        ),
        dtype=_weights_dtype(_read(options, "dtype", parse_dtype)),
        attention=options.get("attention") or AUTO,
        chunk_tokens="none" if chunk_tokens == "none" else _read(options, "chunk_tokens", parse_count),
        fence=_fence(options.get("fence")),
        plan_file=options.get("plan_file"),
        overlap=_yes_or_no("overlap", options.get("overlap")),
    )


def _device(value: object) -> str:
    if not isinstance(value, str | None):
        raise InvalidSetting("device", value, "not a text", remedy="write cpu, cuda, or cuda:1")
    return (value or "cpu").strip().lower()


def _weights_dtype(name: str | None) -> str | None:
    return None if name is None else parse_dtype(name, knob="dtype", allowed=WEIGHT_DTYPES)


def _names(value: str | Iterable[str] | None) -> frozenset[str]:
    return frozenset([value] if isinstance(value, str) else value or ())


def _fence(value: object) -> bool:
    return _yes_or_no("fence", value) is not False


def _switch(options: Options, name: str) -> Setting[bool]:
    value = _yes_or_no(name, options.get(name))
    return Setting() if value is None else Setting(value, str(value), Origin.API, name)


def _yes_or_no(name: str, value: object) -> bool | None:
    if not isinstance(value, bool | None):
        raise InvalidSetting(name, value, "neither True nor False", remedy=f"write {name}=False, or leave it out")
    return value


def _setting(options: Options, name: str, parse: Callable[..., Any]) -> Setting[Any]:
    value = _read(options, name, parse)
    return Setting() if value is None else Setting(value, str(options.get(name)), Origin.API, name)


def _read(options: Options, name: str, parse: Callable[..., Any]) -> Any:
    value = options.get(name)
    if value is None:
        return None
    if not isinstance(value, str | int | float | Fraction) and parse is not parse_dtype:
        raise InvalidSetting(name, value, f"a {type(value).__name__}", remedy="write a number or a text")
    # What was typed as 0.9 is the shortest text of the float, and exact again.
    return parse(str(value) if isinstance(value, float) else value, knob=name)
