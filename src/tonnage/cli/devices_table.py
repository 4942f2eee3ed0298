"""The devices for a person: a table each, then what holds for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tonnage.cli.devices import NOT_PROBED, DeviceReport, DevicesReport
from tonnage.device.paths import State
from tonnage.report.draw import grid, maybe_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text


def parts(made: DevicesReport) -> Iterator[RenderableType]:
    """One table a device, then what holds for all of them."""
    from rich.text import Text

    for device in made.devices:
        yield _table(device)
    if made.no_cuda:
        why = made.no_cuda if made.no_cuda.endswith((".", ".)")) else made.no_cuda + "."
        yield Text.assemble(("No CUDA device. ", "bold"), f"{why} Everything runs on the host device.")
    rows: list[tuple[str, str | Text]] = [("torch's segments", made.torch_boundary)]
    if made.driver_version:
        rows.insert(0, ("driver", f"CUDA {made.driver_version}"))
    if made.torch_settings:
        rows.append(("torch's settings", Text(made.torch_settings, "yellow")))
    table = grid(["", ""], rows, title="All devices")
    table.show_header = False
    yield table


def _table(device: DeviceReport) -> Table:
    from rich.text import Text

    name = device.name if device.kind == "host" else f"cuda:{device.ordinal}  {device.name}"
    table = grid(["", ""], _rows(device), title=name)
    table.show_header = False
    if device.problem:
        table.add_row("problem", Text(device.problem, "red"))
    for told in device.surroundings:
        table.add_row("around it", told)
    return table


def _rows(device: DeviceReport) -> Iterator[tuple[str, str]]:
    yield "total", maybe_bytes(device.total_bytes)
    yield "free", f"{maybe_bytes(device.free_bytes)} ({device.free_source})"
    yield "processes", _others_text(device)
    for who, path in device.in_use.items():
        yield who, _way_text(device, path)
    for way in device.paths:
        if way.state is State.NO:
            yield f"no {way.path}", f"{way.reason}. The price: {way.costs}."
    absent = [one for one in device.capabilities if one.state is State.NO and one.capability not in ("vmm", "pools")]
    for one in absent:
        yield f"no {one.capability.replace('_', ' ')}", one.reason
    if device.catalogue or device.catalogue_told:
        known = f"{device.catalogue} ({device.form}): {device.catalogue_told}" if device.catalogue else ""
        yield "catalogue", known or device.catalogue_told
    if device.page_bytes is not None:
        yield "pages", maybe_bytes(device.page_bytes)
    yield "own bytes", device.own_source
    if device.context_bytes is not None:
        yield "context", f"{maybe_bytes(device.context_bytes)} (free before it was opened, less free after)"


def _way_text(device: DeviceReport, path: str) -> str:
    (way,) = (one for one in device.paths if one.path == path)
    return f"{path}, as the driver promises; {NOT_PROBED}" if way.state is State.PROMISED else path


def _others_text(device: DeviceReport) -> str:
    if device.others is None:
        return device.others_told
    if not device.others:
        return "none that NVML can see from here"
    told = ", ".join(f"pid {one.pid} {maybe_bytes(one.num_bytes)}" for one in device.others)
    return f"{len(device.others):,}: {told}"
