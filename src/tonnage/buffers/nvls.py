"""Memory of a group of devices: each rank's own part, the parts of its peers, and one address that writes to all.

Made, resized and closed by all ranks together. Whatever fails on one rank is told to all before any of them unwinds,
so that either every rank has its buffer or none holds anything.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TypeVar

from tonnage.buffers.buffer import num_bytes_of
from tonnage.buffers.group import Group
from tonnage.buffers.memory import Exports, out_of_memory
from tonnage.buffers.stream import Stream
from tonnage.errors import DriverError, DriverOOM, DriverUnsupported
from tonnage.ledger import Ledger
from tonnage.terms import LineKind, MemoryKind
from tonnage.units import round_up

_log = logging.getLogger(__name__)
T = TypeVar("T")


class NvlsView(StrEnum):
    """Which address of an ``NvlsBuffer``: our own memory, that of all at once, or a peer's."""

    UNICAST = "unicast"
    MULTICAST = "multicast"
    PEER = "peer"


class NvlsPart:
    """A view of an ``NvlsBuffer``; a ``Memory``. It belongs to the buffer: it is not resized, released or closed.

    Its ``address`` is 0 once the buffer was closed, or lies elsewhere after a resize.
    """

    def __init__(self, buffer: NvlsBuffer, kind: NvlsView, rank: int, address: int) -> None:
        self._buffer, self.kind, self.rank, self.address = buffer, kind, rank, address
        self._exports = Exports()
        self.dtype = "uint8"
        self.shape: tuple[int, ...] = (buffer.size_bytes,)

    def __repr__(self) -> str:
        whose = f" of rank {self.rank}" if self.kind is NvlsView.PEER else ""
        return f"<NvlsPart {self.kind}{whose} {self.size_bytes:,} bytes at {self.address:#x} on {self.stream!r}>"

    @property
    def stream(self) -> Stream:
        return self._buffer.stream

    @property
    def size_bytes(self) -> int:
        return self._buffer.size_bytes

    @property
    def usable_bytes(self) -> int:
        return self._buffer.size_bytes

    @property
    def exports(self) -> Exports:
        """Raises ``ValueError`` for the multicast view: there is nothing to read there, and tensors read."""
        if self.kind is NvlsView.MULTICAST:
            raise ValueError(f"{self!r} has no bytes of its own: look at the unicast view, or write with a kernel")
        return self._exports

    def reshape(self, shape: Sequence[int], dtype: str = "uint8") -> None:
        """Look at the same bytes as ``shape`` elements. Raises ``ValueError`` for more than there are."""
        need_bytes, _ = num_bytes_of(shape, dtype)
        if need_bytes > self._buffer.padded_bytes:
            raise ValueError(f"{need_bytes:,} bytes do not fit into {self!r}, which has {self._buffer.padded_bytes:,}")
        self.dtype, self.shape = dtype, tuple(shape)

    def resize(self, num_elements: int) -> None:
        """Always raises ``ValueError``."""
        raise ValueError(f"{self!r} cannot be resized to {num_elements:,}: resize the buffer, on all ranks together")

    def release(self) -> None:
        """Always raises ``ValueError``."""
        raise ValueError(f"{self!r} cannot be released: close the buffer, on all ranks together")

    close = release


class NvlsBuffer:
    """``size_bytes`` on each device of ``group``, of ``padded_bytes`` each. Made by ``ipc_nvls``.

    unicast    our own memory                     peers  the memory of every rank by rank, ours among it
    multicast  what is written there is written to the memory of all ranks

    Booked by every rank for its own part alone. Not thread-safe within a rank.
    """

    unicast: NvlsPart
    multicast: NvlsPart
    peers: tuple[NvlsPart, ...]

    def __init__(
        self, group: Group, stream: Stream, size_bytes: int, *, ledger: Ledger, owner: str, line: LineKind, tag: str
    ) -> None:
        self.group, self.stream, self.owner = group, stream, owner
        self.size_bytes = self.padded_bytes = 0
        self._driver = stream.driver
        self._account = ledger.open(owner=owner, line=line, memory=MemoryKind.IPC_NVLS, tag=tag)
        self._undo: list[Callable[[], None]] = []  # oldest first: what was done and is to be taken back
        self._parting = self._keeps_some = False
        self.peers = ()
        self._build(size_bytes)

    def __repr__(self) -> str:
        return f"<NvlsBuffer rank {self.group.rank} of {self.group.size}, {self.size_bytes:,} bytes on {self.stream!r}>"

    def resize(self, size_bytes: int) -> None:
        """On all ranks together, to the same size. Beyond ``padded_bytes`` the addresses change and contents are lost.

        When that fails the buffer is empty on all ranks and may be resized again. Raises as ``ipc_nvls`` does, and
        ``BufferInUse`` on every rank where a tensor looks.
        """
        self._require_one_size(size_bytes)
        if not 0 < size_bytes <= self.padded_bytes:
            self.close()
            self._build(size_bytes)
        else:
            self._account.adjust_requested(size_bytes - self.size_bytes)
            self.size_bytes = size_bytes

    def close(self) -> None:
        """On all ranks together, once nothing on any device uses the memory: waits for our own device, then for all.

        Closing again does nothing. Raises ``BufferInUse`` on a rank whose tensors are alive and ``DriverError`` on the
        others, with nothing done. When the driver keeps something, ``DriverError``, and the call may be repeated by
        that rank alone.
        """
        if not self._undo:
            return
        if not self._parting:
            self._together(self._require_unused)
            self._parting = True
        while self._undo:
            self._undo[-1]()
            self._undo.pop()
        self._parting = False
        self._empty()

    def _build(self, size_bytes: int) -> None:
        try:
            self._obtain(size_bytes)
        except BaseException as error:
            self._roll_back()
            self._empty()
            if isinstance(error, DriverOOM):
                raise out_of_memory(error, self.stream, size_bytes=size_bytes, owner=self.owner) from error
            raise

    def _obtain(self, size_bytes: int) -> None:
        """The sequence: own memory, peers' memory, multicast object, all devices added, all memory bound, mapped."""
        self._together(lambda: _require_positive(size_bytes))
        self._require_one_size(size_bytes)
        pages = self.group.exchange(self._driver.capabilities().page_bytes)
        padded = round_up(size_bytes, math.lcm(*pages))  # allocation and multicast granularity of every rank
        self.size_bytes, self.padded_bytes = size_bytes, padded
        handle = self._together(lambda: self._create(size_bytes, padded))
        own = self._together(lambda: self._mapped(handle, padded))
        imported = self._import_peers(handle, padded)
        addresses = self._together(lambda: {rank: self._mapped(one, padded) for rank, one in imported.items()})
        multicast = self._share_multicast(padded)
        self._together(lambda: self._driver.multicast_add_device(multicast))  # none binds before all are added
        self._together(lambda: self._bind(multicast, handle, padded))
        many = self._together(lambda: self._mapped(multicast, padded))
        self.unicast = NvlsPart(self, NvlsView.UNICAST, self.group.rank, own)
        self.multicast = NvlsPart(self, NvlsView.MULTICAST, self.group.rank, many)
        self.peers = tuple(
            self.unicast if rank == self.group.rank else NvlsPart(self, NvlsView.PEER, rank, addresses[rank])
            for rank in range(self.group.size)
        )

    def _together(self, step: Callable[[], T]) -> T:
        """Our part of a step, then everyone's word on it. Raises our own error, or ``DriverError`` for a peer's."""
        mine: BaseException | None = None
        try:
            done = step()
        except BaseException as error:  # noqa: BLE001 - raised again below, once the others know
            mine = error
        problems = self.group.agree(None if mine is None else f"{type(mine).__name__}: {mine}")
        if mine is not None:
            raise mine
        if problems:
            told = "; ".join(f"rank {rank}: {problem}" for rank, problem in problems.items())
            raise DriverError("ipc_nvls", "PEER_FAILED", told)
        return done

    def _require_one_size(self, size_bytes: int) -> None:
        sizes = self.group.exchange(size_bytes)
        if len(set(sizes)) > 1:
            raise ValueError(f"the ranks ask for different sizes: {', '.join(f'{size:,}' for size in sizes)} bytes")

    def _create(self, size_bytes: int, padded: int) -> int:
        handle = self._driver.phys_create(padded, exportable=True)
        try:
            self._account.add(size_bytes, padded, stream=self.stream.bare_handle)
        except BaseException:
            self._driver.phys_release(handle)
            raise

        def undo() -> None:
            self._driver.phys_release(handle)
            if not self._keeps_some:
                self._account.sub(self.size_bytes, padded, stream=self.stream.bare_handle)

        self._undo.append(undo)
        return handle

    def _mapped(self, handle: int, padded: int) -> int:
        """The address of ``handle`` with access, each step noted as it is done."""
        address = self._driver.va_reserve(padded, align=self._driver.capabilities().page_bytes)
        self._undo.append(lambda: self._driver.va_free(address, padded))
        self._driver.map(address, padded, handle)
        self._undo.append(lambda: self._driver.unmap(address, padded))
        self._driver.set_access(address, padded)
        return address

    def _import_peers(self, handle: int, padded: int) -> dict[int, int]:
        """Handles of the other ranks' memory by rank. No descriptor outlives the call."""
        fds: list[int] = []
        try:
            self._together(lambda: fds.append(self._driver.phys_export(handle)))
            fds += (given := self.group.exchange_fds(fds[0]))
            return self._together(
                lambda: {rank: self._imported(fd, padded) for rank, fd in enumerate(given) if rank != self.group.rank}
            )
        finally:
            _close_all(fds)

    def _share_multicast(self, padded: int) -> int:
        """The handle of what rank 0 makes and the others import."""
        fds: list[int] = []
        try:
            made = self._together(lambda: self._make_multicast(padded, fds) if self.group.rank == 0 else 0)
            fds.append(self.group.broadcast_fd(fds[0] if fds else None, root=0))
            return self._together(lambda: made or self._imported(fds[-1], padded))
        finally:
            _close_all(fds)

    def _make_multicast(self, padded: int, fds: list[int]) -> int:
        multicast = self._driver.multicast_create(padded, num_devices=self.group.size)
        self._undo.append(lambda: self._driver.phys_release(multicast))
        fds.append(self._driver.phys_export(multicast))
        return multicast

    def _imported(self, fd: int, padded: int) -> int:
        handle = self._driver.phys_import(fd, padded)
        self._undo.append(lambda: self._driver.phys_release(handle))
        return handle

    def _bind(self, multicast: int, handle: int, padded: int) -> None:
        self._driver.multicast_bind(multicast, handle, padded)
        self._undo.append(lambda: self._driver.multicast_unbind(multicast, padded))

    def _require_unused(self) -> None:
        for part in self.peers:
            part.exports.require_none(self)
        self.stream.device.fences.quiesce()

    def _roll_back(self) -> None:
        """Take back what was done, newest first. What the driver keeps is logged and stays booked."""
        while self._undo:
            undo = self._undo.pop()
            try:
                undo()
            except Exception:  # noqa: BLE001 - the failure that led here is what is raised
                self._keeps_some = True
                _log.exception("%r keeps memory that its driver did not take back", self)

    def _empty(self) -> None:
        for part in self.peers:
            part.address = 0
        if self.peers:
            self.multicast.address = 0
        self.peers, self.size_bytes, self.padded_bytes = (), 0, 0


def ipc_nvls(
    group: Group,
    stream: Stream,
    size_bytes: int,
    *,
    ledger: Ledger,
    owner: str,
    line: LineKind,
    tag: str = "",
    allow_multicast: bool = False,
    shared_gpu: bool = True,
) -> NvlsBuffer:
    """``size_bytes`` on every device of ``group``; called by all its ranks at once, with the same size.

    A multicast object on a card that others use too can put all cards of the host out of service. So it takes
    ``allow_multicast=True``, and ``shared_gpu=False`` from a caller who knows; and only simulated devices make one.
    Raises ``DriverUnsupported`` without these or the capability, ``BufferOOM`` and ``DriverError`` on the rank that
    failed and ``DriverError`` with the code PEER_FAILED on the others; then no rank holds anything.
    """
    if group.size < 2:
        raise ValueError(f"a multicast buffer needs at least two ranks, not {group.size}")
    problem = _refusal(stream, allow_multicast=allow_multicast, shared_gpu=shared_gpu)
    problems = group.agree(problem)
    if problem or problems:
        told = problem or "; ".join(f"rank {rank}: {one}" for rank, one in problems.items())
        raise DriverUnsupported("ipc_nvls", "NOT_SUPPORTED", told)
    return NvlsBuffer(group, stream, size_bytes, ledger=ledger, owner=owner, line=line, tag=tag)


def _refusal(stream: Stream, *, allow_multicast: bool, shared_gpu: bool) -> str | None:
    """Why this rank does not take part, or None."""
    if not allow_multicast:
        return "multicast objects are made only with allow_multicast=True"
    if shared_gpu:
        return "multicast objects are never made on a card that others may use: say shared_gpu=False if none does"
    if stream.driver.kind != "host":
        return f"{stream.driver.name} is real: this release makes multicast objects on simulated devices alone"
    capabilities = stream.driver.capabilities()
    for name in ("multicast", "exportable"):
        if not getattr(capabilities, name):
            return f"{stream.driver.name} lacks {name}: {capabilities.reasons.get(name, 'it does not say why')}"
    return None


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)


def _require_positive(size_bytes: int) -> None:
    if size_bytes <= 0:
        raise ValueError(f"a multicast buffer of {size_bytes:,} bytes")
