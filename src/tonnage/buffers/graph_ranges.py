"""What captured graphs and registrations hold in place, so that a replay never meets memory that is not there.

A graph has its addresses baked in. Its memory may be remapped while no replay is in flight; it must be mapped at
every replay. A registration (NCCL, RDMA, IPC) knows physical pages, so its range must not be edited behind its back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar
from weakref import WeakSet

from tonnage.device.ranges import RangeBook
from tonnage.errors import CaptureError, GraphRangeUnmapped, RangeReferenced

T = TypeVar("T")


class Located(Protocol):
    """Memory at an address that is its own for life: an arena, a buffer of a scope, an allocation."""

    @property
    def address(self) -> int: ...


class Stable(Located, Protocol):
    """Memory that graphs may be captured over, of which a leading part is mapped."""

    @property
    def owner(self) -> str: ...
    @property
    def tag(self) -> str: ...
    @property
    def committed_bytes(self) -> int: ...
    @property
    def has_views(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Touched:
    """``size`` bytes at ``addr``, of ``owner``'s, that a graph replays over; ``tag``: what it sleeps by, if it does."""

    addr: int
    size: int
    owner: str
    tag: str = ""

    def __str__(self) -> str:
        tag = f" (tag {self.tag!r})" if self.tag and self.tag != self.owner else ""
        return f"{self.size:,} bytes at {self.addr:#x} of {self.owner!r}{tag}"

    @property
    def end(self) -> int:
        return self.addr + self.size

    def overlaps(self, addr: int, size: int) -> bool:
        return self.addr < addr + size and addr < self.end


class Capture:
    """What the graph under capture is seen and said to touch. Made by ``GraphRanges.capture``."""

    def __init__(self, graph_id: str) -> None:
        self.graph_id = graph_id
        self._said: list[Touched] = []
        self._handed_out: dict[int, Stable] = {}  # by id(): memory need not be hashable
        self._limits: dict[int, int] = {}  # by address: an arena may have more than one name

    def touch(self, addr: int, size: int, *, owner: str = "a range touched by hand") -> None:
        """The graph uses this range too: memory that was handed out by nobody we know."""
        self._said.append(Touched(addr, size, owner))

    def only(self, memory: Located, num_bytes: int) -> None:
        """Of ``memory`` the graph is bound to the first ``num_bytes`` alone, instead of all that it has.

        For memory reached through tables that the caller rewrites before a replay: paged KV, say, whose tail may go
        once no table names a block of it.
        """
        self._limits[memory.address] = num_bytes

    def hand_out(self, memory: Stable) -> None:
        self._handed_out[id(memory)] = memory

    def ranges(self, viewed: list[Stable]) -> tuple[Touched, ...]:
        """Ranges said, and for memory handed out or looked at: up to its limit, or all that is committed now."""
        found = {memory.address: memory for memory in (*viewed, *self._handed_out.values())}
        whole = []
        for address, memory in found.items():
            size = self._limits.get(address, memory.committed_bytes)
            if size:
                whole.append(Touched(address, size, memory.owner, memory.tag))
        return (*self._said, *whole)


@dataclass(slots=True)
class _Graph:
    ranges: tuple[Touched, ...]
    checked_at: int = -1  # the epoch at which all ranges were found mapped


@dataclass(slots=True, eq=False)
class Registration:
    """A range known to a library by physical page; ``close`` when it is no longer. Made by ``register``."""

    range: Touched
    unregister: Callable[[], None] | None
    reregister: Callable[[int, int], None] | None
    active_bytes: int
    _close: Callable[[Registration], None] = field(repr=False)

    @property
    def is_pinned(self) -> bool:
        """Whether the range may not be edited at all, for want of callbacks."""
        return self.unregister is None or self.reregister is None

    def close(self) -> None:
        """The library has let go of it. Closing again does nothing."""
        self._close(self)


class GraphRanges:
    """One per device: which ranges graphs and registrations hold, and which known ranges are not mapped.

    Whoever maps and unmaps says so through ``edited``, inside ``editing``; a launch waits until an edit is over.
    ``epoch`` counts edits, so ``check`` costs one comparison when nothing was edited since the last one.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._unmapped: RangeBook[str] = RangeBook()
        self._graphs: dict[str, _Graph] = {}
        self._captures: dict[str, Capture] = {}
        self._registrations: list[Registration] = []
        self._known: WeakSet[Stable] = WeakSet()
        self._sources: list[Callable[[], Iterable[Stable]]] = []
        self.epoch = 0

    def __repr__(self) -> str:
        return f"<GraphRanges {len(self._graphs)} graphs, {len(self._registrations)} registrations, epoch {self.epoch}>"

    @property
    def num_edits(self) -> int:
        """Runs of pages that were mapped or unmapped on the device so far; a steady state makes none."""
        return self.epoch

    # capture and replay

    @contextmanager
    def capture(self, graph_id: str) -> Iterator[Capture]:
        """While it is open, memory handed out belongs to the graph, and so does all that anybody looks at anyway.

        A view made long before may be used in the capture without our seeing it: so memory with a living view counts
        with all its committed bytes, unless ``only`` says less. So does all memory of scopes that is awake at the end:
        who has its address is not known. A capture that raises leaves no graph behind.
        """
        if graph_id in self._graphs or graph_id in self._captures:
            raise ValueError(f"there is a graph {graph_id!r} already: destroy it first")
        self._captures[graph_id] = capture = Capture(graph_id)
        try:
            yield capture
            with self._lock:
                viewed = [memory for memory in self._known if memory.has_views]
                viewed += [memory for source in self._sources for memory in source()]
                self._graphs[graph_id] = _Graph(capture.ranges(viewed))
        finally:
            del self._captures[graph_id]

    def launch(self, graph_id: str, replay: Callable[[], T]) -> T:
        """``replay()`` if all that the graph touches is mapped, and no edit comes between. Raises as ``check``.

        ``replay`` launches and nothing else: an edit inside it would wait for the thread that waits for this one.
        """
        with self._lock:
            self.check(graph_id)
            return replay()

    def check(self, graph_id: str) -> None:
        """Raise ``GraphRangeUnmapped`` unless all that the graph touches is mapped; ``KeyError`` for no such graph."""
        graph = self._graphs[graph_id]
        if graph.checked_at == self.epoch:
            return
        with self._lock:
            for touched in graph.ranges:
                for hole in self._unmapped.overlapping(touched.addr, touched.size):
                    start, end = max(hole.start, touched.addr), min(hole.end, touched.end)
                    raise GraphRangeUnmapped(
                        f"graph {graph_id!r} was not launched: it touches {touched}, and {end - start:,} of them at "
                        f"{start:#x} are not mapped; materialise or commit them first"
                    )
            graph.checked_at = self.epoch

    def destroy(self, graph_id: str) -> None:
        """The graph is gone and holds nothing any more; unknown ones are ignored."""
        self._graphs.pop(graph_id, None)

    def ranges(self, graph_id: str) -> tuple[Touched, ...]:
        return self._graphs[graph_id].ranges

    # registrations

    def register(
        self,
        addr: int,
        size: int,
        *,
        owner: str,
        unregister: Callable[[], None] | None = None,
        reregister: Callable[[int, int], None] | None = None,
    ) -> Registration:
        """``owner`` (a library, say) knows the range by physical page from now on.

        Edits of it raise ``RangeReferenced``, unless both callbacks are given: then ``unregister()`` is called before
        the edit and ``reregister(addr, size)`` after it, with the leading part that is mapped, if any is.
        """
        one = Registration(Touched(addr, size, owner), unregister, reregister, size, self._unregistered)
        with self._lock:
            self._registrations.append(one)
        return one

    # what owners of memory say

    def know(self, memory: Stable, *, size: int) -> None:
        """Memory that will be mapped and unmapped; at first none of its ``size`` bytes is."""
        with self._lock:
            self._known.add(memory)
            if size:
                self._unmapped.add(memory.address, size, memory.owner)

    def add_source(self, source: Callable[[], Iterable[Stable]]) -> None:
        """At the end of a capture, what ``source()`` yields belongs to the graph as well."""
        self._sources.append(source)

    def forget(self, addr: int, size: int) -> None:
        """The addresses are given back; whatever lies there later is not known here."""
        with self._lock:
            self._cut(addr, size)

    def hand_out(self, memory: Stable) -> None:
        """A view or the address of ``memory`` was given to somebody: cheap unless something is being captured."""
        if self._captures:
            for capture in tuple(self._captures.values()):
                capture.hand_out(memory)

    def edited(self, addr: int, size: int, *, mapped: bool, owner: str = "") -> None:
        """The range was mapped or unmapped."""
        with self._lock:
            self._cut(addr, size)
            if not mapped:
                self._unmapped.add(addr, size, owner)
            self.epoch += 1

    def require_no_capture(self, what: str) -> None:
        """Raise ``CaptureError`` while a graph is being captured here: ``what`` must not become part of it."""
        for graph_id in self._captures:
            raise CaptureError(f"{what} while graph {graph_id!r} is being captured: do it before the capture")

    @contextmanager
    def editing(self, addr: int, size: int, *, unmaps: bool, drain: Callable[[], None] | None = None) -> Iterator[None]:
        """Around an edit of the range: no launch meanwhile, and registrations are taken down and put up again.

        ``drain`` returns once no work that began before uses the range; leave it out where that is known. Raises
        ``CaptureError`` during a capture and ``RangeReferenced`` where the edit unmaps what is pinned; nothing is done
        then.
        """
        with self._lock:
            self.require_no_capture("an edit of the page table")
            if unmaps:
                pinned = next((one for one in self._registered(addr, size) if one.is_pinned), None)
                if pinned is not None:
                    raise RangeReferenced(
                        f"{size:,} bytes at {addr:#x} cannot be unmapped: {pinned.range} is registered and has "
                        "no callbacks to unregister and register it again"
                    )
            if drain is not None:
                drain()
            try:
                self._take_down(addr, size)
                yield
            finally:
                self._put_up(addr, size)

    def referenced(self, addr: int, size: int) -> str | None:
        """Who holds a byte of the range where it is: a graph or a pinned registration, in words; None for nobody."""
        with self._lock:
            for graph_id, graph in self._graphs.items():
                for touched in graph.ranges:
                    if touched.overlaps(addr, size):
                        return f"graph {graph_id!r} replays over {touched}"
            for one in self._registered(addr, size):
                if one.is_pinned:
                    return f"{one.range} is registered"
        return None

    def referenced_bytes(self, addr: int, size: int) -> int:
        """The bytes from ``addr`` to the last one in the range that is held; 0 where none is."""
        with self._lock:
            held = [touched for graph in self._graphs.values() for touched in graph.ranges]
            held += [one.range for one in self._registrations if one.is_pinned]
        ends = (min(one.end, addr + size) for one in held if one.overlaps(addr, size))
        return max(ends, default=addr) - addr

    def _registered(self, addr: int, size: int) -> list[Registration]:
        return [one for one in self._registrations if one.range.overlaps(addr, size)]

    def _unregistered(self, registration: Registration) -> None:
        with self._lock:
            if registration in self._registrations:
                self._registrations.remove(registration)

    def _take_down(self, addr: int, size: int) -> None:
        for one in self._registered(addr, size):
            if one.active_bytes and one.unregister is not None and not one.is_pinned:
                one.unregister()
                one.active_bytes = 0

    def _put_up(self, addr: int, size: int) -> None:
        """Every registration that was taken down, over the leading part of its range that is mapped now."""
        for one in self._registered(addr, size):
            mapped = self._mapped_bytes(one.range)
            if one.reregister is not None and not one.is_pinned and mapped and not one.active_bytes:
                one.reregister(one.range.addr, mapped)
                one.active_bytes = mapped

    def _mapped_bytes(self, touched: Touched) -> int:
        holes = self._unmapped.overlapping(touched.addr, touched.size)
        return max(0, holes[0].start - touched.addr) if holes else touched.size

    def _cut(self, addr: int, size: int) -> None:
        """Take the range out of what is unmapped, leaving what sticks out on either side."""
        for hole in self._unmapped.overlapping(addr, size):
            self._unmapped.remove(hole.start)
            if hole.start < addr:
                self._unmapped.add(hole.start, addr - hole.start, hole.value)
            if hole.end > addr + size:
                self._unmapped.add(addr + size, hole.end - addr - size, hole.value)
