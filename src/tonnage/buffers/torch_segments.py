"""Torch's segments out of our arenas: activations, graphs and others, each line in its own range of addresses.

Torch asks a pool's allocator for segments and cuts tensors out of them itself. The allocator of our pools is the C
shim (``shim/segments.c``), which carves segments out of memory that an arena has committed. So torch can fail only
inside the line that the arena was committed for, and the ledger is told of every segment.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from tonnage.buffers.arena import VaArena
from tonnage.buffers.memory import Memory
from tonnage.buffers.shim_build import ShimBuild, build_shim
from tonnage.buffers.shim_heaps import HeapState, SegmentEvent, Shim
from tonnage.buffers.stream import Stream
from tonnage.buffers.torch_book import SegmentBook
from tonnage.buffers.torch_memory import TorchAllocator
from tonnage.buffers.torch_settings import settings_problem
from tonnage.buffers.uninterrupted import uninterrupted
from tonnage.errors import BufferInUse, DriverUnsupported, LedgerError
from tonnage.ledger import Account, Ledger
from tonnage.terms import LineKind, MemoryKind
from tonnage.units import MiB, round_down, round_up

#: Torch takes segments of 2 MiB, 20 MiB and whole multiples of 2 MiB.
SEGMENT_ALIGN_BYTES = 2 * MiB

#: The segments that torch was told of and that are not closed, with their pools and memory, by the number of the heap.
_kept: dict[int, TorchSegments] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where torch's segments can come from: from us through ``shim``, or, with None, not, and the ``reason``."""

    shim: Shim | None
    reason: str = ""


def find_route(
    torch_memory: TorchAllocator,
    *,
    fall_back: bool = False,
    environ: Mapping[str, str] | None = None,
    build: Callable[[], ShimBuild] = build_shim,
) -> Route:
    """Ask torch's settings, then for a compiler. Call it before the first ``TorchSegments``.

    Raises ``InvalidSetting`` when torch's settings rule it out, unless told to ``fall_back``. A machine that cannot
    build the shim is no error: the route then has none and says why.
    """
    problem = settings_problem(torch_memory, os.environ if environ is None else environ)
    if problem is not None:
        if not fall_back:
            raise problem
        return Route(shim=None, reason=problem.paragraph())
    built = build()
    return Route(shim=None if built.path is None else Shim(built.path), reason=built.reason)


class TorchSegments:
    """Torch's segments of one line, out of the leading bytes of ``memory``: an arena, or a buffer of fixed size.

    owner, line, tag  the account of the segments; ``tag`` tells it from the memory's own account
    account           where the memory is booked; by default the arena's account of its owner, this line and its tag
    limit_bytes       how much of it segments may take, committed where it must be; by default what is usable now
    device            torch's number of the device; by default the driver's

    Bytes in segments stand in the segments' account, the rest of the committed memory in the memory's own account:
    the sum of both never changes when a segment comes or goes. The memory cannot be closed before this is.

    ``poll``, ``state`` and ``history`` may be called on any thread, the rest is for the thread that drives torch.
    """

    def __init__(
        self,
        memory: Memory,
        *,
        shim: Shim,
        ledger: Ledger,
        owner: str,
        line: LineKind,
        tag: str,
        account: Account | None = None,
        limit_bytes: int | None = None,
        align_bytes: int = SEGMENT_ALIGN_BYTES,
        device: int | None = None,
    ) -> None:
        self.memory, self.owner, self.line, self.tag = memory, owner, line, tag
        self.device = memory.stream.driver.ordinal if device is None else device
        self._align_bytes, self._owns_memory = align_bytes, False
        self._lock = threading.Lock()
        self._pool: Any = None
        self._address = memory.address
        # Segments begin and end at multiples of the alignment, so a remainder could never be used.
        limit_bytes = round_down(memory.usable_bytes if limit_bytes is None else limit_bytes, align_bytes)
        arena = _account_of(memory, ledger, line) if account is None else account
        segments = ledger.open(owner=owner, line=line, memory=MemoryKind.GPU, tag=tag)
        if segments is arena:
            raise ValueError(f"the segments of {memory!r} need an account of their own: give them another tag")
        self._commit(limit_bytes)
        if arena.physical_bytes < limit_bytes:
            raise ValueError(f"{memory!r} is not booked under {arena!r}: name the account that it is booked in")
        self._heap = shim.open_heap(
            address=self._address, limit_bytes=limit_bytes, align_bytes=align_bytes, device=self.device
        )
        self._limit_bytes = limit_bytes
        self._book = SegmentBook(self._heap, ledger=ledger, segments=segments, arena=arena)
        self._export_name = f"torch's pool {tag!r}"
        self._export: int | None = memory.exports.add(self._export_name)
        memory.stream.device.virtual.watch(self._address, self)

    @classmethod
    def reserve(
        cls,
        stream: Stream,
        *,
        shim: Shim,
        ledger: Ledger,
        owner: str,
        line: LineKind,
        tag: str,
        reserve_bytes: int,
        limit_bytes: int = 0,
        **arena_options: Any,
    ) -> TorchSegments:
        """An arena of ``reserve_bytes`` of addresses with its segments, closed together.

        The arena's account has the same owner and line and no tag. ``arena_options`` go to ``VaArena``. Raises what
        it and its ``commit`` raise; then nothing is left behind.
        """
        arena = VaArena(stream, ledger=ledger, owner=owner, line=line, reserve_bytes=reserve_bytes, **arena_options)
        try:
            segments = cls(arena, shim=shim, ledger=ledger, owner=owner, line=line, tag=tag, limit_bytes=limit_bytes)
        except BaseException:
            arena.close()
            raise
        segments._owns_memory = True
        return segments

    def __repr__(self) -> str:
        state = self.state()
        return (
            f"<TorchSegments {self.owner!r} {self.tag!r} {state.live_bytes:,} of {self.limit_bytes:,} bytes "
            f"in {state.num_segments:,} segments at {self._address:#x}>"
        )

    @property
    def limit_bytes(self) -> int:
        """Leading bytes of the memory that segments may take."""
        return self._limit_bytes

    @property
    def history(self) -> tuple[SegmentEvent, ...]:
        """The last events that ``poll`` read: sizes, stream and time of each call of torch, refusals too."""
        return self._book.history

    def state(self) -> HeapState:
        """Exact figures now, whether the ledger knows them yet or not."""
        return self._heap.state()

    def live(self) -> tuple[SegmentEvent, ...]:
        """The segments that torch holds now, by address, as the events that made them."""
        return tuple(self._heap.segments()[0])

    def poll(self) -> HeapState:
        """Tell the ledger what came and went since the last call; returns the figures that it now agrees with.

        Call it before a snapshot. Without it the sum over the accounts is right all the same, the split is old.
        Raises ``LedgerError`` as ``SegmentBook.poll`` does.
        """
        return self._book.poll()

    def fold(self) -> None:
        """Book all bytes as the memory's own: before it is put to sleep, which is refused otherwise.

        ``poll`` moves nothing until the memory has slept and is awake again, or ``unfold`` calls it off.
        """
        self._book.fold()

    def unfold(self) -> None:
        """The memory is not put to sleep after all: the next ``poll`` splits again."""
        self._book.unfold()

    def require_sleepable(self) -> None:
        """Raise ``BufferInUse`` unless all bytes are booked as the memory's own, which takes them off its account."""
        if not self._book.is_folded:
            raise BufferInUse(
                f"{self.memory!r} cannot be put to sleep: bytes of torch's segments may be booked as {self.tag!r}, not "
                "as its own: fold() first"
            )

    def woken(self) -> None:
        """The memory is awake again."""
        self._book.unfold()

    def holds(self, address: int, size_bytes: int = 1) -> bool:
        """Whether the range lies in what segments may take."""
        return self._address <= address and address + size_bytes <= self._address + self.limit_bytes

    @uninterrupted
    def raise_limit(self, num_bytes: int) -> int:
        """Let segments take at least the first ``num_bytes``; returns ``limit_bytes``. At a drained point.

        Commits what the arena lacks and raises what its ``commit`` raises, changing nothing; ``ValueError`` for more
        than a buffer has.
        """
        with self._lock:
            wanted = round_up(num_bytes, self._align_bytes)
            if wanted > self._limit_bytes:
                self._commit(wanted)
                self._heap.set_limit(wanted)
                self._limit_bytes = wanted
            return self._limit_bytes

    @uninterrupted
    def lower_limit(self, num_bytes: int | None = None) -> int:
        """Let segments take no more than ``num_bytes``, or as little as they hold now; returns ``limit_bytes``.

        The arena gives back what whole handles beyond allow. At a drained point. Raises ``BufferInUse`` when a
        segment lies beyond and what the arena's ``decommit`` raises; then nothing has changed.
        """
        with self._lock:
            wanted = self._heap.state().top_bytes if num_bytes is None else round_down(num_bytes, self._align_bytes)
            before = self._limit_bytes
            if wanted < before:
                self._heap.set_limit(wanted)
                try:
                    if isinstance(self.memory, VaArena):
                        self.memory.decommit(wanted)
                except BaseException:
                    self._heap.set_limit(before)
                    raise
                self._limit_bytes = wanted
            return self._limit_bytes

    @property
    def pool(self) -> Any:
        """The ``torch.cuda.MemPool``, made when first asked for. Raises ``DriverUnsupported`` on a host device."""
        if self._pool is None:
            self._pool = self._make_pool()
        return self._pool

    @property
    def has_pool(self) -> bool:
        """Whether torch has been told of it."""
        return self._pool is not None

    @property
    def pool_id(self) -> tuple[int, int]:
        """For ``torch.cuda.graph(..., pool=...)``: allocations of a capture come from here."""
        first, second = self.pool.id
        return first, second

    @contextmanager
    def use(self) -> Iterator[None]:
        """Allocations of this thread come from here: not those of threads that it starts, nor of a capture begun
        inside, which goes where its own ``pool`` says."""
        import torch

        with torch.cuda.use_mem_pool(self.pool, device=self.device):
            yield

    @uninterrupted
    def close(self) -> None:
        """Give torch's cached segments back, then the heap, and the arena if it was made here. Again: nothing.

        Raises ``BufferInUse``, changing nothing, while a graph, a capture that failed, or a tensor holds the pool, and
        ``RangeReferenced`` while a graph or a registration holds an arena that was made here. What a failed capture
        holds stays for the life of the process.
        """
        if self._export is None:
            return
        self._require_closable()
        if self._pool is not None:
            _let_go(self._pool)
            self._pool = None  # torch gives its segments back here
            _kept.pop(self._heap.number, None)
        with suppress(LedgerError):  # a sealed ledger refused the split: all bytes are the memory's then
            self._book.poll()
        self._heap.close()
        self._book.fold()
        self._limit_bytes = 0
        self.memory.stream.device.virtual.unwatch(self._address, self)
        self.memory.exports.drop(self._export)
        self._export = None
        if self._owns_memory and isinstance(self.memory, VaArena):
            self.memory.close()

    def _require_closable(self) -> None:
        """Everything that can be asked before anything is given back."""
        if self._owns_memory and isinstance(self.memory, VaArena):
            self.memory.require_unreferenced()
            others = [name for name in self.memory.exports.names if name != self._export_name]
            if others:
                raise BufferInUse(f"{self!r} cannot be closed: {' and '.join(others)} over its arena is still alive")
        if self._pool is not None:
            self._require_idle()
        elif num_segments := self._heap.state().num_segments:
            raise BufferInUse(f"{self!r} cannot be closed: {num_segments:,} segments are alive")

    def _require_idle(self) -> None:
        """Torch ends the process when a pool goes that is in use, so this is asked first."""
        import torch

        if self._pool.use_count() != 1:
            raise BufferInUse(f"{self!r} cannot be closed: a graph captured into its pool, or its capture, is alive")
        torch.cuda.synchronize(self.device)
        held = sum(segment["active_size"] for segment in self._pool.snapshot())
        if held:
            raise BufferInUse(f"{self!r} cannot be closed: tensors hold {held:,} bytes of its pool")

    def _make_pool(self) -> Any:
        if self.memory.stream.driver.kind != "cuda":
            raise DriverUnsupported("MemPool", "NOT_SUPPORTED", "torch's pools exist on CUDA devices only")
        import torch
        from torch.cuda.memory import CUDAPluggableAllocator

        heap = self._heap
        allocator: Any = CUDAPluggableAllocator(str(heap.shim.path), heap.alloc_name, heap.free_name)
        _keep(allocator)
        with torch.cuda.device(self.device):
            pool = torch.cuda.MemPool(allocator.allocator())
        _keep(pool)
        _kept[heap.number] = self
        return pool

    def _commit(self, num_bytes: int) -> None:
        if isinstance(self.memory, VaArena):
            self.memory.commit(num_bytes)
        if num_bytes > self.memory.usable_bytes:
            raise ValueError(f"{self.memory!r} has no {num_bytes:,} bytes for segments")


def _keep(thing: object) -> None:
    """Let it outlive the interpreter too. Torch calls a pool's allocator for as long as the pool lives, and the end of
    a pool that a graph or a failed capture still holds ends the process, at its exit as well."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _let_go(thing: object) -> None:
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(thing))


def _account_of(memory: Memory, ledger: Ledger, line: LineKind) -> Account:
    if not isinstance(memory, VaArena):
        raise ValueError(f"name the account that {memory!r} is booked in")
    return ledger.open(owner=memory.owner, line=line, memory=MemoryKind.GPU, tag=memory.tag)
