"""Giving the tail back: within the deadline, as much as is free, or a reason; and asked for by another process."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tonnage.buffers import Device, Stream, VaArena
from tonnage.buffers.give_back import GivenBack, give_back, take_back
from tonnage.buffers.neighbours import Lender, ask, runtime_directory
from tonnage.device.host import HostDriver
from tonnage.errors import BufferInUse, BufferOOM, InvalidSetting, NotMaterialized, ResourceError
from tonnage.ledger import Ledger
from tonnage.terms import LineKind

PAGE = 2**16


@pytest.fixture
def arena(driver: HostDriver):
    arena = make(driver)
    arena.commit(20 * PAGE)
    yield arena
    arena.close()


def make(driver: HostDriver, **arguments) -> VaArena:
    arguments = {"chunk_bytes": 4 * PAGE, "fine_from_bytes": 8 * PAGE, "reserve_bytes": 32 * PAGE, **arguments}
    return VaArena(Stream(Device(driver)), ledger=Ledger(0, 1), owner="kv", line=LineKind.KV, tag="kv", **arguments)


def leave(keep_bytes: int) -> int:
    """A user that needs nothing of what it is asked to leave."""
    return keep_bytes


def test_all_that_was_asked(arena: VaArena, driver: HostDriver) -> None:
    asked = []
    ctypes.memset(arena.address, 4, 13 * PAGE)
    given = give_back(arena, 7 * PAGE, deadline_s=5, vacate=lambda keep: asked.append(keep) or keep)
    assert given == GivenBack(asked_bytes=7 * PAGE, given_bytes=7 * PAGE)
    assert asked == [13 * PAGE]
    assert driver.used_bytes == 13 * PAGE
    assert ctypes.string_at(arena.address, 13 * PAGE) == b"\x04" * (13 * PAGE)


@pytest.mark.parametrize(
    ("asked", "needs", "given", "reason"),
    [
        (7, 15, 5, "its user still needs 983,040 bytes"),
        (7, 20, 0, "its user still needs"),
        (14, 0, 12, "larger handle"),  # pages 4 to 7 are one handle, and page 6 is not to go
        (30, 0, 20, "it has 1,310,720 bytes"),
        (0, 0, 0, ""),
    ],
)
def test_less_than_was_asked_has_a_reason(
    arena: VaArena, driver: HostDriver, asked: int, needs: int, given: int, reason: str
) -> None:
    found = give_back(arena, asked * PAGE, deadline_s=5, vacate=lambda keep: max(keep, needs * PAGE))
    assert found.given_bytes == given * PAGE
    assert reason in found.reason
    assert bool(found.reason) == (given < asked)
    assert driver.used_bytes == arena.committed_bytes == (20 - given) * PAGE


def test_what_a_graph_holds_stays(arena: VaArena) -> None:
    graphs = arena.stream.device.graphs
    with graphs.capture("g") as capture:
        capture.only(arena, 16 * PAGE + 1)
    found = give_back(arena, 10 * PAGE, deadline_s=5, vacate=leave)
    assert found.given_bytes == 3 * PAGE
    assert "graph 'g' replays over 1,048,577 bytes" in found.reason
    graphs.check("g")
    graphs.destroy("g")


def test_nothing_is_done_after_the_deadline(arena: VaArena, driver: HostDriver, monkeypatch) -> None:
    def slow(keep_bytes: int) -> int:
        time.sleep(0.02)
        return keep_bytes

    found = give_back(arena, PAGE, deadline_s=0.01, vacate=slow)
    assert (found.given_bytes, found.reason) == (0, "its user took longer than 0.01 s to make room")
    monkeypatch.setattr(arena.stream.device.fences, "wait_idle", lambda *, timeout_s=None: timeout_s is None)
    found = give_back(arena, PAGE, deadline_s=5, vacate=leave)
    assert (found.given_bytes, found.reason) == (0, "work was still running after 5 s")
    assert driver.used_bytes == arena.committed_bytes == 20 * PAGE


def test_a_user_that_fails_keeps_everything(arena: VaArena, driver: HostDriver) -> None:
    with pytest.raises(ZeroDivisionError):
        give_back(arena, PAGE, deadline_s=5, vacate=lambda keep: keep // 0)
    assert driver.used_bytes == 20 * PAGE


def test_an_arena_that_sleeps_or_is_plain_has_nothing_to_give(arena: VaArena) -> None:
    arena.stream.device.virtual.release("kv")
    assert "sleeps" in give_back(arena, PAGE, deadline_s=5, vacate=leave).reason
    with pytest.raises(NotMaterialized):
        take_back(arena, PAGE)
    plain = HostDriver(64 * PAGE, page_bytes=PAGE, without=frozenset({"vmm"}))
    static = make(plain)
    assert "plain allocation" in give_back(static, PAGE, deadline_s=5, vacate=leave).reason
    static.close()
    assert plain.close() == ()


def test_taking_it_back_looks_first(arena: VaArena, driver: HostDriver) -> None:
    give_back(arena, 10 * PAGE, deadline_s=5, vacate=leave)
    driver.foreign_bytes = 50 * PAGE
    edits = arena.num_edits
    with pytest.raises(BufferOOM, match="262,144 bytes are free and 0 of them are to stay so: others hold") as caught:
        take_back(arena, 10 * PAGE)
    assert (caught.value.size_bytes, caught.value.owner, arena.num_edits) == (10 * PAGE, "kv", edits)
    assert take_back(arena, 3 * PAGE, margin_bytes=PAGE) == 13 * PAGE
    with pytest.raises(BufferOOM):
        take_back(arena, PAGE, margin_bytes=PAGE)
    driver.foreign_bytes = 0
    assert take_back(arena, 100 * PAGE) == 32 * PAGE  # all there are addresses for
    assert driver.used_bytes == 32 * PAGE


# other processes


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def lender(driver: HostDriver, directory: Path):
    lender = Lender(driver.uuid, directory=directory)
    yield lender
    lender.close()


def start_asking(directory: Path, num_bytes: int, deadline_s: float, uuid: str = "host-0") -> subprocess.Popen[str]:
    program = f"""
import json
from dataclasses import asdict
from pathlib import Path
from tonnage.buffers.neighbours import ask

answers = ask({uuid!r}, {num_bytes}, deadline_s={deadline_s}, directory=Path({str(directory)!r}))
print(json.dumps([asdict(answer) for answer in answers]))
"""
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


def await_request(lender: Lender) -> None:
    until = time.monotonic() + 30
    while not lender.pending():
        assert time.monotonic() < until, "nobody asked"
        select.select([lender], [], [], 0.05)


def finished(child: subprocess.Popen[str]) -> list[dict[str, object]]:
    out, _ = child.communicate(timeout=30)
    assert child.returncode == 0
    return json.loads(out)


def test_another_process_asks_and_is_told_when_the_memory_is_free(
    lender: Lender, arena: VaArena, driver: HostDriver, directory: Path
) -> None:
    child = start_asking(directory, 7 * PAGE, 30)
    await_request(lender)
    (request,) = lender.pending()
    assert (request.pid, request.num_bytes) == (child.pid, 7 * PAGE)
    assert 0 < request.left_s <= 30
    assert child.poll() is None  # it waits
    assert lender.serve(arena, leave) == [GivenBack(asked_bytes=7 * PAGE, given_bytes=7 * PAGE)]
    assert driver.used_bytes == 13 * PAGE
    expected = {"pid": os.getpid(), "asked_bytes": 7 * PAGE, "given_bytes": 7 * PAGE, "reason": ""}
    assert finished(child) == [expected]
    assert lender.serve(arena, leave) == []
    assert take_back(arena, 7 * PAGE) == 20 * PAGE


def test_an_answer_says_why_it_is_less(lender: Lender, arena: VaArena, directory: Path) -> None:
    child = start_asking(directory, 7 * PAGE, 30)
    await_request(lender)
    lender.serve(arena, lambda _: 18 * PAGE)
    (answer,) = finished(child)
    assert answer["given_bytes"] == 2 * PAGE
    assert "its user still needs" in str(answer["reason"])


def test_who_is_not_answered_in_time_goes_away_and_is_forgotten(
    lender: Lender, arena: VaArena, driver: HostDriver, directory: Path
) -> None:
    child = start_asking(directory, PAGE, 0.4)
    (answer,) = finished(child)
    assert (answer["given_bytes"], answer["reason"]) == (0, "no answer before the time was over")
    assert lender.serve(arena, leave) == []
    assert driver.used_bytes == 20 * PAGE


def test_who_died_waiting_is_forgotten(lender: Lender, arena: VaArena, driver: HostDriver, directory: Path) -> None:
    child = start_asking(directory, PAGE, 60)
    await_request(lender)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate(timeout=30)
    assert lender.pending() == ()
    assert lender.serve(arena, leave) == []
    assert driver.used_bytes == 20 * PAGE


def test_a_user_that_fails_is_told_to_both_sides(lender: Lender, arena: VaArena, directory: Path) -> None:
    child = start_asking(directory, PAGE, 30)
    await_request(lender)
    with pytest.raises(ZeroDivisionError):
        lender.serve(arena, lambda keep: keep // 0)
    (answer,) = finished(child)
    assert answer["given_bytes"] == 0
    assert "it failed" in str(answer["reason"])


def test_a_lender_that_closes_tells_those_who_wait(lender: Lender, directory: Path) -> None:
    child = start_asking(directory, PAGE, 60)
    await_request(lender)
    lender.close()
    lender.close() if lender.fileno() >= 0 else None
    (answer,) = finished(child)
    assert (answer["given_bytes"], answer["reason"]) == (0, "it went away without an answer")
    assert list(directory.iterdir()) == []


def test_other_devices_and_oneself_are_not_asked(lender: Lender, directory: Path) -> None:
    assert ask("host-0", PAGE, deadline_s=1, directory=directory) == ()  # only we lend
    assert finished(start_asking(directory, PAGE, 1, uuid="host-01")) == []


def test_a_name_left_by_a_dead_process_is_cleared_away(directory: Path) -> None:
    dead = directory / "host-0.999999.sock"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(dead))
    assert ask("host-0", PAGE, deadline_s=5, directory=directory) == ()
    assert not dead.exists()


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\n",
        b"[]\n",
        b"7\n",
        b'{"num_bytes": -1, "deadline": 1e18}\n',
        b'{"num_bytes": 5}\n',
        b"x" * 5000,
        b'{"num_bytes": Infinity, "deadline": 1e18}\n',
        b'{"num_bytes": NaN, "deadline": 1e18}\n',
        b'{"num_bytes": 5, "deadline": NaN}\n',
        b'{"num_bytes": 5, "deadline": Infinity}\n',
        b"[" * 4000 + b"\n",
    ],
)
def test_nonsense_is_not_answered(lender: Lender, arena: VaArena, directory: Path, line: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(directory / f"host-0.{os.getpid()}.sock"))
        stranger.sendall(line)
        assert lender.serve(arena, leave) == []
        stranger.settimeout(10)
        with suppress(ConnectionResetError):  # where it did not even read all of it
            assert stranger.recv(10) == b""


def test_a_line_may_come_in_pieces_and_a_late_one_is_ignored(lender: Lender, arena: VaArena, directory: Path) -> None:
    path = str(directory / f"host-0.{os.getpid()}.sock")
    with socket.socket(socket.AF_UNIX) as slow, socket.socket(socket.AF_UNIX) as late:
        slow.connect(path)
        late.connect(path)
        late.sendall(json.dumps({"num_bytes": PAGE, "deadline": time.monotonic() - 1}).encode() + b"\n")
        line = json.dumps({"num_bytes": PAGE, "deadline": time.monotonic() + 30}).encode() + b"\n"
        slow.sendall(line[:9])
        assert lender.serve(arena, leave) == []
        assert late.recv(10) == b""
        slow.sendall(line[9:])
        assert lender.serve(arena, leave) == [GivenBack(asked_bytes=PAGE, given_bytes=PAGE)]
        assert json.loads(slow.recv(1000)) == {"given_bytes": PAGE, "reason": ""}


def test_the_runtime_directory_is_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TONNAGE_RUNTIME_DIR", str(tmp_path / "here"))
    assert runtime_directory() == tmp_path / "here"
    assert (tmp_path / "here").stat().st_mode & 0o777 == 0o700
    (tmp_path / "here").chmod(0o777)
    with pytest.raises(InvalidSetting, match="others may write"):
        runtime_directory()
    monkeypatch.delenv("TONNAGE_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_directory() == tmp_path / "tonnage"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert runtime_directory() == tmp_path / f"tonnage-{os.getuid()}"


def test_a_directory_that_cannot_be_used_is_refused_with_its_name(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        monkeypatch.setenv("TONNAGE_RUNTIME_DIR", str(wrong))
        with pytest.raises(InvalidSetting, match=f"{wrong}.*cannot be made or used"):
            runtime_directory()
    with pytest.raises(InvalidSetting, match="cannot hold a socket: No such file"):
        Lender("host-0", directory=tmp_path / "missing")


def test_a_directory_too_long_for_a_socket_is_refused_with_numbers(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    with pytest.raises(InvalidSetting, match=r"is too long: the name of a socket has 107 bytes, not \d+.*short path"):
        Lender("host-0", directory=deep)
    assert ask("host-0", PAGE, deadline_s=1, directory=deep) == ()


def test_names_that_are_not_ours_are_ignored(directory: Path) -> None:
    for name in ("host-0.foo.sock", "host-0.\u0661.sock", "host-0..sock"):
        (directory / name).write_text("")
    assert ask("host-0", PAGE, deadline_s=1, directory=directory) == ()
    assert len(list(directory.iterdir())) == 3


@pytest.mark.parametrize("deadline_s", [float("inf"), float("nan")])
def test_a_deadline_that_never_comes_is_refused(directory: Path, deadline_s: float) -> None:
    with pytest.raises(ValueError, match="a deadline of"):
        ask("host-0", PAGE, deadline_s=deadline_s, directory=directory)


@pytest.mark.parametrize(
    "answer",
    [
        b'{"given_bytes": Infinity, "reason": ""}\n',
        b"[" * 5000 + b"\n",
        b"x" * 100_000,
        b'{"given_bytes": -5, "reason": ""}\n',
    ],
)
def test_a_lender_that_answers_nonsense_gives_nothing(directory: Path, answer: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as lender:
        lender.bind(str(directory / "host-0.1.sock"))
        lender.listen()
        child = start_asking(directory, PAGE, 20)
        connection, _ = lender.accept()
        with connection, suppress(OSError):
            connection.recv(1000)
            connection.sendall(answer)
        assert [one["given_bytes"] for one in finished(child)] == [0]


def test_one_lender_for_each_device_and_process(directory: Path) -> None:
    first = Lender("host-0", directory=directory)
    with pytest.raises(ResourceError, match="hears requests for this device already"):
        Lender("host-0", directory=directory)
    other = Lender("host-1", directory=directory)
    other.close()
    assert len(list(directory.iterdir())) == 1
    first.close()
    again = Lender("host-0", directory=directory)
    first.close()  # closing again does nothing, to the next one's name either
    assert len(list(directory.iterdir())) == 1
    again.close()


def test_a_closed_lender_says_so(lender: Lender, arena: VaArena) -> None:
    lender.close()
    for call in (lender.pending, lambda: lender.serve(arena, leave)):
        with pytest.raises(ValueError, match=r"<Lender .*> is closed"):
            call()


def test_a_forked_child_lends_nothing(directory: Path) -> None:
    program = f"""
import os
from pathlib import Path
from tonnage.buffers.neighbours import Lender
from tonnage.errors import ForkedProcess

lender = Lender("host-0", directory=Path({str(directory)!r}))
if not os.fork():
    for call in (lender.pending, lambda: lender.serve(None, None)):
        try:
            call()
        except ForkedProcess as error:
            assert "in its child" in str(error)
        else:
            os._exit(1)
    lender.close()
    os._exit(0)
assert os.wait()[1] == 0
assert lender.pending() == ()
assert len(list(Path({str(directory)!r}).iterdir())) == 1
lender.close()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_work_that_runs_on_is_an_error_for_who_edits_by_hand(arena: VaArena, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(arena.stream.device.fences, "wait_idle", lambda **_: False)
        with pytest.raises(BufferInUse):
            arena.decommit(0, timeout_s=0.1)
