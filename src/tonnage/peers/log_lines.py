"""What an engine's own log would say of a start: the line that people compare a prediction with."""

from __future__ import annotations

from tonnage.peers.start import Start
from tonnage.units import GiB, MiB

#: The term that is left when everything has been allocated, by engine.
_LEFT = "left free"


def log_lines(start: Start) -> tuple[str, ...]:
    """The lines about the pool, figures as predicted; empty where the pool is."""
    if not start.pool.bytes or start.logged_tokens is None:
        return ()
    writers = {"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm, "llamacpp": _llamacpp}
    return writers[start.launch.engine](start, start.logged_tokens.best)


def _vllm(start: Start, tokens: int) -> tuple[str, ...]:
    lines = [f"Available KV cache memory: {start.pool.bytes / GiB:.2f} GiB", f"GPU KV cache size: {tokens:,} tokens"]
    if start.concurrency is not None:
        times = start.concurrency.best / 1000
        lines.append(f"Maximum concurrency for {start.max_model_len:,} tokens per request: {times:.2f}x")
    return tuple(lines)


def _sglang(start: Start, tokens: int) -> tuple[str, ...]:
    defaults = {name: value.replace(",", "") for name, value, _ in start.defaults}
    requests = start.launch.get("max_running_requests") or defaults.get("max_running_requests", "")
    chunk = start.launch.get("chunked_prefill_size") or defaults.get("chunked_prefill_size", "")
    left = next((term.bytes.bytes for term in start.terms if term.name == _LEFT), 0)
    return (
        f"max_total_num_tokens={tokens}, chunked_prefill_size={chunk}, max_running_requests={requests}, "
        f"context_len={start.max_model_len}, available_gpu_mem={left / GiB:.2f} GB",
    )


def _trtllm(start: Start, tokens: int) -> tuple[str, ...]:
    return (f"Allocated {start.pool.bytes / GiB:.2f} GiB for max tokens in paged KV cache ({tokens}).",)


def _llamacpp(start: Start, tokens: int) -> tuple[str, ...]:
    cache = next((term.bytes.bytes for term in start.terms if term.name == "kv cache"), start.pool.bytes)
    return (f"llama_kv_cache: size = {cache / MiB:.2f} MiB ({tokens} cells)",)
