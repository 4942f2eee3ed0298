"""A chunk: physical memory that comes and goes behind addresses that stay.

A chunk has a creator, which makes the memory, and configurators, which make it usable one after the other (map it,
bind it) and are undone in reverse. ``PageRun`` is both for memory of any size: it holds as many handles as are wanted
at the addresses they belong to.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from tonnage.device.driver import Driver
from tonnage.errors import DeviceLost, DriverError
from tonnage.units import MiB

logger = logging.getLogger(__name__)

H = TypeVar("H")
In = TypeVar("In", contravariant=True)

#: One handle is at most this large. Measured on an H200, 40 GiB in handles of 64, 256 and 512 MiB take 45, 20 to 35 and
#: 17 to 35 ms to release; to make them again after a second 22 to 30 and 15 to 30. At once it is 60 to 80: the driver
#: clears freed pages first, beside us where it is given a tenth of a second.
HANDLE_BYTES = 512 * MiB
_ACCESS_ATTEMPTS = 4


class Creator(Protocol[H]):
    """Makes the memory of a chunk. A handle is whatever the configurators need, None excepted."""

    def create(self) -> H:
        """New memory; leaks nothing when it raises."""

    def release(self, handle: H, *, destructing: bool) -> None:
        """Called once for every ``create`` that returned."""


class Configurator(Protocol[In]):
    """One step that makes created memory usable."""

    def setup(self, handle: In) -> None:
        """Undoes itself when it raises."""

    def teardown(self, handle: In, *, destructing: bool) -> None:
        """Called once for every ``setup`` that returned. ``destructing``: the contents are not wanted any more."""


class State(StrEnum):
    INVALID = "invalid"
    RELEASED = "released"
    MATERIALIZED = "materialized"
    ERRORED = "errored"


class Chunk(Generic[H]):
    """Memory made by ``creator`` and set up by ``configurators`` in their order. Not thread-safe.

    INVALID       has no creator
    RELEASED      has no memory; ``materialize`` may be called
    MATERIALIZED  is usable; ``release`` may be called
    ERRORED       a set-up raised: ``release`` brings it back to RELEASED; or, ``is_terminal``, a release raised: what
                  it held may be lost and it is never used again
    """

    def __init__(self, creator: Creator[H] | None = None, configurators: Iterable[Configurator[H]] = ()) -> None:
        self._creator, self._configurators = creator, tuple(configurators)
        self._handle: H | None = None
        self._num_set_up = 0
        self.is_terminal = False

    def __repr__(self) -> str:
        return f"<Chunk {self.state}{' for ever' * self.is_terminal}>"

    @property
    def state(self) -> State:
        if self._creator is None:
            return State.INVALID
        if self.is_terminal:
            return State.ERRORED
        if self._handle is None:
            return State.RELEASED
        return State.MATERIALIZED if self._num_set_up == len(self._configurators) else State.ERRORED

    @property
    def is_releasable(self) -> bool:
        """Whether it holds memory that ``release`` may still give back."""
        return self._handle is not None

    def materialize(self) -> None:
        """Create and set up. When ``create`` raises the chunk stays RELEASED; when a set-up raises it is ERRORED, with
        what was done still in place. Raises ``ValueError``, changing nothing, unless it is RELEASED.
        """
        if self._creator is None or self.state is not State.RELEASED:
            raise ValueError(f"{self!r} cannot be materialised")
        self._handle = self._creator.create()
        for configurator in self._configurators:
            configurator.setup(self._handle)
            self._num_set_up += 1

    def release(self, *, destructing: bool = False) -> None:
        """Undo what was set up, newest first, and give the memory back.

        Every step is tried whatever the others do; the last exception is raised, earlier ones are logged, and the
        chunk is then ERRORED for ever. Raises ``ValueError``, changing nothing, where it has no memory.
        """
        if self._creator is None or self._handle is None:
            raise ValueError(f"{self!r} has nothing to release")
        handle, creator = self._handle, self._creator
        last: BaseException | None = None
        for step in self._steps_back(handle, creator, destructing=destructing):
            try:
                step()
            except BaseException as error:  # noqa: BLE001 - the other steps must run; it is raised below
                if last is not None:
                    logger.error("releasing %r: %s", self, last)
                last = graver(last, error)
        self._handle, self._num_set_up = None, 0
        if last is not None:
            self.is_terminal = True
            raise last

    def _steps_back(self, handle: H, creator: Creator[H], *, destructing: bool) -> Iterator[Callable[[], None]]:
        while self._num_set_up:
            self._num_set_up -= 1
            configurator = self._configurators[self._num_set_up]
            yield lambda configurator=configurator: configurator.teardown(handle, destructing=destructing)  # type: ignore[misc]
        yield lambda: creator.release(handle, destructing=destructing)

    def destroy(self) -> None:
        """Release what it holds, contents unwanted; a failure is logged. Destroying again does nothing.

        As with ``release``, work that uses the memory must be done before.
        """
        if self._handle is not None:
            try:
                self.release(destructing=True)
            except Exception:
                logger.exception("destroying %r", self)

    def __del__(self) -> None:
        # Work may still use the memory, and a finaliser may run anywhere, in a capture too, where nothing may be waited
        # for. So it stays as it is, until the driver is closed or the process ends.
        if getattr(self, "_handle", None) is not None and not sys.is_finalizing():
            logger.error("%r was dropped with its memory, which nobody can give back now: destroy it first", self)


@dataclass(slots=True)
class Piece:
    """One handle of physical memory at its place, and how far it has come: each flag is a step to be undone."""

    addr: int
    size: int
    handle: int | None = None
    mapped: bool = False

    @property
    def is_held(self) -> bool:
        return self.handle is not None or self.mapped


def pieces_of(addr: int, size: int, *, handle_bytes: int = HANDLE_BYTES) -> list[Piece]:
    """Pieces of at most ``handle_bytes`` that cover ``[addr, addr + size)``; both are multiples of the page."""
    return [Piece(addr + at, min(handle_bytes, size - at)) for at in range(0, size, handle_bytes)]


class PageRun:
    """Memory for ``pieces``: creator and first configurator of a chunk, ``Chunk(run, [run, ...])``.

    The list is live. Its owner may add pieces that it created and mapped by the methods below, and remove pieces that
    are no longer held, while the chunk is MATERIALIZED: the next release unmaps what is there then, and the next
    materialise brings back exactly those pieces. An empty list is fine. Neighbours are opened and unmapped by one call.

    Every method remembers in the pieces how far it came, so a call that failed may be repeated and goes on from there.
    """

    def __init__(self, driver: Driver, pieces: list[Piece], *, peers: tuple[int, ...] = ()) -> None:
        self.driver, self.pieces, self.peers = driver, pieces, peers

    @property
    def padded_bytes(self) -> int:
        """What all pieces take once they have memory."""
        return sum(piece.size for piece in self.pieces)

    @property
    def held_bytes(self) -> int:
        """What they take now, memory that the driver would not take back included."""
        return sum(piece.size for piece in self.pieces if piece.is_held)

    def create(self) -> list[Piece]:
        self.create_pieces(self.pieces)
        return self.pieces

    def setup(self, handle: list[Piece]) -> None:
        self.map_pieces(handle)

    def teardown(self, handle: list[Piece], *, destructing: bool) -> None:  # noqa: ARG002 - unmapping saves nothing
        self.unmap_pieces(handle)

    def release(self, handle: list[Piece], *, destructing: bool) -> None:  # noqa: ARG002
        self.release_pieces(handle)

    def give_back(self) -> None:
        """Whatever is still held, after a failure too. Raises the last ``DriverError``; may be repeated."""
        try:
            self.unmap_pieces(self.pieces)
        finally:
            self.release_pieces(self.pieces)

    def create_pieces(self, pieces: Sequence[Piece]) -> None:
        """Physical memory for those that have none; all or nothing."""
        new: list[Piece] = []
        try:
            for piece in pieces:
                if piece.handle is None:
                    piece.handle = self.driver.phys_create(piece.size)
                    new.append(piece)
        except BaseException:
            _logged(self.release_pieces, new)
            raise

    def map_pieces(self, pieces: Sequence[Piece]) -> None:
        """Map and open those that are not mapped; all or nothing."""
        new: list[Piece] = []
        try:
            for piece in pieces:
                if not piece.mapped:
                    self._map(piece)
                    new.append(piece)
            for addr, size, _ in _runs(new):
                self._open(addr, size)
        except BaseException:
            _logged(self.unmap_pieces, new)
            raise

    def unmap_pieces(self, pieces: Sequence[Piece]) -> None:
        """Unmap those that are mapped, each run by one call. A run that fails does not stop the others.

        What anything but a ``DriverError`` cuts short (an interrupt) counts as unmapped: it may be, and nobody may
        touch it.
        """
        last: BaseException | None = None
        for addr, size, run in _runs([piece for piece in pieces if piece.mapped]):
            try:
                self.driver.unmap(addr, size)
            except DriverError as error:
                logger.error("%d bytes at %#x stay mapped: %s", size, addr, error)
                last = graver(last, error)
                continue
            except BaseException as error:  # noqa: BLE001 - raised below, when the others are done
                last = error
                self._make_sure(addr, size)
            for piece in run:
                piece.mapped = False
        if last is not None:
            raise last

    def release_pieces(self, pieces: Sequence[Piece]) -> None:
        """Release the handles that are there. One that fails does not stop the others."""
        last: BaseException | None = None
        for piece in pieces:
            if piece.handle is None:
                continue
            try:
                self.driver.phys_release(piece.handle)
            except DriverError as error:
                logger.error("handle %#x of %d bytes stays: %s", piece.handle, piece.size, error)
                last = graver(last, error)
                continue
            except BaseException as error:  # noqa: BLE001 - raised below, when the others are done
                last = error  # it may be gone, and its number may be another's by the next attempt
            piece.handle = None
        if last is not None:
            raise last

    def _map(self, piece: Piece) -> None:
        assert piece.handle is not None, "created before it is mapped"
        try:
            self.driver.map(piece.addr, piece.size, piece.handle)
        except DriverError:
            raise
        except BaseException:
            self._make_sure(piece.addr, piece.size)
            raise
        piece.mapped = True

    def _make_sure(self, addr: int, size: int) -> None:
        """Unmap what may or may not be mapped: a call was cut short, and where it was not, this one is refused."""
        with suppress(DriverError):
            self.driver.unmap(addr, size)

    def _open(self, addr: int, size: int) -> None:
        """Allow access; a driver that is not ready is waited for a few times, then the edit fails as a whole."""
        for attempt in range(1, _ACCESS_ATTEMPTS + 1):
            try:
                self.driver.set_access(addr, size, peers=self.peers)
                return
            except DriverError as error:
                if attempt == _ACCESS_ATTEMPTS or not error.code.endswith("NOT_READY"):
                    raise
            self.driver.device_sync()


def graver(last: BaseException | None, error: BaseException) -> BaseException:
    """The one of two failures to raise: the later, unless that would hide an interrupt."""
    return error if last is None or isinstance(last, Exception) else last


def _runs(pieces: Sequence[Piece]) -> Iterator[tuple[int, int, list[Piece]]]:
    """(address, bytes, pieces) of every stretch without a gap, in the order of addresses."""
    run: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.addr):
        if run and run[-1].addr + run[-1].size != piece.addr:
            yield run[0].addr, run[-1].addr + run[-1].size - run[0].addr, run
            run = []
        run.append(piece)
    if run:
        yield run[0].addr, run[-1].addr + run[-1].size - run[0].addr, run


def _logged(undo: Callable[[Sequence[Piece]], None], pieces: Sequence[Piece]) -> None:
    """Undo without raising: the failure that brought us here is the one to report, and the pieces remember."""
    try:
        undo(pieces)
    except DeviceLost:
        pass  # every later call fails too; the first said so
    except DriverError:
        logger.exception("a step back failed")
