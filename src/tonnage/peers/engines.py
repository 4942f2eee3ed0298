"""The engines whose knobs are understood: how their names are written, what version was read, and their defaults."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tonnage.errors import UserError

#: Names that a remedy offers; words of so many knobs that sharing one says nothing.
MOST_NEAR, COMMON_WORDS = 3, ("max", "enable", "disable", "no", "num", "size", "of", "per")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One engine. ``defaults``: what it does where a knob of the budget is left out, as it is told in a report.

    name      as it is typed before the colon
    title     as it is written in a sentence
    version   whose knobs and defaults these are
    """

    name: str
    title: str
    version: str
    aliases: tuple[str, ...]
    defaults: tuple[tuple[str, str], ...]


VLLM = Engine(
    name="vllm",
    title="vLLM",
    version="0.33",
    aliases=(),
    defaults=(
        ("gpu_memory_utilization", "0.92"),
        ("max_num_seqs", "256 (1024 on most cards of 70 GiB and more)"),
        ("max_num_batched_tokens", "2048 to 16384 by card"),
    ),
)
SGLANG = Engine(
    name="sglang",
    title="SGLang",
    version="0.5.23",
    aliases=("sgl",),
    defaults=(
        ("mem_fraction_static", "about 0.80 to 0.90 by card"),
        ("chunked_prefill_size", "2048 to 16384 by card"),
        ("max_running_requests", "2048 to 4096 (at most half of the tokens)"),
    ),
)
TRTLLM = Engine(
    name="trtllm",
    title="TensorRT-LLM",
    version="fa013630 (PyTorch backend)",
    aliases=("trt", "trt-llm", "tensorrt-llm", "tensorrt_llm"),
    defaults=(("free_gpu_memory_fraction", "0.9"), ("tokens_per_block", "32")),
)
ENGINES = (VLLM, SGLANG, TRTLLM)


def find_engine(name: str, *, typed: str) -> Engine:
    """The engine called ``name``; raises ``UserError`` for ``typed``, which named none."""
    wanted = name.strip().lower()
    known = {spelling: engine for engine in ENGINES for spelling in (engine.name, *engine.aliases)}
    if wanted in known:
        return known[wanted]
    raise UserError(
        f"--like {typed}: there is no engine {name.strip()!r} here{close_to(wanted, known)}",
        need=f"one of {', '.join(engine.name for engine in ENGINES)} before the colon",
        remedy="write for example --like vllm:gpu_memory_utilization=0.9",
    )


def close_to(wanted: str, known: Iterable[str]) -> str:
    """``; did you mean max_num_seqs?`` or nothing."""
    import difflib  # only a misspelt name needs it

    near = difflib.get_close_matches(wanted, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def write_near(engine: str, wanted: str, known: Iterable[str]) -> str:
    """What to write for a knob that there is not: the names nearest to it, by their letters or a word they share."""
    import difflib

    names = list(known)
    near = difflib.get_close_matches(wanted, names, n=MOST_NEAR, cutoff=0.5)
    words = set(wanted.split("_")) - {"", *COMMON_WORDS}
    near += [name for name in names if name not in near and words & set(name.split("_"))]
    ways = [f"--like {engine}:{name}" for name in near[:MOST_NEAR]]
    told = f"write {' or '.join(ways)}" if ways else "leave it out"
    return f"{told}; tonnage plan MODEL --like help lists every knob"
