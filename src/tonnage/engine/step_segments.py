"""Torch's segments for steps out of an arena of ours, as large as the plan has it for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tonnage.buffers import VaArena
from tonnage.buffers.torch_memory import TorchMemory
from tonnage.buffers.torch_segments import SEGMENT_ALIGN_BYTES, Route, TorchSegments, find_route
from tonnage.engine.faults import release_frames
from tonnage.engine.site import Site
from tonnage.errors import BufferOOM
from tonnage.terms import LineKind
from tonnage.units import MiB, format_bytes, round_down

#: Owner of the arena; torch itself is the owner of what lies in no arena.
OWNER = "torch's steps"
TAG = "activations"
#: The arena's own tag, by which it sleeps: what is in segments is booked apart from it.
ARENA = "steps"
#: What torch's own pool may take beside the arena: a segment for tensors from a MiB on, and two for smaller ones. The
#: rest of the slack that torch is left with lies in the arena, where steps of odd shapes need it.
BESIDE_BYTES = 24 * MiB


class StepSegments:
    """Where torch's memory for steps comes from: its own pool until ``open``, then an arena.

    Graphs keep the pool that they were captured into, weights and KV are ours from the beginning. What was made before
    ``open`` and is still alive (inputs of graphs, the workspace of cuBLAS) stays where it is.
    """

    def __init__(self, site: Site, torch_memory: TorchMemory) -> None:
        self._site, self._torch_memory = site, torch_memory
        self._segments: TorchSegments | None = None
        self._is_used = self._is_inside = False
        self.route = Route(shim=None, reason="torch_segments does not ask for arenas of ours")

    @property
    def all(self) -> tuple[TorchSegments, ...]:
        return () if self._segments is None else (self._segments,)

    @property
    def headroom_bytes(self) -> int:
        """What more segments may take of the arena."""
        return sum(one.limit_bytes - one.state().live_bytes for one in self.all) if self._is_used else 0

    @property
    def live_bytes(self) -> int:
        """What torch has in segments of ours: counted, and in no statistics of its default pool."""
        return sum(one.state().live_bytes for one in self.all)

    @property
    def is_used(self) -> bool:
        """Whether steps get their memory from the arena."""
        return self._segments is not None and self._is_used

    @property
    def pool_id(self) -> tuple[int, int]:
        """Of torch's pool that steps use now."""
        return self._segments.pool_id if self._segments is not None and self._is_used else (0, 0)

    @contextmanager
    def used(self) -> Iterator[None]:
        """What this thread asks of torch inside comes from the arena, if there is one. Torch refuses a pool that is in
        use already, so inside another one this changes nothing."""
        if self._segments is None or not self._is_used or self._is_inside:
            yield
            return
        self._is_inside = True
        try:
            with self._segments.use():
                yield
        finally:
            self._is_inside = False

    @property
    def arena_bytes(self) -> int:
        """What the arena has of the device now."""
        return sum(one.memory.usable_bytes for one in self.all)

    @property
    def tags(self) -> tuple[str, ...]:
        """What the arena sleeps by, if there is one."""
        return (ARENA,) * len(self.all)

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """The arena is put to sleep inside; it wakes by its tag. Nothing lies in it that a step has not made."""
        for one in self.all:
            one.fold()
        try:
            yield
        except BaseException:
            for one in self.all:
                if one.memory.usable_bytes:  # else it sleeps all the same
                    one.unfold()
            raise

    def poll(self) -> None:
        """Tell the ledger which part of the arena is in segments."""
        for one in self.all:
            one.poll()

    def open(self, *, step_bytes: int, kept_bytes: int, try_out: Callable[[], None]) -> None:
        """Commit the arena: what is left of ``step_bytes`` beside the ``kept_bytes`` that torch's own pool does not
        give back and ``BESIDE_BYTES``; then ``try_out`` runs steps of every kind in it.

        Where there is no compiler, no memory, or torch cuts the arena so that a step does not fit, steps get their
        memory as before, ``route`` says why, and ``try_out`` fills torch's own pool again. Raises what that raises, and
        ``BufferInUse`` where the step that did not fit has left something in the arena.
        """
        self._open(step_bytes, kept_bytes, try_out)
        if not self._is_used:
            try_out()

    def _open(self, step_bytes: int, kept_bytes: int, try_out: Callable[[], None]) -> None:
        self.route = find_route(self._torch_memory, fall_back=True)
        shim = self.route.shim
        if shim is None:
            return
        num_bytes = round_down(max(0, step_bytes - kept_bytes - BESIDE_BYTES), SEGMENT_ALIGN_BYTES)
        if not num_bytes:
            self.route = Route(shim=None, reason="what steps need lies in torch's own pool already")
            return
        arena = self._site.arena(OWNER, LineKind.TRANSIENT, reserve_bytes=num_bytes, tag=ARENA)
        try:
            self._segments = TorchSegments(
                arena,
                shim=shim,
                ledger=self._site.ledger,
                owner=OWNER,
                line=LineKind.TRANSIENT,
                tag=TAG,
                limit_bytes=num_bytes,
            )
        except BufferOOM as error:
            arena.close()
            self.route = Route(shim=None, reason=f"its arena could not be had: {error}")
            return
        self._site.closing(self.close)
        self._is_used = True
        try:
            with self.used():
                try_out()
        except torch.OutOfMemoryError as error:
            release_frames(error)  # they hold what lies in it
            self._is_used = False
            self.close()  # or steps would have their memory twice, and the plan has it once
            told = f"a step did not fit into an arena of {format_bytes(num_bytes)} as torch cuts it"
            self.route = Route(shim=None, reason=told)

    def close(self) -> None:
        """Give the arena back; again: nothing. Raises ``BufferInUse`` while a tensor lies in it."""
        if self._segments is not None:
            # cuBLAS keeps a workspace for each stream, and keeps it in whatever pool it was first used.
            torch._C._cuda_clearCublasWorkspaces()
            arena = self._segments.memory
            self._segments.close()
            self._segments = None
            assert isinstance(arena, VaArena)
            arena.close()
