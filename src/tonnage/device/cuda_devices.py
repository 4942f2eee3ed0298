"""Which CUDA devices there are, told without opening any of them: no context is made, no memory is taken."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from tonnage.device.cuda_api import CudaApi, attribute, device_name, device_uuid, is_slice, load_api, visible_devices
from tonnage.errors import DriverError


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaDevice:
    """One device as the driver presents it to this process.

    uuid        "GPU-..." or "MIG-...", as NVML writes it
    sm          compute capability, 90 for 9.0; num_sms its streaming multiprocessors
    total_bytes by the driver, without what the card keeps for itself
    integrated  shares the host's memory; is_slice: a MIG instance, part of a card
    """

    ordinal: int
    name: str
    uuid: str
    sm: int
    num_sms: int
    total_bytes: int
    integrated: bool
    is_slice: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaDevices:
    """The devices; ``reason`` says why there are none. ``driver_version`` is the CUDA version that the driver can do,
    "13.0", and "" where there is no driver."""

    devices: tuple[CudaDevice, ...] = ()
    reason: str = ""
    driver_version: str = ""


def cuda_devices(*, api: Any = None) -> CudaDevices:
    """Never raises for want of a package, a driver or a device."""
    version = ""
    try:
        loaded = load_api(api)
        version = _version(int(loaded.call("cuDriverGetVersion")))
        devices = tuple(_describe(loaded, ordinal) for ordinal in range(int(loaded.call("cuDeviceGetCount"))))
    except DriverError as error:
        return CudaDevices(reason=str(error), driver_version=version)
    reason = "" if devices else f"the driver finds no CUDA device{visible_devices()}"
    return CudaDevices(devices=devices, reason=reason, driver_version=version)


def _describe(api: CudaApi, ordinal: int) -> CudaDevice:
    device = api.call("cuDeviceGet", ordinal)

    of = partial(attribute, api, device)
    name = device_name(api, device)
    return CudaDevice(
        ordinal=ordinal,
        name=name,
        uuid=device_uuid(api, device),
        sm=10 * of("COMPUTE_CAPABILITY_MAJOR") + of("COMPUTE_CAPABILITY_MINOR"),
        num_sms=of("MULTIPROCESSOR_COUNT"),
        total_bytes=int(api.call("cuDeviceTotalMem", device)),
        integrated=bool(of("INTEGRATED")),
        is_slice=is_slice(name),
    )


def _version(number: int) -> str:
    """ "12.4" for 12040."""
    return f"{number // 1000}.{number % 1000 // 10}"
