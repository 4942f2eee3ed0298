"""The physical memory behind an arena: handles side by side, made and given back in few driver calls.

Neighbouring handles form a run, and a run costs one ``set_access`` and one ``unmap`` however many handles it has. What
a failed call leaves behind is kept here, booked, until it is really gone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain

from tonnage.buffers.chunk import PageRun, Piece, graver
from tonnage.buffers.device import Device
from tonnage.buffers.ladder import relieve
from tonnage.errors import DeviceLost, DriverError, DriverOOM, ForkedProcess, LedgerError
from tonnage.ledger import Account

_log = logging.getLogger(__name__)


def lay_out(start: int, end: int, *, page_bytes: int, bulk_bytes: int, fine_from: int) -> Iterator[tuple[int, int]]:
    """(offset, size) of the handles that fill ``[start, end)``: large ones where a whole large one fits, else pages.

    Large ones begin at multiples of their size, and none reaches beyond ``fine_from``: there lies what is given back
    and taken again page by page.
    """
    while start < end:
        is_bulk = start % bulk_bytes == 0 and start + bulk_bytes <= min(end, fine_from)
        size = bulk_bytes if is_bulk else page_bytes
        yield start, size
        start += size


def stretches(pieces: Sequence[Piece]) -> Iterator[tuple[int, int]]:
    """(address, size) of what lies side by side; ``pieces`` are in the order of their addresses."""
    start = end = 0
    for piece in pieces:
        if piece.addr != end:
            if end > start:
                yield start, end - start
            start = piece.addr
        end = piece.addr + piece.size
    if end > start:
        yield start, end - start


class ArenaRun(PageRun):
    """The pieces of one arena, in the order of their addresses, booked in ``account`` while they have memory.

    ``edited`` hears of every change of the page table: address, size, whether it is mapped now. A piece that the
    driver would not unmap is ``poisoned``: out of use for good. One that is unmapped but whose handle was not taken
    back is ``kept``, and tried again. Both stay booked. ``num_edits`` counts map, set_access and unmap calls
    that were done.
    """

    def __init__(
        self,
        device: Device,
        account: Account,
        *,
        edited: Callable[[int, int, bool], None],
        peers: tuple[int, ...] = (),
    ) -> None:
        super().__init__(device.driver, [], peers=peers)
        self._device = device
        self._account, self._edited = account, edited
        self._booked: set[int] = set()  # by id(): pieces that are booked are alive, in one of the lists
        self.poisoned: list[Piece] = []
        self.kept: list[Piece] = []
        self._refusal: DriverError | None = None  # why the last of them is kept
        self.requested_bytes = self.num_edits = 0
        self._is_up = True
        self._process = os.getpid()

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(address, bytes) whose contents are worth saving: all that may be touched."""
        return tuple(stretches(self.pieces))

    def require_process(self) -> None:
        if os.getpid() != self._process:
            raise ForkedProcess(
                f"the arena of {self._account.owner!r} was made in process {self._process} and cannot be used in its "
                f"child {os.getpid()}: device memory does not pass through a fork. Start workers with 'spawn', or make "
                "the arena in the child"
            )

    @property
    def leftover_bytes(self) -> int:
        """Physical bytes that are out of use and yet ours."""
        return sum(piece.size for piece in chain(self.poisoned, self.kept))

    # what a chunk calls when the arena goes to sleep and wakes

    def setup(self, handle: list[Piece]) -> None:
        super().setup(handle)
        try:
            self.book(handle)
        except LedgerError:
            self.unmap_pieces(handle)
            raise
        if not self._is_up:
            self._account.adjust_requested(self.requested_bytes)
        self._is_up = True

    def teardown(self, handle: list[Piece], *, destructing: bool) -> None:
        self.require_process()
        self._account.adjust_requested(-self.requested_bytes)
        self._is_up = False
        super().teardown(handle, destructing=destructing)

    # what an arena calls while it is awake

    def request(self, num_bytes: int) -> None:
        """Now so many bytes are asked for, of those that are committed. Asleep, none are."""
        if self._is_up:
            self._account.adjust_requested(num_bytes - self.requested_bytes)
        self.requested_bytes = num_bytes

    def book(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if id(piece) not in self._booked:
                self._account.add(0, piece.size)
                self._booked.add(id(piece))

    def take_away(self, pieces: Sequence[Piece]) -> None:
        """Unmap and give back; what the driver does not take is kept here. Of its errors raises ``DeviceLost`` alone.

        An interrupt goes on when both steps are done.
        """
        last: BaseException | None = None
        for step in (self.unmap_pieces, self.release_pieces):
            try:
                step(pieces)
            except DeviceLost:
                raise
            except DriverError as error:
                _log.error("giving back memory of %r: %s", self._account.owner, error)
            except BaseException as error:  # noqa: BLE001 - raised below
                last = graver(last, error)
        if last is not None:
            raise last

    def drop(self, gone: Sequence[Piece]) -> None:
        """``take_away`` the last of the pieces, which then are the run's no more."""
        try:
            self.take_away(gone)
        except DriverError:
            raise  # the device is lost, and they are where they were
        except BaseException:
            del self.pieces[-len(gone) :]
            raise
        del self.pieces[-len(gone) :]

    def abandon(self, pieces: Sequence[Piece]) -> None:
        """Undo without raising: the failure that brought us here is the one to report."""
        with suppress(DeviceLost):
            self.take_away(pieces)

    def create_pieces(self, pieces: Sequence[Piece]) -> None:
        """All or nothing; once more after our own caches, and whoever registered to give, were asked for theirs."""
        try:
            super().create_pieces(pieces)
        except DriverOOM:
            for told in relieve(self._device, sum(piece.size for piece in pieces if piece.handle is None)):
                _log.info("no memory for %r: %s", self._account.owner, told)
            super().create_pieces(pieces)

    def map_pieces(self, pieces: Sequence[Piece]) -> None:
        new = [piece for piece in pieces if not piece.mapped]
        super().map_pieces(pieces)
        self.num_edits += len(new)
        for addr, size in stretches(new):
            self.num_edits += 1
            self._edited(addr, size, True)

    def unmap_pieces(self, pieces: Sequence[Piece]) -> None:
        """Unmap those that are mapped, one call a run; raises the last ``DriverError`` where something is poisoned."""
        out_of_use = {id(piece) for piece in self.poisoned}
        mapped = [piece for piece in pieces if piece.mapped and id(piece) not in out_of_use]
        failed: BaseException | None = None
        try:
            super().unmap_pieces(mapped)
        except DeviceLost:
            raise
        except DriverError:
            # One of a run is to blame, or that one call: piece by piece, as much as possible is saved.
            for piece in mapped:
                try:
                    super().unmap_pieces([piece])
                except DriverError as error:
                    failed = graver(failed, error)
                except BaseException as error:  # noqa: BLE001 - as below
                    failed = error
        except BaseException as error:  # noqa: BLE001 - raised below: the graphs must hear what is unmapped
            failed = error
        for addr, size in stretches(mapped):
            self.num_edits += 1
            self._edited(addr, size, False)  # what is poisoned may be mapped or not: nobody may touch it
        for piece in mapped:
            if piece.mapped:
                self._poison(piece)
        if failed is not None:
            raise failed

    def release_pieces(self, pieces: Sequence[Piece]) -> None:
        """Give back handles that are not mapped; those that are not taken are kept, never raising for them."""
        free = [piece for piece in pieces if piece.handle is not None and not piece.mapped]
        interrupt: BaseException | None = None
        try:
            super().release_pieces(free)
        except DeviceLost:
            raise
        except DriverError as error:
            _log.error("memory of %r was not taken back: %s", self._account.owner, error)
            self._refusal = error
        except BaseException as error:  # noqa: BLE001 - raised below, when the books are right
            interrupt = error
        for piece in free:
            if piece.handle is None:
                self._unbook(piece)
            else:
                self._keep(piece)
        if interrupt is not None:
            raise interrupt

    def sweep(self) -> None:
        """Once more what a failed release left behind."""
        kept, self.kept = self.kept, []
        self.release_pieces(kept)

    def rescue(self) -> None:
        """The last attempt at what is out of use, for closing; raises ``DriverError`` where the driver keeps it."""
        poisoned, self.poisoned = sorted(self.poisoned, key=lambda piece: piece.addr), []
        try:
            self.unmap_pieces(poisoned)  # poisons again what stays
        finally:
            self.release_pieces(poisoned)
        self.sweep()
        if self.kept:
            told = f"{self.leftover_bytes:,} bytes were not taken back"
            raise DriverError("phys_release", "KEPT", told) from self._refusal

    def _poison(self, piece: Piece) -> None:
        _log.error(
            "%s bytes of %r at %#x are out of use for good, with handle %#x",
            f"{piece.size:,}", self._account.owner, piece.addr, piece.handle or 0,
        )  # fmt: skip
        self.poisoned.append(piece)
        self._book_leak(piece)

    def _keep(self, piece: Piece) -> None:
        """The place of the piece is free for another handle; the handle is not free."""
        self.kept.append(piece)
        for number, one in enumerate(self.pieces):
            if one is piece:
                self.pieces[number] = Piece(piece.addr, piece.size)
        self._book_leak(piece)

    def _book_leak(self, piece: Piece) -> None:
        """Memory that the driver would not take back is ours until it does, and the ledger says so."""
        try:
            self.book([piece])
        except LedgerError as error:  # a strict seal refuses owners that it does not know
            _log.error("a leak of %s bytes is not in the ledger: %s", f"{piece.size:,}", error)

    def _unbook(self, piece: Piece) -> None:
        if id(piece) in self._booked:
            self._account.sub(0, piece.size)
            self._booked.discard(id(piece))
