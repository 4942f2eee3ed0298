"""Lines on which a start ends, in the words of each engine."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tonnage.peers.logs.log import Unit
from tonnage.peers.logs.patterns import I, N, Pattern

G, M, C, S = Unit.GIB, Unit.MIB, Unit.COUNT, Unit.SHARE

#: Kind -> what it means, in a sentence.
KINDS: Mapping[str, str] = {
    "no pool": "weights, peak and reserves leave nothing of what was asked for",
    "one request": "the pool is smaller than one sequence of full length",
    "free memory": "less was free at start than the share that was asked for",
    "state blocks": "each running sequence needs a block of states of its own, and there are fewer",
    "out of memory": "an allocation failed on the device",
    "sampler": "the pool was made before the sampler ran for all sequences at once",
    "profiling": "free memory grew while it was measured: another process gave some back",
    "arguments": "the command line has a flag that this release does not read",
    "unbalanced": "one GPU has much less free memory than another",
}


def _row(pattern: str, *figures: tuple[str, Unit]) -> Pattern:
    return re.compile(pattern), figures


#: In order: the first kind that a line matches is its own.
PATTERNS: tuple[tuple[str, Pattern], ...] = (
    ("one request", _row(rf"max seq len \({I}\), \(?{N} GiB KV cache is needed, which is larger than the available KV "
                         rf"cache memory \({N} GiB\)", ("max_model_len", C), ("kv_needed", G), ("kv_cache", G))),
    ("one request", _row(rf"max seq len \({I}\) is larger than the maximum number of tokens that can be stored in KV "
                         rf"cache \({I}\)", ("max_model_len", C), ("kv_cache_tokens", C))),
    ("no pool", _row(r"No available memory for the cache blocks")),
    ("no pool", _row(r"Not enough memory\. Please try to increase --mem-fraction-static")),
    ("no pool", _row(r"[Ii]mpossible to fit in any sequence in kvCache|No enough memory for KV cache")),
    ("free memory", _row(rf"Free memory on device (?:\S+ )?\({N}/{N} GiB\) on startup is less than desired GPU memory "
                         rf"utilization \({N}, {N} GiB\)",
                         ("free_at_start", G), ("total_gpu_memory", G), ("utilization", S), ("requested", G))),
    ("state blocks", _row(rf"max_num_seqs \({I}\) exceeds available Mamba cache blocks \({I}\)",
                          ("max_num_seqs", C), ("state_blocks", C))),
    ("sampler", _row(rf"out of memory occurred when warming up sampler with {I} dummy requests", ("max_num_seqs", C))),
    ("out of memory", _row(rf"Tried to allocate {N} GiB\. GPU \d+ has a total capacity of {N} GiB of which {N} GiB is "
                           r"free", ("asked", G), ("total_gpu_memory", G), ("free", G))),
    ("out of memory", _row(rf"Tried to allocate {N} GiB\. GPU \d+ has a total capacity of {N} GiB of which {N} MiB is "
                           r"free", ("asked", G), ("total_gpu_memory", G), ("free", M))),
    ("out of memory", _row(rf"Tried to allocate {N} MiB\. GPU \d+ has a total capacity of {N} GiB of which {N} GiB is "
                           r"free", ("asked", M), ("total_gpu_memory", G), ("free", G))),
    ("out of memory", _row(rf"Tried to allocate {N} MiB\. GPU \d+ has a total capacity of {N} GiB of which {N} MiB is "
                           r"free", ("asked", M), ("total_gpu_memory", G), ("free", M))),
    ("out of memory", _row(r"CUDA out of memory|CUDA error: out of memory|Capture cuda graph failed: CUDA out")),
    ("profiling", _row(rf"Error in memory profiling\. Initial free memory {N}", ("free_at_start", Unit.BYTES))),
    ("arguments", _row(r"error: unrecognized arguments: ")),
    ("unbalanced", _row(r"The memory capacity is unbalanced")),
)  # fmt: skip

#: What the last line of a failed start says beside the kind.
ESTIMATE = re.compile(rf"the estimated maximum model length is {I}")
