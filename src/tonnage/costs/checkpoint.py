"""What a folder of weights says about itself: headers of safetensors files, their index, or the header of a GGUF file.

No weight is read. A safetensors file starts with the length of its header, eight bytes little-endian, then the
header as JSON: for every tensor its dtype, its shape, and where its bytes begin and end behind the header.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tonnage.costs.gguf import gguf_files, model_names, model_parts, read_gguf
from tonnage.costs.stored import StoredTensor
from tonnage.errors import InputError, ModelNotFound

#: No published header comes near; the format itself allows no more.
LARGEST_HEADER_BYTES = 100_000_000
_INDEX = "model.safetensors.index.json"
_REMEDY = "download the file again, or plan from config.json alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What is stored. ``tensors`` is empty where only the index was there, which names no sizes but the total.

    total_bytes  of all tensors, as stored
    ref          which files said so
    """

    tensors: tuple[StoredTensor, ...]
    total_bytes: int
    ref: str


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint | None:
    """The best that a folder or one file tells: headers, then the index, then a GGUF header; None if there is none.

    Raises ``ModelNotFound`` where the path does not exist, ``InputError`` for a file that is not what it claims.
    """
    root = Path(path).expanduser()
    if not root.exists():
        raise ModelNotFound(f"{root}: no such file or folder", remedy="give the folder that holds the weights")
    try:
        return _read(root)
    except OSError as error:
        raise InputError(f"{root} cannot be read: {error.strerror or error}", remedy="check its permissions") from None


def _read(root: Path) -> Checkpoint | None:
    single = root / "model.safetensors"  # beside it lie adapters and other copies, not shards
    files = [root] if root.is_file() else [single] if single.is_file() else sorted(root.glob("*.safetensors"))
    shards = [file for file in files if file.suffix == ".safetensors"]
    index = root / _INDEX if root.is_dir() else None
    listed = _index(index) if index is not None and index.is_file() else None
    if listed is not None:
        named = [root / name for name in sorted(set(listed[1].values()))]
        if not all(file.is_file() for file in named):
            return Checkpoint(tensors=(), total_bytes=listed[0], ref=f"{_INDEX}: total_size") if listed[0] else None
        shards = named
    if shards:
        return _from_headers(shards)
    if root.is_file():
        return _from_gguf(model_parts(root) if root.suffix.lower() == ".gguf" else [])
    return _from_gguf(gguf_files(root))


def _from_gguf(files: list[Path]) -> Checkpoint | None:
    """One model, which may lie in several numbered files; several models in one folder are refused by name."""
    models = model_names(files)
    if len(models) > 1:
        raise InputError(f"the folder holds {len(models)} GGUF models: {', '.join(models)}", remedy="name one file")
    tensors = tuple(tensor for file in files for tensor in read_gguf(file))
    total = sum(tensor.num_bytes for tensor in tensors)
    return Checkpoint(tensors=tensors, total_bytes=total, ref=f"header of {files[0].name}") if files else None


def _from_headers(files: list[Path]) -> Checkpoint:
    found: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in safetensors_header(file):
            if tensor.name in found:
                raise _malformed(file, f"{tensor.name} is in another file too")
            found[tensor.name] = tensor
    total = sum(tensor.num_bytes for tensor in found.values())
    noun = "file" if len(files) == 1 else "files"
    ref = f"headers of {len(files)} safetensors {noun}, {len(found):,} tensors"
    return Checkpoint(tensors=tuple(found.values()), total_bytes=total, ref=ref)


def safetensors_header(file: Path) -> tuple[StoredTensor, ...]:
    """The tensors of one file. Raises ``InputError`` where the header is cut, too long, no JSON, or does not add up."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(LARGEST_HEADER_BYTES, size - 8):
            raise _malformed(file, f"it claims a header of {length:,} bytes in a file of {size:,}")
        try:
            header = json.loads(stream.read(length))
        except (ValueError, RecursionError):
            raise _malformed(file, "its header is no JSON") from None
    if not isinstance(header, Mapping):
        raise _malformed(file, "its header is no JSON object")
    room = size - 8 - length
    return tuple(_tensor(file, name, entry, room) for name, entry in header.items() if name != "__metadata__")


def _tensor(file: Path, name: str, entry: object, room: int) -> StoredTensor:
    try:
        if not isinstance(entry, Mapping):
            raise TypeError
        shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
        if any(type(size) is not int for size in (*shape, begin, end)):
            raise TypeError
        tensor = StoredTensor(name=str(name), dtype=str(entry["dtype"]), shape=shape, num_bytes=end - begin)
        bits = tensor.num_elements * _BITS[tensor.dtype]
        if not 0 <= begin <= end <= room or -(-bits // 8) != end - begin or min(shape, default=0) < 0:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise _malformed(file, f"the entry of {str(name)[:100]!r} does not add up") from None
    return tensor


#: Bits of one element, by the name a header gives the dtype.
_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32,
    "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I8": 8, "U8": 8, "BOOL": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


def _index(file: Path) -> tuple[int, Mapping[str, str]]:
    """(total_size or 0, file of every tensor)."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        total = (raw.get("metadata") or {}).get("total_size") or 0
        names = {str(name): os.path.basename(str(shard)) for name, shard in raw["weight_map"].items()}
        if isinstance(total, bool) or total < 0:
            raise ValueError
        return math.ceil(total), names
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError, OverflowError):
        raise _malformed(file, "it is no index of safetensors files") from None


def _malformed(file: Path, what: str) -> InputError:
    return InputError(f"{file.name} cannot be used: {what}", remedy=_REMEDY)
