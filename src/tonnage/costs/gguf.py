"""The header of a GGUF file: which tensors it holds and how each is packed. No weight is read.

Layout: magic ``GGUF``, version (2 or 3), number of tensors, number of key-value pairs; the pairs; then for every
tensor its name, its dimensions (fastest first), its type and its offset. All numbers are little-endian.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tonnage.costs.stored import StoredTensor
from tonnage.errors import InputError

#: Far beyond any published file: a larger count is not read.
_MOST_TENSORS, _MOST_PAIRS, _LONGEST_TEXT, _LONGEST_ARRAY = 1_000_000, 100_000, 2**24, 2**24

#: Type number -> (name, elements of one block, bytes of one block), as ggml defines its packed types.
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 28: ("F64", 1, 8),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 20: ("IQ4_NL", 32, 18), 39: ("MXFP4", 32, 17),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
}  # fmt: skip
#: How the key-value types of a fixed size are stored; 8 is a text, 9 an array.
_FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LONGEST_LIST = 10_000
_PART_NUMBER = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True, slots=True)
class _Reader:
    stream: BinaryIO
    file: Path

    def read(self, size: int) -> bytes:
        raw = self.stream.read(size)
        if len(raw) != size:
            raise self.error("it ends inside its header")
        return raw

    def number(self, form: str) -> int:
        return int(struct.unpack("<" + form, self.read(struct.calcsize("<" + form)))[0])

    def count(self, most: int) -> int:
        value = self.number("Q")
        if value > most:
            raise self.error(f"its header counts {value:,} of something that is at most {most:,}")
        return value

    def text(self) -> str:
        return self.read(self.count(_LONGEST_TEXT)).decode("utf-8", "replace")

    def value(self, kind: int) -> object:
        """A number or a text; of a list its numbers, or how many texts it holds where it holds those."""
        if kind == 8:
            return self.text()
        if kind != 9:
            if kind not in _FORMS:
                raise self.error(f"its header holds a value of unknown type {kind}")
            return self.scalar(kind)
        inner, length = self.number("I"), self.count(_LONGEST_ARRAY)
        if inner in _FORMS and length <= _LONGEST_LIST:
            return [self.scalar(inner) for _ in range(length)]
        for _ in range(length):
            self.skip_value(inner, 1)
        return length

    def scalar(self, kind: int) -> int | float | bool:
        form = "<" + _FORMS[kind]
        found: int | float | bool = struct.unpack(form, self.read(struct.calcsize(form)))[0]
        return found

    def skip_value(self, kind: int, depth: int = 0) -> None:
        if kind == 8:
            self.stream.seek(self.count(_LONGEST_TEXT), 1)
        elif kind == 9 and depth < 4:
            inner, length = self.number("I"), self.count(_LONGEST_ARRAY)
            if inner in _FORMS:
                self.stream.seek(struct.calcsize("<" + _FORMS[inner]) * length, 1)
            else:
                for _ in range(length):
                    self.skip_value(inner, depth + 1)
        elif kind in _FORMS:
            self.stream.seek(struct.calcsize("<" + _FORMS[kind]), 1)
        else:
            raise self.error(f"its header holds a value of unknown type {kind}")

    def tensor(self) -> StoredTensor:
        name, num_dims = self.text(), self.number("I")
        if num_dims > 8:
            raise self.error(f"{name[:100]!r} has {num_dims} dimensions")
        dims = tuple(self.number("Q") for _ in range(num_dims))
        kind, _offset = self.number("I"), self.number("Q")
        if kind not in GGML_TYPES:
            raise self.error(f"{name[:100]!r} is of type {kind}, which this release does not know")
        label, elements, num_bytes = GGML_TYPES[kind]
        total = math.prod(dims)
        if total % elements:
            raise self.error(f"{name[:100]!r} has {total:,} elements, no multiple of {elements}")
        return StoredTensor(name=name, dtype=label, shape=dims[::-1], num_bytes=total // elements * num_bytes)

    def error(self, what: str) -> InputError:
        return InputError(f"{self.file.name} cannot be used: {what}", remedy="download the file again")


def gguf_files(folder: Path) -> list[Path]:
    """The GGUF files in a folder, by name."""
    return sorted(folder.glob("*.[gG][gG][uU][fF]"))


def model_names(files: Iterable[Path]) -> list[str]:
    """Of the models that the files hold: numbered parts are one model."""
    return sorted({_PART_NUMBER.sub("", file.stem) for file in files})


def model_parts(file: Path) -> list[Path]:
    """Every file of a model, given one: its numbered parts, or the file alone."""
    name = _PART_NUMBER.sub("", file.stem)
    if name == file.stem:
        return [file]
    return [each for each in gguf_files(file.parent) if _PART_NUMBER.sub("", each.stem) == name != each.stem]


def read_gguf(file: Path) -> tuple[StoredTensor, ...]:
    """Every tensor of one file. Raises ``InputError`` for a file that is no GGUF file or whose header is broken."""
    with file.open("rb") as stream:
        reader, num_tensors, num_pairs = _start(stream, file)
        for _ in range(num_pairs):
            reader.text()
            reader.skip_value(reader.number("I"))
        return tuple(reader.tensor() for _ in range(num_tensors))


def read_metadata(file: Path) -> dict[str, object]:
    """The key-value pairs of one file; a list of texts comes as its length. Raises ``InputError`` as ``read_gguf``."""
    with file.open("rb") as stream:
        reader, _num_tensors, num_pairs = _start(stream, file)
        return {reader.text(): reader.value(reader.number("I")) for _ in range(num_pairs)}


def _start(stream: BinaryIO, file: Path) -> tuple[_Reader, int, int]:
    """The reader behind the fixed part of the header, how many tensors there are, and how many pairs."""
    reader = _Reader(stream, file)
    if stream.read(4) != b"GGUF":
        raise reader.error("it does not start like a GGUF file")
    version = reader.number("I")
    if version not in (2, 3):
        raise reader.error(f"version {version} of the format is not known to this release")
    num_tensors, num_pairs = reader.count(_MOST_TENSORS), reader.count(_MOST_PAIRS)
    return reader, num_tensors, num_pairs
