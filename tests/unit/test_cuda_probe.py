"""What a CUDA device is found able to do, when parts of its driver refuse."""

from __future__ import annotations

import pytest
from fake_cuda import PAGE, CUresult, FakeCuda

from tonnage.device.cuda import CudaDriver
from tonnage.errors import DeviceLost, DriverError, DriverOOM, DriverUnsupported
from tonnage.units import MiB

REFUSALS = ["NOT_SUPPORTED", "NOT_PERMITTED", "INVALID_DEVICE", "INVALID_VALUE", "OPERATING_SYSTEM"]


def code(name: str) -> CUresult:
    return CUresult[f"CUDA_ERROR_{name}"]


def test_a_device_that_can_everything_has_no_reasons_and_keeps_nothing_of_the_attempts():
    api = FakeCuda()
    driver = CudaDriver(api=api)
    found = driver.capabilities()
    assert found.pools
    assert found.vmm
    assert found.managed
    assert found.exportable
    assert found.concurrent_managed
    assert found.page_bytes == PAGE
    assert not found.reasons
    assert api.host.leaks() == ()
    assert [args[0] for args in api.called("cuMemAllocFromPoolAsync")] == [2 * MiB]
    assert [args[0] for args in api.called("cuMemAllocManaged")] == [2 * MiB]


@pytest.mark.parametrize("refused", REFUSALS)
@pytest.mark.parametrize(
    ("capability", "call"),
    [
        ("pools", "cuMemPoolCreate"),
        ("pools", "cuMemPoolSetAttribute"),
        ("pools", "cuMemAllocFromPoolAsync"),
        ("vmm", "cuMemGetAllocationGranularity"),
        ("vmm", "cuMemAddressReserve"),
        ("vmm", "cuMemCreate"),
        ("vmm", "cuMemMap"),
        ("vmm", "cuMemSetAccess"),
        ("exportable", "cuMemExportToShareableHandle"),
        ("managed", "cuMemAllocManaged"),
    ],
)
def test_what_the_driver_refuses_is_absent_with_call_and_code_and_nothing_is_left_over(capability, call, refused):
    api = FakeCuda()
    driver = CudaDriver(api=api)
    api.fail(call, code(refused))
    found = driver.capabilities()
    assert not getattr(found, capability)
    assert found.reasons[capability] == f"{call}: {refused} ({code(refused).value})"
    others = {"pools", "vmm", "managed"} - {capability}
    assert all(getattr(found, other) for other in others)
    assert api.host.leaks() == ()


@pytest.mark.parametrize(
    ("capability", "attribute"),
    [
        ("pools", "MEMORY_POOLS_SUPPORTED"),
        ("vmm", "VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED"),
        ("exportable", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"),
        ("managed", "MANAGED_MEMORY"),
        ("multicast", "MULTICAST_SUPPORTED"),
        ("concurrent_managed", "CONCURRENT_MANAGED_ACCESS"),
        ("host_register", "HOST_REGISTER_SUPPORTED"),
    ],
)
def test_what_the_attribute_denies_is_not_tried(capability, attribute):
    api = FakeCuda()
    api.attributes[attribute] = 0
    found = CudaDriver(api=api).capabilities()
    assert not getattr(found, capability)
    assert found.reasons[capability] == f"CU_DEVICE_ATTRIBUTE_{attribute} is 0"
    tried = {"pools": "cuMemPoolCreate", "vmm": "cuMemCreate", "managed": "cuMemAllocManaged"}.get(capability)
    assert tried is None or not api.called(tried)


def test_multicast_is_read_and_never_made():
    api = FakeCuda()
    driver = CudaDriver(api=api)
    assert driver.capabilities().multicast
    for call in (
        lambda: driver.multicast_create(PAGE, num_devices=2),
        lambda: driver.multicast_add_device(1),
        lambda: driver.multicast_bind(1, 2, PAGE),
        lambda: driver.multicast_unbind(1, PAGE),
    ):
        with pytest.raises(DriverUnsupported, match="out of service"):
            call()
    assert not [name for name, _ in api.calls if "Multicast" in name]


@pytest.mark.parametrize("call", ["cuMemPoolCreate", "cuMemAllocFromPoolAsync", "cuMemCreate", "cuMemAllocManaged"])
def test_want_of_memory_is_no_answer(call):
    api = FakeCuda()
    driver = CudaDriver(api=api)
    api.fail(call, code("OUT_OF_MEMORY"), times=1)
    with pytest.raises(DriverOOM):
        driver.capabilities()
    assert api.host.leaks() == ()
    assert driver.capabilities().vmm, "nothing was remembered"


def test_neither_is_a_capture_that_goes_on():
    api = FakeCuda()
    driver = CudaDriver(api=api)
    api.fail("cuMemPoolCreate", code("STREAM_CAPTURE_UNSUPPORTED"), times=1)
    with pytest.raises(DriverError):
        driver.capabilities()
    assert driver.capabilities().pools


def test_a_device_lost_in_a_probe_is_lost():
    api = FakeCuda()
    driver = CudaDriver(api=api)
    api.fail("cuMemSetAccess", code("ILLEGAL_ADDRESS"), times=1)
    with pytest.raises(DeviceLost):
        driver.capabilities()
    with pytest.raises(DeviceLost):
        driver.mem_info()


def test_absences_are_remembered_until_asked_again():
    api = FakeCuda()
    driver = CudaDriver(api=api)
    api.fail("cuMemPoolCreate", code("NOT_SUPPORTED"))
    assert not driver.capabilities().pools
    api.heal()
    num_calls = len(api.calls)
    assert not driver.capabilities().pools
    with pytest.raises(DriverUnsupported, match=r"cuMemPoolCreate: NOT_SUPPORTED \(801\)"):
        driver.pool_create()
    assert len(api.called("cuMemPoolCreate")) == 1
    assert {name for name, _ in api.calls[num_calls:]} <= {"cuCtxSetCurrent"}
    driver.probe_again()
    assert driver.capabilities().pools
    assert driver.pool_create()


def test_without_virtual_memory_its_calls_say_why_and_the_rest_works():
    api = FakeCuda()
    api.attributes["VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED"] = 0
    driver = CudaDriver(api=api)
    for call in (lambda: driver.va_reserve(PAGE, align=PAGE), lambda: driver.phys_create(PAGE)):
        with pytest.raises(DriverUnsupported, match="VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED is 0"):
            call()
    assert driver.capabilities().page_bytes == 2 * MiB
    assert "VIRTUAL_ADDRESS" in driver.capabilities().reasons["exportable"]
    driver.mem_free(driver.mem_alloc(PAGE))


def test_exportable_memory_is_refused_with_the_reason_where_it_cannot_be():
    api = FakeCuda()
    api.attributes["HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"] = 0
    driver = CudaDriver(api=api)
    with pytest.raises(DriverUnsupported, match="POSIX_FILE_DESCRIPTOR"):
        driver.phys_create(PAGE, exportable=True)
    driver.phys_release(driver.phys_create(PAGE))


def test_pages_heed_the_minimum_and_what_is_recommended():
    api = FakeCuda()
    sizes = {"MINIMUM": PAGE, "RECOMMENDED": 4 * PAGE}
    api.cuMemGetAllocationGranularity = lambda _, option: (0, sizes[option.name.rsplit("_", 1)[1]])
    assert CudaDriver(api=api).capabilities().page_bytes == 4 * PAGE


def test_memory_for_network_cards_is_asked_for_where_the_attribute_promises_it():
    api = FakeCuda()
    driver = CudaDriver(api=api)
    driver.phys_create(PAGE)
    driver.phys_create(PAGE, exportable=True)
    plain, exportable = (args[1] for args in api.called("cuMemCreate")[-2:])
    assert plain.allocFlags.gpuDirectRDMACapable == exportable.allocFlags.gpuDirectRDMACapable == 1
    assert plain.location.type == api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    assert plain.requestedHandleTypes is None
    assert exportable.requestedHandleTypes == (api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)


def test_where_it_is_promised_but_refused_memory_is_made_without():
    api = FakeCuda()
    driver = CudaDriver(api=api)
    api.fail("cuMemCreate", code("NOT_SUPPORTED"), times=1)
    found = driver.capabilities()
    assert found.vmm
    assert found.reasons["rdma"] == "cuMemCreate: NOT_SUPPORTED (801)"
    driver.phys_create(PAGE)
    assert api.called("cuMemCreate")[-1][1].allocFlags.gpuDirectRDMACapable == 0
