"""Asking another process of this machine for the tail of its arenas, with a deadline.

Whoever may give memory listens on a Unix socket in the runtime directory, named by device and process, and looks at
it between steps; whoever needs memory asks each of them in turn. One JSON line each way. A request whose deadline has
passed, or whose sender is gone, is ignored; so is a socket that nobody listens on any more.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import stat
import struct
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tonnage.buffers.arena import VaArena
from tonnage.buffers.give_back import GivenBack, give_back
from tonnage.buffers.uninterrupted import uninterrupted
from tonnage.errors import ForkedProcess, InvalidSetting, ResourceError

_log = logging.getLogger(__name__)

#: Set this to keep the sockets elsewhere; both sides must agree.
DIRECTORY_VARIABLE = "TONNAGE_RUNTIME_DIR"
_MOST_LINE_BYTES, _MOST_ANSWER_BYTES = 4096, 16_384
#: What the system allows, without the zero at the end.
_MOST_PATH_BYTES = 107
#: What a line that is not what it should be raises: infinities overflow, brackets nest too deep.
_NONSENSE = (ValueError, TypeError, KeyError, OverflowError, RecursionError)
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """``num_bytes`` wanted by process ``pid``, until ``deadline`` on the machine's monotonic clock."""

    pid: int
    num_bytes: int
    deadline: float

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What process ``pid`` gave of what it was asked; it is free on the device when this arrives."""

    pid: int
    asked_bytes: int
    given_bytes: int
    reason: str = ""


@dataclass(slots=True, eq=False)
class _Caller:
    """One connection, and as much of its line as has come."""

    socket: socket.socket
    pid: int
    line: bytes = b""
    request: Request | None = None


class Lender:
    """Hears requests for memory of one device on behalf of this process.

    ``serve`` never waits: call it where memory may be given, between steps. Requests are answered in the order they
    came. Only processes of the same user are heard. One for each device and process: it may serve several arenas.
    Raises ``InvalidSetting`` for a directory that cannot hold the socket or is not this user's own, ``ResourceError``
    where the process has a lender of the device already. A forked child has none (``ForkedProcess``).
    """

    def __init__(self, device_uuid: str, *, directory: Path | None = None) -> None:
        self._path = _require_short((directory or runtime_directory()) / f"{_name(device_uuid)}.{os.getpid()}.sock")
        self._process = os.getpid()
        other = _lenders.get(self._key)
        if other is not None:
            raise ResourceError(f"{other!r} hears requests for this device already: serve all arenas through it")
        self._callers: list[_Caller] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        # Under its name only once it listens: before, it would look like one that a dead process left.
        unready = self._path.with_suffix(".new")
        try:
            unready.unlink(missing_ok=True)
            self._socket.bind(str(unready))
            self._socket.listen()
            unready.rename(self._path)
        except BaseException as error:
            self._socket.close()
            with suppress(OSError):
                unready.unlink()
            if isinstance(error, OSError):
                raise _unusable(self._path.parent, f"cannot hold a socket: {error.strerror}") from error
            raise
        _lenders[self._key] = self

    def __repr__(self) -> str:
        return f"<Lender {self._path}>"

    def fileno(self) -> int:
        """Readable when a request may have come: for ``select``."""
        return self._socket.fileno()

    def pending(self) -> tuple[Request, ...]:
        """Requests that are complete, alive and in time, oldest first. Raises ``ValueError`` once it is closed."""
        self._require_open()
        self._listen()
        for caller in tuple(self._callers):
            self._hear(caller)
        return tuple(caller.request for caller in self._callers if caller.request is not None)

    def serve(self, arena: VaArena, vacate: Callable[[int], int]) -> list[GivenBack]:
        """Answer all pending requests out of the tail of ``arena``; see ``give_back`` for ``vacate``.

        Raises what ``vacate`` raises, after telling who asked, and ``ValueError`` once it is closed.
        """
        done = []
        self.pending()
        for caller in tuple(self._callers):
            if caller.request is None or not self._is_alive(caller):
                continue
            asked = caller.request
            before = arena.committed_bytes
            try:
                given = give_back(arena, asked.num_bytes, deadline_s=max(0.0, asked.left_s), vacate=vacate)
                self._answer(caller, given)
            except BaseException as error:
                if caller in self._callers:  # an interrupt may come when the memory is given already
                    gone = min(asked.num_bytes, max(0, before - arena.committed_bytes))
                    failed = GivenBack(asked_bytes=asked.num_bytes, given_bytes=gone, reason=f"it failed: {error!r}")
                    self._answer(caller, failed)
                raise
            done.append(given)
        return done

    def close(self) -> None:
        """Hear nobody any more; those who wait learn that they get nothing. Closing again does nothing."""
        if self._socket.fileno() < 0:
            return
        for caller in tuple(self._callers):
            self._drop(caller)
        self._socket.close()
        if os.getpid() == self._process:  # a child that inherited it must not take the parent's name away
            _lenders.pop(self._key, None)
            self._path.unlink(missing_ok=True)

    @property
    def _key(self) -> str:
        return os.path.realpath(self._path)

    def _require_open(self) -> None:
        if os.getpid() != self._process:
            raise ForkedProcess(
                f"{self!r} was made in process {self._process} and cannot be used in its child {os.getpid()}: the "
                "memory that it lends is the parent's"
            )
        if self._socket.fileno() < 0:
            raise ValueError(f"{self!r} is closed: it hears nobody any more")

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return
            connection.setblocking(False)
            pid, uid = _peer(connection)
            if uid not in (os.getuid(), 0):
                _log.warning("a request of user %d was not heard", uid)
                connection.close()
                continue
            self._callers.append(_Caller(connection, pid))

    def _hear(self, caller: _Caller) -> None:
        """Read what has come; forget who is gone, too late or not to be understood."""
        if not self._is_alive(caller) or caller.request is not None:
            return
        with suppress(OSError):  # nothing there yet, or gone meanwhile
            caller.line += caller.socket.recv(_MOST_LINE_BYTES)
        if b"\n" in caller.line:
            caller.request = _understood(caller)
        if caller.request is not None:
            self._is_alive(caller)  # what it sent hid that it hung up
        elif b"\n" in caller.line or len(caller.line) >= _MOST_LINE_BYTES:
            self._drop(caller)

    def _is_alive(self, caller: _Caller) -> bool:
        """Whether the sender still waits; its end of the connection closes with the process or its patience."""
        if caller not in self._callers:
            return False
        late = caller.request is not None and caller.request.left_s <= 0
        try:
            gone = caller.socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            gone = False
        except OSError:
            gone = True
        if late or gone:
            self._drop(caller)
        return not (late or gone)

    @uninterrupted
    def _answer(self, caller: _Caller, given: GivenBack) -> None:
        said = {"given_bytes": given.given_bytes, "reason": given.reason[:1000]}
        with suppress(OSError):  # it is gone; what was given is free for anybody
            caller.socket.sendall(json.dumps(said).encode() + b"\n")
        self._drop(caller)

    def _drop(self, caller: _Caller) -> None:
        caller.socket.close()
        self._callers.remove(caller)


#: By the path of its socket, those of this process that are open.
_lenders: weakref.WeakValueDictionary[str, Lender] = weakref.WeakValueDictionary()


def ask(device_uuid: str, num_bytes: int, *, deadline_s: float, directory: Path | None = None) -> tuple[Answer, ...]:
    """Ask the other processes on the device, one after the other, until ``num_bytes`` were given or the time is over.

    Returns one answer for each that was asked, with what it gave and why not more; none, where nobody lends. Raises
    ``ValueError`` for a time without end, ``InvalidSetting`` as ``runtime_directory`` does.
    """
    if not math.isfinite(deadline_s):
        raise ValueError(f"a deadline of {deadline_s} s: others must know when nobody waits any more")
    until = time.monotonic() + deadline_s
    answers: list[Answer] = []
    wanted = num_bytes
    for path in sorted((directory or runtime_directory()).glob(f"{_name(device_uuid)}.*.sock")):
        number = path.suffixes[-2].removeprefix(".")
        if not (number.isascii() and number.isdigit()):  # not one of ours
            continue
        pid = int(number)
        if wanted <= 0 or pid == os.getpid():
            continue
        answer = _ask_one(path, pid, wanted, until)
        if answer is not None:
            answers.append(answer)
            wanted -= answer.given_bytes
    return tuple(answers)


def runtime_directory() -> Path:
    """Where the sockets are: ``TONNAGE_RUNTIME_DIR``, else the user's runtime directory, else one of ours in /tmp.

    Made where it is missing. Raises ``InvalidSetting`` where it cannot be made or used, and where it is not this user's
    alone: others could pose as lenders.
    """
    given, users = os.environ.get(DIRECTORY_VARIABLE), os.environ.get("XDG_RUNTIME_DIR")
    if given:
        found = Path(given)
    elif users and Path(users).is_dir():
        found = Path(users) / "tonnage"
    else:
        found = Path(tempfile.gettempdir()) / f"tonnage-{os.getuid()}"
    try:
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = found.stat()
    except OSError as error:
        raise _unusable(found, f"cannot be made or used: {error.strerror}") from error
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise _unusable(found, "belongs to another user, or others may write to it")
    return found


def _require_short(path: Path) -> Path:
    num_bytes = len(os.fsencode(path))
    if num_bytes > _MOST_PATH_BYTES:
        raise _unusable(path.parent, f"is too long: the name of a socket has {_MOST_PATH_BYTES} bytes, not {num_bytes}")
    return path


def _unusable(directory: Path, what: str) -> InvalidSetting:
    return InvalidSetting(
        DIRECTORY_VARIABLE,
        str(directory),
        what,
        remedy=f"set {DIRECTORY_VARIABLE} to a short path of a directory of your own with mode 0700",
    )


def _ask_one(path: Path, pid: int, num_bytes: int, until: float) -> Answer | None:
    """The answer of one lender, or None where there is none any more."""

    def nothing(reason: str) -> Answer:
        return Answer(pid=pid, asked_bytes=num_bytes, given_bytes=0, reason=reason)

    left_s = until - time.monotonic()
    if left_s <= 0:
        return nothing("the time was over before it was asked")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(left_s)
        try:
            connection.connect(str(path))
            connection.sendall(json.dumps({"num_bytes": num_bytes, "deadline": until}).encode() + b"\n")
            line = _read_line(connection, until)
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)  # left by a process that is gone
            return None
        except TimeoutError:
            return nothing("no answer before the time was over")
        except OSError as error:
            return nothing(f"it went away: {error.strerror}")
    try:
        said = json.loads(line)
        given, reason = min(max(0, int(said["given_bytes"])), num_bytes), str(said["reason"])
    except _NONSENSE:
        return nothing("it went away without an answer")
    return Answer(pid=pid, asked_bytes=num_bytes, given_bytes=given, reason=reason)


def _understood(caller: _Caller) -> Request | None:
    try:
        said = json.loads(caller.line)
        request = Request(pid=caller.pid, num_bytes=int(said["num_bytes"]), deadline=float(said["deadline"]))
    except _NONSENSE as error:
        _log.warning("a request of process %d was not understood: %r", caller.pid, error)
        return None
    return request if request.num_bytes > 0 and math.isfinite(request.deadline) else None


def _read_line(connection: socket.socket, until: float) -> bytes:
    line = b""
    while not line.endswith(b"\n") and len(line) < _MOST_ANSWER_BYTES:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        piece = connection.recv(_MOST_LINE_BYTES)
        if not piece:
            break
        line += piece
    return line


def _peer(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of who connected, by the kernel's word."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def _name(device_uuid: str) -> str:
    """The device's part of a socket's name: a path of a socket has room for about a hundred bytes."""
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in device_uuid)[:48]
