"""The flags that would give other engines about the same pool, as a report and a plan file show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tonnage.peers.equivalent import Equivalent, Flag, equivalents
from tonnage.report.draw import hanging
from tonnage.report.shell import pasteable
from tonnage.terms import MemoryPlan

if TYPE_CHECKING:
    from rich.text import Text

#: The knobs of TensorRT-LLM that live in a table of their own in its options file.
_KV_CACHE_CONFIG = (
    "free_gpu_memory_fraction", "max_tokens", "max_gpu_total_bytes", "tokens_per_block", "dtype", "enable_block_reuse",
)  # fmt: skip
_SWITCHES = ("enforce_eager", "disable_cuda_graph", "no_enable_prefix_caching", "disable_radix_cache")


def equivalent_document(plan: MemoryPlan) -> dict[str, Any]:
    """By engine: its version, the flags, the fraction that may stand in for the size, its defaults. Texts alone."""
    return {
        each.engine.name: {
            "version": each.engine.version,
            "limits": dict(each.limits),
            "exact": dict(each.exact),
            "fraction": dict(each.fraction),
            "defaults": dict(each.engine.defaults),
            "notes": list(each.notes),
        }
        for each in equivalents(plan)
    }


def flags_text(plan: MemoryPlan, width: int) -> Text:
    """A paragraph for each engine: what to paste, the fraction instead of the size, and what it does left alone."""
    from rich.text import Text

    text = Text(no_wrap=True, overflow="ignore")
    text.append("About the same pool elsewhere", "bold")
    for each in equivalents(plan):
        label = f"{each.engine.title:<14}"
        text.append("\n" + _shown(each, label, width))
        text.append("\n" + hanging(_aside(each), " " * len(label), width), "dim")
    return text


def _shown(each: Equivalent, label: str, width: int) -> str:
    """The flags behind the engine's name: rows that a shell reads as one, or an options file in one pair of braces."""
    flags = command(each, (*each.limits, *each.exact))
    if each.engine.name == "trtllm":
        return hanging(flags, label, width)
    return pasteable(flags, width, label=label, indent=" " * len(label))


def command(each: Equivalent, flags: Sequence[Flag]) -> str:
    """Flags as that engine takes them: on its command line, or for TensorRT-LLM in its options file."""
    if each.engine.name != "trtllm":
        return " ".join(_option(name, value) for name, value in flags)
    top = [f"{name}: {value}" for name, value in flags if name not in _KV_CACHE_CONFIG]
    cache = [f"{name}: {value}" for name, value in flags if name in _KV_CACHE_CONFIG]
    return "{" + ", ".join([*top, "kv_cache_config: {" + ", ".join(cache) + "}"]) + "}"


def _option(name: str, value: str) -> str:
    flag = "--" + name.replace("_", "-")
    return flag if name in _SWITCHES else f"{flag} {value}"


def _aside(each: Equivalent) -> str:
    told = []
    if each.exact and each.fraction:
        told.append(f"by its share alone: {pairs(each.fraction)}, without {' and '.join(_sizes(each))}")
    told.append(f"its defaults (version {each.engine.version}): {pairs(each.engine.defaults)}")
    return "; ".join([*told, *each.notes])


def _sizes(each: Equivalent) -> list[str]:
    """What the share stands in for."""
    shares = dict(each.fraction)
    return [name for name, _ in each.exact if name not in shares]


def pairs(flags: Sequence[Flag]) -> str:
    """``name value`` pairs, as they stand in a sentence."""
    return ", ".join(f"{name} {value}" for name, value in flags)
