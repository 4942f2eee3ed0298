"""Files about a load: batch sizes with their counts, steps one by one, requests, and step times.

Rows are objects of a ``.jsonl`` or ``.json`` array, or lines of a ``.csv`` with a header. Keys decide what they are:

    batch_size [, count]            steps: one, or that many, of so many sequences
    arrival_us, output_tokens       a request: when it arrives, how long its output is
    batch_size, step_us             a measured step; several of one size are samples, of which the median counts
    rows, bucket, step_us, graph_us [, padded_us]
                                    a step taken apart, as ``benchmarks/step_parts.py`` files it: ``rows`` sequences in
                                    a graph of ``bucket``, the replay of that, and one of padding alone; samples of the
                                    last two under graph_samples_us and padded_samples_us

A ``.json`` object has rows under "rows", is what ``tonnage bench --output`` kept (its requests), or a histogram: sizes
to counts, by itself or under "counts". Keys beside these are passed over.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import NoReturn

from tonnage.errors import InputError
from tonnage.files import to_read, why
from tonnage.graphs.histogram import Histogram
from tonnage.graphs.step_times import StepPoints
from tonnage.graphs.traffic import Request
from tonnage.units import exact

#: Of files that ``tonnage bench`` writes; a room above this one, which this one may not import.
BENCH_SCHEMA = "tonnage.bench/1"
REMEDY = "see docs/graph-buckets.md for the files that are read"
#: Larger than any batch, count, length or time here; a guard against a typing error that would fill the memory.
MOST_SEQUENCES, MOST_NUMBER = 2**16, 2**53

Row = Mapping[str, object]


def read_load(path: Path) -> Histogram | tuple[Request, ...]:
    """A histogram, or the requests that one comes from. Raises ``InputError`` naming file and line."""
    rows = list(_rows(path))
    if not rows:
        _fail(path, "holds no rows")
    where, first = rows[0]
    if "batch_size" in first:
        return _histogram(path, rows)
    if not {"arrival_us", "output_tokens"} <= first.keys():
        found = ", ".join(map(repr, first)) or "nothing"
        _fail(path, f"{where}: has {found}", need="batch_size, or arrival_us and output_tokens")
    requests = tuple(_request(path, where, row) for where, row in rows)
    if all(request.output_tokens == 1 for request in requests):
        _fail(path, "no request has a second token, so nothing is ever decoded")
    return requests


def read_step_times(path: Path) -> StepPoints:
    """Medians of what was measured. Raises ``InputError`` naming file and line.

    Of a step taken apart, the graph's own time is that of padding alone, and the rest of the whole step is its rows'.
    Without such a replay every padded row is charged as a sequence, and ``told`` says so.
    """
    rows = list(_rows(path))
    if not rows:
        _fail(path, "holds no rows")
    is_apart = [row.get("graph_us") is not None for _, row in rows]
    if not any(is_apart):
        steps = _medians(
            (_size(path, where, row, "batch_size"), _times(path, where, row, "step")) for where, row in rows
        )
        return StepPoints(steps.values_ns, told=steps.told)
    part = "padded" if all(row.get("padded_us") is not None for _, row in rows) else "graph"
    graphs = _medians((_size(path, where, row, "bucket"), _times(path, where, row, part)) for where, row in rows)
    rest = _medians((_size(path, where, row, "rows"), _rest(path, where, row, part)) for where, row in rows)
    how = "; padding as in a graph of padding alone" if part == "padded" else "; a padded row charged as a sequence"
    return StepPoints(graphs.values_ns, rest.values_ns, graphs.told + how)


@dataclass(frozen=True, slots=True)
class _Medians:
    values_ns: dict[int, int]
    told: str


def _medians(found: Iterable[tuple[int, list[int]]]) -> _Medians:
    """By size the median of its samples, and how many those were in all, unless each size has one."""
    samples: dict[int, list[int]] = {}
    for size, times in found:
        samples.setdefault(size, []).extend(times)
    num = sum(map(len, samples.values()))
    told = "" if num == len(samples) else f", medians of {num:,} samples"
    return _Medians({size: round(median(times)) for size, times in samples.items()}, told)


def _times(path: Path, where: str, row: Row, part: str) -> list[int]:
    """Nanoseconds of a part of a step: its samples, or the one figure there is."""
    samples = row.get(f"{part}_samples_us")
    if samples is None:
        times = [_number(path, where, row, f"{part}_us")]
    elif isinstance(samples, list) and samples:
        times = [_number(path, where, {f"{part}_samples_us": each}, f"{part}_samples_us") for each in samples]
    else:
        _fail(path, f"{where}: {part}_samples_us is no array of numbers")
    found = [round(each * 1000) for each in times]
    if min(found) == 0:
        _fail(path, f"{where}: a step that takes 0 ns is no step")
    return found


def _rest(path: Path, where: str, row: Row, part: str) -> list[int]:
    """Nanoseconds of the whole step beside its graph's own time; noise does not make it less than nothing."""
    (whole,) = _times(path, where, {"step_us": row.get("step_us")}, "step")
    return [max(0, round(whole - median(_times(path, where, row, part))))]


def _size(path: Path, where: str, row: Row, key: str) -> int:
    size = _whole(path, where, row, key, most=MOST_SEQUENCES)
    if size == 0:
        _fail(path, f"{where}: a step of no sequences is no step")
    return size


def _histogram(path: Path, rows: list[tuple[str, Row]]) -> Histogram:
    counts = Counter[int]()
    for where, row in rows:
        size = _whole(path, where, row, "batch_size", most=MOST_SEQUENCES)
        counts[size] += _whole(path, where, row, "count") if row.get("count") is not None else 1
    del counts[0]
    if not any(counts.values()):
        _fail(path, "has no step with a sequence in it")
    return Histogram.counted(counts)


def _request(path: Path, where: str, row: Row) -> Request:
    arrival_ns = int(_number(path, where, row, "arrival_us") * 1000)
    output_tokens = _whole(path, where, row, "output_tokens")
    if output_tokens == 0:
        _fail(path, f"{where}: output_tokens is 0")
    return Request(arrival_ns, output_tokens)


def _rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Every row with its place in the file, as a person counts."""
    text = _text(path)
    if path.suffix == ".csv":
        yield from _csv_rows(path, text)
    elif path.suffix == ".jsonl":
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield f"line {number}", _object(path, f"line {number}", _json(path, line, f"line {number}"))
    elif path.suffix == ".json":
        document = _listed(_json(path, text, ""))
        if isinstance(document, dict):
            counts = document.get("counts", {k: v for k, v in document.items() if k != "schema"})
            for size, count in _object(path, "counts", counts).items():
                yield f"size {size!r}", {"batch_size": size, "count": count}
        elif isinstance(document, list):
            for number, row in enumerate(document, 1):
                yield f"row {number}", _object(path, f"row {number}", row)
        else:
            _fail(path, "holds neither an object nor an array")
    else:
        _fail(path, f"ends in {path.suffix!r}", need=".csv, .jsonl or .json")


def _listed(document: object) -> object:
    """The rows of a file that is more than its rows; anything else as it is. A request of ``tonnage bench`` that failed
    before its first token was never decoded."""
    if not isinstance(document, dict):
        return document
    if document.get("schema") == BENCH_SCHEMA and isinstance(document.get("samples"), list):
        samples = [each for each in document["samples"] if isinstance(each, dict) and each.get("num_output_tokens")]
        return [{**each, "output_tokens": each["num_output_tokens"]} for each in samples]
    return document["rows"] if isinstance(document.get("rows"), list) else document


def _csv_rows(path: Path, text: str) -> Iterator[tuple[str, Row]]:
    lines = csv.reader(text.splitlines())
    header = [name.strip() for name in next(lines, [])]
    for cells in lines:
        if not cells:
            continue
        where = f"line {lines.line_num}"
        if len(cells) != len(header):
            _fail(path, f"{where}: has {len(cells)} cells, and the header {len(header)}")
        yield where, dict(zip(header, (cell.strip() for cell in cells), strict=True))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        _fail(path, "is not text")
    except OSError as fault:
        raise InputError(f"{path}: cannot be read: {why(fault)}", value=str(path), remedy=to_read(fault)) from None


def _json(path: Path, text: str, where: str) -> object:
    try:
        return json.loads(text, parse_float=exact, parse_constant=_refuse)
    except (ValueError, RecursionError) as fault:
        _fail(path, f"{where or 'it'}: is not JSON ({fault})")


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number of JSON")


def _object(path: Path, where: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        _fail(path, f"{where}: is not an object")
    return value


def _whole(path: Path, where: str, row: Row, key: str, *, most: int = MOST_NUMBER) -> int:
    value = _number(path, where, row, key)
    if value.denominator != 1 or value > most:
        _fail(path, f"{where}: {key} = {row[key]} is not a whole number up to {most:,}")
    return int(value)


def _number(path: Path, where: str, row: Row, key: str) -> Fraction:
    """At least 0. A number of JSON, or the text of a cell or of a key."""
    value = row.get(key)
    if value is None:
        _fail(path, f"{where}: has no {key}")
    number = None
    if isinstance(value, int | Fraction) and not isinstance(value, bool):
        number = Fraction(value)
    elif isinstance(value, str) and value[:1].isdigit() and len(value) <= 32:
        number = _fraction(value)
    if number is None or not 0 <= number <= MOST_NUMBER:
        _fail(path, f"{where}: {key} = {value!r} is not a number of at least 0")
    return number


def _fraction(text: str) -> Fraction | None:
    try:
        return exact(text)
    except (ValueError, ZeroDivisionError):
        return None


def _fail(path: Path, what: str, *, need: str | None = None) -> NoReturn:
    raise InputError(f"{path}: {what}", value=str(path), need=need, remedy=REMEDY)
