"""Options files: vLLM's ``--config``, TensorRT-LLM's ``--extra_llm_api_options``, as flags."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tonnage.peers.commands import kinds
from tonnage.peers.commands.command import Flag
from tonnage.peers.commands.kinds import Kind

#: Tables of TensorRT-LLM's options whose keys are knobs of their own.
_TABLES = ("kv_cache_config", "cuda_graph_config", "scheduler_config", "lora_config", "build_config")


def flags_of(engine: str, options: Mapping[str, object], *, file: str) -> tuple[Flag, ...]:
    """Every option as the flag that it stands for. ``file``: its name, for messages."""
    found = []
    for key, value in options.items():
        name = kinds.canonical(engine, str(key))
        if engine == "trtllm" and name in _TABLES and isinstance(value, Mapping):
            for inner, inside in value.items():
                # The cache's dtype is a knob of its own; the model's has the same name.
                known = "kv_cache_dtype" if (name, inner) == ("kv_cache_config", "dtype") else str(inner)
                found.append(_flag(engine, kinds.canonical(engine, known), inside, f"{file}: {key}.{inner}"))
        else:
            found.append(_flag(engine, name, value, f"{file}: {key}"))
    return tuple(found)


def _flag(engine: str, name: str, value: object, written: str) -> Flag:
    if isinstance(value, bool):
        if kinds.kind_of(engine, name) in (Kind.SWITCH, None):
            return Flag(name=name, written=written, is_off=not value)
        return Flag(name=name, written=written, text=str(value).lower())
    if value is None:
        return Flag(name=name, written=written, text="null")
    if isinstance(value, list | dict):
        return Flag(name=name, written=written, text=_json(value))
    return Flag(name=name, written=written, text=str(value))


def _json(value: object) -> str:
    try:
        return json.dumps(value, default=str)
    except (ValueError, RecursionError, TypeError):
        return "null"
