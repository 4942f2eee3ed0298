"""What the settings of a command come to for its engine's rules: objects taken apart, renamed flags by one name."""

from __future__ import annotations

from collections.abc import Mapping

#: Flags that newer releases call otherwise -> the name that the rules know.
_RENAMED = {
    "vllm": {"cuda_graph_sizes": "cudagraph_capture_sizes"},
    "sglang": {
        "cuda_graph_bs_decode": "cuda_graph_bs", "cuda_graph_max_bs_decode": "cuda_graph_max_bs",
        "disable_piecewise_cuda_graph": "disable_prefill_cuda_graph",
    },
    "trtllm": {},
}  # fmt: skip
#: Keys of vLLM's objects that are settings of their own.
_OBJECTS = {
    "speculative_config": {"num_speculative_tokens": "num_speculative_tokens", "method": "speculative_method"},
    "compilation_config": {
        "cudagraph_capture_sizes": "cudagraph_capture_sizes", "cudagraph_mode": "cudagraph_mode",
        "max_cudagraph_capture_size": "max_cudagraph_capture_size", "max_capture_size": "max_capture_size",
    },
}  # fmt: skip
#: Fields of a launch, which are no settings of it.
FIELDS = ("kv_cache_dtype", "dtype")
#: Ends of methods whose layers are in the checkpoint, or that draft without a model; methods whose drafts are counted;
#: names of drafts of other kinds.
_INSIDE = ("mtp", "ngram", "suffix")
_COUNTED = ("draft_model", "eagle", "eagle3")
_OTHERS = ("medusa", "mlp_speculator", "accelerator", "dflash", "dspark")
_OFF = ("none", "0", "false")


def meaning(engine: str, settings: Mapping[str, object], variables: Mapping[str, str]) -> dict[str, object]:
    """The settings as the rules of that engine read them. ``variables``: of its process."""
    renamed = _RENAMED[engine]
    found = {renamed.get(name, name): value for name, value in settings.items() if name not in FIELDS}
    if engine == "vllm":
        found = _vllm(found, variables)
    elif engine == "sglang" and str(found.get("cuda_graph_backend_decode", "")).lower() == "disabled":
        found["disable_cuda_graph"] = True
    return {name: value for name, value in found.items() if value is not None}


def _vllm(settings: dict[str, object], variables: Mapping[str, str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, keys in _OBJECTS.items():
        inside = settings.pop(name, None)
        if isinstance(inside, Mapping):
            found.update({keys[key]: value for key, value in inside.items() if key in keys})
    if isinstance(sizes := found.get("cudagraph_capture_sizes"), list):
        found["cudagraph_capture_sizes"] = tuple(size for size in sizes if isinstance(size, int))
    found.update(settings)
    if str(found.get("cudagraph_mode", "")).lower() in _OFF or found.get("optimization_level") == 0:
        found["enforce_eager"] = True  # to the budget they are one: nothing is captured
    estimate = variables.get("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS")
    if estimate is not None:
        found["cudagraph_mem_estimate_enabled"] = estimate.strip().lower() not in (*_OFF, "")
    if (core := variables.get("VLLM_USE_V1")) in ("0", "1"):
        found["engine_core"] = f"V{core}"
    return found


def draft_model(engine: str, settings: Mapping[str, object]) -> str | None:
    """The name of a draft that is loaded beside the model, a whole one or a head; None where there is none."""
    if engine == "vllm":
        config = settings.get("speculative_config")
        if isinstance(config, Mapping) and str(config.get("method", "")).lower().endswith(_INSIDE):
            return None
        named = config.get("model") if isinstance(config, Mapping) else settings.get("speculative_model")
    else:
        named = settings.get("speculative_draft_model_path")
    return named if isinstance(named, str) and named not in ("[ngram]", "ngram") else None


def counted_draft(engine: str, settings: Mapping[str, object]) -> str | None:
    """The name of a draft that can be counted: a model of its own, or a head of EAGLE; None for other kinds.

    As vLLM tells them apart where no method is named: by the name of the draft, and by its config.json.
    """
    named = draft_model(engine, settings)
    if engine != "vllm" or named is None:
        return None
    config = settings.get("speculative_config")
    method = str(config.get("method") or "").lower() if isinstance(config, Mapping) else ""
    is_other = any(word in named.lower() for word in _OTHERS)
    return named if method in _COUNTED or (not method and not is_other) else None


def drafts_inside(engine: str, settings: Mapping[str, object]) -> bool:
    """Whether the model's own layers for multi-token prediction are loaded."""
    if draft_model(engine, settings) is not None:
        return False
    if engine == "vllm":
        config = settings.get("speculative_config")
        return "mtp" in str(config.get("method", "")).lower() if isinstance(config, Mapping) else False
    if engine == "sglang":
        return str(settings.get("speculative_algorithm", "")).upper() in ("NEXTN", "EAGLE", "EAGLE3")
    return bool(settings.get("num_nextn_predict_layers") or settings.get("max_draft_len"))
