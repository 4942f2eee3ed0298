"""The boundary around torch: a cap at what it holds plus a declared slack, so that it can only fail inside its line."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from tonnage.buffers.torch_memory import TorchAllocator
from tonnage.buffers.torch_segments import Route, TorchSegments
from tonnage.units import MiB, format_bytes

#: Held for 200 random shapes after the captures, with no retry and no failure; without any slack 7 of them failed.
DEFAULT_SLACK_BYTES = 64 * MiB


class BoundaryMode(StrEnum):
    """From the best to none: torch's segments in our arenas and a cap; a cap alone; nothing."""

    SEGMENTS_AND_CAP = "segments+cap"
    CAP = "cap"
    NONE = "none"


_COSTS = {
    BoundaryMode.SEGMENTS_AND_CAP: "",
    BoundaryMode.CAP: (
        "activations, graphs and whatever else torch holds are one sampled figure, not a counted account each; what "
        "one of them leaves free cannot be kept from the others; and a new segment costs a call of the driver"
    ),
    BoundaryMode.NONE: (
        "torch may take what the plan gave to another line, and the first to notice is whoever asks the driver next"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """What holds torch in on one device, for the report. Bytes.

    reason          why a better mode is not in use; empty in the best
    reserved_bytes  what torch held when the boundary was closed, ``segment_bytes`` of them in our arenas
    cap_bytes       what torch may hold in all; None without a cap
    headroom_bytes  room for more segments in our arenas: of no use beyond the slack, so lower the limits before
    """

    mode: BoundaryMode
    reason: str
    device: int
    reserved_bytes: int
    segment_bytes: int
    slack_bytes: int
    headroom_bytes: int
    cap_bytes: int | None
    fraction_before: float = field(repr=False)

    @property
    def cost(self) -> str:
        """What it costs that the best mode is not in use."""
        return _COSTS[self.mode]

    @property
    def idle_bytes(self) -> int:
        """Committed for segments, and kept from them by the cap."""
        return 0 if self.cap_bytes is None else max(0, self.headroom_bytes - (self.cap_bytes - self.reserved_bytes))

    def paragraph(self) -> str:
        """For people: what holds, why not more, and what that costs."""
        if self.cap_bytes is None:
            parts = ["Torch is not held in"]
        else:
            parts = [
                f"Torch may hold {format_bytes(self.cap_bytes)}: the {format_bytes(self.reserved_bytes)} it has and "
                f"{format_bytes(self.cap_bytes - self.reserved_bytes)} more"
            ]
        if self.mode is BoundaryMode.SEGMENTS_AND_CAP:
            parts.append(f"{format_bytes(self.segment_bytes)} of what it has lie in our arenas")
        if self.idle_bytes:
            parts.append(f"{format_bytes(self.idle_bytes)} committed for its segments are out of its reach")
        if self.reason:
            parts.append(f"Not better because {self.reason.rstrip('.')}")
            parts.append(f"What that costs: {self.cost}")
        return ". ".join(parts) + "."


def close_boundary(
    torch_memory: TorchAllocator,
    *,
    route: Route,
    segments: tuple[TorchSegments, ...] = (),
    slack_bytes: int = DEFAULT_SLACK_BYTES,
) -> Boundary:
    """Cap torch at what it has reserved now plus ``slack_bytes``; returns what holds from here on.

    Call it once all probes ran, after the captures: capturing empties torch's cache. Segments in our arenas count
    against the cap like all others. Never raises for what torch cannot do: the mode and its reason say so.
    """
    if slack_bytes < 0:
        raise ValueError(f"a slack of {slack_bytes:,} bytes would take from torch what it holds")
    states = [ours.poll() for ours in segments]
    reserved, total = torch_memory.reserved_bytes(), torch_memory.total_bytes()
    cap, before = min(total, reserved + slack_bytes), torch_memory.fraction()
    problem = _set_cap(torch_memory, cap, total)
    mode, reason = BoundaryMode.SEGMENTS_AND_CAP, ""
    if problem:
        mode, reason = BoundaryMode.NONE, problem
    elif not segments:
        mode, reason = BoundaryMode.CAP, route.reason or "no segments of torch were asked to come from our arenas"
    return Boundary(
        mode=mode,
        reason=reason,
        device=torch_memory.device,
        reserved_bytes=reserved,
        segment_bytes=sum(state.live_bytes for state in states),
        slack_bytes=slack_bytes,
        headroom_bytes=sum(state.limit_bytes - state.live_bytes for state in states),
        cap_bytes=None if problem else cap,
        fraction_before=before,
    )


def open_boundary(torch_memory: TorchAllocator, boundary: Boundary) -> None:
    """Put back the cap from before ``boundary``: to measure again, or to capture more. Opening again does nothing."""
    if boundary.cap_bytes is not None:
        torch_memory.set_fraction(boundary.fraction_before)


def reserved_outside(torch_memory: TorchAllocator, *segments: TorchSegments) -> int:
    """What torch holds beside our arenas, in bytes: for the sampled account of the line that bears it."""
    return max(0, torch_memory.reserved_bytes() - sum(ours.state().live_bytes for ours in segments))


def fraction_for(cap_bytes: int, total_bytes: int) -> float:
    """The fraction of which torch makes exactly ``cap_bytes``: it multiplies by the total and cuts the rest off."""
    fraction = min(1.0, cap_bytes / total_bytes)
    while int(fraction * total_bytes) < cap_bytes:
        fraction = math.nextafter(fraction, 1.0)
    return fraction


def _set_cap(torch_memory: TorchAllocator, cap: int, total: int) -> str:
    """Why the cap does not hold; empty: it does, as torch itself says."""
    before = torch_memory.fraction()
    try:
        torch_memory.set_fraction(fraction_for(cap, total))
    except RuntimeError as error:
        return f"torch's {torch_memory.backend()} allocator cannot be capped: {str(error).splitlines()[0]}"
    said = round(torch_memory.fraction() * total)
    if said != cap:
        torch_memory.set_fraction(before)
        return f"torch was told to stop at {cap:,} bytes and says that it stops at {said:,}"
    return ""
