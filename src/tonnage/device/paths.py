"""Which way memory is asked for on a device, why not a better one, and what that costs.

Three paths, the best first: virtual memory, a private pool, the driver's plain allocation. What a device can do is
read from its driver (``found_in``), or from attributes alone where it is not opened (``promised``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from tonnage.device.cuda_api import attribute, load_api
from tonnage.device.driver import Capabilities
from tonnage.errors import DriverError


class AllocationPath(StrEnum):
    """The ways to ask for memory, the best first."""

    VIRTUAL = "virtual memory"
    POOL = "private pool"
    SYNCHRONOUS = "synchronous"


class State(StrEnum):
    """PROMISED: the driver's attribute says so, and nobody tried; slices and sandboxes promise what they refuse."""

    YES = "yes"
    NO = "no"
    PROMISED = "promised"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One capability, by its name in ``Capabilities``; ``reason``: why it is absent, by call and code, or attribute."""

    capability: str
    state: State
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathFound:
    """One path: whether it is there, why not, and what it ``costs`` that it is not; both empty where it is."""

    path: AllocationPath
    state: State
    reason: str = ""
    costs: str = ""


#: Capability -> what the driver calls its attribute. All are read without opening the device.
ATTRIBUTES = {
    "vmm": "VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED",
    "pools": "MEMORY_POOLS_SUPPORTED",
    "exportable": "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
    "managed": "MANAGED_MEMORY",
    "concurrent_managed": "CONCURRENT_MANAGED_ACCESS",
    "multicast": "MULTICAST_SUPPORTED",
    "host_register": "HOST_REGISTER_SUPPORTED",
}

#: What stands behind each path, and what it costs to be without. Times: ``benchmarks/buffers_overhead.py`` on an H200.
_PATHS = (
    (
        AllocationPath.VIRTUAL,
        "vmm",
        "the KV pool is sized before CUDA graphs are captured and neither grows nor shrinks; nothing sleeps and wakes "
        "at its address; a buffer that grows is allocated anew and copied, and both copies are held meanwhile",
    ),
    (
        AllocationPath.POOL,
        "pools",
        "every free waits for the device: 70 to 108 microseconds to allocate 1 to 64 MiB and free them; a pool takes "
        "1.3",
    ),
)

#: Who asks for memory, and the paths it takes, the best first. An arena without virtual memory is one plain allocation.
TAKES = {
    "arenas": (AllocationPath.VIRTUAL, AllocationPath.SYNCHRONOUS),
    "scopes": (AllocationPath.VIRTUAL, AllocationPath.POOL, AllocationPath.SYNCHRONOUS),
    "buffers": (AllocationPath.POOL, AllocationPath.SYNCHRONOUS),
}

#: Read from the attribute only, whoever asks: making such an object can put the GPUs of a whole host out of service.
_NEVER_TRIED = frozenset({"multicast", "concurrent_managed", "host_register"})
_MACHINE_PIDS = 0xEFFFFFFC  # the inode of the machine's own pid namespace, fixed in Linux
_VIRTUAL_CARD = re.compile(r"^GRID |-\d+[ABCQ]$")


def found_in(capabilities: Capabilities) -> tuple[Found, ...]:
    """What a driver found by trying."""
    return tuple(
        Found(capability=name, state=State.YES)
        if getattr(capabilities, name)
        else Found(
            capability=name, state=State.NO, reason=capabilities.reasons.get(name, "the driver does not say why")
        )
        for name in ATTRIBUTES
    )


def promised(ordinal: int, *, api: Any = None) -> tuple[Found, ...]:
    """What the attributes of CUDA device ``ordinal`` say; no context is made, no memory is taken.

    ``api`` stands in for the module ``cuda.bindings.driver`` in tests. Raises ``DriverError``.
    """
    loaded = load_api(api)
    device = loaded.call("cuDeviceGet", ordinal)
    return tuple(_promised(loaded, device, name, asked) for name, asked in ATTRIBUTES.items())


def paths(found: Sequence[Found]) -> tuple[PathFound, ...]:
    """All three, the best first."""
    by_name = {one.capability: one for one in found}
    told = [
        PathFound(
            path=path,
            state=by_name[name].state,
            reason=by_name[name].reason,
            costs=costs if by_name[name].state is State.NO else "",
        )
        for path, name, costs in _PATHS
    ]
    return (*told, PathFound(path=AllocationPath.SYNCHRONOUS, state=State.YES))


def in_use(found: Sequence[PathFound]) -> Mapping[str, PathFound]:
    """The path of each that takes memory: the first of its paths that is not known to be absent."""
    by_path = {one.path: one for one in found if one.state is not State.NO}
    return {who: next(by_path[path] for path in takes if path in by_path) for who, takes in TAKES.items()}


def surroundings(device_name: str, *, is_integrated: bool = False, root: Path = Path("/")) -> tuple[str, ...]:
    """What around the device explains that it can do less, one sentence each, as far as it shows. Never raises."""
    told = []
    if is_integrated:
        told.append(
            "Its memory is the machine's: NVML does not tell it, page cache counts as used in the driver's figure, and "
            "everything that runs here takes from it. What is free is what the system calls available."
        )
    if " MIG " in device_name:
        told.append("A MIG instance: NVML does not tell what each process holds of it.")
    if _VIRTUAL_CARD.search(device_name):
        told.append(
            "The name is that of a virtual card (vGPU): such profiles often have no pools and no virtual memory."
        )
    if "microsoft" in _read(root / "proc" / "version").lower():
        told.append(
            "WSL: NVML does not tell what each process holds, the Windows desktop takes from the same card, and "
            "address space is scarcer than on Linux."
        )
    if _is_contained(root):
        told.append(
            "A container or sandbox numbers its processes for itself: NVML may not know this one, and the sandbox may "
            "refuse calls that the driver promises."
        )
    return tuple(told)


def _promised(api: Any, device: Any, name: str, asked: str) -> Found:
    try:
        if attribute(api, device, asked):
            return Found(capability=name, state=State.YES if name in _NEVER_TRIED else State.PROMISED)
    except DriverError as error:
        return Found(capability=name, state=State.NO, reason=str(error))
    return Found(capability=name, state=State.NO, reason=f"CU_DEVICE_ATTRIBUTE_{asked} is 0")


def _is_contained(root: Path) -> bool:
    if any((root / name).exists() for name in (".dockerenv", "run/.containerenv")):
        return True
    try:
        return (root / "proc/self/ns/pid").stat().st_ino != _MACHINE_PIDS
    except OSError:
        return False


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
