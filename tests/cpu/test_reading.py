"""One look at a device, what is inferred where it cannot tell, and the thread that goes on looking."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tonnage.costs.context import context_bytes
from tonnage.device.driver import PoolStats
from tonnage.device.host import HostDriver
from tonnage.device.reading import HOST_SOURCE, MAX_LOOKS, POOL_SLACK, TORCH, Sampler, take_reading
from tonnage.errors import DeviceLost
from tonnage.ledger import OTHERS, Account, Ledger
from tonnage.terms import LineKind, MemoryKind
from tonnage.units import MiB

PAGE = 64 * 1024
CAPACITY = 4096 * MiB
CONTEXT_BYTES = context_bytes("cuda").bytes


class Card(HostDriver):
    """A host device that counts as a card does: ``own_bytes`` is exact, or unknown; a context takes memory first."""

    def __init__(self, *, tells: bool = True, foreign_bytes: int = 0) -> None:
        super().__init__(CAPACITY, page_bytes=PAGE)
        self.tells, self.foreign_bytes = tells, foreign_bytes
        self.before_own: Callable[[], None] = lambda: None
        self.num_own = 0

    @property
    def kind(self) -> str:
        return "cuda"

    def mem_info(self) -> tuple[int, int]:
        free, total = super().mem_info()
        return free - CONTEXT_BYTES, total

    def own_bytes(self) -> int | None:
        self.num_own += 1
        self.before_own()
        return self.used_bytes + CONTEXT_BYTES if self.tells else None


@pytest.fixture
def card():
    made = Card()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def ledger_of(**arguments: Any) -> Ledger:
    return Ledger(0, CAPACITY, host_is_device=False, **arguments)


def take(driver: HostDriver, ledger: Ledger, size: int) -> tuple[Account, int]:
    account = ledger.open(owner="ours", line=LineKind.KV, memory=MemoryKind.GPU)
    addr = driver.mem_alloc(size)
    account.add(size, size)
    return account, addr


def test_a_reading_says_what_the_device_says(card: Card) -> None:
    ledger = ledger_of()
    card.foreign_bytes = 300 * MiB
    take(card, ledger, 100 * MiB)
    before = time.monotonic_ns()
    reading = take_reading(card, phase="build", ledger=ledger)
    assert (reading.phase, reading.total_bytes) == ("build", CAPACITY)
    assert before <= reading.at_ns <= time.monotonic_ns()
    assert (reading.own_bytes, reading.own_source) == (100 * MiB + CONTEXT_BYTES, "nvml")
    assert reading.free_bytes == CAPACITY - 400 * MiB - CONTEXT_BYTES
    assert (reading.arena_bytes, reading.pool_reserved_bytes, reading.torch_reserved) == (100 * MiB, 0, 0)
    ledger.sample(reading)
    assert (ledger.snapshot().foreign, ledger.snapshot().unattributed) == (300 * MiB, CONTEXT_BYTES)


def test_the_host_says_where_its_figure_is_from() -> None:
    driver = HostDriver(64 * MiB, page_bytes=PAGE)
    try:
        assert take_reading(driver, phase="x", ledger=Ledger(0, 64 * MiB)).own_source == HOST_SOURCE
    finally:
        driver.close()


def test_a_host_that_does_not_tell_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = HostDriver(64 * MiB, page_bytes=PAGE)
    monkeypatch.setattr(driver, "own_bytes", lambda: None)
    try:
        reading = take_reading(driver, phase="x", ledger=Ledger(0, 64 * MiB))
        assert (reading.own_bytes, reading.own_source) == (None, "unknown")
    finally:
        driver.close()


def test_own_is_inferred_from_what_was_free_before_and_foreign_then_stands_still() -> None:
    card, ledger = Card(tells=False, foreign_bytes=200 * MiB), ledger_of()
    ledger.free_before_bytes = CAPACITY - 200 * MiB
    take(card, ledger, 50 * MiB)
    ledger.sample(take_reading(card, phase="x", ledger=ledger))
    shot = ledger.snapshot()
    assert (shot.own, shot.own_source) == (50 * MiB + CONTEXT_BYTES, "inferred")
    assert (shot.foreign, shot.unattributed) == (200 * MiB, CONTEXT_BYTES)
    # The documented error: growth of others cannot be told from ours, and shows where nobody explains it.
    card.foreign_bytes += 70 * MiB
    ledger.sample(take_reading(card, phase="x", ledger=ledger))
    shot = ledger.snapshot()
    assert (shot.foreign, shot.own, shot.unattributed) == (
        200 * MiB, 120 * MiB + CONTEXT_BYTES, 70 * MiB + CONTEXT_BYTES,
    )  # fmt: skip
    card.close()


def test_without_a_look_before_the_first_reading_assumes_a_context() -> None:
    card, ledger = Card(tells=False, foreign_bytes=200 * MiB), ledger_of()
    take(card, ledger, 50 * MiB)
    ledger.sample(take_reading(card, phase="x", ledger=ledger))
    shot = ledger.snapshot()
    assert (shot.own, shot.foreign) == (50 * MiB + CONTEXT_BYTES, 200 * MiB)
    card.close()


def test_what_is_inferred_never_falls_below_zero() -> None:
    card, ledger = Card(tells=False), ledger_of()
    ledger.free_before_bytes = 0  # others gave back more than we took
    assert take_reading(card, phase="x", ledger=ledger).own_bytes == 0
    card.close()


def test_memory_that_moves_during_a_look_is_not_somebody_elses(card: Card) -> None:
    ledger = ledger_of()
    moves = [lambda: take(card, ledger, 10 * MiB)]
    card.before_own = lambda: moves.pop()() if moves else None
    ledger.sample(take_reading(card, phase="x", ledger=ledger))
    assert (ledger.snapshot().foreign, ledger.snapshot().unattributed) == (0, CONTEXT_BYTES)


def test_a_device_that_never_rests_is_read_all_the_same(card: Card) -> None:
    ledger = ledger_of()
    card.before_own = lambda: take(card, ledger, MiB) and None
    assert take_reading(card, phase="x", ledger=ledger).total_bytes == CAPACITY
    assert card.num_own == MAX_LOOKS


class Pool:
    def __init__(self, reserved: int, used: int) -> None:
        self.given = PoolStats(used_bytes=used, reserved_bytes=reserved, used_high_bytes=0, reserved_high_bytes=0)

    def stats(self) -> PoolStats:
        return self.given


def test_the_slack_of_a_pool_is_an_account_and_no_surprise(card: Card) -> None:
    ledger = ledger_of()
    ledger.seal(strict=True)
    for reserved, used, slack in ((64 * MiB, 10 * MiB, 54 * MiB), (64 * MiB, 70 * MiB, 0)):
        reading = take_reading(card, phase="x", ledger=ledger, pool=Pool(reserved, used))
        assert reading.pool_reserved_bytes == reserved
        (entry,) = ledger.snapshot().entries
        assert (entry.owner, entry.how, entry.physical_bytes) == (POOL_SLACK, "sampled", slack)
    assert ledger.snapshot().first_uses == ()


def fake_torch(*, is_initialized: bool) -> SimpleNamespace:
    said = {"allocated_bytes.all.current": 3, "reserved_bytes.all.current": 20 * MiB,
            "allocated_bytes.all.peak": 5, "reserved_bytes.all.peak": 30 * MiB}  # fmt: skip
    return SimpleNamespace(
        cuda=SimpleNamespace(is_initialized=lambda: is_initialized, memory_stats=lambda device: {0: said}[device])
    )


def torch_fields(driver: HostDriver, **arguments: Any) -> tuple[int, ...]:
    reading = take_reading(driver, phase="x", ledger=ledger_of(), **arguments)
    return (
        reading.torch_allocated, reading.torch_reserved, reading.torch_peak_allocated, reading.torch_peak_reserved,
    )  # fmt: skip


def test_torch_is_asked_only_where_it_is_at_work(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_fields(card) == (0, 0, 0, 0)
    assert "torch" not in sys.modules
    monkeypatch.setitem(sys.modules, "torch", fake_torch(is_initialized=False))
    assert torch_fields(card) == (0, 0, 0, 0)
    monkeypatch.setitem(sys.modules, "torch", fake_torch(is_initialized=True))
    assert torch_fields(card) == (3, 20 * MiB, 5, 30 * MiB)
    assert torch_fields(card, torch=False) == (0, 0, 0, 0)
    host = HostDriver(64 * MiB, page_bytes=PAGE)
    assert torch_fields(host) == (0, 0, 0, 0)
    host.close()


def test_what_torch_holds_beyond_our_segments_is_an_account(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(is_initialized=True))
    ledger = ledger_of()
    take_reading(card, phase="x", ledger=ledger)
    assert ledger.snapshot().entries == ()
    take_reading(card, phase="x", ledger=ledger, torch_counted_bytes=8 * MiB)
    (entry,) = ledger.snapshot().entries
    assert (entry.owner, entry.physical_bytes, entry.how) == (TORCH, 12 * MiB, "sampled")


def until(condition: Callable[[], bool], *, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.002)


def test_the_sampler_sees_another_process_come_and_go_at_an_unannounced_moment(card: Card) -> None:
    ledger = ledger_of()
    take(card, ledger, 100 * MiB)
    with Sampler(card, ledger, interval_s=0.002, full_every=10**9) as sampler:
        own = ledger.snapshot().own
        for foreign in (3072 * MiB, 0):
            card.foreign_bytes = foreign
            until(lambda foreign=foreign: ledger.snapshot().foreign == foreign)
    shot = ledger.snapshot()
    assert (shot.own, shot.foreign_low, shot.foreign_high) == (own, 0, 3072 * MiB)
    assert [event.delta for event in ledger.history(owner=OTHERS)] == [3072 * MiB, -3072 * MiB]
    assert sampler.lowest_free_bytes == CAPACITY - 3172 * MiB - CONTEXT_BYTES


def test_looks_are_cheap_while_accounts_explain_everything(card: Card) -> None:
    ledger = ledger_of()
    sampler = Sampler(card, ledger, full_every=1000)
    sampler.look()
    for _ in range(20):
        take(card, ledger, MiB)
        sampler.look()
    assert (sampler.num_looks, sampler.num_readings) == (21, 1)
    card.mem_alloc(MiB)  # nobody booked it
    sampler.look()
    assert sampler.num_readings == 2
    assert ledger.snapshot().unattributed == CONTEXT_BYTES + MiB


def test_a_whole_reading_comes_now_and_then_in_any_case(card: Card) -> None:
    sampler = Sampler(card, ledger_of(), full_every=4)
    for _ in range(9):
        sampler.look()
    assert sampler.num_readings == 3


def test_the_sampler_starts_and_stops_and_starts(card: Card) -> None:
    sampler = Sampler(card, ledger_of(), interval_s=0.001)
    sampler.stop()
    for _ in range(2):
        sampler.start()
        sampler.start()
        looks = sampler.num_looks
        until(lambda looks=looks: sampler.num_looks > looks + 2)
        sampler.stop()
        assert not [thread for thread in threading.enumerate() if thread.name == "tonnage sampler"]


def test_what_ends_the_sampler_is_told_when_it_is_stopped(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Sampler(card, ledger_of(), interval_s=0.001)
    sampler.start()

    def lost() -> tuple[int, int]:
        raise DeviceLost("cuMemGetInfo", "ILLEGAL_ADDRESS")

    monkeypatch.setattr(card, "mem_info", lost)
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "tonnage sampler"])
    with pytest.raises(DeviceLost):
        sampler.stop()
    sampler.stop()  # and only once


def test_an_error_inside_is_not_hidden_by_the_samplers_own(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> tuple[int, int]:
        raise DeviceLost("cuMemGetInfo", "ILLEGAL_ADDRESS")

    def fails() -> None:
        with Sampler(card, ledger_of(), interval_s=10):
            monkeypatch.setattr(card, "mem_info", lost)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()


def test_a_reading_of_another_make_may_be_taken(card: Card) -> None:
    ledger = Ledger(0, CAPACITY)
    taken = take_reading(card, phase="mine", ledger=ledger)
    with Sampler(card, ledger, interval_s=10, read=lambda: taken) as sampler:
        assert sampler.num_readings == 1
    assert ledger.snapshot().own_source == "nvml"
