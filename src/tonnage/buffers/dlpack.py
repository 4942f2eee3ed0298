"""Our memory as a DLPack capsule, made by hand: nothing looks behind the pointer, so pages need not be mapped yet.

The consumer calls our deleter when the last tensor over the memory goes: on any thread, perhaps while the interpreter
ends. So deleters are plain functions kept for the life of the process, they take no lock and raise nothing, and at
exit they are taken out of all structures that are still in use.
"""

from __future__ import annotations

import atexit
import ctypes
import math
from ctypes import (
    CFUNCTYPE,
    POINTER,
    PYFUNCTYPE,
    Structure,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
    cast,
    py_object,
)
from typing import Any

from tonnage.buffers.memory import Memory
from tonnage.layout import DTYPE_BYTES

CPU, CUDA = 1, 2

#: name -> (type code, bits, lanes) of dlpack.h
_TYPES = {
    "float64": (2, 64, 1), "int64": (0, 64, 1),
    "float32": (2, 32, 1), "int32": (0, 32, 1),
    "bfloat16": (4, 16, 1), "float16": (2, 16, 1), "int16": (0, 16, 1),
    "float8_e4m3fn": (10, 8, 1), "float8_e5m2": (12, 8, 1), "int8": (0, 8, 1), "uint8": (1, 8, 1), "bool": (6, 8, 1),
    "float4_e2m1fn_x2": (17, 4, 2),
}  # fmt: skip


class _Device(Structure):
    _fields_ = (("type", c_int32), ("id", c_int32))


class _Type(Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(Structure):
    _fields_ = (
        ("data", c_void_p), ("device", _Device), ("num_dimensions", c_int32), ("dtype", _Type),
        ("shape", POINTER(c_int64)), ("strides", POINTER(c_int64)), ("offset_bytes", c_uint64),
    )  # fmt: skip


class _Managed(Structure):
    """``DLManagedTensor``"""

    _fields_ = (("tensor", _Tensor), ("context", c_void_p), ("deleter", c_void_p))


class _Versioned(Structure):
    """``DLManagedTensorVersioned``: without it numpy takes the memory for read-only."""

    _fields_ = (
        ("major", c_uint32), ("minor", c_uint32), ("context", c_void_p), ("deleter", c_void_p), ("flags", c_uint64),
        ("tensor", _Tensor),
    )  # fmt: skip


_NAMES: dict[type[_Managed | _Versioned], bytes] = {_Managed: b"dltensor", _Versioned: b"dltensor_versioned"}

#: By the address of its structure, all that one capsule needs to stay alive: structure, shape, memory, number.
_live: dict[int, tuple[_Managed | _Versioned, Any, Memory, int]] = {}

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = py_object, [c_void_p, ctypes.c_char_p, c_void_p]
# Seen from a destructor the capsule has no references left: as a py_object it would be destroyed once more.
_is_named = PYFUNCTYPE(ctypes.c_int, c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer_of = PYFUNCTYPE(c_void_p, c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))


def _end(structure: int) -> None:
    """The consumer's last tensor is gone."""
    found = _live.pop(structure, None)
    if found is not None:
        found[2].exports.drop(found[3])


def _end_unused(capsule: int) -> None:
    """A capsule goes. One that was consumed has been renamed, and the consumer calls the deleter."""
    for name in _NAMES.values():
        if _is_named(capsule, name):
            _end(_pointer_of(capsule, name))


_delete, _drop_capsule = CFUNCTYPE(None, c_void_p)(_end), PYFUNCTYPE(None, c_void_p)(_end_unused)


@atexit.register
def _let_go() -> None:
    """Tensors may outlive the interpreter, whose functions may not be called then: leave memory without deleters."""
    for structure, *_ in list(_live.values()):
        structure.deleter = None
    for held in list(_live.values()):
        ctypes.pythonapi.Py_IncRef(py_object(held))


def device_of(memory: Memory) -> tuple[int, int]:
    """(type, number) as ``__dlpack_device__`` tells it: pinned memory is the host's, managed memory the device's."""
    driver = memory.stream.driver
    if memory.exports.on_host or driver.kind != "cuda":
        return CPU, 0
    return CUDA, driver.ordinal


def capsule(memory: Memory, *, shape: tuple[int, ...], dtype: str = "uint8", versioned: bool = False) -> object:
    """A capsule over the first bytes of ``memory``, writable and contiguous; ``dtype`` is a name of ``DTYPE_BYTES``.

    It and every tensor made from it keep the memory from being closed. Raises ``ValueError`` for more bytes than
    there are.
    """
    num_bytes = math.prod(shape) * DTYPE_BYTES[dtype]
    if num_bytes > memory.size_bytes:
        raise ValueError(f"{num_bytes:,} bytes of {dtype} do not lie in {memory!r}")
    managed = _Versioned(major=1, minor=0) if versioned else _Managed()
    numbers = (c_int64 * (2 * len(shape) or 1))(*shape, *_strides(shape))
    tensor = managed.tensor
    tensor.data = memory.address or None
    tensor.device = _Device(*device_of(memory))
    tensor.dtype = _Type(*_TYPES[dtype])
    tensor.num_dimensions = len(shape)
    tensor.shape = cast(numbers, POINTER(c_int64))
    tensor.strides = cast(ctypes.addressof(numbers) + 8 * len(shape), POINTER(c_int64))
    managed.deleter = cast(_delete, c_void_p)
    address = ctypes.addressof(managed)
    number = memory.exports.add(f"a tensor of {num_bytes:,} bytes")
    _live[address] = (managed, numbers, memory, number)
    made: object = _new_capsule(address, _NAMES[type(managed)], cast(_drop_capsule, c_void_p))
    return made


def exported(
    memory: Memory,
    *,
    shape: tuple[int, ...],
    dtype: str,
    stream: int | None,
    max_version: tuple[int, int] | None,
    dl_device: tuple[int, int] | None,
    copy: bool | None,
) -> object:
    """``__dlpack__`` of the array API standard: the consumer's ``stream`` is made to wait for the memory's own.

    Raises ``BufferError`` where the consumer wants a copy or another device.
    """
    have = device_of(memory)
    if copy or (dl_device is not None and tuple(dl_device) != have):
        raise BufferError(f"{memory!r} is exported as it is, on device {have}: no copy, no other device")
    if have[0] == CUDA and stream != -1:
        # The standard's 1 is the legacy stream, our 0; a consumer that names none is on that one.
        _order(memory, 0 if stream in (None, 1) else int(stream or 0))
    return capsule(memory, shape=shape, dtype=dtype, versioned=max_version is not None and max_version[0] >= 1)


def _order(memory: Memory, consumer: int) -> None:
    own = memory.stream
    if consumer != own.handle:
        wait_for(own.driver, waiting=consumer, on=own.handle)


def wait_for(driver: Any, *, waiting: int, on: int) -> None:
    """Stream ``waiting`` does nothing more before ``on`` has done what it was asked so far."""
    event = driver.event_create()
    try:
        driver.event_record(event, stream=on)
        driver.stream_wait(waiting, event)
    finally:
        driver.event_destroy(event)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[index + 1 :]) for index in range(len(shape)))
