"""On a card: another process is given an arena's tail and uses it, and the watch for hazards around the driver."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tonnage.buffers import BufferManager, Device, Lender, Restore, Stream, VaArena, scope, take_back
from tonnage.errors import DeviceLost
from tonnage.ledger import Ledger
from tonnage.terms import LineKind, MemoryKind
from tonnage.units import GiB, MiB

pytestmark = pytest.mark.gpu

#: Takes all but a little, so that what it needs can only come from whoever lends; then asks, and takes that.
ASKS = """
import json, sys
from pathlib import Path
from tonnage.buffers.neighbours import ask
from tonnage.device.cuda import CudaDriver
from tonnage.errors import DriverOOM
driver, need = CudaDriver(0), int(sys.argv[2])
most = driver.mem_alloc(driver.mem_info()[0] - need // 2)
try:
    driver.mem_alloc(need)
    refused = False
except DriverOOM:
    refused = True
(answer,) = ask(driver.uuid, need, deadline_s=60, directory=Path(sys.argv[1]))
got = driver.mem_alloc(need)
print(json.dumps({"refused": refused, "given": answer.given_bytes, "reason": answer.reason, "got": got != 0}))
driver.close()
"""


@pytest.fixture
def card():
    from tonnage.device.cuda import CudaDriver

    driver = CudaDriver(0)
    yield driver
    driver.close()


@pytest.fixture
def directory():
    """Short: the name of a socket has 107 bytes at most."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


def test_another_process_gets_the_tail_of_an_arena(card, directory: Path) -> None:
    stream = Stream.create(Device(card))
    arena = VaArena(stream, ledger=Ledger(0, 8 * GiB), owner="kv", line=LineKind.KV, reserve_bytes=8 * GiB)
    arena.commit(6 * GiB)
    card.fill(arena.address, 7, 4 * GiB, stream=stream.bare_handle)
    lender = Lender(card.uuid, directory=directory)
    child = subprocess.Popen(
        [sys.executable, "-c", ASKS, str(directory), str(2 * GiB)], stdout=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 60
    while not lender.pending():
        assert time.monotonic() < until, "nobody asked"
        assert child.poll() is None
        select.select([lender], [], [], 0.05)
    (given,) = lender.serve(arena, lambda keep_bytes: min(keep_bytes, 4 * GiB))
    assert given.given_bytes == 2 * GiB
    out, _ = child.communicate(timeout=60)
    assert json.loads(out) == {"refused": True, "given": 2 * GiB, "reason": "", "got": True}
    assert take_back(arena, 2 * GiB) == 6 * GiB  # it has ended
    lender.close()
    arena.close()


def watched(card):
    from tonnage.device.hazard import HazardDriver

    watch = HazardDriver(card, reservation_hazard=True)
    ledger = Ledger(0, 8 * GiB, host_is_device=False)
    stream = Stream.create(Device(watch))
    return watch, ledger, stream


def test_the_watch_sees_no_hazard_in_what_the_rooms_do(card) -> None:
    watch, ledger, stream = watched(card)
    with BufferManager(stream, ledger=ledger, owner="rooms", trim_on_close=True) as manager:
        for kind in (
            MemoryKind.GPU,
            MemoryKind.GPU_SYNC,
            MemoryKind.PINNED,
            MemoryKind.PINNED_POOL,
            MemoryKind.MANAGED,
        ):
            first, second = (manager.allocate(kind, MiB + 3, line=LineKind.TABLES) for _ in range(2))
            manager.set_mem(first, 9)
            manager.copy(src=first, dst=second)
            first.close()
            second.close()
        with scope("kv", restore=Restore.PINNED):
            kept = manager.gpu(4 * MiB, line=LineKind.KV)
        manager.set_mem(kept, 5)
        stream.device.virtual.release("kv")
        stream.device.virtual.materialize("kv").sync()
        kept.close()
        arena = VaArena(stream, ledger=ledger, owner="arena", line=LineKind.KV, reserve_bytes=64 * MiB)
        for num_bytes in (8 * MiB, 40 * MiB, 64 * MiB):
            arena.commit(num_bytes)
            watch.launch(stream.bare_handle, writes=[(arena.address, num_bytes)], what="attention")
        arena.close()
    stream.device.fences.quiesce()
    assert watch.hazards == []
    assert ledger.accounted_bytes == 0


def test_the_watch_stops_an_edit_under_work_before_the_card_sees_it(card) -> None:
    watch, ledger, stream = watched(card)
    arena = VaArena(
        stream, ledger=ledger, owner="arena", line=LineKind.KV, reserve_bytes=64 * MiB, concurrent_growth=True
    )
    arena.commit(8 * MiB)
    watch.launch(stream.bare_handle, reads=[(arena.address, 8 * MiB)], what="attention")
    with pytest.raises(DeviceLost, match="attention"):
        arena.commit(16 * MiB)
    card.device_sync()  # the card itself is none the worse
    card.fill(arena._address, 1, MiB, stream=stream.bare_handle)
    card.device_sync()
