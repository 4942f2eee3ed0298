"""Opening a CUDA device, listing devices, and the end of it: what is said when there is none, forks, and closing."""

from __future__ import annotations

import builtins
import subprocess
import sys
from pathlib import Path

import pytest
from fake_cuda import CAPACITY, UUIDS, CUresult, FakeCuda

from tonnage.device.cuda import CudaDriver, cuda_devices
from tonnage.errors import DeviceLost, DriverError, DriverOOM, DriverUnsupported


def no_library(flags: int) -> None:
    raise RuntimeError("libcuda.so.1 was not found\nand much more")


def refusal(api: FakeCuda, ordinal: int = 0) -> DriverUnsupported:
    with pytest.raises(DriverUnsupported) as caught:
        CudaDriver(ordinal, api=api)
    assert "\n" not in str(caught.value)
    return caught.value


def test_without_the_package_the_error_names_it(monkeypatch):
    real = builtins.__import__

    def without_cuda(name, *args, **kwargs):
        if name.startswith("cuda"):
            raise ImportError("No module named 'cuda'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_cuda)
    with pytest.raises(DriverUnsupported, match=r"cuda-bindings is not installed.*pip install") as caught:
        CudaDriver(0)
    assert caught.value.code == "NO_PACKAGE"
    assert "cuda-bindings" in cuda_devices().reason


def test_without_the_drivers_library_the_error_says_so_in_one_line():
    api = FakeCuda()
    api.cuInit = no_library
    error = refusal(api)
    assert error.code == "NO_DRIVER"
    assert "libcuda.so.1 was not found" in str(error)
    assert cuda_devices(api=api).devices == ()
    assert "libcuda.so.1" in cuda_devices(api=api).reason


def test_no_device_names_the_variable_that_hides_them(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    api = FakeCuda()
    api.fail("cuInit", CUresult.CUDA_ERROR_NO_DEVICE)
    error = refusal(api)
    assert error.code == "NO_DEVICE"
    assert "CUDA_VISIBLE_DEVICES is ''" in str(error)


def test_any_other_code_is_told_with_the_drivers_words():
    api = FakeCuda()
    api.fail("cuInit", CUresult.CUDA_ERROR_UNKNOWN)
    error = refusal(api)
    assert (error.call, error.code) == ("cuInit", "UNKNOWN")
    assert "the words for 999" in str(error)


@pytest.mark.parametrize("ordinal", [-1, 2])
def test_an_ordinal_out_of_range_says_what_there_is(ordinal):
    error = refusal(FakeCuda(num_devices=2), ordinal)
    assert error.code == "INVALID_DEVICE"
    assert f"no device {ordinal}" in str(error)
    assert "2, numbered from 0" in str(error)


def test_a_refused_context_is_the_drivers_code_and_leaves_nothing_retained():
    api = FakeCuda()
    api.fail("cuDevicePrimaryCtxRetain", CUresult.CUDA_ERROR_NOT_PERMITTED)
    assert refusal(api).code == "NOT_PERMITTED"
    assert not api.retained[0]


def test_no_memory_for_the_context_is_no_lack_of_support():
    api = FakeCuda()
    api.fail("cuDevicePrimaryCtxRetain", CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(DriverOOM):
        CudaDriver(api=api)


def test_devices_are_listed_without_a_context():
    api = FakeCuda(num_devices=2)
    found = cuda_devices(api=api)
    assert (found.reason, found.driver_version) == ("", "13.0")
    assert [(one.ordinal, one.uuid) for one in found.devices] == [(0, f"GPU-{UUIDS[0]}"), (1, f"GPU-{UUIDS[1]}")]
    one = found.devices[1]
    assert (one.name, one.sm, one.num_sms, one.total_bytes) == ("NVIDIA Fake", 90, 132, CAPACITY)
    assert not one.integrated
    assert not one.is_slice
    assert not api.retained
    assert not api.called("cuCtxSetCurrent")


def test_a_slice_of_a_card_is_named_as_nvml_names_it():
    api = FakeCuda()
    api.cuDeviceGetName = lambda *_: (0, b"NVIDIA H200 MIG 1g.18gb\0")
    (one,) = cuda_devices(api=api).devices
    assert one.is_slice
    assert one.uuid == f"MIG-{UUIDS[0]}"


def test_no_devices_is_a_reason_too():
    assert "no CUDA device" in cuda_devices(api=FakeCuda(num_devices=0)).reason


def test_closing_releases_the_context_once_and_nothing_stays_alive():
    api = FakeCuda()
    driver = CudaDriver(api=api)
    driver.pool_alloc(driver.pool_create(), 100, stream=driver.stream_create(priority=-1))
    driver.managed_alloc(100)
    driver.event_create()
    driver.stream_destroy(driver.stream_create(priority=0))
    leaks = driver.close()
    assert len(leaks) == 2
    assert driver.close() == ()
    assert api.retained[0] == 0
    assert api.host.leaks() == ()
    assert len(api.called("cuStreamDestroy")) == 2
    assert len(api.called("cuEventDestroy")) == 1
    with pytest.raises(DriverError, match="the device is closed"):
        driver.pool_create()


def test_what_cannot_be_given_back_is_told_and_the_rest_is_given_back():
    api = FakeCuda()
    driver = CudaDriver(api=api)
    driver.mem_alloc(100)
    driver.host_alloc(200, flags=0)
    api.fail("cuMemFree", CUresult.CUDA_ERROR_UNKNOWN)
    leaks = driver.close()
    assert len(leaks) == 3
    assert "not given back: cuMemFree failed: UNKNOWN" in leaks[2]
    assert api.called("cuMemFreeHost")
    assert api.retained[0] == 0


def test_a_device_lost_while_it_is_closed_is_asked_nothing_more():
    api = FakeCuda()
    driver = CudaDriver(api=api)
    driver.mem_alloc(100)
    api.fail("cuCtxSynchronize", CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
    leaks = driver.close()
    assert "lost while it was closed" in leaks[-1]
    assert not api.called("cuMemFree")
    assert not api.called("cuDevicePrimaryCtxRelease")


def test_a_process_that_ends_leaves_the_driver_alone(monkeypatch):
    api = FakeCuda()
    driver = CudaDriver(api=api)
    driver.mem_alloc(100)
    num_calls = len(api.calls)
    monkeypatch.setattr(sys, "is_finalizing", lambda: True)
    assert len(driver.close()) == 1
    assert len(api.calls) == num_calls


FORK = """
import os, sys
from fake_cuda import FakeCuda
from tonnage.device.cuda import CudaDriver
from tonnage.errors import DeviceLost

api = FakeCuda()
driver = CudaDriver(api=api)
stream, pool = driver.stream_create(priority=0), driver.pool_create()
held = driver.pool_alloc(pool, 100, stream=stream)
num_calls = len(api.calls)
driver._lock.acquire()  # as if another thread had been inside a call
child = os.fork()
if child == 0:
    calls = [
        driver.mem_info, driver.activate, driver.device_sync, lambda: driver.pool_alloc(pool, 1, stream=stream),
        lambda: driver.pool_alloc(pool, 1, stream=0), lambda: driver.pool_free(held, stream=stream),
        lambda: driver.va_reserve(65536, align=1), lambda: driver.stream_sync(stream), lambda: driver.mem_alloc(1),
    ]
    told = 0
    for call in calls:
        try:
            call()
        except DeviceLost as error:
            told += "fork" in str(error) and error.code == "FORKED"
    driver.close()
    os._exit(7 if told == len(calls) and len(api.calls) == num_calls else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
driver._lock.release()
driver.pool_free(held, stream=stream)
assert driver.close() == ()
print("good")
"""


def test_after_a_fork_the_child_is_refused_and_the_parent_goes_on():
    """In a process of its own, so that no thread of this one is forked."""
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, env={"PYTHONPATH": ":".join([here, *sys.path])}
    )
    assert done.stdout == "good\n", done.stderr


def test_a_lost_device_stays_lost_when_it_is_closed():
    api = FakeCuda()
    driver = CudaDriver(api=api)
    api.fail("cuMemGetInfo", CUresult.CUDA_ERROR_ECC_UNCORRECTABLE)
    with pytest.raises(DeviceLost):
        driver.mem_info()
    num_calls = len(api.calls)
    driver.close()
    assert len(api.calls) == num_calls
    with pytest.raises(DeviceLost):
        driver.mem_info()
