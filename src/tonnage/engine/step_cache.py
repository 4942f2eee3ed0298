"""The segments that torch keeps for steps, taken again whenever its cache has been emptied.

Torch cuts the tensors of a step from segments, and keeps these. So what its cache comes to depends on which step was
the first: after the largest one all others find room in its segments; of steps that grow, each leaves segments that are
too small for the next. By the allocator's rules (``exact.segments``) steps of Llama-3.1-8B with 512, 1,024 ... 8,192
tokens take 1,000 MiB after the largest and 3,854 in rising order. Start-up runs the largest first, plans for that, and
holds torch to it.
A cache that is empty again, after a sleep, would be filled by whoever comes first: it gets segments of the same sizes
before that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tonnage.buffers.torch_memory import TorchAllocator
from tonnage.units import MiB

#: A segment for tensors of up to a MiB, which two of these fill.
SMALL_SEGMENT_BYTES, SMALL_BYTES = 2 * MiB, MiB


class StepCache:
    """Of one stream's segments in one pool. ``take`` makes a tensor of so many bytes there."""

    def __init__(self, memory: TorchAllocator, *, stream: int, take: Callable[[int], object]) -> None:
        self._memory, self._stream, self._take = memory, stream, take
        self._pool_id = (0, 0)
        self._sizes: Counter[int] = Counter()

    @property
    def num_bytes(self) -> int:
        """Of all segments that are remembered."""
        return sum(size * num for size, num in self._sizes.items())

    def remember(self, pool_id: tuple[int, int] = (0, 0)) -> None:
        """As the segments are now, so they are to be. Torch's own pool has the id (0, 0).

        Only torch's native backend has segments, and others raise when they are asked for them: with those nothing is
        remembered.
        """
        if self._memory.backend() == "native":
            self._pool_id = pool_id
            self._sizes = self._present()

    def refill(self) -> None:
        """Take segments of the sizes that are missing, and let them go: torch keeps them.

        Raises what ``take`` raises where the device lacks the memory; what was taken until then is cached.
        """
        if not self._sizes:
            return
        held: list[object] = []
        try:
            for size, num in sorted((self._sizes - self._present()).items(), reverse=True):
                pieces = [SMALL_BYTES] * 2 if size == SMALL_SEGMENT_BYTES else [size]
                held += [self._take(piece) for piece in pieces * num]
        finally:
            held.clear()  # the frames of an error would hold them, and whoever catches it could not give them back

    def _present(self) -> Counter[int]:
        """How many segments there are of each size, whatever lies in them."""
        return Counter(
            segment["total_size"]
            for segment in self._memory.segments()
            if segment["stream"] == self._stream and tuple(segment["segment_pool_id"]) == self._pool_id
        )
