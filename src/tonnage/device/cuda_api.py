"""The CUDA driver API as it is called here: a status becomes an exception, and a missing driver says why.

Nothing is imported before it is asked for: ``tonnage`` works where there is neither the package nor a driver.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any
from uuid import UUID

from tonnage.errors import DeviceLost, DriverError, DriverOOM, DriverUnsupported

INVALID_VALUE, OUT_OF_MEMORY, NO_DEVICE, INVALID_CONTEXT, NOT_READY = 1, 2, 100, 201, 600
#: A capture is going on elsewhere in the context, so nothing can be said of, or asked from, stream 0.
CAPTURE_IMPLICIT = 906
#: The device cannot, or may not: not permitted, not supported.
UNSUPPORTED = frozenset((800, 801))
#: Refused because a stream is being captured: it says nothing about the device.
DURING_CAPTURE = range(900, 909)
#: After these no call of the process on this context will succeed: memory or link errors, faults of kernels, a context
#: that was destroyed, a driver that is shutting down, a server of several processes that ended us.
LOST = frozenset(
    (4, 214, 220, 226, INVALID_CONTEXT, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911)
)  # fmt: skip


class CudaApi:
    """Calls functions of ``cuda.bindings.driver``, or of a module that looks like it."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def call(self, name: str, *args: Any) -> Any:
        """What the function returns behind its status: nothing, one value, or a tuple of them.

        Raises ``DriverOOM``, ``DriverUnsupported``, ``DeviceLost`` or ``DriverError``.
        """
        status, *values = self.function(name)(*args)
        if status:
            raise self.error(name, status)
        return values[0] if len(values) == 1 else tuple(values) or None

    def function(self, name: str) -> Any:
        """The function itself, which returns its status first; ``DriverUnsupported`` where there is none."""
        found = getattr(self.module, name, None)
        if found is None:
            raise DriverUnsupported(name, "NOT_FOUND", "the installed cuda-bindings does not know this function")
        return found

    def error(self, name: str, status: Any, detail: str = "") -> DriverError:
        """The exception for a status that is not success."""
        code = int(status)
        if code == OUT_OF_MEMORY:
            kind: type[DriverError] = DriverOOM
        elif code in UNSUPPORTED:
            kind = DriverUnsupported
        else:
            kind = DeviceLost if code in LOST else DriverError
        return kind(name, self.code_name(status), detail)

    def code_name(self, status: Any) -> str:
        """ "OUT_OF_MEMORY" for CUDA_ERROR_OUT_OF_MEMORY; the number where it has no name."""
        return str(getattr(status, "name", int(status))).removeprefix("CUDA_ERROR_")

    def code_number(self, name: str) -> int | None:
        """The inverse of ``code_name``; None for codes of our own."""
        if name.isdigit():
            return int(name)
        found = getattr(self.module.CUresult, f"CUDA_ERROR_{name}", None)
        return None if found is None else int(found)

    def description(self, status: Any) -> str:
        """The driver's own words for a status."""
        failed, text = self.module.cuGetErrorString(status)
        return "" if failed or text is None else text.decode(errors="replace")


def load_api(module: ModuleType | Any | None = None) -> CudaApi:
    """The API, initialised. ``module`` stands in for ``cuda.bindings.driver`` (for tests).

    Raises ``DriverUnsupported``, which says what is missing: the package, the driver's library, a device, or the
    driver's code.
    """
    if module is None:
        module = _import_driver()
    api = CudaApi(module)
    try:
        status = module.cuInit(0)[0]
    except RuntimeError as error:  # the bindings look the library up at the first call
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DriverUnsupported(
            "cuInit", "NO_DRIVER", f"the library of the NVIDIA driver cannot be loaded on this machine: {said}"
        ) from error
    if int(status) == NO_DEVICE:
        raise DriverUnsupported("cuInit", "NO_DEVICE", f"the driver finds no CUDA device{visible_devices()}")
    if status:
        raise DriverUnsupported("cuInit", api.code_name(status), f"the driver says: {api.description(status)}")
    return api


def device_name(api: CudaApi, device: Any) -> str:
    return str(api.call("cuDeviceGetName", 256, device).split(b"\0")[0].decode(errors="replace"))


def device_uuid(api: CudaApi, device: Any) -> str:
    """As NVML and CUDA_VISIBLE_DEVICES write it."""
    kind = "MIG" if is_slice(device_name(api, device)) else "GPU"
    return f"{kind}-{UUID(bytes=bytes(api.call('cuDeviceGetUuid', device).bytes))}"


def is_slice(name: str) -> bool:
    """Whether a device of this name is a MIG instance, a part of a GPU: "NVIDIA H200 MIG 1g.18gb"."""
    return " MIG " in name


def attribute(api: CudaApi, device: Any, name: str) -> int:
    """An attribute of a device, such as INTEGRATED (its memory is the host's); 0 where the bindings do not know it."""
    known = getattr(api.module.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
    return 0 if known is None else int(api.call("cuDeviceGetAttribute", known, device))


def visible_devices() -> str:
    """ "; CUDA_VISIBLE_DEVICES is '1'", or nothing where it is not set: it hides devices from the driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}"


def _import_driver() -> ModuleType:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DriverUnsupported(
            "import cuda.bindings.driver",
            "NO_PACKAGE",
            f"the Python package cuda-bindings is not installed or cannot be loaded ({error}): "
            "pip install 'tonnage[gpu]'",
        ) from error
    module: ModuleType = driver
    return module
