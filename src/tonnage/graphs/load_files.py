"""Files about a load: batch sizes with their counts, steps one by one, requests, and step times.

Rows are objects of a ``.jsonl`` or ``.json`` array, or lines of a ``.csv`` with a header. Keys decide what they are:

    batch_size [, count]            steps: one, or that many, of so many sequences
    arrival_us, output_tokens       a request: when it arrives, how long its output is
    batch_size, step_us             a measured step time

A ``.json`` object is a histogram: sizes to counts, by itself or under "counts". Keys beside these are passed over.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import NoReturn

from tonnage.errors import InputError
from tonnage.graphs.histogram import Histogram
from tonnage.graphs.traffic import Request

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


def read_step_times(path: Path) -> dict[int, int]:
    """From batch size to nanoseconds. Raises ``InputError`` naming file and line."""
    points: dict[int, int] = {}
    for where, row in _rows(path):
        size = _whole(path, where, row, "batch_size", most=MOST_SEQUENCES)
        step_ns = round(_number(path, where, row, "step_us") * 1000)
        if size == 0 or step_ns == 0:
            _fail(path, f"{where}: a batch of {size} that takes {step_ns} ns is no step")
        if points.setdefault(size, step_ns) != step_ns:
            _fail(path, f"{where}: batch size {size} has two step times")
    if not points:
        _fail(path, "holds no rows")
    return points


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
        document = _json(path, text, "")
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
        _fail(path, f"cannot be read: {fault.strerror}")


def _json(path: Path, text: str, where: str) -> object:
    try:
        return json.loads(text, parse_float=Fraction, parse_constant=_refuse)
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
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None


def _fail(path: Path, what: str, *, need: str | None = None) -> NoReturn:
    raise InputError(f"{path}: {what}", value=str(path), need=need, remedy=REMEDY)
