"""What compiled layers keep, estimated from how they run uncompiled.

A compiler such as Inductor computes pointwise operations, reductions and copies inside the kernels that want them.
What lies in memory then is: what goes into and comes out of kernels that it only calls (products, attention, sorts),
what the function returns, and what one fused kernel leaves for a later one. A fused kernel writes its result over an
input of equal size that nobody reads any more. Everything lives from the kernel that makes it to the last one that
reads it.

So each region of a trace is taken apart into kernels and played again: an operation's *level* is the number of called
kernels before it, fused operations of one level that hang together are one kernel, and a value stays in memory where
somebody of another level reads it. Inductor's own code for a card (``benchmarks/code_for_card.py``) and on a host
(``benchmarks/exact_peaks.py``) keep as much, within 0.4 %, where feed-forward parts and experts set the peak.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch

from tonnage.engine.exact.segments import Event
from tonnage.engine.exact.trace import Op, Region, Trace


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


@dataclass(slots=True, eq=False)
class _Node:
    """One operation inside a region."""

    op: Op
    level: int
    is_recomputed: bool
    reads: list[_Value] = field(default_factory=list)
    makes: list[_Value] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Kernel:
    """Operations that run as one, ``members`` by number; ``place`` in the order of the uncompiled run."""

    members: list[int]
    is_fused: bool
    place: int
    reads: list[_Value] = field(default_factory=list)
    makes: list[_Value] = field(default_factory=list)


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
        last_reader = {id(value): number for number, kernel in enumerate(kernels) for value in kernel.reads}
        stays = {id(value) for value in returned}
        for number, kernel in enumerate(kernels):
            op = self._first + max(kernel.members)
            dying = [
                value
                for value in dict.fromkeys(kernel.reads)
                if last_reader[id(value)] == number and id(value) not in stays and value.slot >= 0
            ]
            for value in kernel.makes:
                place = self._reused(value, dying, is_fused=kernel.is_fused)
                if place is None:
                    place = next(self._slots)
                    self._note(place, value.num_bytes, op)
                value.slot = place
            unread = [each for each in kernel.makes if id(each) not in last_reader and id(each) not in stays]
            for value in (*dying, *unread):
                self._note(value.slot, -value.num_bytes, op)

    def _reused(self, value: _Value, dying: list[_Value], *, is_fused: bool) -> int | None:
        """The place of an input that nobody reads any more: of the same storage, or in a fused kernel of the same
        kind. It is no longer among the dying then."""
        for other in dying:
            is_alike = other.num_bytes == value.num_bytes and other.dtype == value.dtype
            if other is value.old or (is_fused and is_alike):
                dying.remove(other)
                return other.slot
        return None

    def _note(self, slot: int, num_bytes: int, op: int) -> None:
        self.events.append((slot, num_bytes))
        self.at.append(op)


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
        node = _Node(op=op, level=level, is_recomputed=is_recomputed, reads=reads)
        for value in reads:
            value.readers.append(number)
        for made in op.makes:
            value = _Value(made.storage, made.num_bytes, made.dtype, number)
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
    """One kernel for each called operation, and for fused ones of a level that hang together and are wanted."""
    wanted = _wanted(nodes)
    groups = list(range(len(nodes)))

    def root(number: int) -> int:
        while groups[number] != number:
            number = groups[number]
        return number

    for number in wanted:
        for value in nodes[number].reads:
            maker = nodes[value.maker]
            if nodes[number].op.is_fused and maker.op.is_fused and maker.level == nodes[number].level:
                groups[root(number)] = root(value.maker)
    members: dict[int, list[int]] = defaultdict(list)
    for number in wanted:
        members[root(number)].append(number)
    return [_kernel(nodes, sorted(each)) for each in members.values()]


def _kernel(nodes: Sequence[_Node], members: list[int]) -> _Kernel:
    kernel = _Kernel(members=members, is_fused=nodes[members[0]].op.is_fused, place=members[-1])
    inside = set(members)
    for number in members:
        kernel.makes += [value for value in nodes[number].makes if value.is_kept]
        kernel.reads += [value for value in _kept_reads(nodes, number) if value.maker not in inside]
    return kernel


def _kept_reads(nodes: Sequence[_Node], number: int) -> Iterator[_Value]:
    """What lies in memory and is read, be it by what is computed again on the way."""
    for value in nodes[number].reads:
        if value.is_kept:
            yield value
        elif nodes[value.maker].level != nodes[number].level or nodes[value.maker].is_recomputed:
            yield from _kept_reads(nodes, value.maker)


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
