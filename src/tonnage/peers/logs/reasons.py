"""What is known to make a term differ from its rule, and which other settings would explain a difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tonnage.peers.lint.case import Case
from tonnage.peers.lint.remedies import flags_text
from tonnage.peers.logs.compare import compare
from tonnage.peers.logs.log import Log
from tonnage.peers.logs.rows import Row

#: (row, whether the log has more) -> sentences, each with where it was seen.
_KNOWN: Mapping[tuple[str, bool], tuple[str, ...]] = {
    ("weights", True): (
        "the checkpoint is kept in another form than it is stored in: repacked, or dequantised where the card has no "
        "kernel for it",
        "a vision tower, a draft model, or layers for multi-token prediction are loaded too",
    ),
    ("weights", False): (
        "weights are quantised as they are loaded (--quantization), or are offloaded to the host (--cpu-offload-gb)",
        "the figure is a difference of free memory, which caches of the host and other processes move",
    ),
    ("non-torch", True): (
        "another process took memory while this one measured (vllm-project/vllm#55827): it is charged to this one",
        "collectives with more channels, or workspaces of a kernel library that torch does not count",
    ),
    ("non-torch", False): ("another process gave memory back while this one measured (vllm-project/vllm#55169)",),
    ("activation peak", True): (
        "a first start after the compile cache was emptied counts what compiling takes (vllm-project/vllm#54122)",
        "an encoder's largest batch of pictures or video decides, and not the text",
    ),
    ("activation peak", False): ("the dry run was smaller: fewer sequences, or fewer tokens in a step",),
    ("graphs", True): ("more sizes are captured, or mixed batches and drafts have graphs of their own",),
    ("graphs", False): ("fewer sizes are captured, or graphs share the memory of larger ones",),
    ("context", True): ("other processes hold memory on the device, or several contexts of one engine do",),
    ("states", True): ("drafts keep states of their own for each step that is verified",),
}
#: Row -> settings that would move it, each tried.
_WHAT_IFS: Mapping[str, Mapping[str, tuple[Mapping[str, object], ...]]] = {
    "vllm": {
        "activation peak": (
            *({"max_num_seqs": number} for number in (1024, 256, 128, 64)),
            *({"max_num_batched_tokens": number} for number in (2048, 8192, 16384, 32768)),
        ),
        "graphs": ({"enforce_eager": True}, {"enforce_eager": None}),
        "tokens": ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": None}, {"enable_prefix_caching": False}),
    },
    "sglang": {
        "graphs": ({"disable_cuda_graph": True}, {"cuda_graph_max_bs": 512}, {"cuda_graph_max_bs": 128}),
        "tokens": ({"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": None}),
    },
    "trtllm": {"tokens": ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": None})},
}


def reasons(log: Log, row: Row) -> tuple[str, ...]:
    """Sentences about a row that differs; more than one may be true."""
    del log
    return _KNOWN.get((row.name, row.difference > 0), ())


def what_ifs(case: Case, log: Log, row: Row) -> tuple[str, ...]:
    """Settings with which the row would agree; where there are none, those with which it would differ by a fifth of
    what it does. At most two, closest first."""
    found = sorted(_tried(case, log, row), key=lambda pair: (not pair[0].agrees, abs(pair[0].difference)))
    agreeing = [pair for pair in found if pair[0].agrees] or found
    return tuple(_told(case, changes) for _, changes in agreeing[:2])


def _tried(case: Case, log: Log, row: Row) -> Iterator[tuple[Row, Mapping[str, object]]]:
    for changes in _WHAT_IFS[log.engine].get(row.name, ()):
        if all(case.settings.get(name) == value for name, value in changes.items()):
            continue
        tried = case.tried(changes)
        found = None if tried is None else next((each for each in compare(log, tried) if each.name == row.name), None)
        if found is not None and (found.agrees or abs(found.difference) * 5 <= abs(row.difference)):
            yield found, changes


def _told(case: Case, changes: Mapping[str, object]) -> str:
    return flags_text(case, changes) or " ".join(f"no --{name.replace('_', '-')}" for name in changes)
