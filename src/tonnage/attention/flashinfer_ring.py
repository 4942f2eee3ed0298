"""Pinned memory for plans on their way to the device, two pieces in turn.

A plan is copied when the stream gets there, and the host plans ahead of that: with a single piece a step in flight
would get the plan of a later one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

#: One for the step that runs, one for the step that is planned meanwhile.
DEPTH = 2


class PinnedRing:
    """Pieces grow to the largest plan so far, and are then kept: no step allocates once the largest has been seen."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces = [torch.empty(0, dtype=torch.uint8) for _ in range(DEPTH)]
        self._copied: list[torch.cuda.Event | None] = [None] * DEPTH
        self._next = 0

    @contextmanager
    def piece(self, num_bytes: int) -> Iterator[torch.Tensor]:
        """The piece that was used longest ago, once what was copied from it has arrived: uint8 [num_bytes].

        The caller queues its copy on the current stream before the context ends.
        """
        at, self._next = self._next, (self._next + 1) % DEPTH
        copied = self._copied[at]
        if copied is not None:
            copied.synchronize()
        is_card = self._device.type == "cuda"
        if self._pieces[at].numel() < num_bytes:
            self._pieces[at] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_card)
        yield self._pieces[at][:num_bytes]
        if is_card:
            event = copied or torch.cuda.Event()
            event.record()
            self._copied[at] = event
