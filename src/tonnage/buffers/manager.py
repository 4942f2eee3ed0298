"""Buffers by kind, on one stream. The manager asks the device for memory and knows nothing of budgets."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

from tonnage.buffers.buffer import Buffer, num_bytes_of
from tonnage.buffers.copying import Copying
from tonnage.buffers.kinds import PLAIN, Source, Virtual
from tonnage.buffers.ladder import sweep
from tonnage.buffers.pooled import InGraph, Pooled
from tonnage.buffers.scopes import current, tags_opened
from tonnage.buffers.stream import Stream
from tonnage.errors import CaptureError, DriverUnsupported
from tonnage.ledger import Account, Ledger
from tonnage.terms import LineKind, MemoryKind

if TYPE_CHECKING:
    from tonnage.buffers.group import Group
    from tonnage.buffers.nvls import NvlsBuffer
    from tonnage.buffers.pinned_pool import PinnedStats

Shape: TypeAlias = int | Sequence[int]

T = TypeVar("T", bound=StrEnum)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStats:
    """Bytes. The first five are the device's private pool, shared by all managers; 0 where there is none.

    free_bytes  reserved less used, not below 0: the two are asked for one after the other
    live_bytes  asked for by this manager's owner and not yet closed, by kind
    pinned      the device's pool of pinned memory, None where nobody used it
    """

    reserved_bytes: int
    used_bytes: int
    free_bytes: int
    reserved_high_bytes: int
    used_high_bytes: int
    live_bytes: Mapping[MemoryKind, int]
    pinned: PinnedStats | None


class BufferManager(Copying):
    """Buffers for ``owner`` on the device of ``stream``, each booked in ``ledger`` under the line it is for.

    gpu          in a scope virtual memory, else the private pool, in stream order; where the device has none of
                 them, plain memory
    gpu_sync     in a scope virtual memory, else plain memory: it and its free may wait for the whole device
    cpu          pageable memory of the host
    pinned       page-locked memory of the host, slow to make
    pinned_pool  the same out of a pool
    managed      memory that host and device both may touch
    ipc_nvls     memory of a group of devices

    Sizes are elements of ``dtype`` (bytes by default) or a shape; contents are undefined. An allocation is all or
    nothing, in memory and in the ledger. It raises ``BufferOOM`` when nothing on the ladder helped, ``CaptureError``
    while a stream is captured, ``DriverUnsupported`` where the device cannot, and ``LedgerError`` after a strict seal.
    ``with`` it to have it closed. Any thread may call it, but a buffer belongs to one. Memory of ``gpu`` is there for
    work that follows on the stream; other streams wait for an event first, and are recorded with
    ``Buffer.record_stream``.
    """

    def __init__(self, stream: Stream, *, ledger: Ledger, owner: str, trim_on_close: bool = False) -> None:
        self.stream, self.owner, self.trim_on_close = stream, owner, trim_on_close
        self._ledger = ledger
        self._accounts: dict[tuple[MemoryKind, LineKind, str], Account] = {}
        self._quick: dict[object, Account] = {}  # line, or line and tag -> the account of pooled memory
        self._orphans = stream.device.orphans
        self._pool = stream.device.pool
        self._closed = self._told = False
        self._plain: dict[MemoryKind, Source] = {kind: self._source(make, kind) for kind, make in PLAIN.items()}
        self._pooled = Pooled(MemoryKind.GPU, stream, ledger)
        self._unpooled = self._source(Source, MemoryKind.GPU)

    def __repr__(self) -> str:
        return f"<BufferManager {self.owner!r} on {self.stream!r}>"

    def gpu(
        self, shape: Shape, dtype: str = "uint8", *, line: LineKind, tag: str = "", graph_memory: bool = False
    ) -> Buffer:
        """``graph_memory`` allows it on a stream that is being captured: see ``InGraph`` for what that means."""
        # The common case, written out because it is meant to cost next to nothing beside the driver's own work.
        if type(shape) is int and dtype == "uint8" and not graph_memory and not (tags_opened and current()):
            account = self._quick.get((line, tag) if tag else line)
            if account is not None and shape > 0 and not self._orphans:
                return self._pooled.make(account, shape)
        return self.allocate(MemoryKind.GPU, shape, dtype, line=line, tag=tag, graph_memory=graph_memory)

    def gpu_sync(self, shape: Shape, dtype: str = "uint8", *, line: LineKind, tag: str = "") -> Buffer:
        return self.allocate(MemoryKind.GPU_SYNC, shape, dtype, line=line, tag=tag)

    def cpu(self, shape: Shape, dtype: str = "uint8", *, line: LineKind, tag: str = "") -> Buffer:
        return self.allocate(MemoryKind.CPU, shape, dtype, line=line, tag=tag)

    def pinned(self, shape: Shape, dtype: str = "uint8", *, line: LineKind, tag: str = "") -> Buffer:
        return self.allocate(MemoryKind.PINNED, shape, dtype, line=line, tag=tag)

    def pinned_pool(self, shape: Shape, dtype: str = "uint8", *, line: LineKind, tag: str = "") -> Buffer:
        return self.allocate(MemoryKind.PINNED_POOL, shape, dtype, line=line, tag=tag)

    def managed(self, shape: Shape, dtype: str = "uint8", *, line: LineKind, tag: str = "") -> Buffer:
        return self.allocate(MemoryKind.MANAGED, shape, dtype, line=line, tag=tag)

    def ipc_nvls(
        self,
        group: Group,
        size_bytes: int,
        *,
        line: LineKind,
        tag: str = "",
        allow_multicast: bool = False,
        shared_gpu: bool = True,
    ) -> NvlsBuffer:
        """``size_bytes`` on every device of ``group``, called on all of its ranks at once.

        A multicast object is made only with ``allow_multicast=True`` and ``shared_gpu=False``: see
        ``tonnage.buffers.nvls``, which also says what it raises.
        """
        from tonnage.buffers.nvls import ipc_nvls

        return ipc_nvls(
            group,
            self.stream,
            size_bytes,
            ledger=self._ledger,
            owner=self.owner,
            line=line,
            tag=tag,
            allow_multicast=allow_multicast,
            shared_gpu=shared_gpu,
        )

    def empty(self, kind: MemoryKind, dtype: str = "uint8", *, line: LineKind, tag: str = "") -> Buffer:
        """A buffer without memory, to be resized."""
        return self.allocate(kind, 0, dtype, line=line, tag=tag)

    def allocate(
        self,
        kind: MemoryKind,
        shape: Shape,
        dtype: str = "uint8",
        *,
        line: LineKind,
        tag: str = "",
        graph_memory: bool = False,
    ) -> Buffer:
        """A new buffer of any kind but ``ipc_nvls``, which needs a group (``DriverUnsupported``).

        ``kind`` and ``line`` may be the names; ``ValueError`` where there is none such.
        """
        if self._closed:
            raise ValueError(f"{self!r} is closed")
        if self._orphans:
            sweep(self.stream.device)
        size_bytes, sizes = num_bytes_of(shape, dtype)
        kind = _one_of(MemoryKind, kind, "kind")
        account = self._accounts.get((kind, line, tag))
        if account is None:
            account = self._open(kind, _one_of(LineKind, line, "line"), tag)
        source = self._choose(kind, graph_memory=graph_memory)
        buffer = source.makes.made(source, account, size_bytes, dtype, sizes)
        if source is self._pooled and size_bytes:
            self._quick[(line, tag) if tag else line] = account
        return buffer

    def copy_from(self, src: Buffer, kind: MemoryKind, *, line: LineKind, tag: str = "") -> Buffer:
        """A new buffer of ``kind`` with the shape, dtype and contents of ``src``, in stream order."""
        made = self.allocate(kind, src.shape, src.dtype, line=line, tag=tag)
        try:
            self.copy(src=src, dst=made)
        except BaseException:
            made.close()
            raise
        return made

    def stats(self, *, sync: bool = False) -> BufferStats:
        """Never waits; with ``sync`` after all work on the stream, so that frees on it are seen."""
        if sync:
            self.stream.sync()
        sweep(self.stream.device)
        pool = self._pool.stats()
        live: dict[MemoryKind, int] = {}
        for account in list(self._accounts.values()):
            live[account.memory] = live.get(account.memory, 0) + account.requested_bytes
        return BufferStats(
            reserved_bytes=pool.reserved_bytes,
            used_bytes=pool.used_bytes,
            free_bytes=max(0, pool.reserved_bytes - pool.used_bytes),
            reserved_high_bytes=pool.reserved_high_bytes,
            used_high_bytes=pool.used_high_bytes,
            live_bytes=live,
            pinned=self.stream.device.pinned.stats() if self._has_pinned() else None,
        )

    def trim_to(self, num_bytes: int, *, sync: bool = False) -> int:
        """Give cached memory back as long as ``num_bytes`` stay in each cache; returns the bytes given back.

        The caches are the device's private pool and wholly free chunks of its pinned pool, both shared by all
        managers. A free that a stream has not reached yet still counts as used: ``sync`` waits for all registered
        streams first.
        """
        device = self.stream.device
        if sync:
            for handle in device.fences.streams:
                device.driver.stream_sync(handle)
        sweep(self.stream.device)
        device.fences.reap()
        return self._pool.trim(num_bytes) + (device.pinned.trim(num_bytes) if self._has_pinned() else 0)

    def close(self) -> None:
        """No more buffers; those that live go on and are closed by whoever has them. Closing again does nothing.

        With ``trim_on_close`` the caches are emptied, those that other managers filled too.
        """
        if self._closed:
            return
        sweep(self.stream.device)
        if self.trim_on_close:
            self.stream.sync()
            self.trim_to(0)
        self._closed = True
        self._accounts.clear()
        self._quick.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self, kind: MemoryKind, line: LineKind, tag: str) -> Account:
        if not isinstance(tag, str):
            raise ValueError(f"tag={tag!r}: a tag is a string")
        account = self._ledger.open(owner=self.owner, line=line, memory=kind, tag=tag)
        self._accounts[kind, line, tag] = account
        return account

    def _choose(self, kind: MemoryKind, *, graph_memory: bool) -> Source:
        """On every allocation anew: the scope, then the pool, then plain memory."""
        if graph_memory and kind is MemoryKind.GPU and self.stream.driver.stream_capturing(self.stream.bare_handle):
            return self._in_graph()
        config = current() if kind in (MemoryKind.GPU, MemoryKind.GPU_SYNC) else None
        if config is not None and self._has_virtual(config.tag):
            return Virtual(kind, self.stream, self._ledger, config=config)
        if kind is MemoryKind.GPU:
            return self._unpooled if self._pool.ensure() is None else self._pooled
        if kind not in self._plain:
            raise DriverUnsupported("allocate", "NOT_SUPPORTED", f"{kind} buffers are not made by allocate")
        return self._plain[kind]

    def _has_virtual(self, tag: str) -> bool:
        """Without virtual memory a scope's memory is got as outside, and never sleeps: said once."""
        capabilities = self.stream.driver.capabilities()
        if not capabilities.vmm and not self._told:
            self._told = True
            why = capabilities.reasons.get("vmm", "the device has none")
            _log.warning("no virtual memory, so what is allocated in scope %r stays when it is released: %s", tag, why)
        return capabilities.vmm

    def _in_graph(self) -> Source:
        if not self.stream.bare_handle:
            raise CaptureError("stream 0 waits for a stream that is being captured: ask for graph memory on that one")
        if self._pool.handle is None:
            raise CaptureError(
                f"{self.stream!r} is being captured and {self._pool!r} cannot be made now: allocate a buffer before"
            )
        return self._source(InGraph, MemoryKind.GPU)

    def _source(self, make: type[Source], kind: MemoryKind) -> Source:
        return make(kind, self.stream, self._ledger)

    def _has_pinned(self) -> bool:
        return "pinned" in vars(self.stream.device)


def _one_of(names: type[T], given: Any, what: str) -> T:
    """``given`` where it is one of ``names``, or the one of that name. Raises ``ValueError``, which tells them all."""
    if type(given) is names:
        return given
    try:
        return names(given)
    except ValueError:
        raise ValueError(f"no {what} {given!r}: one of {', '.join(names)}") from None
