"""``tonnage devices``: what there is to allocate on, by which path, why not a better one, and what that costs."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from tonnage.cli import options as opt

if TYPE_CHECKING:
    from tonnage.device.cuda import CudaDevice
    from tonnage.device.nvml import Nvml
    from tonnage.device.paths import AllocationPath, Found, PathFound

SCHEMA = "tonnage.devices/1"
NOT_PROBED = "not probed: --probe opens the device and tries"
NOT_BUILT = "not probed: --probe builds the shim that hands our arenas to torch"

Probe = Annotated[
    bool,
    typer.Option("--probe", help="Open each CUDA device and try: takes a context (524 MiB on an H200) meanwhile."),
]

Catalogue = Annotated[
    bool, typer.Option("--catalogue", help="List the cards that plans know, with where each figure is from, instead.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """Another process on a device; None where NVML does not say how much it holds."""

    pid: int
    num_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """One device. Bytes; None and a sentence where it is not known.

    free_source     where ``free_bytes`` is from
    others          who else is on it; ``others_told`` says why that is not known
    in_use          the path that arenas, buffers in a scope, and other buffers take
    own_source      how the ledger would know what this process holds
    context_bytes   what opening it took; only where it was probed
    surroundings    what around it explains that it can do less
    catalogue       its row in the catalogue of cards, "" for a device that has none; ``catalogue_told``: whether it
                    reports what the catalogue expects
    form            whose memory it has, as the catalogue calls it
    problem         why it could not be opened
    """

    kind: str
    ordinal: int
    name: str
    uuid: str = ""
    total_bytes: int | None
    free_bytes: int | None
    free_source: str
    others: tuple[Process, ...] | None = None
    others_told: str = ""
    is_probed: bool
    in_use: Mapping[str, AllocationPath] = field(default_factory=dict)
    paths: tuple[PathFound, ...] = ()
    capabilities: tuple[Found, ...] = ()
    page_bytes: int | None = None
    own_source: str
    context_bytes: int | None = None
    surroundings: tuple[str, ...] = ()
    catalogue: str = ""
    catalogue_told: str = ""
    form: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesReport:
    """All of it. ``no_cuda``: why there is no CUDA device; ``torch_boundary``: whose hands torch's segments are in;
    ``torch_settings``: what in the environment keeps them out of ours."""

    schema: str = SCHEMA
    driver_version: str
    no_cuda: str
    devices: tuple[DeviceReport, ...]
    torch_boundary: str
    torch_settings: str


def devices(probe: Probe = False, catalogue: Catalogue = False, as_json: opt.AsJson = False) -> None:
    """Show the devices and how memory is asked for on each.

    Without --probe nothing is opened: what the driver promises is told, not what it does.
    """
    if catalogue:
        from tonnage.cli.devices_catalogue import show_catalogue

        show_catalogue(as_json=as_json)
        return
    made = collect(probe=probe)
    if as_json:
        from tonnage.report.codec import dumps, to_json

        print(dumps(to_json(made)), end="")
        return

    from tonnage.cli.devices_table import parts
    from tonnage.report.draw import console_for, show

    show(parts(made), console_for(sys.stdout))


def collect(*, probe: bool) -> DevicesReport:
    """Look at everything. Never raises for what a machine lacks."""
    from tonnage.device.cuda import cuda_devices

    found = cuda_devices()
    cards = tuple(_card(device, probe=probe) for device in found.devices)
    return DevicesReport(
        driver_version=found.driver_version,
        no_cuda=found.reason,
        devices=(_host(), *cards),
        torch_boundary=_torch_boundary(has_cuda=bool(cards), probe=probe),
        torch_settings=_torch_settings(),
    )


def _host() -> DeviceReport:
    """The machine's memory as a device; opening it costs nothing."""
    from tonnage.device.host import HostDriver
    from tonnage.device.machine import host_memory
    from tonnage.device.paths import found_in, in_use, paths
    from tonnage.device.process import process_memory
    from tonnage.errors import DriverError
    from tonnage.units import MiB

    memory, process = host_memory(), process_memory()
    known = {
        "kind": "host",
        "ordinal": 0,
        "name": "host memory",
        "total_bytes": memory.total_bytes,
        "free_bytes": memory.available_bytes,
        "free_source": memory.source,
        "others_told": "not told apart: what is neither free nor ours is theirs",
        "own_source": "anonymous + shared memory of this process" if process.supported else process.reason,
        "form": "host",
        "is_probed": True,
    }
    try:
        driver = HostDriver(16 * MiB)
    except DriverError as error:
        return DeviceReport(**known, problem=str(error))  # type: ignore[arg-type]
    try:
        capabilities = driver.capabilities()
    finally:
        driver.close()
    found = found_in(capabilities)
    ways = paths(found)
    return DeviceReport(
        **known,  # type: ignore[arg-type]
        in_use={who: way.path for who, way in in_use(ways).items()},
        paths=ways,
        capabilities=found,
        page_bytes=capabilities.page_bytes,
    )


def _card(device: CudaDevice, *, probe: bool) -> DeviceReport:
    from tonnage.device.nvml import Nvml
    from tonnage.device.paths import in_use, paths, surroundings

    nvml = Nvml(device.uuid)
    # Before it is opened: what is free counts no context of ours, and everyone on it is somebody else.
    memory = nvml.memory()
    free_told = nvml.reason
    row = _row(device)
    listed = nvml.processes()
    others = None if listed is None else tuple(Process(pid=one.pid, num_bytes=one.num_bytes) for one in listed)
    others_told = nvml.reason
    free, source = (memory.free_bytes, "NVML") if memory else (None, "")
    if device.integrated:
        free, source = _system_free()
    seen = _probed(device, free) if probe else _promised(device)
    ways = paths(seen.found) if seen.found else ()
    return DeviceReport(
        kind="cuda",
        ordinal=device.ordinal,
        name=device.name,
        uuid=device.uuid,
        total_bytes=device.total_bytes,
        free_bytes=seen.free_bytes if free is None else free,
        free_source=source or f"the driver, with our context open ({free_told})",
        others=others,
        others_told=others_told,
        is_probed=probe and not seen.problem,
        in_use={who: way.path for who, way in in_use(ways).items()} if ways else {},
        paths=ways,
        capabilities=seen.found,
        page_bytes=seen.page_bytes,
        own_source=seen.own_source,
        context_bytes=seen.context_bytes,
        surroundings=surroundings(device.name, is_integrated=device.integrated),
        catalogue=row.name,
        catalogue_told=row.told,
        form=row.form,
        problem=seen.problem,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """What the catalogue says of a device that is there."""

    name: str = ""
    told: str = ""
    form: str = ""


def _row(device: CudaDevice) -> _Row:
    from tonnage.hardware import Form, recognise
    from tonnage.units import format_bytes

    card = recognise(device.name, device.total_bytes)
    if card is None:
        form = Form.UNIFIED if device.integrated else Form.SLICE if device.is_slice else Form.DISCRETE
        return _Row(told="not in it: plan for it with --memory", form=form.value)
    low, high = format_bytes(card.total.low), format_bytes(card.total.high)
    inside = card.total.low <= device.total_bytes <= card.total.high
    range_told = low if low == high else f"{low} to {high}"
    told = (
        f"as expected, {range_told}" if inside else f"it reports {format_bytes(device.total_bytes)}, not {range_told}"
    )
    return _Row(name=card.name, told=told, form=card.form.value)


def _system_free() -> tuple[int | None, str]:
    """What is free on a device whose memory is the machine's."""
    from tonnage.device.machine import host_memory

    memory = host_memory()
    return memory.available_bytes, f"MemAvailable, {memory.available_source}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What was learnt of a card, by opening it or from its attributes."""

    found: tuple[Found, ...] = ()
    page_bytes: int | None = None
    free_bytes: int | None = None
    context_bytes: int | None = None
    own_source: str = NOT_PROBED
    problem: str = ""


def _promised(device: CudaDevice) -> _Seen:
    from tonnage.device.paths import promised
    from tonnage.errors import DriverError

    try:
        return _Seen(found=promised(device.ordinal))
    except DriverError as error:
        return _Seen(problem=str(error))


def _probed(device: CudaDevice, free_before: int | None) -> _Seen:
    from tonnage.device.cuda import CudaDriver
    from tonnage.device.paths import found_in
    from tonnage.errors import DriverError

    try:
        driver = CudaDriver(device.ordinal)
    except DriverError as error:
        return _Seen(problem=f"It cannot be opened: {error}")
    try:
        free, _ = driver.mem_info()
        capabilities = driver.capabilities()
        return _Seen(
            found=found_in(capabilities),
            page_bytes=capabilities.page_bytes,
            free_bytes=free,
            context_bytes=None if free_before is None else max(0, free_before - free),
            own_source=_own_source(driver.nvml),
        )
    except DriverError as error:
        return _Seen(problem=f"It was opened, and then: {error}")
    finally:
        driver.close()


def _own_source(nvml: Nvml) -> str:
    if nvml.own_bytes() is not None:
        return "nvml"
    return f"inferred from free memory, so others' changes count as ours: {nvml.reason}"


def _torch_boundary(*, has_cuda: bool, probe: bool) -> str:
    if not has_cuda:
        return "no CUDA device: torch's tensors lie on this process's heap, and the ledger samples it"
    if not _is_there("torch"):
        return "torch is not installed: the engine needs the extra tonnage[engine]"
    if not probe:
        return NOT_BUILT
    from tonnage.buffers.shim_build import build_shim

    built = build_shim()
    if built.path is not None:
        return f"torch's segments come from our arenas, through a C shim built with {built.compiler}"
    return f"torch takes its segments itself, capped by its memory fraction, and the ledger samples it: {built.reason}"


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # a finder that refuses it
        return False


def _torch_settings() -> str:
    from tonnage.buffers.torch_settings import environment_problem

    problem = environment_problem(os.environ)
    return "" if problem is None else problem.paragraph()
