"""Scratch within its declaration: sized for the worst step, bounded in every step."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.buffers import BufferManager, Device, Stream, VaArena
from tonnage.config import Limits
from tonnage.declarations import declare
from tonnage.device.host import HostDriver
from tonnage.errors import BufferInUse, DeclarationExceeded
from tonnage.ledger import Ledger
from tonnage.terms import Chip, LineKind, Scratch, StepShape, worst_bytes, worst_shape
from tonnage.workspace import ScratchArena

LIMITS = Limits(max_seq_len=512, max_batch_size=8, max_num_tokens=256, max_logits_rows=8)
CHIP = Chip(name="host", sm=0, num_sms=2, total_bytes=2**30)
SHAPE = StepShape(num_tokens=10, prefill_tokens=10, prefill_rows=1)


@dataclass(frozen=True, kw_only=True)
class PerToken(Scratch):
    """``rate`` bytes for every token of a step."""

    backend: str = "toy"
    name: str = "toy scratch"
    share: str = "attention"
    keeps_state: bool = False
    alignment: int = 64
    source: str = "test"
    rate: int = 100

    def bytes_at(self, shape: StepShape, chip: Chip) -> int:
        return self.rate * shape.num_tokens


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(0, 2**24)


@pytest.fixture
def memory(ledger: Ledger):
    driver = HostDriver(2**24, page_bytes=2**16)
    memory = VaArena(Stream(Device(driver)), ledger=ledger, owner="scratch", line=LineKind.SCRATCH, reserve_bytes=2**30)
    yield memory
    memory.close()
    assert driver.close() == ()


def make(memory, *declarations: Scratch, **arguments) -> ScratchArena:
    return ScratchArena(memory, declarations or (PerToken(),), limits=LIMITS, chip=CHIP, **arguments)


def test_the_worst_step_is_enough_for_every_step() -> None:
    assert worst_bytes((), LIMITS, CHIP) == 0
    assert worst_bytes((PerToken(), PerToken(rate=70)), LIMITS, CHIP) == 25_600
    assert worst_shape(LIMITS).attended_tokens == 8 * 512


@given(
    st.lists(st.tuples(st.integers(0, 511), st.integers(1, 512)), min_size=1, max_size=8),
    st.sampled_from(["float32", "bfloat16"]),
)
def test_no_admissible_step_needs_more_than_the_worst(rows: list[tuple[int, int]], dtype: str) -> None:
    declarations = declare("sdpa", kv_heads=3, head_dim=64, kv_dtype=dtype, block_tokens=16)
    budget, spans = LIMITS.max_num_tokens, []
    for start, count in rows:
        taken = min(count, budget, LIMITS.max_seq_len - start)
        budget -= taken
        if taken:
            spans.append((start, taken))
    prefill = [(start, count) for start, count in spans if count > 1 or start == 0]
    shape = StepShape(
        num_tokens=sum(count for _, count in spans),
        prefill_tokens=sum(count for _, count in prefill),
        prefill_rows=len(prefill),
        decode_rows=len(spans) - len(prefill),
        attended_tokens=sum(start + count for start, count in spans),
        max_row_tokens=max(start + count for start, count in spans),
        logits_rows=len(spans),
    )
    assert declarations[0].bytes_at(shape, CHIP) <= worst_bytes(declarations, LIMITS, CHIP)


def test_the_arena_is_committed_to_its_worst_step_at_once(memory: VaArena, ledger: Ledger) -> None:
    arena = make(memory)
    assert arena.size_bytes == 25_600
    assert memory.committed_bytes == 2**16
    assert ledger.snapshot().entries[0].requested_bytes == 25_600
    assert arena.address == memory.address


def test_pieces_are_aligned_apart_and_start_again_each_step(memory: VaArena) -> None:
    arena = make(memory)
    for _ in range(2):
        with arena.step(SHAPE) as scratch:
            assert [scratch.take(100), scratch.take(1), scratch.take(0), scratch.take(64)] == [0, 128, 0, 192]
            assert scratch.used_bytes == 256
            assert scratch.address == memory.address
            assert scratch.declared_bytes == 1000
    assert arena.high_water_bytes == 256
    assert "256" in repr(arena)


def test_more_than_declared_names_backend_asked_declared_and_shape(memory: VaArena) -> None:
    arena = make(memory)
    with arena.step(SHAPE) as scratch:
        scratch.take(900)
        with pytest.raises(DeclarationExceeded) as caught:
            scratch.take(105)  # starts at 960
        scratch.take(40)
    error = caught.value
    assert (error.backend, error.asked_bytes, error.declared_bytes, error.shape) == ("toy", 1065, 1000, SHAPE)
    assert isinstance(error, MemoryError)
    assert arena.high_water_bytes == 1000


def test_backends_that_share_count_once_and_the_largest_is_named(memory: VaArena) -> None:
    arena = make(memory, PerToken(), PerToken(backend="larger", rate=150))
    assert arena.size_bytes == 150 * 256
    with arena.step(SHAPE) as scratch, pytest.raises(DeclarationExceeded, match="'larger'"):
        scratch.take(1501)


def test_a_shape_beyond_the_limits_is_refused(memory: VaArena) -> None:
    with pytest.raises(DeclarationExceeded), make(memory).step(StepShape(num_tokens=257)):
        pytest.fail("no scratch for it")


def test_one_step_at_a_time_and_a_failed_step_ends(memory: VaArena) -> None:
    arena = make(memory)
    with pytest.raises(AssertionError), arena.step(SHAPE), arena.step(SHAPE):
        pytest.fail("two steps at once")
    with arena.step(SHAPE):
        pass


def test_poison_covers_what_a_step_used_and_nothing_else(memory: VaArena) -> None:
    arena = make(memory, PerToken(zeroed_bytes=64), poison=True)
    with arena.step(SHAPE) as scratch:
        ctypes.memset(arena.address + scratch.take(300), 1, 300)
    after = ctypes.string_at(arena.address, 400)
    assert after == b"\x01" * 64 + b"\xaa" * 236 + bytes(100)


def test_leading_bytes_are_zero_before_first_use(memory: VaArena) -> None:
    memory.commit(2**16)
    ctypes.memset(memory.address, 7, 2**16)
    make(memory, PerToken(zeroed_bytes=128))
    assert ctypes.string_at(memory.address, 130) == bytes(128) + b"\x07\x07"


def test_kept_state_is_never_poisoned(memory: VaArena) -> None:
    with pytest.raises(ValueError, match="keeps state"):
        make(memory, PerToken(keeps_state=True), poison=True)


def test_two_shares_need_two_arenas(memory: VaArena) -> None:
    with pytest.raises(ValueError, match="several shares"):
        make(memory, PerToken(), PerToken(share="other"))


def test_what_a_library_allocates_is_not_served(memory: VaArena) -> None:
    arena = make(memory, PerToken(served=False))
    assert (arena.size_bytes, memory.committed_bytes) == (0, 0)
    with arena.step(SHAPE) as scratch, pytest.raises(DeclarationExceeded):
        scratch.take(1)


def test_a_buffer_must_be_large_enough(memory: VaArena, ledger: Ledger) -> None:
    manager = BufferManager(memory.stream, ledger=ledger, owner="scratch")
    for size in (25_600, 25_599):
        buffer = manager.gpu_sync(size, line=LineKind.SCRATCH)
        if size == 25_600:
            assert make(buffer).address == buffer.address
        else:
            with pytest.raises(DeclarationExceeded):
                make(buffer)
        buffer.close()


def test_tensors_lie_in_the_arena_and_let_go_of_it(memory: VaArena) -> None:
    torch = pytest.importorskip("torch")
    arena = make(memory)
    with arena.step(SHAPE) as scratch:
        first = scratch.tensor((5, 5), torch.float32)
        second = scratch.tensor((3,), torch.bool)
        empty = scratch.tensor((2, 0), torch.float32)
        assert first.data_ptr() == memory.address
        assert second.data_ptr() == memory.address + 128
        assert empty.numel() == 0
        first.fill_(1.5)
        assert float(first.sum()) == 37.5
        with pytest.raises(DeclarationExceeded):
            scratch.tensor((1000,), torch.float32)
    del first, second, empty
    with pytest.raises(BufferInUse):
        memory.close()
    arena.close()
    arena.close()
