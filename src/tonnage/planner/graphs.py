"""The knob ``graphs``: which decode batch sizes get a CUDA graph of their own, as users, files and peers say it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from tonnage.config import BUCKETS_SCHEMA, FITTED_LIST, Origin, Setting
from tonnage.errors import InputError, InvalidSetting
from tonnage.files import to_read, why
from tonnage.planner.buckets import GENERATORS, default_sizes, filter_sizes
from tonnage.units import parse_count

#: A list longer than this is a typing error: each graph costs megabytes and a fraction of a second.
MOST_GRAPHS = 1024
NONE, DEFAULT = "none", "default"
#: Words that may be written, and the one that is kept.
_WORDS: Mapping[str, str] = MappingProxyType(
    {"none": NONE, "off": NONE, "default": DEFAULT, "auto": DEFAULT} | {name: name for name in GENERATORS}
)
_REMEDY = (
    f"write none, default, {', '.join(GENERATORS)}, sizes such as 1,2,4,8, or a .json file of tonnage buckets --output"
)
_HOW_TO_WRITE = "write one with tonnage buckets LOAD --output FILE"
_NO_SUCH_GRAPHS = "has no graphs here, which would own a memory pool and a line of the plan: only steps of decodes do"
#: Other things that engines capture, refused by name.
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "piecewise": f"a step of prompts, in pieces between its attention layers, {_NO_SUCH_GRAPHS}",
        "full_and_piecewise": f"a step of prompts, in pieces between its attention layers, {_NO_SUCH_GRAPHS}",
        "encoder": f"an encoder {_NO_SUCH_GRAPHS}",
    }
)


def read_graphs(text: str | int, *, knob: str = "graphs") -> str:
    """The knob as it is kept: ``none``, ``default``, ``x2``, ``+64``, ``+8``, or ascending sizes between commas.

    ``off`` is none and ``auto`` default; a file that ``tonnage buckets --output`` wrote becomes the sizes in it.
    Raises ``InvalidSetting`` naming ``knob`` for anything else, and ``InputError`` for a file that cannot be read.
    """
    text = str(text).strip()
    word = text.lower()
    if word in _WORDS:
        return _WORDS[word]
    if word in _REFUSED:
        raise InvalidSetting(knob, text, _REFUSED[word], remedy=_REMEDY)
    if word.endswith(".json"):
        return ",".join(map(str, _sizes_in(Path(text), knob)))
    if not word[:1].isdigit():
        raise InvalidSetting(knob, text, "not a list of batch sizes", remedy=_REMEDY)
    sizes = sorted({parse_count(part, knob=knob) for part in word.split(",")})
    if len(sizes) > MOST_GRAPHS:
        raise InvalidSetting(knob, f"{len(sizes)} sizes", f"more than {MOST_GRAPHS}", remedy="name fewer sizes")
    return ",".join(map(str, sizes))


def read_sizes(text: str, *, max_batch_size: int, knob: str = "graphs") -> tuple[int, ...]:
    """The sizes that such a text stands for, ascending, none above ``max_batch_size``.

    Raises as ``read_graphs``, and ``InvalidSetting`` for a size above ``max_batch_size``: no step could replay it.
    """
    kept = read_graphs(text, knob=knob)
    if kept in _WORDS:
        return () if kept == NONE else GENERATORS.get(kept, default_sizes)(max_batch_size)
    sizes = named_sizes(kept)
    if sizes[-1] > max_batch_size:
        raise InvalidSetting(
            knob,
            text,
            f"{sizes[-1]} is above max_batch_size = {max_batch_size}, so no step could replay it",
            remedy=f"leave out sizes above {max_batch_size}, or raise max_batch_size",
        )
    return sizes


def named_sizes(kept: str) -> tuple[int, ...]:
    """The sizes of a text that ``read_graphs`` gave; empty for a word."""
    return () if kept in _WORDS else tuple(map(int, kept.split(",")))


def graph_sizes(
    asked: Setting[str], *, max_batch_size: int, max_num_tokens: int, step_tokens: int, on_host: bool
) -> tuple[int, ...]:
    """The sizes, ascending, none above ``max_batch_size``; empty for none, and where there are no graphs (a host).

    A list in another engine's words is cut as the engines cut theirs: it may go beyond what a step can reach, which is
    ``max_num_tokens`` at ``step_tokens`` a sequence. Raises as ``read_sizes``.
    """
    kept = DEFAULT if asked.value is None else read_graphs(asked.value)
    if on_host:
        if kept in (NONE, DEFAULT):
            return ()
        raise InvalidSetting("graphs", asked.value, "a host captures no graphs", remedy="leave graphs out")
    if asked.origin is Origin.PEER and named_sizes(kept):
        return filter_sizes(
            named_sizes(kept),
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            tokens_per_request=step_tokens,
            is_padded=True,
        )
    return read_sizes(kept, max_batch_size=max_batch_size)


def uncovered(asked: Setting[str], sizes: tuple[int, ...], *, max_batch_size: int) -> str:
    """Where somebody named sizes and steps may have more sequences than the largest: what becomes of those steps."""
    if not asked.is_set or asked.origin is Origin.FIT or not sizes or sizes[-1] >= max_batch_size:
        return ""
    return (
        f"graphs end at {sizes[-1]:,}: a step of more sequences, of which there may be {max_batch_size:,}, is launched "
        "kernel by kernel"
    )


def _sizes_in(path: Path, knob: str) -> tuple[int, ...]:
    """The chosen list of such a file. Raises ``InputError`` naming it."""
    told = f"{knob} = {str(path)!r}"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as fault:
        remedy = f"{to_read(fault)}; {_HOW_TO_WRITE}"
        raise InputError(f"{told} cannot be read: {why(fault)}", knob=knob, value=str(path), remedy=remedy) from None
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or document.get("schema") != BUCKETS_SCHEMA:
        raise InputError(
            f"{told}: not a file of graph sizes, which has schema {BUCKETS_SCHEMA}",
            knob=knob,
            value=str(path),
            remedy=_HOW_TO_WRITE,
        )
    sizes = next(
        (each.get("sizes") for each in _objects(document.get("lists")) if each.get("name") == FITTED_LIST), None
    )
    if not isinstance(sizes, list) or not 1 <= len(sizes) <= MOST_GRAPHS or not all(map(_is_size, sizes)):
        what = f"{told}: holds no list called {FITTED_LIST} of 1 to {MOST_GRAPHS} sizes"
        raise InputError(what, knob=knob, value=str(path), remedy=_HOW_TO_WRITE)
    return tuple(sorted(set(sizes)))


def _objects(value: object) -> list[dict[str, object]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
