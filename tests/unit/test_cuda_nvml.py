"""NVML's figures, and the reasons where it gives none."""

from __future__ import annotations

import builtins
import os
from types import SimpleNamespace

import pytest

from tonnage.device.cuda import CudaDriver
from tonnage.device.nvml import Nvml, NvmlProcess

ME = os.getpid()


class FakeNvml:
    """Stands in for ``pynvml``."""

    class NVMLError(Exception):
        pass

    nvmlMemory_v2 = 2

    def __init__(self, *, compute=(), graphics=(), fails=()) -> None:
        self.compute, self.graphics, self.fails = compute, graphics, fails
        self.num_inits = 0

    def _ask(self, name):
        if name in self.fails:
            raise self.NVMLError(f"{name} says no")

    def nvmlInit(self):
        self._ask("nvmlInit")
        self.num_inits += 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self._ask("nvmlDeviceGetHandleByUUID")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle, version=1):
        self._ask("nvmlDeviceGetMemoryInfo")
        if version == 2:
            self._ask("v2")
            return SimpleNamespace(total=100, used=30, free=65, reserved=5)
        return SimpleNamespace(total=100, used=35, free=65)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        self._ask("nvmlDeviceGetComputeRunningProcesses")
        return [SimpleNamespace(pid=pid, usedGpuMemory=num_bytes) for pid, num_bytes in self.compute]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle):
        return [SimpleNamespace(pid=pid, usedGpuMemory=num_bytes) for pid, num_bytes in self.graphics]


@pytest.fixture
def proc(tmp_path):
    """A /proc of a container in which only this process exists."""
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns" / "pid").write_text("")
    (tmp_path / str(ME)).mkdir()
    return tmp_path


def test_own_bytes_are_those_of_our_pid(proc):
    (proc / "7").mkdir()
    nvml = Nvml("GPU-1", module=FakeNvml(compute=[(ME, 500), (7, 80)]), proc=proc)
    assert nvml.own_bytes() == 500
    assert nvml.others() == (NvmlProcess(7, 80),)
    assert nvml.reason == ""


def test_a_process_in_both_lists_counts_once(proc):
    nvml = Nvml("GPU-1", module=FakeNvml(compute=[(ME, 500)], graphics=[(ME, 520)]), proc=proc)
    assert nvml.processes() == (NvmlProcess(ME, 520),)


def test_a_pid_that_is_not_listed_is_unknown_and_said_so(proc):
    nvml = Nvml("GPU-1", module=FakeNvml(compute=[(7, 80)]), proc=proc)
    assert nvml.own_bytes() is None
    assert f"not pid {ME}" in nvml.reason
    assert nvml.others() is None


def test_a_list_with_pids_that_do_not_exist_here_is_not_believed(proc):
    """In a container our pid may be another process's on the machine."""
    fake = FakeNvml(compute=[(ME, 500), (7, 80)])
    nvml = Nvml("GPU-1", module=fake, proc=proc)
    assert nvml.own_bytes() is None
    assert "not ours" in nvml.reason
    fake.compute = [(ME, 500)]
    assert nvml.own_bytes() == 500
    fake.compute = [(ME, 600), (8, 10)]  # one that is just ending, say: by now the numbers are known to be ours
    assert nvml.own_bytes() == 600


def test_where_bytes_are_not_told_there_are_none(proc):
    nvml = Nvml("MIG-1", module=FakeNvml(compute=[(ME, None)]), proc=proc)
    assert nvml.own_bytes() is None
    assert "does not tell" in nvml.reason
    assert nvml.processes() == (NvmlProcess(ME, None),)


@pytest.mark.parametrize(
    "fails",
    ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses"],
)
def test_an_error_of_the_library_is_a_reason(proc, fails):
    nvml = Nvml("GPU-1", module=FakeNvml(compute=[(ME, 1)], fails=[fails]), proc=proc)
    answers = [nvml.memory() if fails == "nvmlDeviceGetMemoryInfo" else nvml.own_bytes()]
    assert answers == [None]
    assert f"{fails} says no" in nvml.reason


def test_it_recovers_when_the_library_does(proc):
    fake = FakeNvml(compute=[(ME, 500)], fails=["nvmlInit"])
    nvml = Nvml("GPU-1", module=fake, proc=proc)
    assert nvml.own_bytes() is None
    fake.fails = ()
    assert nvml.own_bytes() == 500
    assert nvml.own_bytes() == 500
    assert (fake.num_inits, nvml.reason) == (1, "")


@pytest.mark.parametrize(("fails", "reserved", "used"), [((), 5, 30), (("v2",), None, 35)])
def test_memory_of_the_card_with_or_without_the_drivers_part(proc, fails, reserved, used):
    found = Nvml("GPU-1", module=FakeNvml(fails=fails), proc=proc).memory()
    assert (found.total_bytes, found.used_bytes, found.free_bytes, found.reserved_bytes) == (100, used, 65, reserved)


def test_without_the_package_it_says_so(monkeypatch):
    real = builtins.__import__

    def without_nvml(name, *args, **kwargs):
        if name == "pynvml":
            raise ImportError("No module named 'pynvml'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_nvml)
    nvml = Nvml("GPU-1")
    assert nvml.own_bytes() is None
    assert nvml.memory() is None
    assert "nvidia-ml-py" in nvml.reason


def test_the_driver_asks_for_its_own_card_and_survives_its_absence(proc):
    from fake_cuda import UUIDS, FakeCuda

    driver = CudaDriver(api=FakeCuda())
    assert driver.nvml.uuid == f"GPU-{UUIDS[0]}"
    driver.nvml = Nvml(driver.uuid, module=FakeNvml(compute=[(ME, 123)]), proc=proc)
    assert driver.own_bytes() == 123
    driver.nvml = Nvml(driver.uuid, module=FakeNvml(fails=["nvmlInit"]), proc=proc)
    assert driver.own_bytes() is None
