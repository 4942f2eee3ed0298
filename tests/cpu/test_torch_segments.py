"""The boundary with torch where no card is needed: books, limits, settings, the audit and the cap."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shim_fixture import Torch, shim_or_skip

from tonnage.buffers import BufferManager, Device, Stream, VaArena
from tonnage.buffers.shim_build import ShimBuild
from tonnage.buffers.torch_audit import audit_segments
from tonnage.buffers.torch_fence import (
    BoundaryMode,
    close_boundary,
    fraction_for,
    open_boundary,
    reserved_outside,
)
from tonnage.buffers.torch_segments import Route, TorchSegments, find_route
from tonnage.buffers.torch_settings import environment_problem, parse_alloc_conf
from tonnage.device.host import HostDriver
from tonnage.errors import BufferInUse, BufferOOM, DriverUnsupported, InvalidSetting, LedgerError, RangeReferenced
from tonnage.ledger import Ledger
from tonnage.terms import LineKind, MemoryKind, Reading
from tonnage.units import MiB

PAGE = 2 * MiB
CAPACITY = 32 * PAGE


@pytest.fixture
def driver():
    driver = HostDriver(CAPACITY, page_bytes=PAGE)
    yield driver
    assert driver.close() == ()


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(0, CAPACITY)


@pytest.fixture
def segments(driver: HostDriver, ledger: Ledger):
    segments = reserve(driver, ledger)
    yield segments
    torch = torch_of(segments)
    for segment in segments.live():
        torch.free(segment.address)
    segments.close()
    assert ledger.accounted_bytes == 0


def reserve(driver: HostDriver, ledger: Ledger, **changes: Any) -> TorchSegments:
    arguments: dict[str, Any] = {
        "owner": "torch",
        "line": LineKind.TRANSIENT,
        "tag": "activations",
        "reserve_bytes": 64 * PAGE,
        "limit_bytes": 8 * PAGE,
        "chunk_bytes": 4 * PAGE,
        **changes,
    }
    return TorchSegments.reserve(Stream(Device(driver)), shim=shim_or_skip(), ledger=ledger, **arguments)


def torch_of(segments: TorchSegments) -> Torch:
    return Torch(segments._heap)


def accounts(ledger: Ledger) -> dict[str, tuple[int, int, int]]:
    """tag -> requested and physical pages, live allocations."""
    return {
        entry.tag: (entry.requested_bytes // PAGE, entry.physical_bytes // PAGE, entry.num_live)
        for entry in ledger.snapshot().entries
    }


def test_segments_are_split_off_the_arenas_account(segments: TorchSegments, ledger: Ledger) -> None:
    torch = torch_of(segments)
    assert accounts(ledger) == {"": (8, 8, 2), "activations": (0, 0, 0)}
    first, second = torch.alloc(PAGE, stream=3), torch.alloc(2 * PAGE, stream=4)
    assert accounts(ledger)["activations"] == (0, 0, 0)  # nobody has polled
    assert segments.poll().live_bytes == 3 * PAGE
    assert accounts(ledger) == {"": (5, 5, 2), "activations": (3, 3, 2)}
    events = [event for event in ledger.events() if event.stream is not None]
    assert [(event.stream, event.delta) for event in events] == [(3, PAGE), (4, 2 * PAGE)]
    torch.free(first, stream=3)
    segments.poll()
    assert accounts(ledger) == {"": (6, 6, 2), "activations": (2, 2, 1)}
    assert ledger.accounted_bytes == 8 * PAGE
    assert [event.change.name for event in segments.history] == ["ALLOCATED", "ALLOCATED", "FREED"]
    assert segments.holds(second, 2 * PAGE)
    assert not segments.holds(second + 7 * PAGE)


def test_a_segment_counts_once_in_its_lines_high_water_mark(segments: TorchSegments, ledger: Ledger) -> None:
    torch = torch_of(segments)
    torch.alloc(8 * PAGE)
    segments.poll()
    row = next(row for row in ledger.audit() if row.line is LineKind.TRANSIENT)
    assert (row.actual_bytes, row.high_water_bytes) == (8 * PAGE, 8 * PAGE)


def test_what_torch_asked_for_and_what_it_takes_are_booked_apart(segments: TorchSegments, ledger: Ledger) -> None:
    torch_of(segments).alloc(PAGE + 1)
    segments.poll()
    entry = next(entry for entry in ledger.snapshot().entries if entry.tag == "activations")
    assert (entry.requested_bytes, entry.physical_bytes) == (PAGE + 1, 2 * PAGE)


def test_a_reading_is_right_before_and_after_a_poll(segments: TorchSegments, ledger: Ledger) -> None:
    """Own bytes are the committed ones whatever torch does with them, and so is the sum of the accounts."""
    own = 8 * PAGE
    ledger.sample(
        Reading(phase="p", at_ns=0, total_bytes=CAPACITY, free_bytes=CAPACITY - own, own_bytes=own, own_source="here")
    )
    torch = torch_of(segments)
    for step in (lambda: torch.alloc(PAGE), segments.poll, lambda: torch.alloc(3 * PAGE), segments.poll):
        step()
        assert ledger.snapshot().unattributed == 0


def test_whoever_looks_meanwhile_sees_every_byte_once(segments: TorchSegments, ledger: Ledger) -> None:
    torch, stop, sums = torch_of(segments), threading.Event(), set()

    def look() -> None:
        while not stop.is_set():
            sums.add(ledger.accounted_bytes)
            segments.poll()

    lookers = [threading.Thread(target=look) for _ in range(2)]
    for looker in lookers:
        looker.start()
    for _ in range(400):
        torch.free(torch.alloc(2 * PAGE))
        segments.poll()
    stop.set()
    for looker in lookers:
        looker.join()
    assert sums == {8 * PAGE}


def test_a_segment_after_a_strict_seal_stays_in_the_arenas_account_and_is_told(driver, ledger: Ledger) -> None:
    arena = VaArena(
        Stream(Device(driver)), ledger=ledger, owner="arena", line=LineKind.TRANSIENT, reserve_bytes=8 * PAGE
    )
    arena.commit(4 * PAGE)
    segments = TorchSegments(
        arena, shim=shim_or_skip(), ledger=ledger, owner="torch", line=LineKind.TRANSIENT, tag="late"
    )
    ledger.seal(strict=True)
    torch = torch_of(segments)
    place = torch.alloc(PAGE)
    for _ in range(2):
        with pytest.raises(LedgerError, match="'torch' asks for its first"):
            segments.poll()
        assert accounts(ledger) == {"": (4, 4, 4), "late": (0, 0, 0)}
    ledger.seal(declared=["torch"])
    segments.poll()
    assert accounts(ledger) == {"": (3, 3, 4), "late": (1, 1, 1)}
    torch.free(place)
    segments.close()
    arena.close()


def test_lost_events_do_not_spoil_the_ledger(segments: TorchSegments, ledger: Ledger) -> None:
    torch = torch_of(segments)
    gone, replaced = torch.alloc(PAGE), torch.alloc(2 * PAGE)
    segments.poll()
    torch.free(gone)
    torch.free(replaced)
    assert torch.alloc(3 * PAGE, stream=9) == gone
    for _ in range(5000):
        torch.free(torch.alloc(PAGE))
    state = segments.poll()
    assert state.num_lost > 0
    assert accounts(ledger) == {"": (5, 5, 2), "activations": (3, 3, 1)}
    kept = torch.alloc(PAGE)
    segments.poll()
    torch.free(kept)
    assert segments.poll().live_bytes == 3 * PAGE
    assert accounts(ledger) == {"": (5, 5, 2), "activations": (3, 3, 1)}


def test_the_limit_is_raised_and_lowered_with_the_arena(segments: TorchSegments, driver: HostDriver) -> None:
    torch = torch_of(segments)
    kept = torch.alloc(3 * PAGE)
    assert torch.alloc(6 * PAGE) == 0
    assert segments.raise_limit(12 * PAGE - 1) == 12 * PAGE
    assert segments.raise_limit(PAGE) == 12 * PAGE
    assert torch.alloc(6 * PAGE) == kept + 3 * PAGE
    with pytest.raises(BufferInUse):
        segments.lower_limit(8 * PAGE)
    assert (segments.limit_bytes, driver.used_bytes) == (12 * PAGE, 12 * PAGE)
    torch.free(kept + 3 * PAGE)
    segments.poll()
    assert segments.lower_limit() == 3 * PAGE
    assert driver.used_bytes == 4 * PAGE  # the arena's handles are of four pages
    assert torch.alloc(PAGE) == 0
    segments.raise_limit(4 * PAGE)
    assert torch.alloc(PAGE) == kept + 3 * PAGE


def test_a_limit_beyond_the_device_is_refused_and_changes_nothing(
    segments: TorchSegments, driver: HostDriver, ledger: Ledger
) -> None:
    before = (accounts(ledger), driver.used_bytes, segments.state())
    with pytest.raises(BufferOOM):
        segments.raise_limit(40 * PAGE)
    with pytest.raises(ValueError, match="cannot commit"):
        segments.raise_limit(65 * PAGE)
    assert (accounts(ledger), driver.used_bytes, segments.state()) == before


def test_a_decommit_that_fails_leaves_the_limit(segments: TorchSegments, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(num_bytes: int) -> int:
        raise BufferInUse("work is still running")

    monkeypatch.setattr(segments.memory, "decommit", refuse)
    with pytest.raises(BufferInUse, match="still running"):
        segments.lower_limit(PAGE)
    monkeypatch.undo()
    assert segments.limit_bytes == segments.state().limit_bytes == 8 * PAGE


@pytest.fixture
def sleeper(driver: HostDriver, ledger: Ledger):
    """Segments in an arena that has a tag."""
    arena = VaArena(
        Stream(Device(driver)),
        ledger=ledger,
        owner="torch",
        line=LineKind.TRANSIENT,
        reserve_bytes=8 * PAGE,
        tag="act",
        chunk_bytes=8 * PAGE,
    )
    arena.commit(8 * PAGE)
    segments = TorchSegments(
        arena, shim=shim_or_skip(), ledger=ledger, owner="torch", line=LineKind.TRANSIENT, tag="activations"
    )
    yield segments
    torch = torch_of(segments)
    for segment in segments.live():
        torch.free(segment.address)
    segments.close()
    arena.close()
    assert ledger.accounted_bytes == 0


def test_an_arena_sleeps_only_when_its_split_is_folded(sleeper: TorchSegments, ledger: Ledger) -> None:
    torch_of(sleeper).alloc(3 * PAGE)
    sleeper.poll()
    split = {"act": (5, 5, 1), "activations": (3, 3, 1)}
    assert accounts(ledger) == split
    virtual = sleeper.memory.stream.device.virtual
    with pytest.raises(BufferInUse, match="fold"):
        virtual.release("act")
    assert accounts(ledger) == split  # and nothing is lost
    assert (virtual.bad_handles(), virtual.leftovers("act")[0].why) == ((), "materialized")
    sleeper.fold()
    assert accounts(ledger) == {"act": (8, 8, 1), "activations": (0, 0, 0)}
    watch = threading.Thread(target=sleeper.poll)  # somebody looks, between the fold and the release
    watch.start()
    watch.join()
    assert accounts(ledger)["activations"] == (0, 0, 0)
    assert virtual.release("act").freed_bytes == 8 * PAGE
    sleeper.poll()
    assert accounts(ledger) == {"act": (0, 0, 0), "activations": (0, 0, 0)}
    virtual.materialize("act")
    assert ledger.accounted_bytes == 8 * PAGE
    sleeper.poll()
    assert accounts(ledger) == split
    with pytest.raises(BufferInUse, match="fold"):
        virtual.release("act")


def test_a_sleep_that_is_called_off_is_unfolded(sleeper: TorchSegments, ledger: Ledger) -> None:
    torch_of(sleeper).alloc(3 * PAGE)
    sleeper.fold()
    sleeper.poll()
    assert accounts(ledger)["activations"] == (0, 0, 0)
    sleeper.unfold()
    sleeper.poll()
    assert accounts(ledger)["activations"] == (3, 3, 1)


def test_a_refused_close_changes_nothing(segments: TorchSegments) -> None:
    graphs = segments.memory.stream.device.graphs
    with graphs.capture("g") as capture:
        capture.touch(segments.memory.address, PAGE)
    with pytest.raises(RangeReferenced, match="'g'"):
        segments.close()
    assert segments.state().limit_bytes == segments.limit_bytes == 8 * PAGE  # the heap is open
    graphs.destroy("g")
    number = segments.memory.exports.add("a view of somebody's")
    with pytest.raises(BufferInUse, match="a view of somebody's"):
        segments.close()
    assert segments.state().limit_bytes == 8 * PAGE
    segments.memory.exports.drop(number)
    assert torch_of(segments).alloc(PAGE)  # it serves on


def test_what_a_sealed_ledger_refuses_does_not_keep_it_open(segments: TorchSegments, ledger: Ledger) -> None:
    ledger.seal(strict=True)
    place = torch_of(segments).alloc(PAGE)
    torch_of(segments).free(place)
    segments.close()
    assert segments.memory.usable_bytes == 0


def test_neither_it_nor_its_arena_closes_under_a_segment(segments: TorchSegments, driver: HostDriver) -> None:
    place = torch_of(segments).alloc(PAGE)
    with pytest.raises(BufferInUse, match="1 segments are alive"):
        segments.close()
    with pytest.raises(BufferInUse, match="torch's pool 'activations'"):
        segments.memory.close()  # type: ignore[attr-defined]
    torch_of(segments).free(place)
    segments.close()
    segments.close()
    assert driver.used_bytes == 0


def test_a_buffer_serves_too_at_its_size(driver: HostDriver, ledger: Ledger) -> None:
    buffer = BufferManager(Stream(Device(driver)), ledger=ledger, owner="fixed").gpu_sync(
        3 * PAGE, line=LineKind.GRAPHS, tag="room"
    )
    arguments: dict[str, Any] = {
        "shim": shim_or_skip(), "ledger": ledger, "owner": "torch", "line": LineKind.GRAPHS, "tag": "graphs",
    }  # fmt: skip
    with pytest.raises(ValueError, match="name the account"):
        TorchSegments(buffer, **arguments)
    account = ledger.open(owner="fixed", line=LineKind.GRAPHS, memory=MemoryKind.GPU_SYNC, tag="room")
    segments = TorchSegments(buffer, account=account, **arguments)
    torch = torch_of(segments)
    place = torch.alloc(2 * PAGE)
    segments.poll()
    assert accounts(ledger) == {"room": (1, 1, 1), "graphs": (2, 2, 1)}
    with pytest.raises(ValueError, match="has no 8,388,608 bytes"):
        segments.raise_limit(4 * PAGE)
    torch.free(place)
    segments.close()
    buffer.close()


def test_a_wrong_account_is_noticed(driver: HostDriver, ledger: Ledger) -> None:
    with pytest.raises(ValueError, match="another tag"):
        reserve(driver, ledger, tag="")
    assert driver.used_bytes == 0
    arena = VaArena(Stream(Device(driver)), ledger=ledger, owner="a", line=LineKind.GRAPHS, reserve_bytes=8 * PAGE)
    arena.commit(PAGE)
    with pytest.raises(ValueError, match="is not booked under"):
        TorchSegments(arena, shim=shim_or_skip(), ledger=ledger, owner="a", line=LineKind.TRANSIENT, tag="t")
    arena.close()


def test_torch_gets_no_pool_on_the_host(segments: TorchSegments) -> None:
    assert not segments.has_pool
    with pytest.raises(DriverUnsupported, match="CUDA devices only"):
        _ = segments.pool
    assert "'torch' 'activations' 0 of 16,777,216 bytes in 0 segments" in repr(segments)


# the cap, the settings and the audit, with an allocator that plays torch's


class Allocator:
    """Plays torch's allocator: what it is told, and what it cuts off."""

    device = 0

    def __init__(self, *, total: int = 150_000_000_001, reserved: int = 1_000_000_007, **parts: Any) -> None:
        self.total, self.reserved, self.allowed = total, reserved, total
        self.parts = {"backend": "native", "settings": {}, "segments": [], "error": None, "rounds_to": 1, **parts}

    def backend(self) -> str:
        return self.parts["backend"]

    def settings(self) -> dict[str, Any]:
        return self.parts["settings"]

    def segments(self) -> list[dict[str, Any]]:
        return self.parts["segments"]

    def total_bytes(self) -> int:
        return self.total

    def reserved_bytes(self) -> int:
        return self.reserved

    def fraction(self) -> float:
        return self.allowed / self.total

    def set_fraction(self, fraction: float) -> None:
        assert 0 <= fraction <= 1
        if self.parts["error"]:
            raise RuntimeError(self.parts["error"])
        self.allowed = int(fraction * self.total) // self.parts["rounds_to"] * self.parts["rounds_to"]


NO_SHIM = Route(shim=None, reason="no C compiler: neither CC nor cc, gcc, clang in PATH")


@given(total=st.integers(1, 2**48), data=st.data())
def test_the_fraction_gives_exactly_the_cap(total: int, data: st.DataObject) -> None:
    cap = data.draw(st.integers(0, total))
    fraction = fraction_for(cap, total)
    assert 0 <= fraction <= 1
    assert int(fraction * total) == cap


def test_the_boundary_caps_what_is_reserved_plus_the_slack_and_opens_again() -> None:
    torch = Allocator()
    torch.allowed = 140_000_000_000
    boundary = close_boundary(torch, route=NO_SHIM, slack_bytes=5)
    assert (boundary.mode, boundary.cap_bytes, torch.allowed) == (BoundaryMode.CAP, 1_000_000_012, 1_000_000_012)
    told = boundary.paragraph()
    assert "no C compiler" in told
    assert "one sampled figure" in told
    assert "\n" not in told
    open_boundary(torch, boundary)
    assert torch.allowed == 140_000_000_000


def test_the_cap_is_never_more_than_the_device() -> None:
    torch = Allocator(total=1_000_000_010)
    assert close_boundary(torch, route=NO_SHIM).cap_bytes == 1_000_000_010
    with pytest.raises(ValueError, match="would take from torch"):
        close_boundary(torch, route=NO_SHIM, slack_bytes=-1)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"error": "not supported\nby this one", "backend": "pluggable"}, "pluggable allocator cannot be capped: not"),
        ({"rounds_to": 4096}, "and says that it stops at"),
    ],
)
def test_a_cap_that_does_not_hold_is_no_boundary(parts: dict[str, Any], reason: str) -> None:
    torch = Allocator(**parts)
    boundary = close_boundary(torch, route=NO_SHIM)
    assert (boundary.mode, boundary.cap_bytes) == (BoundaryMode.NONE, None)
    assert reason in boundary.reason
    assert boundary.paragraph().startswith("Torch is not held in. Not better because")
    assert torch.allowed // parts.get("rounds_to", 1) == torch.total // parts.get("rounds_to", 1)
    open_boundary(torch, boundary)


def test_segments_in_our_arenas_are_told_and_idle_room_too(segments: TorchSegments, ledger: Ledger) -> None:
    torch_of(segments).alloc(3 * PAGE)
    torch = Allocator(reserved=5 * PAGE)
    route = Route(shim=shim_or_skip())
    boundary = close_boundary(torch, route=route, segments=(segments,), slack_bytes=PAGE)
    assert (boundary.mode, boundary.reason, boundary.cost) == (BoundaryMode.SEGMENTS_AND_CAP, "", "")
    assert (boundary.segment_bytes, boundary.headroom_bytes, boundary.idle_bytes) == (3 * PAGE, 5 * PAGE, 4 * PAGE)
    assert accounts(ledger)["activations"][1] == 3
    assert "out of its reach" in boundary.paragraph()
    assert reserved_outside(torch, segments) == 2 * PAGE


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}),
        ("expandable_segments:True", {"expandable_segments": "True"}),
        (" backend : native , expandable_segments: True ", {"backend": "native", "expandable_segments": "True"}),
        (
            "roundup_power2_divisions:[256:1,>:4],backend:native",
            {"roundup_power2_divisions": "[256:1,>:4]", "backend": "native"},
        ),
        ("expandable_segments:True,expandable_segments:False", {"expandable_segments": "False"}),
        ("nonsense", {}),
    ],
)  # fmt: skip
def test_allocator_settings_are_read_as_torch_reads_them(text: str, found: dict[str, str]) -> None:
    assert parse_alloc_conf(text) == found


@pytest.mark.parametrize(
    ("environ", "knob"),
    [
        ({}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,backend:native"}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:[256:1,>:4],expandable_segments:True"}, "PYTORCH_CUDA_ALLOC_CONF"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments: True"}, "PYTORCH_ALLOC_CONF"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}, None),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, "PYTORCH_ALLOC_CONF"),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "PYTORCH_NO_CUDA_MEMORY_CACHING"),
    ],
)  # fmt: skip
def test_settings_that_rule_our_segments_out_are_refused_by_name(environ: dict[str, str], knob: str | None) -> None:
    problem = environment_problem(environ)
    assert (None if problem is None else problem.knob) == knob
    if problem is not None:
        assert environ[knob] == problem.value
        with pytest.raises(InvalidSetting) as caught:
            find_route(Allocator(), environ=environ)
        assert "To change:" in str(caught.value)
        route = find_route(Allocator(), environ=environ, fall_back=True)
        assert route.shim is None
        assert f"{knob} = " in route.reason


def test_torch_reads_the_variable_that_we_look_at() -> None:
    pytest.importorskip("torch")
    environ = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    code = (
        "import torch; ask = getattr(torch._C, '_accelerator_getAllocatorSettings', None); print(ask() if ask else '-')"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTORCH")}
    done = subprocess.run([sys.executable, "-c", code], env={**clean, **environ}, capture_output=True, text=True)
    if done.stdout.strip() == "-":
        pytest.skip("this torch does not tell its settings")
    assert done.stdout.strip() == environ["PYTORCH_CUDA_ALLOC_CONF"]


def test_torchs_settings_of_the_moment_count_too() -> None:
    with pytest.raises(InvalidSetting, match="the program has set it"):
        find_route(Allocator(settings={"expandable_segments": True}), environ={})
    with pytest.raises(InvalidSetting, match="native backend only"):
        find_route(Allocator(backend="pluggable"), environ={})


def test_the_route_says_why_there_is_no_shim_or_has_one() -> None:
    assert find_route(Allocator(), environ={}, build=lambda: ShimBuild(path=None, reason="none")).reason == "none"
    shim = shim_or_skip()
    route = find_route(Allocator(), environ={}, build=lambda: ShimBuild(path=shim.path))
    assert route.shim is not None
    assert (route.shim.path, route.reason) == (shim.path, "")


def test_the_audit_names_what_lies_outside_and_what_does_not_agree(segments: TorchSegments) -> None:
    ours = torch_of(segments)
    first, second = ours.alloc(PAGE), ours.alloc(2 * PAGE)

    def segment(address: int, size: int, pool: tuple[int, int], used: int = 512) -> dict[str, Any]:
        return {"address": address, "total_size": size, "segment_pool_id": pool, "allocated_size": used}

    far = 2**45
    torch = Allocator(segments=[
        segment(first, PAGE, (0, 1)), segment(second, 2 * PAGE, (0, 1)),
        segment(far, PAGE, (0, 0)), segment(far + PAGE, 4 * PAGE, (3, 0)), segment(far + 9 * PAGE, PAGE, (0, 0)),
    ])  # fmt: skip
    audit = audit_segments(torch, segments)
    assert [(row.name, row.num_segments, row.num_bytes) for row in audit.inside] == [("activations", 2, 3 * PAGE)]
    assert [(row.name, row.num_segments, row.used_bytes) for row in audit.outside] == [
        ("torch's pool (3, 0)", 1, 512),
        ("torch's default pool", 2, 1024),
    ]
    assert (audit.disagreements, audit.outside_bytes) == ((), 6 * PAGE)
    assert audit.lines()[0] == "activations: 6 MiB in 2 segments in its arena"
    ours.free(first)
    again = audit_segments(torch, segments)
    assert len(again.disagreements) == 1
    assert f"at {first:#x} torch has 2,097,152 bytes and the shim 0" in again.lines()[-1]
