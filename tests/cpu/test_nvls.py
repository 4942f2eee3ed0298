"""Memory of a group of simulated devices: one address for all, made or unmade by all ranks together."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tonnage.buffers import BufferManager, Device, Stream
from tonnage.buffers.group import ThreadGroup
from tonnage.buffers.nvls import NvlsBuffer, NvlsView, ipc_nvls
from tonnage.device.fabric import HostFabric
from tonnage.device.fault import ALLOCATING, RELEASING, FaultDriver
from tonnage.device.host import HostDriver
from tonnage.device.trace import TraceDriver
from tonnage.errors import BufferInUse, BufferOOM, DriverError, DriverUnsupported, LedgerError
from tonnage.ledger import Ledger
from tonnage.terms import LineKind, MemoryKind

PAGE = 64 * 1024
RANKS = 3


class Ranks:
    """``RANKS`` devices on one fabric, each with its ledger, its failures and its trace; ``run`` is a step of all."""

    def __init__(self, *, pages: tuple[int, ...] = (PAGE,) * RANKS, timeout_s: float = 20) -> None:
        fabric = HostFabric()
        self.hosts = [
            HostDriver(64 * PAGE, page_bytes=page, ordinal=rank, fabric=fabric) for rank, page in enumerate(pages)
        ]
        self.faults = [FaultDriver(host) for host in self.hosts]
        self.traces = [TraceDriver(fault) for fault in self.faults]
        self.ledgers = [Ledger(rank, 64 * PAGE) for rank in range(RANKS)]
        self.streams = [Stream(Device(trace)) for trace in self.traces]
        self.groups = ThreadGroup.make(RANKS, timeout_s=timeout_s)
        self.threads = ThreadPoolExecutor(RANKS)

    def run(self, step: Callable[[int], Any]) -> list[Any]:
        """What each rank returned or raised."""
        return list(self.threads.map(lambda rank: _outcome(step, rank), range(RANKS)))

    def make(self, rank: int, size_bytes: int = 2 * PAGE - 100, **options: Any) -> NvlsBuffer:
        options = {"allow_multicast": True, "shared_gpu": False, **options}
        return ipc_nvls(
            self.groups[rank],
            self.streams[rank],
            size_bytes,
            ledger=self.ledgers[rank],
            owner="nvls",
            line=LineKind.TABLES,
            **options,
        )

    def require_nothing_left(self) -> None:
        for host, ledger in zip(self.hosts, self.ledgers, strict=True):
            assert host.leaks() == ()
            assert (host.used_bytes, ledger.accounted_bytes) == (0, 0)

    def close(self) -> None:
        self.threads.shutdown()
        for host in self.hosts:
            host.close()


def _outcome(step: Callable[[int], Any], rank: int) -> Any:
    try:
        return step(rank)
    except Exception as error:  # noqa: BLE001 - what it is, is what is tested
        return error


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()


def made(ranks: Ranks, **options: Any) -> list[NvlsBuffer]:
    buffers = ranks.run(lambda rank: ranks.make(rank, **options))
    for buffer in buffers:
        if isinstance(buffer, Exception):
            raise buffer
    return buffers


def test_a_write_to_the_multicast_address_reaches_every_rank(ranks: Ranks) -> None:
    buffers = made(ranks)
    for rank, buffer in enumerate(buffers):
        driver = buffer.stream.driver
        driver.fill(buffer.unicast.address, rank + 1, buffer.padded_bytes, stream=0)
    buffers[1].stream.driver.fill(buffers[1].multicast.address + 100, 9, 50, stream=0)
    source = ctypes.create_string_buffer(b"hello", 5)
    buffers[2].stream.driver.copy(buffers[2].multicast.address + PAGE - 2, ctypes.addressof(source), 5, stream=0)
    for rank, buffer in enumerate(buffers):
        seen = ctypes.string_at(buffer.unicast.address, buffer.padded_bytes)
        mine = bytes([rank + 1])
        assert seen == mine * 100 + b"\x09" * 50 + mine * (PAGE - 152) + b"hello" + mine * (PAGE - 3)


def test_a_rank_reads_and_writes_the_memory_of_its_peers(ranks: Ranks) -> None:
    buffers = made(ranks)
    for mine in buffers:
        for rank, part in enumerate(mine.peers):
            mine.stream.driver.fill(part.address + mine.group.rank, 10 * mine.group.rank + rank, 1, stream=0)
    for rank, buffer in enumerate(buffers):
        assert list(ctypes.string_at(buffer.unicast.address, RANKS)) == [10 * of + rank for of in range(RANKS)]
        assert buffer.peers[rank] is buffer.unicast
        assert [part.kind for part in buffer.peers].count(NvlsView.PEER) == RANKS - 1


def test_it_is_booked_once_by_each_rank_and_given_back(ranks: Ranks) -> None:
    buffers = made(ranks)
    for ledger, host in zip(ranks.ledgers, ranks.hosts, strict=True):
        (entry,) = ledger.snapshot().entries
        assert (entry.owner, entry.memory, entry.num_live) == ("nvls", MemoryKind.IPC_NVLS, 1)
        assert (entry.requested_bytes, entry.physical_bytes) == (2 * PAGE - 100, 2 * PAGE)
        assert host.used_bytes == 2 * PAGE
    assert ranks.run(lambda rank: buffers[rank].close()) == [None] * RANKS
    ranks.require_nothing_left()
    assert ranks.run(lambda rank: buffers[rank].close()) == [None] * RANKS  # again: nothing happens
    assert {part.address for buffer in buffers for part in (buffer.unicast, buffer.multicast)} == {0}


def test_sizes_are_rounded_to_the_coarsest_pages_of_the_group() -> None:
    ranks = Ranks(pages=(PAGE, 4 * PAGE, 2 * PAGE))
    assert {buffer.padded_bytes for buffer in made(ranks, size_bytes=PAGE)} == {4 * PAGE}
    ranks.close()


def test_no_descriptor_stays_open(ranks: Ranks) -> None:
    made_before = num_descriptors()
    buffers = made(ranks)
    # What is left are the files behind the memory itself: one for each rank, and one for the multicast object.
    assert num_descriptors() == made_before + RANKS + 1
    ranks.run(lambda rank: buffers[rank].close())
    assert num_descriptors() == made_before


def test_no_rank_binds_before_all_were_added(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    order, lock = [], threading.Lock()
    for name in ("multicast_add_device", "multicast_bind"):
        real = getattr(HostDriver, name)

        def noted(driver: HostDriver, *args: int, name: str = name, real: Any = real) -> None:
            with lock:
                order.append(name)
            real(driver, *args)

        monkeypatch.setattr(HostDriver, name, noted)
    made(ranks)
    assert order == ["multicast_add_device"] * RANKS + ["multicast_bind"] * RANKS


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"allow_multicast": False}, "allow_multicast=True"),
        ({"shared_gpu": True}, "shared_gpu=False"),
    ],
)
def test_without_the_callers_word_nothing_is_made(ranks: Ranks, options: dict[str, bool], told: str) -> None:
    for error in ranks.run(lambda rank: ranks.make(rank, **options)):
        assert isinstance(error, DriverUnsupported)
        assert told in str(error)
    assert all(trace.log == [] for trace in ranks.traces)


def test_one_rank_that_may_not_keeps_all_from_it(ranks: Ranks) -> None:
    outcomes = ranks.run(lambda rank: ranks.make(rank, shared_gpu=rank == 1))
    assert all(isinstance(error, DriverUnsupported) for error in outcomes)
    assert "rank 1: multicast objects are never made on a card that others may use" in str(outcomes[0])
    assert all(trace.log == [] for trace in ranks.traces)


def test_a_device_without_a_fabric_says_why_not() -> None:
    groups = ThreadGroup.make(2)
    hosts = [HostDriver(8 * PAGE, page_bytes=PAGE, ordinal=rank) for rank in range(2)]

    def make(rank: int) -> NvlsBuffer:
        stream, ledger = Stream(Device(hosts[rank])), Ledger(rank, 8 * PAGE)
        return ipc_nvls(
            groups[rank],
            stream,
            PAGE,
            ledger=ledger,
            owner="x",
            line=LineKind.TABLES,
            allow_multicast=True,
            shared_gpu=False,
        )

    with ThreadPoolExecutor(2) as threads:
        for error in threads.map(lambda rank: _outcome(make, rank), range(2)):
            assert isinstance(error, DriverUnsupported)
            assert "no fabric" in str(error)
    for host in hosts:
        assert host.close() == ()


def test_a_real_card_is_refused_whatever_it_says_of_itself(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostDriver, "kind", "cuda")
    for error in ranks.run(ranks.make):
        assert isinstance(error, DriverUnsupported)
        assert "simulated devices alone" in str(error)


def test_a_group_of_one_and_odd_sizes_are_refused(ranks: Ranks) -> None:
    (alone,) = ThreadGroup.make(1)
    with pytest.raises(ValueError, match="at least two ranks"):
        ipc_nvls(alone, ranks.streams[0], 1, ledger=ranks.ledgers[0], owner="x", line=LineKind.TABLES)
    assert all(isinstance(error, ValueError) for error in ranks.run(lambda rank: ranks.make(rank, 0)))
    for error in ranks.run(lambda rank: ranks.make(rank, PAGE + rank)):
        assert isinstance(error, ValueError)
        assert "65,536, 65,537, 65,538 bytes" in str(error)
    ranks.require_nothing_left()


# failures


def num_calls(failing: int, calls: frozenset[str]) -> int:
    """How many of ``calls`` rank ``failing`` makes when all goes well."""
    ranks = Ranks()
    ranks.faults[failing].arm(None, calls=calls)
    buffers = made(ranks)
    found = ranks.faults[failing].num_calls
    ranks.run(lambda rank: buffers[rank].close())
    ranks.require_nothing_left()
    ranks.close()
    return found


@pytest.mark.parametrize("failing", range(RANKS))
def test_when_any_call_of_any_rank_fails_no_rank_keeps_anything(failing: int) -> None:
    total = num_calls(failing, ALLOCATING)
    # Own memory and three more mappings, each with three steps; create, export, two imports, the object, add, bind.
    assert total >= 3 * (RANKS + 1) + 7
    ranks = Ranks()
    before = num_descriptors()
    for nth in range(1, total + 1):
        ranks.faults[failing].arm(nth)
        outcomes = ranks.run(ranks.make)
        assert ranks.faults[failing].num_injected == 1
        for rank, error in enumerate(outcomes):
            if rank == failing:
                assert isinstance(error, BufferOOM), error
                assert error.owner == "nvls"
            else:
                assert isinstance(error, DriverError), error
                assert error.code == "PEER_FAILED"
                assert f"rank {failing}: DriverOOM" in str(error)
        ranks.require_nothing_left()
        assert num_descriptors() == before
    ranks.faults[failing].arm(None)
    buffers = made(ranks)  # and then it works
    ranks.run(lambda rank: buffers[rank].close())
    ranks.require_nothing_left()
    ranks.close()


def test_ranks_that_fail_together_each_raise_their_own(ranks: Ranks) -> None:
    for fault in ranks.faults:
        fault.arm(1, forever=True)
    assert all(isinstance(error, BufferOOM) for error in ranks.run(ranks.make))
    ranks.require_nothing_left()


def test_a_rank_whose_ledger_is_sealed_keeps_the_others_from_it(ranks: Ranks) -> None:
    ranks.ledgers[2].seal(strict=True)
    outcomes = ranks.run(ranks.make)
    assert isinstance(outcomes[2], LedgerError)
    assert all(isinstance(error, DriverError) for error in outcomes[:2])
    ranks.require_nothing_left()


@pytest.mark.parametrize("failing", range(RANKS))
def test_a_close_that_fails_can_be_repeated_by_that_rank(failing: int) -> None:
    ranks = Ranks()
    buffers = made(ranks)
    ranks.faults[failing].arm(None, calls=RELEASING)
    ranks.run(lambda rank: buffers[rank].close())
    total = ranks.faults[failing].num_calls
    assert total > 3 * (RANKS + 1)
    for nth in range(1, total + 1):
        buffers = made(ranks)
        ranks.faults[failing].arm(nth, calls=RELEASING, error=DriverError)
        outcomes = ranks.run(lambda rank: buffers[rank].close())  # noqa: B023 - run now
        assert [isinstance(one, DriverError) for one in outcomes] == [rank == failing for rank in range(RANKS)]
        buffers[failing].close()
        ranks.require_nothing_left()
        ranks.faults[failing].arm(None)
    ranks.close()


def test_what_a_roll_back_cannot_give_back_stays_booked(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    total = num_calls(0, ALLOCATING)
    ranks.faults[0].arm(total, in_rollback=True)
    outcomes = ranks.run(ranks.make)
    assert isinstance(outcomes[0], BufferOOM)
    assert "did not take back" in caplog.text
    assert [ledger.accounted_bytes for ledger in ranks.ledgers] == [2 * PAGE, 0, 0]


def test_a_rank_that_does_not_come_is_no_wait_for_ever() -> None:
    ranks = Ranks(timeout_s=0.2)
    outcomes = ranks.run(lambda rank: None if rank == 1 else ranks.make(rank))
    for rank in (0, 2):
        assert isinstance(outcomes[rank], DriverError)
        assert "did not come" in str(outcomes[rank])
    ranks.require_nothing_left()
    ranks.close()


# the life of a buffer


def test_parts_belong_to_the_buffer(ranks: Ranks) -> None:
    (buffer, *_) = made(ranks)
    for part in (buffer.unicast, buffer.multicast, *buffer.peers):
        for call in (part.release, part.close, lambda part=part: part.resize(1)):
            with pytest.raises(ValueError, match="on all ranks together"):
                call()
    buffer.unicast.reshape((2, PAGE // 4), "float16")
    assert (buffer.unicast.dtype, buffer.unicast.shape) == ("float16", (2, PAGE // 4))
    with pytest.raises(ValueError, match="do not fit"):
        buffer.unicast.reshape((2 * PAGE,), "float16")
    with pytest.raises(ValueError, match="no bytes of its own"):
        _ = buffer.multicast.exports


def test_while_a_rank_looks_at_its_memory_no_rank_closes(ranks: Ranks) -> None:
    buffers = made(ranks)
    number = buffers[1].peers[0].exports.add("a tensor")
    outcomes = ranks.run(lambda rank: buffers[rank].close())
    assert isinstance(outcomes[1], BufferInUse)
    assert all(isinstance(outcomes[rank], DriverError) for rank in (0, 2))
    assert all(host.used_bytes == 2 * PAGE for host in ranks.hosts)
    buffers[1].peers[0].exports.drop(number)
    assert ranks.run(lambda rank: buffers[rank].close()) == [None] * RANKS
    ranks.require_nothing_left()


def test_it_is_resized_by_all_in_place_or_anew(ranks: Ranks) -> None:
    buffers = made(ranks)
    parts = [buffer.unicast for buffer in buffers]
    addresses = [part.address for part in parts]
    ranks.run(lambda rank: buffers[rank].resize(2 * PAGE))
    assert [buffer.unicast.address for buffer in buffers] == addresses
    assert {ledger.snapshot().entries[0].requested_bytes for ledger in ranks.ledgers} == {2 * PAGE}
    ranks.run(lambda rank: buffers[rank].resize(5 * PAGE))
    assert {(buffer.size_bytes, buffer.padded_bytes) for buffer in buffers} == {(5 * PAGE, 5 * PAGE)}
    assert {part.address for part in parts} == {0}  # the old ones are dead
    ranks.streams[0].driver.fill(buffers[0].multicast.address, 3, 5 * PAGE, stream=0)
    assert ctypes.string_at(buffers[2].unicast.address + 5 * PAGE - 1, 1) == b"\x03"
    for error in ranks.run(lambda rank: buffers[rank].resize(PAGE * (1 + rank))):
        assert isinstance(error, ValueError)
    ranks.run(lambda rank: buffers[rank].close())
    ranks.require_nothing_left()


def test_a_resize_that_fails_leaves_it_empty_everywhere_and_may_be_repeated(ranks: Ranks) -> None:
    buffers = made(ranks)
    for error in ranks.run(lambda rank: buffers[rank].resize(1000 * PAGE)):
        assert isinstance(error, BufferOOM)
    assert {buffer.size_bytes for buffer in buffers} == {0}
    ranks.require_nothing_left()
    assert ranks.run(lambda rank: buffers[rank].resize(PAGE)) == [None] * RANKS
    ranks.run(lambda rank: buffers[rank].close())
    ranks.require_nothing_left()


def test_the_manager_offers_it(ranks: Ranks) -> None:
    def make(rank: int) -> NvlsBuffer:
        manager = BufferManager(ranks.streams[rank], ledger=ranks.ledgers[rank], owner="comm")
        return manager.ipc_nvls(ranks.groups[rank], PAGE, line=LineKind.TABLES, allow_multicast=True, shared_gpu=False)

    buffers = ranks.run(make)
    assert {buffer.owner for buffer in buffers} == {"comm"}
    ranks.run(lambda rank: buffers[rank].close())
    ranks.require_nothing_left()
