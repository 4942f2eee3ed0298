"""``tonnage devices`` over what drivers and NVML answered on machines that were not at hand (tests/data/devices)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import shapes
from cli_fakes import Ended, tonnage_fixture  # noqa: F401 - a fixture
from fake_cuda import CAPACITY, PAGE, FakeCuda

from tonnage.device import cuda_api, cuda_context, machine
from tonnage.device.cuda import CudaDriver
from tonnage.device.machine import HostMemory
from tonnage.device.paths import surroundings
from tonnage.hardware import CARDS, find_card

Program = Callable[..., Ended]
FILE = Path(__file__).parents[1] / "data" / "devices" / "recorded.json"
RECORDED = json.loads(FILE.read_text(encoding="utf-8"))["devices"]


class NvmlError(Exception):
    """As pynvml raises it."""


def stand_in(monkeypatch: pytest.MonkeyPatch, record: dict[str, Any]) -> FakeCuda:
    """The driver, NVML and /proc/meminfo of that machine."""
    fake = FakeCuda()
    fake.attributes["INTEGRATED"] = record["integrated"]
    fake.cuDeviceGetName = lambda *_: (0, record["name"].encode() + b"\0")
    fake.cuDeviceTotalMem = lambda *_: (0, record["total_bytes"])
    monkeypatch.setattr(cuda_api, "_import_driver", lambda: fake)

    def memory(*_: object, **__: object) -> Any:
        if record["nvml"]:
            raise NvmlError(record["nvml"])
        return SimpleNamespace(total=record["total_bytes"], used=0, free=record["total_bytes"], reserved=0)

    one = SimpleNamespace(pid=10**7 + 1, usedGpuMemory=record["processes"])
    nvml = SimpleNamespace(
        NVMLError=NvmlError, nvmlMemory_v2=2, nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda _: 0,
        nvmlDeviceGetMemoryInfo=memory, nvmlDeviceGetComputeRunningProcesses=lambda _: [one],
        nvmlDeviceGetGraphicsRunningProcesses=lambda _: [],
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    if record["meminfo"]:
        kib = record["meminfo"]
        known = HostMemory(
            total_bytes=kib["MemTotal"] * 1024, available_bytes=kib["MemAvailable"] * 1024, limit_bytes=None,
            source="/proc/meminfo", available_source="/proc/meminfo",
        )  # fmt: skip
        monkeypatch.setattr(machine, "host_memory", lambda **_: known)
    return fake


@pytest.mark.parametrize("record", RECORDED, ids=lambda record: f"{record['name']} ({record['source'][:20]})")
def test_recorded_devices(tonnage: Program, monkeypatch: pytest.MonkeyPatch, record: dict[str, Any]) -> None:
    stand_in(monkeypatch, record)
    ended = tonnage("devices", "--json")
    assert (ended.code, ended.err) == (0, "")
    card = json.loads(ended.out)["devices"][1]
    assert (card["name"], card["total_bytes"]) == (record["name"], record["total_bytes"])
    assert (card["catalogue"], card["form"]) == (record["catalogue"], record["form"])
    assert card["catalogue_told"].startswith(record["told"])
    (other,) = card["others"]
    assert other["num_bytes"] == record["processes"]
    if record["integrated"]:
        assert card["free_bytes"] == record["meminfo"]["MemAvailable"] * 1024
        assert card["free_source"] == "MemAvailable, /proc/meminfo"
        assert any("page cache counts as used" in told for told in card["surroundings"])
    else:
        assert card["free_source"] == "NVML"
    table = " ".join(tonnage("devices").out.split())
    assert f"catalogue {record['catalogue']}".strip() in table


def test_free_memory_of_a_unified_machine_is_what_its_system_calls_available(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    free = [0]
    fake.cuMemGetInfo = lambda: (0, free[0], CAPACITY)
    fake.cuMemGetInfo.__annotations__["return"] = "tuple[int, int]"
    asked = []

    def memory() -> HostMemory:
        asked.append(1)
        return HostMemory(
            total_bytes=CAPACITY, available_bytes=40 * PAGE, limit_bytes=None, source="x", available_source="x"
        )

    monkeypatch.setattr(cuda_context, "host_memory", memory)
    for integrated, driver_says, expected in ((1, 3 * PAGE, 40 * PAGE), (1, 50 * PAGE, 50 * PAGE), (0, PAGE, PAGE)):
        fake.attributes["INTEGRATED"], free[0] = integrated, driver_says
        driver = CudaDriver(0, api=fake)
        asked.clear()
        assert driver.mem_info() == (expected, CAPACITY)
        assert len(asked) == integrated  # a card of its own asks nobody else
        driver.close()


def test_more_than_the_device_is_never_free(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    fake.attributes["INTEGRATED"] = 1
    known = HostMemory(total_bytes=1, available_bytes=10 * CAPACITY, limit_bytes=None, source="x")
    monkeypatch.setattr(cuda_context, "host_memory", lambda: known)
    driver = CudaDriver(0, api=fake)
    assert driver.mem_info() == (CAPACITY, CAPACITY)
    driver.close()


def test_wsl_is_told_by_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "version").write_text("Linux version 5.15.90.1-microsoft-standard-WSL2")
    assert "Windows desktop takes from the same card" in "".join(surroundings("NVIDIA GeForce RTX 4090", root=tmp_path))


def test_the_catalogue_is_printed_with_its_sources(tonnage: Program) -> None:
    ended, table = tonnage("devices", "--catalogue", "--json"), tonnage("devices", "--catalogue")
    assert (ended.code, ended.err, table.code, table.err) == (0, "", 0, "")
    made = json.loads(ended.out)
    assert made["schema"] == "tonnage.catalogue/1"
    assert [card["name"] for card in made["cards"]] == [card.name for card in CARDS]
    assert all(card["total"]["ref"] and card["page_bytes"] == 2**21 for card in made["cards"])
    assert {cut["part_of"] for cut in made["slices"]} > {"H100-80GB", "A100-40GB", "H200", "B200"}
    words = " ".join(table.out.split())
    for piece in ("GB10 unified", "(119.67 - 121.70)", "H200 1g.18gb", "16.00 GiB", "vllm-10511-b", "met in person"):
        assert piece in words


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_the_starts_that_a_total_names_are_there_and_of_that_card(card) -> None:
    known = {row["id"]: row for row in shapes.starts()}
    for part in card.total.ref.split(";"):
        if not part.strip().startswith("starts:"):
            continue
        names = part.partition(":")[2].replace(" and ", ", ").split(",")
        ids = [name.split("(")[0].strip() for name in names]
        for name in (each for each in ids if each and not each.endswith("*") and " " not in each and each[0] != "-"):
            row = known[name]
            assert row["gpu_mem_gib"] is None or card.total.low <= row["gpu_mem_gib"] * 2**30 + 2**24, name
            if "class" not in row["gpu"] and "/" not in row["gpu"]:
                assert find_card(row["gpu"]) is card, name
