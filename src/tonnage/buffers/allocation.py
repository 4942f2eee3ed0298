"""An allocation of virtual memory, as its holder has it: an address that stays while the memory comes and goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tonnage.buffers.chunk import State
from tonnage.buffers.entries import Entry
from tonnage.errors import NotMaterialized

if TYPE_CHECKING:
    from tonnage.buffers.virtual import VirtualMemory


class VirtualAllocation:
    """``size_bytes`` at ``address``, which stays while the memory comes and goes. Made by ``VirtualMemory``."""

    def __init__(self, memory: VirtualMemory, entry: Entry, *, size_bytes: int) -> None:
        self._memory, self._entry = memory, entry
        self.address, self.size_bytes = entry.address, size_bytes
        self.padded_bytes, self.tag, self.owner = entry.extent.padded_bytes, entry.tag, entry.owner

    def __repr__(self) -> str:
        return f"<VirtualAllocation {self._entry!r}>"

    @property
    def state(self) -> State:
        return self._entry.chunk.state

    def require_materialized(self) -> None:
        """Raise ``NotMaterialized`` unless the memory may be touched."""
        if self.state is not State.MATERIALIZED:
            raise NotMaterialized(
                f"{self.owner}: {self.size_bytes:,} bytes at {self.address:#x} are {self.state}; "
                f"materialise the tag {self.tag!r} first"
            )

    def keep_zero(self, offset: int, size_bytes: int) -> None:
        """These bytes read zero from now on after every materialise: semaphores, counters. Zeroes them now as well,
        on the stream of the allocation. Raises ``ValueError`` outside the allocation, ``NotMaterialized`` asleep.
        """
        if not 0 <= offset <= offset + size_bytes <= self.size_bytes:
            raise ValueError(f"{self!r} has no bytes {offset:,} to {offset + size_bytes:,}")
        with self._entry.held():
            self.require_materialized()
            self._memory.device.driver.fill(self.address + offset, 0, size_bytes, stream=self._entry.stream)
            self._entry.zero_ranges = [*self._entry.zero_ranges, (self.address + offset, size_bytes)]

    def free(self, *, sync: bool = False) -> None:
        """See ``VirtualMemory.free``. Freeing again does nothing."""
        self._memory.free(self.address, sync=sync, only=self._entry)
