"""Torch tensors over arenas and buffers: one address for life, and no tensor left over nothing."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch")

from tonnage.buffers import BufferManager, Device, Stream, VaArena  # noqa: E402
from tonnage.buffers.torch_view import as_tensor, typed_view  # noqa: E402
from tonnage.device.host import HostDriver  # noqa: E402
from tonnage.errors import BufferInUse  # noqa: E402
from tonnage.layout import DTYPE_BYTES  # noqa: E402
from tonnage.ledger import Ledger  # noqa: E402
from tonnage.terms import LineKind  # noqa: E402

PAGE = 2**16


@pytest.fixture
def driver():
    driver = HostDriver(64 * PAGE, page_bytes=PAGE)
    yield driver
    assert driver.close() == ()


@pytest.fixture
def arena(driver: HostDriver):
    arena = VaArena(
        Stream(Device(driver)), ledger=Ledger(0, 64 * PAGE), owner="kv", line=LineKind.KV, reserve_bytes=2**36
    )
    yield arena
    arena.close()


def test_a_tensor_over_the_reservation_is_valid_before_and_after_growth(arena: VaArena) -> None:
    tensor = as_tensor(arena)
    assert (tensor.data_ptr(), tensor.numel(), tensor.dtype) == (arena.address, 2**36, torch.uint8)
    for num_pages in (1, 10, 3):
        arena.commit(num_pages * PAGE)
        tensor[: num_pages * PAGE].fill_(num_pages)
        assert as_tensor(arena) is tensor
        assert int(tensor[:PAGE].sum()) == num_pages * PAGE
    arena.decommit(0)
    arena.commit(PAGE)
    assert (int(tensor[:PAGE].sum()), tensor.data_ptr()) == (0, arena.address)


def test_closing_is_refused_while_any_view_is_alive(arena: VaArena) -> None:
    arena.commit(PAGE)
    view = typed_view(as_tensor(arena), 64, (4, 4), "float32")
    gc.collect()
    with pytest.raises(BufferInUse, match=r"'kv'.*cannot be closed: a tensor of 68,719,476,736 bytes"):
        arena.close()
    view.fill_(2.0)  # still there: the refusal changed nothing
    assert arena.committed_bytes == PAGE
    del view
    arena.close()


def test_a_view_outlives_the_tensor_and_a_new_tensor_sees_the_same_bytes(arena: VaArena) -> None:
    arena.commit(PAGE)
    view = as_tensor(arena)[10:20]
    view.fill_(9)
    assert int(as_tensor(arena)[10:20].sum()) == 90
    assert as_tensor(arena).data_ptr() == arena.address
    again = as_tensor(arena)
    del view
    with pytest.raises(BufferInUse):
        arena.close()
    del again


def test_a_buffer_is_a_tensor_too(driver: HostDriver) -> None:
    manager = BufferManager(Stream(Device(driver)), ledger=Ledger(0, 64 * PAGE), owner="tests")
    for make in (manager.gpu_sync, manager.cpu):
        buffer = make(400, line=LineKind.TABLES)
        tensor = as_tensor(buffer)
        typed_view(tensor, 0, (100,), "int32").fill_(7)
        assert int(tensor.sum()) == 700
        with pytest.raises(BufferInUse, match="400"):
            buffer.close()
        del tensor
        buffer.close()


@pytest.mark.parametrize("name", DTYPE_BYTES)
def test_every_dtype_of_the_layout_has_a_view(arena: VaArena, name: str) -> None:
    arena.commit(PAGE)
    view = typed_view(as_tensor(arena), 128, (3, 5), name)
    assert (view.dtype, tuple(view.shape)) == (getattr(torch, name), (3, 5))
    assert view.data_ptr() == arena.address + 128
    assert view.element_size() == DTYPE_BYTES[name]


@pytest.mark.parametrize(("offset", "shape"), [(1, (1,)), (-4, (1,)), (0, (26,)), (100, (1,))])
def test_a_view_that_does_not_lie_in_the_tensor_is_refused(offset: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="do not lie in 100 bytes"):
        typed_view(torch.zeros(100, dtype=torch.uint8), offset, shape, "float32")


def test_an_empty_view_is_fine() -> None:
    assert typed_view(torch.zeros(8, dtype=torch.uint8), 8, (2, 0), "float32").shape == (2, 0)
