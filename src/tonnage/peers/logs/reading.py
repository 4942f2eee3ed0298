"""From the text of a log to its figures. Lines that are not known are passed over; nothing in a log is an error."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from fractions import Fraction

from tonnage.errors import InputError
from tonnage.peers.commands import kinds
from tonnage.peers.commands.command import Flag
from tonnage.peers.logs import failures
from tonnage.peers.logs.log import Failure, Figure, Log, Unit
from tonnage.peers.logs.patterns import ENGINES, PATTERNS, RANK, VERSIONS, Pattern
from tonnage.units import GiB, MiB

#: Characters of one line that are looked at: the settings of SGLang are one line of some thousand.
MOST_OF_A_LINE = 20_000
MOST_LINES = 500_000
_SCALES = {Unit.GIB: GiB, Unit.MIB: MiB, Unit.BYTES: 1, Unit.COUNT: 1, Unit.TIMES: 1000, Unit.SHARE: 10**6}
#: Lines of one engine that settle whose log it is.
_ENOUGH = 40
#: Characters in which a figure stands, and a word without which a line has none.
_MOST_OF_A_FIGURE = 2_000
_MAYBE = re.compile(
    "total_gpu_memory|gpu_memory_utilization|instance can use|model weights|non_torch_memory|activation|loading took|"
    "blocks|KV [cC]ache|kv_?[cC]ache|concurrency|[Gg]raph|memory|Memory|attention block|avail mem|mem usage|mamba|"
    "max_total_num_tokens|max seq len|max_seq_len|fraction|kv size|paged|engine size|per block|sampler|unrecognized|"
    "capacity|max_num_seqs|bytes for k/v|weights"
)
#: A line of a server that runs: there are thousands of each, and they tell nothing of its start.
_RUNNING = re.compile(r"KV cache usage|Decode batch|Prefill batch|iter = \d|HTTP/1|throughput")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
#: A line that begins a start anew: a log may hold several.
_BEGINS = {
    "vllm": re.compile(r"vLLM API server version"),
    "sglang": re.compile(r"server_args=ServerArgs\("),
}


def read_log(text: str, *, engine: str | None = None, name: str = "-") -> Log:
    """The last start that ``text`` tells of. ``engine``: whose log it is, where its lines do not say.

    Raises ``InputError`` where no line is one of an engine's start.
    """
    lines = [_ESCAPES.sub("", line[:MOST_OF_A_LINE]).rstrip() for line in text.splitlines()[:MOST_LINES]]
    found = engine or engine_of(lines)
    if found is None:
        raise InputError(
            f"{name} has no line of a start of vLLM, SGLang or TensorRT-LLM",
            value=name,
            remedy="give the log from its first line on, and --engine NAME==VERSION where it does not say",
        )
    start = _begin(found, lines)
    figures: list[Figure] = []
    failed: list[Failure] = []
    for number, whole in enumerate(lines[start:], start + 1):
        if _MAYBE.search(whole) is None or _RUNNING.search(whole):
            continue
        line = whole[:_MOST_OF_A_FIGURE]
        figures += _figures(found, line, number)
        if (failure := _failure(line, number)) is not None:
            failed.append(failure)
    model, flags = settings_in(found, lines[start:])
    return Log(
        engine=found,
        version=_version(found, lines),
        model=model,
        flags=flags,
        figures=tuple(figures),
        failures=tuple(_first_of_each(failed)),
        num_lines=len(lines),
    )


def engine_of(lines: Iterable[str]) -> str | None:
    """The engine whose lines are most of it."""
    counts = dict.fromkeys(ENGINES, 0)
    for line in lines:
        for engine, pattern in ENGINES.items():
            counts[engine] += bool(pattern.search(line))
        if max(counts.values()) >= _ENOUGH:
            break
    best = max(counts, key=lambda engine: counts[engine])
    return best if counts[best] else None


def _begin(engine: str, lines: list[str]) -> int:
    pattern = _BEGINS.get(engine)
    starts = [place for place, line in enumerate(lines) if pattern is not None and pattern.search(line)]
    return starts[-1] if starts else 0


def _version(engine: str, lines: Iterable[str]) -> str | None:
    found = None
    for line in lines:
        if match := VERSIONS[engine].search(line):
            found = next(group for group in match.groups() if group)
    return None if found is None else found.rstrip(".,;)")


def _figures(engine: str, line: str, number: int) -> Iterator[Figure]:
    tag = rank_of(line)
    for pattern in PATTERNS[engine]:
        for name, unit, value, rounding in _numbers(pattern, line):
            yield Figure(name=name, value=value, unit=unit, rounding=rounding, rank=tag, line=number)


def rank_of(line: str) -> str:
    """The tag of the process, empty where the line has none."""
    match = RANK.search(line[:200])
    if match is None:
        return ""
    tag = next(group for group in match.groups() if group)
    return f"TP{tag}" if tag.isdecimal() else tag


def _numbers(pattern: Pattern, line: str) -> Iterator[tuple[str, Unit, int, int]]:
    match = pattern[0].search(line)
    if match is None:
        return
    for (name, unit), text in zip(pattern[1], match.groups(), strict=True):
        plain = text.replace(",", "")
        decimals = len(plain.partition(".")[2])
        scale = _SCALES[unit]
        half = Fraction(scale, 2 * 10**decimals) if "." in plain or unit in (Unit.GIB, Unit.MIB) else Fraction(0)
        yield name, unit, round(Fraction(plain) * scale), int(half)


def _failure(line: str, number: int) -> Failure | None:
    for kind, pattern in failures.PATTERNS:
        if pattern[0].search(line):
            numbers = {name: value for name, _, value, _ in _numbers(pattern, line)}
            if estimate := failures.ESTIMATE.search(line):
                numbers["estimated_max_model_len"] = int(estimate[1].replace(",", ""))
            return Failure(kind=kind, line=number, text=line.strip()[:400], numbers=numbers)
    return None


def _first_of_each(failed: list[Failure]) -> Iterator[Failure]:
    """An error is told by every process, and again by whoever waits for it."""
    seen = set()
    for failure in failed:
        if (failure.kind, tuple(sorted(failure.numbers.items()))) not in seen:
            seen.add((failure.kind, tuple(sorted(failure.numbers.items()))))
            yield failure


_NON_DEFAULT = re.compile(r"non-default args: (\{.*\})")
_CALLS = re.compile(r"(?:args: Namespace|server_args=ServerArgs|KvCacheConfig)\((.*)\)")
_WITH_CONFIG = re.compile(r"LLM engine (?:\(v?[^)\s]+\) )?with config: (.*)")
_PAIR = re.compile(r"(?<![\w.])([a-z_][a-z0-9_]*)=('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\[[^\[\]]*\]|[^,()\s]+)")
#: Settings of vLLM's line about its whole configuration, by the names that they are typed with.
_CONFIG_NAMES = {
    "max_seq_len": "max_model_len", "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size", "data_parallel_size": "data_parallel_size",
    "quantization": "quantization", "enforce_eager": "enforce_eager", "kv_cache_dtype": "kv_cache_dtype",
    "enable_prefix_caching": "enable_prefix_caching", "dtype": "dtype",
}  # fmt: skip


def settings_in(engine: str, lines: Iterable[str]) -> tuple[str | None, tuple[Flag, ...]]:
    """The model and the settings that the log prints, as flags. What stands in the non-default arguments counts
    before what stands in the whole configuration."""
    whole: dict[str, object] = {}
    given: dict[str, object] = {}
    model = None
    for line in lines:
        if match := _NON_DEFAULT.search(line):
            given.update(_dictionary(match[1]))
        elif engine != "trtllm" and (match := _CALLS.search(line)):
            given.update(_pairs(match[1]))
        elif engine == "vllm" and (match := _WITH_CONFIG.search(line)):
            pairs = _pairs(match[1])
            model = str(pairs["model"]) if "model" in pairs else model
            whole.update({_CONFIG_NAMES[name]: value for name, value in pairs.items() if name in _CONFIG_NAMES})
    for name in ("model_tag", "model", "model_path"):
        model = str(given[name]) if given.get(name) else model
    flags = [_flag(engine, name, value) for name, value in {**whole, **given}.items() if value is not None]
    return model, tuple(flag for flag in flags if kinds.kind_of(engine, flag.name) is not None)


def _flag(engine: str, name: str, value: object) -> Flag:
    known = kinds.canonical(engine, name)
    if isinstance(value, bool):
        return Flag(name=known, written=name, text=str(value).lower())
    text = str(value).removeprefix("torch.") if isinstance(value, str) else _text(value)
    return Flag(name=known, written=name, text=text)


def _text(value: object) -> str:
    import json

    try:
        return json.dumps(value, default=str) if isinstance(value, dict | list | tuple) else str(value)
    except (ValueError, TypeError, RecursionError):
        return "null"


def _dictionary(text: str) -> dict[str, object]:
    """A Python dict as it is printed; where an object inside cannot be read, its plain pairs alone."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        pairs = re.findall(r"'(\w+)': ('(?:[^'\\]|\\.)*'|-?[\d.]+|True|False|\[[^\[\]]*\])", text)
        value = {name: _literal(word) for name, word in pairs}
    return {str(name): inside for name, inside in value.items()} if isinstance(value, dict) else {}


def _pairs(text: str) -> dict[str, object]:
    return {match[1]: _literal(match[2]) for match in _PAIR.finditer(text)}


def _literal(word: str) -> object:
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return word
