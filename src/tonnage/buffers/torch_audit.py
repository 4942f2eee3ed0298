"""Torch's own account of its segments beside ours: which lie in our ranges, which do not, and whether both agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tonnage.buffers.torch_memory import TorchAllocator
from tonnage.buffers.torch_segments import TorchSegments
from tonnage.units import format_bytes

_DEFAULT_POOL = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRow:
    """The segments of one of torch's pools in one place. Bytes: what torch holds, and what tensors use of it now."""

    name: str
    num_segments: int
    num_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentAudit:
    """inside: a row for each of our ranges; outside: a row for each pool with segments elsewhere, largest first.

    ``disagreements`` are sentences about segments that torch and the shim see differently: none, if all is well and
    torch allocated nothing while the two were read.
    """

    inside: tuple[PoolRow, ...]
    outside: tuple[PoolRow, ...]
    disagreements: tuple[str, ...]

    @property
    def outside_bytes(self) -> int:
        """What torch holds beside our arenas: it is in no counted account."""
        return sum(row.num_bytes for row in self.outside)

    def lines(self) -> tuple[str, ...]:
        """For people, one line a pool."""
        places = [("in its arena", row) for row in self.inside] + [("outside", row) for row in self.outside]
        told = [
            f"{row.name}: {format_bytes(row.num_bytes)} in {row.num_segments:,} segments {place}"
            for place, row in places
        ]
        return (*told, *self.disagreements)


def audit_segments(torch_memory: TorchAllocator, *segments: TorchSegments) -> SegmentAudit:
    """Ask torch for every segment of the device and say where each lies. Allocation on other threads waits for it."""
    found = torch_memory.segments()
    inside: list[list[Mapping[str, Any]]] = [[] for _ in segments]
    outside: dict[str, list[Mapping[str, Any]]] = {}
    for segment in found:
        extent = segment["address"], segment["total_size"]
        home = next((held for ours, held in zip(segments, inside, strict=True) if ours.holds(*extent)), None)
        if home is not None:
            home.append(segment)
        else:
            outside.setdefault(_pool_name(segment, segments), []).append(segment)
    return SegmentAudit(
        inside=tuple(_row(ours.tag, held) for ours, held in zip(segments, inside, strict=True)),
        outside=tuple(sorted((_row(name, held) for name, held in outside.items()), key=lambda row: -row.num_bytes)),
        disagreements=tuple(
            sentence for ours, held in zip(segments, inside, strict=True) for sentence in _compare(ours, held)
        ),
    )


def _pool_name(segment: Mapping[str, Any], segments: tuple[TorchSegments, ...]) -> str:
    pool = tuple(segment["segment_pool_id"])
    if pool == _DEFAULT_POOL:
        return "torch's default pool"
    ours = next((ours.tag for ours in segments if ours.has_pool and ours.pool_id == pool), None)
    return f"torch's pool {pool}" if ours is None else f"torch's pool of {ours!r}, not in its arena"


def _row(name: str, held: list[Mapping[str, Any]]) -> PoolRow:
    return PoolRow(
        name=name,
        num_segments=len(held),
        num_bytes=sum(segment["total_size"] for segment in held),
        used_bytes=sum(segment["allocated_size"] for segment in held),
    )


def _compare(ours: TorchSegments, held: list[Mapping[str, Any]]) -> list[str]:
    torchs = {segment["address"]: segment["total_size"] for segment in held}
    shims = {segment.address: segment.asked_bytes for segment in ours.live()}
    return [
        f"{ours.tag}: at {address:#x} torch has {torchs.get(address, 0):,} bytes and the shim {shims.get(address, 0):,}"
        for address in sorted(torchs.keys() | shims.keys())
        if torchs.get(address) != shims.get(address)
    ]
