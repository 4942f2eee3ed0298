"""Flags to write instead, each tried by predicting again: what still fails is never suggested."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction

from tonnage.costs.layers import Attention, Latent
from tonnage.peers.commands import known
from tonnage.peers.lint.case import Case, number_of
from tonnage.peers.start import Start
from tonnage.units import decimal_text

Changes = Mapping[str, object]
#: Whether a start that was tried does what is wanted.
Works = Callable[[Start], bool]

_LENGTH = {"vllm": "max_model_len", "sglang": "context_length", "trtllm": "max_seq_len"}
_SHARE = {"vllm": "gpu_memory_utilization", "sglang": "mem_fraction_static", "trtllm": "free_gpu_memory_fraction"}
_SEQUENCES = {"vllm": "max_num_seqs", "sglang": "max_running_requests", "trtllm": "max_batch_size"}
_STEP = {"vllm": "max_num_batched_tokens", "sglang": "chunked_prefill_size", "trtllm": "max_num_tokens"}
_RANKS = {"vllm": "tensor_parallel_size", "sglang": "tp_size", "trtllm": "tp_size"}
_SHARES = tuple(Fraction(text) for text in ("0.9", "0.92", "0.95", "0.97"))
#: The least length that is worth a suggestion, and what suggestions are multiples of.
_LEAST_TOKENS, _STEP_TOKENS = 1024, 256
#: Compute capability times ten from which the engines' default backends read a cache in 8 bits.
FP8_SM = 89
_MOST = 4


def _any(start: Start) -> bool:
    del start
    return True


def remedies(
    case: Case, start: Start, works: Works = _any, *, raised: bool = True, lowered: bool = True
) -> tuple[str, ...]:
    """Single changes after which it starts and ``works`` holds; where there is none, pairs of them. At most four.
    ``raised``, ``lowered``: whether a share of memory may be so."""
    found = []
    singles = list(_candidates(case, start, works, raised=raised, lowered=lowered))
    for family in singles:
        for changes in family:
            tried = case.tried(changes)
            if tried is not None and works(tried):
                found.append(flags_text(case, changes))
                break
    if not found:
        found = _pairs(case, singles, works)
    return tuple(dict.fromkeys(found))[:_MOST]


def _pairs(case: Case, families: list[list[Changes]], works: Works) -> list[str]:
    """The last, that is the strongest, of two families together."""
    for place, first in enumerate(families):
        for second in families[place + 1 :]:
            changes = {**first[-1], **second[-1]} if first and second else {}
            tried = case.tried(changes) if changes else None
            if tried is not None and works(tried):
                return [flags_text(case, changes)]
    return []


def _candidates(case: Case, start: Start, works: Works, *, raised: bool, lowered: bool) -> Iterator[list[Changes]]:
    """Families of one flag each, mildest value first; in the order in which people would rather give something up."""
    yield _sequences(case, start)
    yield [{"kv_cache_dtype": _fp8(case)}] if can_fp8(case) else []
    yield _shares(case, start) if raised else []
    yield lower_shares(case, start)[:20] if lowered else []
    yield _shorter(case, start, works)
    yield _steps(case, start)
    yield _eager(case)
    tp = case.parallel().tp
    yield [{_RANKS[case.engine]: tp * more} for more in (2, 4, 8) if tp * more <= 64]


def _sequences(case: Case, start: Start) -> list[Changes]:
    name = _SEQUENCES[case.engine]
    now = number_of(case, start, name)
    return [{name: number} for number in (256, 128, 64, 32, 16, 8, 4) if now is not None and number < now]


def _shares(case: Case, start: Start) -> list[Changes]:
    name = _SHARE[case.engine]
    now = case.settings.get(name)
    least = now if isinstance(now, Fraction) else _default_share(start, name)
    return [{name: share} for share in _SHARES if share > least]


def _steps(case: Case, start: Start) -> list[Changes]:
    name = _STEP[case.engine]
    now = number_of(case, start, name)
    return [{name: number} for number in (8192, 4096, 2048) if now is not None and number < now]


def _eager(case: Case) -> list[Changes]:
    if case.engine == "trtllm":
        return []
    name = "enforce_eager" if case.engine == "vllm" else "disable_cuda_graph"
    return [] if case.settings.get(name) else [{name: True}]


def _shorter(case: Case, start: Start, works: Works) -> list[Changes]:
    """The longest length, a multiple of 256 tokens, that starts and works; none where not even the least does."""

    def fits(tokens: int) -> bool:
        tried = case.tried({name: tokens})
        return tried is not None and works(tried)

    name = _LENGTH[case.engine]
    low, high = _LEAST_TOKENS // _STEP_TOKENS, start.max_model_len // _STEP_TOKENS
    if high <= low or not fits(low * _STEP_TOKENS):
        return []
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * _STEP_TOKENS) else (low, middle)
    return [{name: low * _STEP_TOKENS}]


def can_fp8(case: Case) -> bool:
    """Whether the card and the model can have a cache in 8 bits, and have none yet."""
    asked = case.settings.get("kv_cache_dtype", "auto")
    mixers = [mixer for layer in case.config.layers for mixer in layer.mixers]
    return asked == "auto" and case.card.sm >= FP8_SM and any(isinstance(mixer, Attention | Latent) for mixer in mixers)


def _fp8(case: Case) -> str:
    return "fp8_e4m3" if case.engine == "sglang" else "fp8"


def fp8_changes(case: Case) -> Changes:
    """The change that keeps the cache in 8 bits."""
    return {"kv_cache_dtype": _fp8(case)}


def lower_shares(case: Case, start: Start) -> list[Changes]:
    """Smaller shares of memory, largest first, in hundredths below what is asked or the release's default."""
    name = _SHARE[case.engine]
    now = case.settings.get(name)
    share = now if isinstance(now, Fraction) else _default_share(start, name)
    hundredths = int(share * 100)
    return [{name: Fraction(number, 100)} for number in range(hundredths - (share * 100 == hundredths), 29, -1)]


def _default_share(start: Start, name: str) -> Fraction:
    for known_name, value, _ in start.defaults:
        if known_name == name:
            try:
                return Fraction(value.split(" ")[0])
            except (ValueError, ZeroDivisionError):
                break
    return Fraction(9, 10)


def flags_text(case: Case, changes: Changes) -> str:
    """The changes as they are typed on that engine's command line, or in TensorRT-LLM's options file."""
    return " ".join(_flag(case.engine, name, value) for name, value in changes.items() if value is not None)


def _flag(engine: str, name: str, value: object) -> str:
    if engine == "trtllm" and name not in known.TRTLLM:
        return f"{name}: {_text(value)} in the options file"
    dashed = "--" + (name if engine == "trtllm" else name.replace("_", "-"))
    if value is True:
        return dashed
    return f"--no-{dashed[2:]}" if value is False else f"{dashed} {_text(value)}"


def _text(value: object) -> str:
    if isinstance(value, Fraction):
        return decimal_text(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
