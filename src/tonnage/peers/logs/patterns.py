"""Lines of start-up logs by engine: what is printed where, in the words of each release that was looked at.

vLLM: the first core (0.4 to 0.8), 0.11.0, 0.19.0 and 0.33.0. SGLang: 0.4.6 to 0.5.23. TensorRT-LLM: the C++ runtime
and the PyTorch backend (0.20 to 1.2). Each row is ours; a line is matched by as few of its words as tell it apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tonnage.peers.logs.log import Unit

#: A number with or without a decimal point, below zero where a budget was.
N = r"(?<!\d)(-?\d{1,12}(?:\.\d{1,12})?)"
I = r"(\d[\d,]{0,17})"  # noqa: E741 - a whole number with commas

#: A pattern, and the figures in its groups.
Pattern = tuple[re.Pattern[str], tuple[tuple[str, Unit], ...]]
G, M, B, C, T, S = Unit.GIB, Unit.MIB, Unit.BYTES, Unit.COUNT, Unit.TIMES, Unit.SHARE


def _row(pattern: str, *figures: tuple[str, Unit]) -> Pattern:
    return re.compile(pattern), figures


_VLLM = (
    _row(rf"total_gpu_memory \({N}GiB\) x gpu_memory_utilization \({N}\) = {N}GiB",
         ("total_gpu_memory", G), ("utilization", S), ("requested", G)),
    _row(rf"model weights take {N}GiB; non_torch_memory takes {N}GiB; PyTorch activation peak memory takes {N}GiB; "
         rf"the rest of the memory reserved for KV Cache is {N}GiB",
         ("weights", G), ("non_torch", G), ("activation_peak", G), ("kv_cache", G)),
    _row(rf"\btotal_gpu_memory\s+{N}GiB", ("total_gpu_memory", G)),
    _row(rf"\bgpu_memory_utilization\s+{N}$", ("utilization", S)),
    _row(rf"the current vLLM instance can use\s+{N}GiB", ("requested", G)),
    _row(rf"model weights take\s+{N}GiB$", ("weights", G)),
    _row(rf"non_torch_memory\s+{N}GiB", ("non_torch", G)),
    _row(rf"PyTorch activation peak memory\s+{N}GiB", ("activation_peak", G)),
    _row(rf"available_kv_cache_memory\s+{N}GiB", ("kv_cache", G)),
    _row(rf"Loading model weights took {N} G[iI]?B", ("weights", G)),
    _row(rf"Model loading took {N} G[iI]?B", ("weights", G)),
    _row(rf"# (?:GPU|CUDA) blocks: {I}", ("num_gpu_blocks", C)),
    _row(rf"Available KV cache memory: {N} GiB", ("kv_cache", G)),
    _row(rf"KV cache size: {I} tokens", ("kv_cache_tokens", C)),
    _row(rf"Maximum concurrency for {I} tokens per request: {N}x", ("max_model_len", C), ("max_concurrency", T)),
    _row(rf"Graph capturing finished in \d+ secs, took {N} GiB", ("cuda_graph", G)),
    _row(rf"Estimated CUDA graph memory: {N} GiB", ("cuda_graph_estimated", G)),
    _row(rf"CUDA graph pool memory: {N} GiB \(actual\), {N} GiB \(estimated\)",
         ("cuda_graph", G), ("cuda_graph_estimated", G)),
    _row(rf"Free memory on device (?:\S+ )?\({N}/{N} GiB\) on startup\. Desired GPU memory utilization is "
         rf"\({N}, {N} GiB\)", ("free_at_start", G), ("total_gpu_memory", G), ("utilization", S), ("requested", G)),
    _row(rf"Actual usage is {N} GiB for weight", ("weights", G)),
    _row(rf"{N} GiB for consumed memory", ("consumed", G)),
    _row(rf"{N} GiB for peak activation", ("activation_peak", G)),
    _row(rf"{N} GiB for non-torch memory", ("non_torch", G)),
    _row(rf"{N} GiB for CUDAGraph memory", ("cuda_graph", G)),
    _row(rf"Current kv cache memory in use is {N} GiB", ("kv_cache", G)),
    _row(rf"Current kv cache memory in use is {I} bytes", ("kv_cache", B)),
    _row(rf"Initial free memory: {N} GiB; Requested memory: {N} \(util\), {N} GiB",
         ("free_at_start", G), ("utilization", S), ("requested", G)),
    _row(rf"torch peak memory increase: {N}GiB", ("activation_peak", G)),
    _row(rf"non-torch forward increase memory: {N}GiB", ("non_torch", G)),
    _row(rf"weights memory: {N}GiB", ("weights", G)),
    _row(rf"Setting attention block size to {I} tokens", ("attn_block_size_tokens", C)),
)  # fmt: skip
_SGLANG = (
    _row(rf"Init torch distributed ends\..*?mem usage={N} GB", ("init_distributed", G)),
    _row(rf"Load weight begin\. avail mem={N} GB", ("avail_before_load", G)),
    _row(rf"Load weight end\..*?avail mem={N} GB", ("avail_after_weights", G)),
    _row(rf"Load weight end\..*?mem usage={N} GB", ("weights", G)),
    _row(rf"KV Cache is allocated\..*?#tokens: {I}, K size: {N} GB, V size: {N} GB",
         ("kv_cache_tokens", C), ("kv_k", G), ("kv_v", G)),
    _row(rf"KV Cache is allocated\..*?#tokens: {I}, KV size: {N} GB", ("kv_cache_tokens", C), ("kv_cache", G)),
    _row(rf"max_mamba_cache_size: {I}, conv_state size: {N} ?GB, ssm_state size: {N} ?GB",
         ("max_mamba_cache_size", C), ("mamba_conv", G), ("mamba_ssm", G)),
    _row(rf"Memory pool end\. avail mem={N} GB", ("avail_after_pool", G)),
    _row(rf"Capture (?:target decode )?(?:cuda|CUDA) graph end\..*?mem usage={N} GB.*?avail mem={N} GB",
         ("cuda_graph", G), ("avail_final", G)),
    _row(rf"Capture (?:piecewise|(?:target )?prefill) (?:cuda|CUDA) graph end\..*?mem usage={N} GB.*?avail mem="
         rf"{N} GB", ("prefill_graph", G), ("avail_final", G)),
    _row(rf"max_total_num_tokens={I}, chunked_prefill_size=(?:-?\d+|None), max_prefill_tokens={I}, "
         rf"max_running_requests={I}, context_len={I}",
         ("max_total_tokens", C), ("max_prefill_tokens", C), ("max_running_requests", C), ("max_model_len", C)),
    _row(rf"available_gpu_mem={N} GB", ("avail_final", G)),
)  # fmt: skip
_TRTLLM = (
    _row(rf"Memory used after loading model weights \(inside torch\) in memory usage profiling: {N} GiB",
         ("weights", G)),
    _row(rf"Rank \d+ uses {N} GB for model weights", ("weights_file", G)),
    _row(rf"Peak memory during memory usage profiling \(torch \+ non-torch\): {N} GiB, available KV cache memory when "
         rf"calculating max tokens: {N} GiB", ("peak", G), ("kv_cache_available", G)),
    _row(rf"fraction is set {N}", ("utilization", S)),
    _row(rf"kv size(?: per token)? is {N}(?=[.,]? )", ("kv_bytes_per_token", B)),
    _row(rf"device total memory {N} GiB", ("total_gpu_memory", G)),
    _row(rf"(?:tmp kv_mem|temporary kv cache memory during profiling) {N} GiB", ("kv_temporary", G)),
    _row(rf"Allocated {N} GiB for max tokens in paged KV cache \({I}\)", ("kv_cache", G), ("kv_cache_tokens", C)),
    _row(rf"Estimated max tokens in KV cache\s*:\s*{I}", ("kv_tokens_estimated", C)),
    _row(rf"tokens per block ?= ?{I}, primary blocks ?= ?{I}", ("tokens_per_block", C), ("num_gpu_blocks", C)),
    _row(rf"Number of blocks in KV cache primary pool: {I}", ("num_gpu_blocks", C)),
    _row(rf"Number of tokens per block: {I}", ("tokens_per_block", C)),
    _row(rf"Memory usage when calculating max tokens in paged kv cache: total: {N} GiB, available: {N} GiB",
         ("total_gpu_memory", G), ("avail_before_kv", G)),
    _row(rf"Allocate {I} bytes for k/v cache", ("kv_cache", B)),
    _row(rf"Using {I} tokens in paged KV cache", ("kv_cache_tokens", C)),
    _row(rf"Loaded engine size: {I} MiB", ("weights", M)),
    _row(rf"max_seq_len={I}, max_num_requests=", ("max_model_len", C)),
)  # fmt: skip
PATTERNS: Mapping[str, tuple[Pattern, ...]] = {"vllm": _VLLM, "sglang": _SGLANG, "trtllm": _TRTLLM}

#: What a line has of an engine that no other's has, and the release in it.
ENGINES: Mapping[str, re.Pattern[str]] = {
    "vllm": re.compile(
        r"vLLM API server version (\S+)|Initializing an? (?:V\d )?LLM engine (?:\(|with config)|gpu_memory_utilization|"
        r"Model loading took|KV cache size: [\d,]+ tokens|vllm[/\\.]|# (?:GPU|CUDA) blocks"
    ),
    "sglang": re.compile(r"server_args=ServerArgs\(|Load weight (?:begin|end)\.|Memory pool end\.|sglang[/\\.]"),
    "trtllm": re.compile(r"TensorRT[- ]LLM version: (\S+)|\[TensorRT-LLM\]|\[TRT-LLM\]|tensorrt_llm"),
}
VERSIONS: Mapping[str, re.Pattern[str]] = {
    "vllm": re.compile(r"vLLM API server version v?(\S+)|Initializing an? (?:V\d )?LLM engine \(v?([^)\s]+)\)"),
    "sglang": re.compile(r"sglang(?:==| version:? )v?(\d\S*)"),
    "trtllm": re.compile(r"TensorRT[- ]LLM version: v?(\S+)"),
}
#: The tag of the process that wrote a line.
RANK = re.compile(
    r"\((?:\w*Worker\w*?_?)?((?:DP\d+_)?(?:PP\d+_)?TP\d+)[\w ]*(?:pid=\d+)?\)|"
    r"\b((?:DP\d+ )?TP\d+)\b[^\]]*\]|\[RANK (\d+)\]"
)
