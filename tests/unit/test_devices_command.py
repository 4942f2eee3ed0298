"""``tonnage devices``: where there is no GPU, and over a stand-in for the driver in all its moods."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_fakes import Ended, tonnage_fixture  # noqa: F401 - a fixture
from fake_cuda import CAPACITY, PAGE, UUIDS, FakeCuda

from tonnage.cli import devices as verb
from tonnage.device import cuda_api
from tonnage.device.paths import (
    ATTRIBUTES,
    Found,
    State,
    found_in,
    in_use,
    paths,
    promised,
    surroundings,
)
from tonnage.errors import DriverUnsupported

Program = Callable[..., Ended]

BEST = {"arenas": "virtual memory", "scopes": "virtual memory", "buffers": "private pool"}


class NvmlError(Exception):
    """As pynvml raises it."""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A machine with one card, and an NVML that knows two other processes on it."""
    fake = FakeCuda()
    monkeypatch.setattr(cuda_api, "_import_driver", lambda: fake)
    others = [
        SimpleNamespace(pid=10**7 + 1, usedGpuMemory=3 * PAGE),
        SimpleNamespace(pid=10**7 + 2, usedGpuMemory=None),
    ]
    nvml = SimpleNamespace(
        NVMLError=NvmlError,
        nvmlMemory_v2=2,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=[f"GPU-{uuid}" for uuid in UUIDS].index,
        nvmlDeviceGetMemoryInfo=lambda _, **__: SimpleNamespace(
            total=CAPACITY, used=9 * PAGE, free=CAPACITY - 9 * PAGE, reserved=PAGE
        ),
        nvmlDeviceGetComputeRunningProcesses=lambda _: others,
        nvmlDeviceGetGraphicsRunningProcesses=lambda _: [],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr("tonnage.buffers.shim_build.build_shim", lambda: SimpleNamespace(path=None, reason="no cc"))
    monkeypatch.setattr(verb, "find_spec", lambda _: object())
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return fake


def flat(text: str) -> str:
    return " ".join(text.split())


def asked(tonnage: Program, *argv: str) -> tuple[dict[str, Any], str]:
    """The JSON, and the table as one line of words."""
    told, table = tonnage("devices", *argv, "--json"), tonnage("devices", *argv)
    assert (told.code, told.err, table.code, table.err) == (0, "", 0, "")
    return json.loads(told.out), flat(table.out)


def no_driver() -> Any:
    raise DriverUnsupported("cuInit", "NO_DRIVER", "the library cannot be loaded")


@pytest.mark.parametrize("argv", [(), ("--probe",)])
def test_without_a_gpu_it_says_why_and_shows_the_host(
    tonnage: Program, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]
) -> None:
    monkeypatch.setattr(cuda_api, "_import_driver", no_driver)
    made, table = asked(tonnage, *argv)
    assert made["schema"] == "tonnage.devices/1"
    (host,) = made["devices"]
    assert (host["kind"], host["in_use"]) == ("host", BEST)
    assert host["total_bytes"] > host["free_bytes"] > 0
    assert "NO_DRIVER" in made["no_cuda"]
    assert "No CUDA device. cuInit failed: NO_DRIVER (the library cannot be loaded). Everything runs on the" in table
    assert "heap" in made["torch_boundary"]


def test_torch_is_never_imported(tonnage: Program, monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it would fail
    asked(tonnage, "--probe")


def test_without_probing_no_context_is_made(tonnage: Program, cuda: FakeCuda) -> None:
    made, table = asked(tonnage)
    card = made["devices"][1]
    assert cuda.called("cuDevicePrimaryCtxRetain") == []
    assert (card["name"], card["ordinal"], card["uuid"]) == ("NVIDIA Fake", 0, f"GPU-{UUIDS[0]}")
    assert (card["total_bytes"], card["free_bytes"]) == (CAPACITY, CAPACITY - 9 * PAGE)
    assert card["others"] == [{"pid": 10**7 + 1, "num_bytes": 3 * PAGE}, {"pid": 10**7 + 2, "num_bytes": None}]
    assert (card["is_probed"], card["context_bytes"], card["page_bytes"]) == (False, None, None)
    assert {one["capability"]: one["state"] for one in card["capabilities"]}["vmm"] == "promised"
    assert [one["state"] for one in card["paths"]] == ["promised", "promised", "yes"]
    assert made["driver_version"] == "13.0"
    assert "virtual memory, as the driver promises; not probed: --probe opens the device" in table
    assert f"pid {10**7 + 1} 192 KiB, pid {10**7 + 2} –" in table
    assert "not probed: --probe builds the shim" in table


def test_probing_tries_and_gives_everything_back(tonnage: Program, cuda: FakeCuda) -> None:
    made, table = asked(tonnage, "--probe")
    card = made["devices"][1]
    assert len(cuda.called("cuDevicePrimaryCtxRetain")) == len(cuda.called("cuDevicePrimaryCtxRelease")) == 2
    assert cuda.host.used_bytes == 0
    assert (card["is_probed"], card["page_bytes"]) == (True, PAGE)
    assert [one["state"] for one in card["paths"]] == ["yes", "yes", "yes"]
    assert card["in_use"] == BEST
    assert all(one["costs"] == one["reason"] == "" for one in card["paths"])
    assert card["own_source"].startswith("inferred from free memory")
    assert "NVML lists 2 processes" in card["own_source"]
    assert "arenas virtual memory scopes virtual memory buffers private pool" in table
    assert "torch takes its segments itself" in table
    assert "no cc" in table


def test_what_is_absent_is_told_with_its_code_and_its_price(tonnage: Program, cuda: FakeCuda) -> None:
    cuda.fail("cuMemCreate", 801)
    cuda.attributes["MEMORY_POOLS_SUPPORTED"] = 0
    made, table = asked(tonnage, "--probe")
    card = made["devices"][1]
    virtual, pool, plain = card["paths"]
    assert set(card["in_use"].values()) == {"synchronous"}
    assert [one["state"] for one in (virtual, pool, plain)] == ["no", "no", "yes"]
    assert virtual["reason"] == "cuMemCreate: NOT_SUPPORTED (801)"
    assert "before CUDA graphs are captured" in virtual["costs"]
    assert pool["reason"] == "CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED is 0"
    assert "70 to 108 microseconds" in pool["costs"]
    for said in (virtual["reason"], virtual["costs"], pool["reason"], pool["costs"]):
        assert flat(said) in table


def test_an_attribute_is_enough_for_an_absence(tonnage: Program, cuda: FakeCuda) -> None:
    cuda.attributes["VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED"] = 0
    card = asked(tonnage)[0]["devices"][1]
    assert card["in_use"] == {"arenas": "synchronous", "scopes": "private pool", "buffers": "private pool"}
    assert card["paths"][0]["reason"] == "CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED is 0"


@pytest.mark.parametrize(
    ("function", "status", "told"),
    [
        ("cuDevicePrimaryCtxRetain", 2, "cannot be opened: cuDevicePrimaryCtxRetain failed: OUT_OF_MEMORY"),
        ("cuDevicePrimaryCtxRetain", 304, "cannot be opened: cuDevicePrimaryCtxRetain failed: OPERATING_SYSTEM"),
        ("cuMemAllocFromPoolAsync", 2, "was opened, and then: cuMemAllocFromPoolAsync failed: OUT_OF_MEMORY"),
        ("cuMemCreate", 700, "was opened, and then: cuMemCreate failed: ILLEGAL_ADDRESS"),
    ],
)
def test_a_card_that_fails_is_a_line_and_not_an_end(
    tonnage: Program, cuda: FakeCuda, function: str, status: int, told: str
) -> None:
    cuda.fail(function, status)
    made, table = asked(tonnage, "--probe")
    card = made["devices"][1]
    assert told in card["problem"]
    assert told in table
    assert (card["is_probed"], card["paths"], card["in_use"]) == (False, [], {})
    assert card["total_bytes"] == CAPACITY


def test_where_nvml_is_silent_it_says_so(tonnage: Program, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise NvmlError("Driver/library version mismatch")

    monkeypatch.setattr(sys.modules["pynvml"], "nvmlInit", refuse)
    made, table = asked(tonnage)
    card = made["devices"][1]
    assert (card["others"], card["free_bytes"]) == (None, None)
    assert "version mismatch" in card["others_told"]
    assert "version mismatch" in table
    # Once it is open, the driver itself says what is free.
    card = asked(tonnage, "--probe")[0]["devices"][1]
    assert card["free_bytes"] == CAPACITY
    assert "with our context open" in card["free_source"]


def test_settings_that_keep_torch_from_us_are_told(
    tonnage: Program, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asked(tonnage)[0]["torch_settings"] == ""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    made, table = asked(tonnage)
    assert "take expandable_segments:True out of PYTORCH_CUDA_ALLOC_CONF" in made["torch_settings"]
    assert "torch's settings PYTORCH_CUDA_ALLOC_CONF" in table


def test_the_torch_boundary_in_words(tonnage: Program, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tonnage.buffers.shim_build.build_shim", lambda: SimpleNamespace(path=Path("x.so"), compiler="gcc", reason="")
    )
    assert asked(tonnage, "--probe")[0]["torch_boundary"].endswith("through a C shim built with gcc")
    monkeypatch.setattr(verb, "find_spec", lambda _: None)
    assert "not installed" in asked(tonnage, "--probe")[0]["torch_boundary"]


def test_several_cards_are_listed_in_their_order(tonnage: Program, cuda: FakeCuda) -> None:
    cuda.num_devices = 3
    made, table = asked(tonnage)
    assert [one["ordinal"] for one in made["devices"] if one["kind"] == "cuda"] == [0, 1, 2]
    assert table.index("cuda:0") < table.index("cuda:1") < table.index("cuda:2")


# paths


@pytest.mark.parametrize(
    ("vmm", "pools", "arenas", "scopes", "buffers"),
    [
        (State.YES, State.YES, "VIRTUAL", "VIRTUAL", "POOL"),
        (State.PROMISED, State.NO, "VIRTUAL", "VIRTUAL", "SYNCHRONOUS"),
        (State.NO, State.PROMISED, "SYNCHRONOUS", "POOL", "POOL"),
        (State.NO, State.NO, "SYNCHRONOUS", "SYNCHRONOUS", "SYNCHRONOUS"),
    ],
)
def test_the_first_path_that_is_there_is_in_use(
    vmm: State, pools: State, arenas: str, scopes: str, buffers: str
) -> None:
    ways = paths([Found(capability="vmm", state=vmm), Found(capability="pools", state=pools)])
    assert {who: way.path.name for who, way in in_use(ways).items()} == {
        "arenas": arenas, "scopes": scopes, "buffers": buffers,
    }  # fmt: skip
    assert [bool(one.costs) for one in ways] == [vmm is State.NO, pools is State.NO, False]


@pytest.mark.parametrize("capability", ATTRIBUTES)
def test_attributes_and_attempts_agree_on_what_is_absent(cuda: FakeCuda, capability: str) -> None:
    from tonnage.device.cuda import CudaDriver

    cuda.attributes[ATTRIBUTES[capability]] = 0
    promises = {one.capability: one for one in promised(0, api=cuda)}
    driver = CudaDriver(0, api=cuda)
    tried = {one.capability: one for one in found_in(driver.capabilities())}
    driver.close()
    assert promises.keys() == tried.keys()
    assert promises[capability].state is tried[capability].state is State.NO
    assert promises[capability].reason == tried[capability].reason
    # Nothing is promised to be absent that is there.
    assert all(promises[name].state is not State.NO for name in tried if tried[name].state is State.YES)


def test_an_attribute_that_cannot_be_read_is_an_absence_with_a_reason(cuda: FakeCuda) -> None:
    cuda.fail("cuDeviceGetAttribute", 101)
    assert {one.state for one in promised(0, api=cuda)} == {State.NO}
    assert "INVALID_DEVICE" in promised(0, api=cuda)[0].reason


@pytest.mark.parametrize(
    ("name", "files", "word"),
    [
        ("NVIDIA H200", {}, ""),
        ("NVIDIA A100-SXM4-40GB", {}, ""),
        ("NVIDIA H200 MIG 1g.18gb", {}, "MIG"),
        ("NVIDIA A40-48Q", {}, "vGPU"),
        ("GRID T4-16C", {}, "vGPU"),
        ("NVIDIA RTX 4090", {"proc/version": "Linux version 5.15.90.1-microsoft-standard-WSL2"}, "WSL"),
        ("NVIDIA H200", {".dockerenv": ""}, "container"),
        ("NVIDIA H200", {"run/.containerenv": ""}, "container"),
        ("NVIDIA H200", {"proc/self/ns/pid": ""}, "container"),
    ],
)
def test_surroundings_are_told_from_what_shows(tmp_path: Path, name: str, files: dict[str, str], word: str) -> None:
    for place, text in files.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(text)
    told = surroundings(name, root=tmp_path)
    assert len(told) == bool(word)
    assert word in "".join(told)
