"""What compiled layers keep, estimated from how they run uncompiled.

A compiler such as Inductor computes pointwise operations, reductions and copies inside the kernels that want them.
What lies in memory then is: what goes into and comes out of kernels that it only calls (products, attention, sorts),
what the function returns, and what one fused kernel leaves for a later one. A fused kernel writes its result over an
input that it reads element by element and nobody reads any more. Everything lives from the kernel that makes it to the
last one that reads it, or until something else has its place (``reuse``).

So each region of a trace is taken apart into kernels and played again: an operation's *level* is the number of called
kernels before it, fused operations of one level that hang together are one kernel, and a value stays in memory where
somebody of another level reads it. Inductor's own code for a card (``benchmarks/code_for_card.py``) and on a host
(``benchmarks/exact_peaks.py``) keep as much, within 0.4 %, where feed-forward parts and experts set the peak.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import count

import torch

from tonnage.engine.exact.reuse import Dead, Key, Life, Pool
from tonnage.engine.exact.segments import Event
from tonnage.engine.exact.trace import Op, Region, Trace

#: Called operations that are told where to write, and others whose results the compiler takes for aligned.
GIVEN_ROOM = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
ALIGNED = ("aten::_grouped_mm",)


@dataclass(slots=True, eq=False)
class _Value:
    """What a storage holds after one operation wrote it; ``old`` is what it held before, where it was changed."""

    storage: int
    num_bytes: int
    dtype: torch.dtype
    maker: int
    old: _Value | None = None
    readers: list[int] = field(default_factory=list)
    is_kept: bool = False
    slot: int = -1
    #: By the address, as the compiler knows it: it does not of what an operation allocates by itself.
    is_aligned: bool = True

    @property
    def key(self) -> Key:
        return self.num_bytes, self.dtype

    @property
    def num_elements(self) -> int:
        return self.num_bytes // self.dtype.itemsize


@dataclass(slots=True, eq=False)
class _Node:
    """One operation inside a region."""

    op: Op
    level: int
    is_recomputed: bool
    reads: list[_Value] = field(default_factory=list)
    makes: list[_Value] = field(default_factory=list)
    given: list[int] = field(default_factory=list)

    @property
    def num_elements(self) -> int:
        """Of what it makes."""
        return max((value.num_elements for value in self.makes), default=0)


@dataclass(slots=True, eq=False)
class _Kernel:
    """Operations that run as one, ``members`` by number; ``place`` in the order of the uncompiled run.

    whole  of what it reads, what all of its operations read element by element
    """

    members: list[int]
    name: str
    is_fused: bool
    place: int
    reads: list[_Value] = field(default_factory=list)
    makes: list[_Value] = field(default_factory=list)
    whole: list[_Value] = field(default_factory=list)


def compiled_events(trace: Trace) -> tuple[list[Event], list[int]]:
    """The trace's events with every region compiled, and which operation each belongs to."""
    events: list[Event] = []
    at: list[int] = []
    slots, place = count(), 0
    moved: dict[Hashable, tuple[str, int]] = {}

    def copy(begin: int, end: int) -> None:
        for (storage, num_bytes), op in zip(trace.events[begin:end], trace.at[begin:end], strict=True):
            key = moved.get(storage, ("kept", storage)) if num_bytes < 0 else ("kept", storage)
            events.append((key, num_bytes))
            at.append(op)

    for region in trace.regions:
        copy(place, region.begin)
        played = _Played(trace, region, slots)
        events += [(("slot", slot), num_bytes) for slot, num_bytes in played.events]
        at += played.at
        moved |= {storage: ("slot", slot) for storage, slot in played.escaped.items()}
        # What died inside but came from outside dies now: the caller of a compiled function holds its arguments.
        for (storage, num_bytes), op in zip(
            trace.events[region.begin : region.end], trace.at[region.begin : region.end], strict=True
        ):
            if num_bytes < 0 and storage not in played.own:
                events.append((moved.get(storage, ("kept", storage)), num_bytes))
                at.append(op)
        place = region.end
    copy(place, len(trace.events))
    return events, at


class _Played:
    """One region as a compiler would run it: ``events`` by slot, and the slots of the storages that outlive it."""

    def __init__(self, trace: Trace, region: Region, slots: Iterator[int]) -> None:
        self.events: list[tuple[int, int]] = []
        self.at: list[int] = []
        self._slots, self._first = slots, region.first_op
        ops = trace.ops[region.first_op : region.last_op]
        inside = trace.events[region.begin : region.end]
        self.own = {storage for storage, num_bytes in inside if num_bytes > 0}
        alive = self.own - {storage for storage, num_bytes in inside if num_bytes < 0}
        nodes, last = _graph(ops)
        returned = [last[storage] for storage in alive if storage in last]
        _keep(nodes, returned)
        self._play(_ordered(_kernels(nodes)), returned)
        self.escaped = {value.storage: value.slot for value in returned}

    def _play(self, kernels: Sequence[_Kernel], returned: Sequence[_Value]) -> None:
        kernels = [kernel for kernel in kernels if kernel.makes]
        last_reader = {id(value): number for number, kernel in enumerate(kernels) for value in kernel.reads}
        stays = {id(value) for value in returned}
        pool = Pool(list(_lives(kernels, last_reader, stays)), len(kernels))
        for number, kernel in enumerate(kernels):
            op = self._first + max(kernel.members)
            dying = [
                value
                for value in dict.fromkeys(kernel.reads)
                if last_reader[id(value)] == number and id(value) not in stays and value.slot >= 0
            ]
            for value in kernel.makes:
                value.slot = self._place(kernel, value, dying, pool, number, op)
            unread = [each for each in kernel.makes if id(each) not in last_reader and id(each) not in stays]
            for value in (*dying, *unread):
                if value.is_aligned:
                    pool.give(value.key, Dead(value.slot, number, len(self.events)))
                self._note(value.slot, -value.num_bytes, op)
        kept = [place for place, (_, num_bytes) in enumerate(self.events) if num_bytes]
        self.events, self.at = [self.events[place] for place in kept], [self.at[place] for place in kept]

    def _place(self, kernel: _Kernel, value: _Value, dying: list[_Value], pool: Pool, number: int, op: int) -> int:
        """Over an input that dies with it, which is no longer among the dying then; where a dead one was; or new."""
        for other in dying:
            if other is value.old or (kernel.is_fused and other.key == value.key and other in kernel.whole):
                dying.remove(other)
                value.is_aligned = other.is_aligned  # in its place, whatever wrote it
                return other.slot
        dead = pool.take(value.key, number) if kernel.is_fused or kernel.name in GIVEN_ROOM else None
        if dead is not None:
            self.events[dead.event] = (dead.slot, 0)  # it was not given back after all
            return dead.slot
        slot = next(self._slots)
        self._note(slot, value.num_bytes, op)
        return slot

    def _note(self, slot: int, num_bytes: int, op: int) -> None:
        self.events.append((slot, num_bytes))
        self.at.append(op)


def _lives(kernels: Sequence[_Kernel], last_reader: Mapping[int, int], stays: Set[int]) -> Iterator[Life]:
    """Of everything that the kernels make."""
    for number, kernel in enumerate(kernels):
        for value in kernel.makes:
            last = None if id(value) in stays else last_reader.get(id(value), number)
            yield Life(value.num_bytes, number, last)


def _graph(ops: Sequence[Op]) -> tuple[list[_Node], dict[int, _Value]]:
    """Nodes with the values that they read and make, and the last value of each storage made inside."""
    now: dict[int, _Value] = {}
    nodes: list[_Node] = []
    for number, op in enumerate(ops):
        reads = [now[storage] for storage in op.reads if storage in now]
        makers = [nodes[value.maker] for value in reads]
        level = max((node.level for node in makers), default=0) + (not op.is_fused)
        # Of nothing but arguments, which the caller holds: it can be computed again wherever it is wanted.
        is_recomputed = op.is_fused and (op.is_created or not reads)
        given = [storage for storage in op.reads if storage not in now]
        node = _Node(op=op, level=level, is_recomputed=is_recomputed, reads=reads, given=given)
        for value in reads:
            value.readers.append(number)
        for made in op.makes:
            value = _Value(made.storage, made.num_bytes, made.dtype, number)
            value.is_aligned = op.is_fused or op.name in (*GIVEN_ROOM, *ALIGNED)
            node.makes.append(value)
            now[made.storage] = value
        for storage in op.writes:
            if storage in now:
                old = now[storage]
                value = _Value(storage, old.num_bytes, old.dtype, number, old=old)
                node.makes.append(value)
                now[storage] = value
        nodes.append(node)
    return nodes, now


def _keep(nodes: Sequence[_Node], returned: Sequence[_Value]) -> None:
    """Mark the values that lie in memory."""
    for value in returned:
        value.is_kept = True
    for node in nodes:
        for value in node.makes:
            readers = [nodes[reader] for reader in value.readers]
            is_called = any(not reader.op.is_fused for reader in readers)
            is_left = not node.is_recomputed and any(reader.level > node.level for reader in readers)
            value.is_kept = value.is_kept or not node.op.is_fused or is_called or is_left


def _kernels(nodes: Sequence[_Node]) -> list[_Kernel]:
    """One kernel for each called operation, and for fused ones of a level that are wanted and hang together: one reads
    the other, or they go over as many elements and share something that the function was given."""
    wanted = _wanted(nodes)
    groups = list(range(len(nodes)))

    def root(number: int) -> int:
        while groups[number] != number:
            number = groups[number]
        return number

    fused = [number for number in wanted if nodes[number].op.is_fused]
    for number in fused:
        for value in nodes[number].reads:
            maker = nodes[value.maker]
            if maker.op.is_fused and maker.level == nodes[number].level:
                groups[root(number)] = root(value.maker)
    sharers: dict[tuple[int, int, int], int] = {}
    for number in fused:
        node = nodes[number]
        for storage in node.given:
            other = sharers.setdefault((storage, node.level, node.num_elements), number)
            groups[root(number)] = root(other)
    members: dict[int, list[int]] = defaultdict(list)
    for number in wanted:
        members[root(number)].append(number)
    return [_kernel(nodes, sorted(each)) for each in members.values()]


def _kernel(nodes: Sequence[_Node], members: list[int]) -> _Kernel:
    first = nodes[members[0]].op
    kernel = _Kernel(members=members, name=first.name, is_fused=first.is_fused, place=members[-1])
    inside, uneven = set(members), set()
    for number in members:
        kernel.makes += [value for value in nodes[number].makes if value.is_kept]
        for reader in _through(nodes, number):
            for value in nodes[reader].reads:
                if value.is_kept and value.maker not in inside:
                    kernel.reads.append(value)
                    if nodes[reader].num_elements != value.num_elements:
                        uneven.add(id(value))
    kernel.whole = [value for value in kernel.reads if id(value) not in uneven]
    return kernel


def _through(nodes: Sequence[_Node], number: int) -> Iterator[int]:
    """An operation, and those that are computed again on the way to it."""
    yield number
    for value in nodes[number].reads:
        maker = nodes[value.maker]
        if not value.is_kept and (maker.level != nodes[number].level or maker.is_recomputed):
            yield from _through(nodes, value.maker)


def _wanted(nodes: Sequence[_Node]) -> list[int]:
    """Operations whose results somebody needs, in order."""
    found: set[int] = set()
    ahead = [number for number, node in enumerate(nodes) if any(value.is_kept for value in node.makes)]
    while ahead:
        number = ahead.pop()
        if number not in found:
            found.add(number)
            ahead += [value.maker for value in nodes[number].reads]
    return sorted(found)


def _ordered(kernels: Sequence[_Kernel]) -> list[_Kernel]:
    """Each after those that make what it reads, else in the order of the uncompiled run."""
    maker = {id(value): kernel for kernel in kernels for value in kernel.makes}
    waits: dict[int, set[int]] = {
        id(kernel): {id(maker[id(value)]) for value in kernel.reads if id(value) in maker} - {id(kernel)}
        for kernel in kernels
    }
    followers: dict[int, list[_Kernel]] = defaultdict(list)
    for kernel in kernels:
        for other in waits[id(kernel)]:
            followers[other].append(kernel)
    ready = [(kernel.place, number, kernel) for number, kernel in enumerate(kernels) if not waits[id(kernel)]]
    heapq.heapify(ready)
    numbers, found = count(len(kernels)), []
    while ready:
        _, _, kernel = heapq.heappop(ready)
        found.append(kernel)
        for follower in followers[id(kernel)]:
            waits[id(follower)].discard(id(kernel))
            if not waits[id(follower)]:
                heapq.heappush(ready, (follower.place, next(numbers), follower))
    assert len(found) == len(kernels)
    return found
