"""An arena for what torch takes in steps: opened, tried out, and given up with a reason where it does not do."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
from shim_fixture import Torch, shim_or_skip

from tonnage.buffers import Device, Stream, VaArena
from tonnage.buffers.torch_segments import Route, TorchSegments
from tonnage.device.host import HostDriver
from tonnage.engine import step_segments
from tonnage.engine.step_segments import BESIDE_BYTES, StepSegments
from tonnage.errors import BufferInUse
from tonnage.ledger import Ledger
from tonnage.terms import LineKind
from tonnage.units import MiB

CAPACITY = 256 * MiB


class OutOfMemoryError(RuntimeError):
    """Torch's."""


@pytest.fixture
def site():
    driver = HostDriver(CAPACITY)
    ledger, closers = Ledger(0, CAPACITY), []
    stream = Stream(Device(driver))

    def arena(owner, line, *, reserve_bytes, tag):
        made = VaArena(stream, ledger=ledger, owner=owner, line=line, reserve_bytes=reserve_bytes, tag=tag)
        closers.append(made.close)
        return made

    yield SimpleNamespace(
        driver=driver,
        stream=stream,
        arena=arena,
        ledger=ledger,
        closing=closers.append,
        closers=closers,
    )
    assert driver.close() == ()


@pytest.fixture
def steps(site, monkeypatch):
    shim = shim_or_skip()
    monkeypatch.setattr(step_segments, "find_route", lambda torch_memory, fall_back: Route(shim=shim))
    monkeypatch.setattr(TorchSegments, "use", lambda self: nullcontext())
    cublas = SimpleNamespace(_cuda_clearCublasWorkspaces=lambda: None)
    monkeypatch.setattr(step_segments, "torch", SimpleNamespace(OutOfMemoryError=OutOfMemoryError, _C=cublas))
    made = StepSegments(site, torch_memory=None)
    yield made
    made.close()
    made.close()
    assert site.ledger.accounted_bytes == 0


def test_the_arena_is_what_the_plan_has_beside_what_torch_keeps(site, steps):
    ran = []
    steps.open(step_bytes=101 * MiB + BESIDE_BYTES, kept_bytes=38 * MiB, try_out=lambda: ran.append(steps.live_bytes))
    assert (ran, site.closers[-1]) == ([0], steps.close)
    (segments,) = steps.all
    assert (segments.limit_bytes, steps.headroom_bytes) == (62 * MiB, 62 * MiB)
    torch = Torch(segments._heap)
    address = torch.alloc(20 * MiB)
    steps.poll()
    assert (steps.live_bytes, steps.headroom_bytes) == (20 * MiB, 42 * MiB)
    entries = {entry.tag: entry.physical_bytes for entry in site.ledger.snapshot().entries}
    assert entries == {"steps": 42 * MiB, "activations": 20 * MiB}
    assert {entry.line for entry in site.ledger.snapshot().entries} == {LineKind.TRANSIENT}
    torch.free(address)


def test_the_arena_sleeps_and_wakes_with_the_segments_in_it(site, steps):
    steps.open(step_bytes=64 * MiB + BESIDE_BYTES, kept_bytes=0, try_out=lambda: None)
    (segments,) = steps.all
    torch, virtual = Torch(segments._heap), site.stream.device.virtual
    address = torch.alloc(20 * MiB)
    steps.poll()
    held = site.ledger.accounted_bytes
    with pytest.raises(BufferInUse):  # split, its bytes are not all its own
        virtual.release(*steps.tags)
    with steps.asleep():
        virtual.release(*steps.tags)
    assert (steps.arena_bytes, site.ledger.accounted_bytes, held) == (0, 0, 64 * MiB)
    virtual.materialize(*steps.tags).sync()
    steps.poll()
    assert (steps.arena_bytes, site.ledger.accounted_bytes) == (64 * MiB, held)
    entries = {entry.tag: entry.physical_bytes for entry in site.ledger.snapshot().entries}
    assert entries == {"steps": 44 * MiB, "activations": 20 * MiB}
    torch.free(address)


def test_a_pool_in_use_is_not_asked_for_again(steps, monkeypatch):
    """Torch refuses that; a cache is refilled within a step and outside."""
    depth = []

    @contextmanager
    def use(_):
        assert not depth
        depth.append(None)
        yield
        depth.pop()

    steps.open(step_bytes=64 * MiB + BESIDE_BYTES, kept_bytes=0, try_out=lambda: None)
    monkeypatch.setattr(TorchSegments, "use", use)
    with steps.used():
        with steps.used():
            assert depth
        assert depth
    assert not depth
    with pytest.raises(ZeroDivisionError), steps.used():
        raise ZeroDivisionError
    depth.clear()
    with steps.used():
        assert depth


def test_a_step_that_does_not_fit_gives_the_arena_up_and_says_so(site, steps):
    """Torch's own pool has steps as before then: it was emptied for the arena, and is held to what it has soon."""
    ran_in = []

    def does_not_fit():
        ran_in.append(len(steps.all))
        if steps.is_used:
            raise OutOfMemoryError("tried to allocate")

    steps.open(step_bytes=64 * MiB + BESIDE_BYTES, kept_bytes=0, try_out=does_not_fit)
    assert (steps.all, ran_in) == ((), [1, 0])
    assert site.ledger.accounted_bytes == 0
    assert steps.route.shim is None
    assert "did not fit into an arena of 64 MiB" in steps.route.reason
    with steps.used():
        pass


def test_an_arena_that_cannot_be_given_up_is_not_had_beside_torch_s_own_pool(site, steps):
    """A step that did not fit has left a tensor there: its memory would be taken twice."""
    left = []

    def does_not_fit():
        (segments,) = steps.all
        torch = Torch(segments._heap)
        left.append((torch, torch.alloc(20 * MiB)))
        raise OutOfMemoryError("tried to allocate")

    with pytest.raises(BufferInUse, match="1 segments are alive"):
        steps.open(step_bytes=64 * MiB + BESIDE_BYTES, kept_bytes=0, try_out=does_not_fit)
    ((torch, address),) = left
    torch.free(address)


def test_no_other_failure_is_taken_for_that(steps):
    def falls_over():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        steps.open(step_bytes=64 * MiB + BESIDE_BYTES, kept_bytes=0, try_out=falls_over)


def test_without_room_for_an_arena_steps_run_in_torch_s_own_pool(site, steps):
    ran = []
    steps.open(step_bytes=64 * MiB, kept_bytes=64 * MiB - BESIDE_BYTES, try_out=lambda: ran.append(1))
    assert "in torch's own pool already" in steps.route.reason
    steps.open(step_bytes=2 * CAPACITY, kept_bytes=0, try_out=lambda: ran.append(2))
    assert "could not be had" in steps.route.reason
    assert (steps.all, site.ledger.accounted_bytes, ran) == ((), 0, [1, 2])


def test_without_a_compiler_steps_run_in_torch_s_own_pool(steps, monkeypatch):
    ran = []
    monkeypatch.setattr(step_segments, "find_route", lambda torch_memory, fall_back: Route(shim=None, reason="no cc"))
    steps.open(step_bytes=64 * MiB, kept_bytes=0, try_out=lambda: ran.append(1))
    assert (steps.route.reason, steps.all, steps.headroom_bytes, ran) == ("no cc", (), 0, [1])
