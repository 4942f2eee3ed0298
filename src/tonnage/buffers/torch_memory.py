"""What we ask torch's allocator on one device, in one place, so that a test can play another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class TorchAllocator(Protocol):
    """Torch's caching allocator on torch's device number ``device``. Bytes."""

    @property
    def device(self) -> int: ...
    def backend(self) -> str:
        """ "native", "cudaMallocAsync", or what a program has put in its place."""

    def settings(self) -> Mapping[str, Any]:
        """Its settings as they are now; empty where torch does not tell."""

    def total_bytes(self) -> int:
        """What a fraction is a fraction of."""

    def reserved_bytes(self) -> int:
        """All segments of all pools, ours included."""

    def fraction(self) -> float: ...
    def set_fraction(self, fraction: float) -> None:
        """Raises ``RuntimeError`` where the backend cannot be capped."""

    def segments(self) -> Sequence[Mapping[str, Any]]:
        """Every segment on the device: address, total_size, stream, segment_pool_id, allocated_size."""


class TorchMemory:
    """The real one. Asking starts CUDA in this process."""

    def __init__(self, device: int) -> None:
        self.device = device

    def backend(self) -> str:
        import torch

        return torch.cuda.get_allocator_backend()

    def settings(self) -> Mapping[str, Any]:
        import torch

        torch.cuda.current_device()  # reads the settings, if nothing has yet
        found: Mapping[str, Any] = torch.cuda.memory._snapshot().get("allocator_settings", {})
        return found

    def total_bytes(self) -> int:
        import torch

        return int(torch.cuda.get_device_properties(self.device).total_memory)

    def reserved_bytes(self) -> int:
        import torch

        return torch.cuda.memory_reserved(self.device)

    def fraction(self) -> float:
        import torch

        return float(torch.cuda.get_per_process_memory_fraction(self.device))

    def set_fraction(self, fraction: float) -> None:
        import torch

        torch.cuda.set_per_process_memory_fraction(fraction, self.device)

    def segments(self) -> Sequence[Mapping[str, Any]]:
        import torch

        memory: Any = torch.cuda.memory  # torch gives the call no types
        return [segment for segment in memory.memory_snapshot() if segment["device"] == self.device]
