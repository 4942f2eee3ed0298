"""Our memory as a DLPack capsule, made by hand: nothing looks behind the pointer, so pages need not be mapped yet.

The consumer calls a deleter when the last tensor over the memory goes: on any thread, while an exception is on its way,
perhaps while the interpreter ends. No Python function can be that deleter: called with an exception pending it fails
and loses the exception. So the capsule is a library's own, over a small array of ours, and only what it says about
place, shape and type is replaced: the library's deleter lets go of our array properly, and not at all once the
interpreter ends. When the array goes, references to it pop themselves out of dicts: no code of ours runs then, because
a thread that is stopped in the middle of it, as daemons are at the end, would bring the process down.
"""

from __future__ import annotations

import ctypes
import math
from ctypes import Structure, c_int32, c_int64, c_uint32, c_uint64, c_void_p, py_object
from typing import Any

from tonnage.buffers.memory import Memory, Until, require_usable
from tonnage.errors import CaptureError
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
        ("shape", c_void_p), ("strides", c_void_p), ("offset_bytes", c_uint64),
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


_NAMES: dict[bytes, type[_Managed | _Versioned]] = {b"dltensor": _Managed, b"dltensor_versioned": _Versioned}

#: What consumers have or may get: by a reference that pops itself when the tensor goes, the memory under it.
_live: dict[Until, Memory] = {}

_is_named = ctypes.pythonapi.PyCapsule_IsValid
_is_named.argtypes = [py_object, ctypes.c_char_p]
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = c_void_p, [py_object, ctypes.c_char_p]


def device_of(memory: Memory) -> tuple[int, int]:
    """(type, number) as ``__dlpack_device__`` tells it: pinned memory is the host's, managed memory the device's."""
    driver = memory.stream.driver
    if memory.exports.on_host or driver.kind != "cuda":
        return CPU, 0
    return CUDA, driver.ordinal


def capsule(memory: Memory, *, shape: tuple[int, ...], dtype: str = "uint8", versioned: bool = False) -> object:
    """A capsule over the first bytes of ``memory``, writable and contiguous; ``dtype`` is a name of ``DTYPE_BYTES``.

    It and every tensor made from it keep the memory from being closed. Raises ``ValueError`` for more bytes than
    there are and for closed memory, ``NotMaterialized`` for memory that sleeps.
    """
    require_usable(memory)
    num_bytes = math.prod(shape) * DTYPE_BYTES[dtype]
    if num_bytes > memory.size_bytes:
        raise ValueError(f"{num_bytes:,} bytes of {dtype} do not lie in {memory!r}")
    numbers = (c_int64 * (2 * len(shape) or 1))(*shape, *_strides(shape))
    made, managed = _lent(numbers, versioned=versioned)
    tensor = managed.tensor
    tensor.data, tensor.offset_bytes = memory.address or None, 0
    tensor.device = _Device(*device_of(memory))
    tensor.dtype = _Type(*_TYPES[dtype])
    tensor.num_dimensions = len(shape)
    tensor.shape = ctypes.addressof(numbers)  # its address alone: we must not keep it alive
    tensor.strides = tensor.shape + 8 * len(shape)
    memory.exports.add_until(f"a tensor of {num_bytes:,} bytes", numbers)
    _live[Until(numbers, _live.pop)] = memory
    return made


def _lent(numbers: Any, *, versioned: bool) -> tuple[object, _Managed | _Versioned]:
    """A capsule over ``numbers`` that some library made, and the structure in it: what it points to lives as long."""
    array: Any
    try:
        import numpy
    except ImportError:  # then the consumer is torch
        import torch

        array = torch.frombuffer(numbers, dtype=torch.int64)
    else:
        array = numpy.frombuffer(numbers, dtype="int64")
    try:
        made: object = array.__dlpack__(max_version=(1, 0)) if versioned else array.__dlpack__()
    except TypeError:  # numpy before 2.1 neither makes nor asks for versions
        made = array.__dlpack__()
    name = next(name for name in _NAMES if _is_named(made, name))
    return made, _NAMES[name].from_address(_pointer_of(made, name))


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

    From then on the consumer's stream counts as using the memory: a later free waits for it, so it must live as long.
    A consumer on the host gets the memory once the work that uses it is done. Raises ``BufferError`` where the
    consumer wants a copy or another device, ``CaptureError`` while a stream that must be waited for is being captured,
    and what ``capsule`` raises.
    """
    require_usable(memory)
    have = device_of(memory)
    if copy or (dl_device is not None and tuple(dl_device) != have):
        raise BufferError(f"{memory!r} is exported as it is, on device {have}: no copy, no other device")
    if have[0] == CPU:
        _finish(memory)
    elif stream != -1:
        # The standard's 1 is the legacy stream, our 0; a consumer that names none is on that one.
        _order(memory, 0 if stream in (None, 1) else int(stream or 0))
    return capsule(memory, shape=shape, dtype=dtype, versioned=max_version is not None and max_version[0] >= 1)


class Exportable:
    """``from_dlpack`` of torch, numpy and cupy for memory without a shape: all its addresses, as uint8.

    Only the first ``usable_bytes`` may be touched. Raises as ``exported`` does.
    """

    def __dlpack_device__(self: Memory) -> tuple[int, int]:
        return device_of(self)

    def __dlpack__(
        self: Memory,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        return exported(
            self,
            shape=(self.size_bytes,),
            dtype="uint8",
            stream=stream,
            max_version=max_version,
            dl_device=dl_device,
            copy=copy,
        )


def _finish(memory: Memory) -> None:
    """Wait for the work that uses host memory: its consumer knows no streams."""
    used_on: tuple[int, ...] = getattr(memory, "used_on", ())
    if used_on:
        mark = memory.stream.device.fences.mark(*used_on)
        try:
            mark.wait()
        finally:
            mark.close()


def _order(memory: Memory, consumer: int) -> None:
    """The consumer waits for the memory's stream, and a free of the memory will wait for the consumer."""
    own = memory.stream
    if consumer != own.bare_handle:
        for handle in (own.bare_handle, consumer):
            # An event recorded on one side of a capture and waited for on the other would end it.
            if own.driver.stream_capturing(handle):
                raise CaptureError(
                    f"{memory!r} is exported to stream {consumer:#x} while stream {handle:#x} is being captured: "
                    "export it before the capture"
                )
        wait_for(own.driver, waiting=consumer, on=own.bare_handle)
    record = getattr(memory, "record_stream", None)
    if record is not None:
        record(consumer)


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
