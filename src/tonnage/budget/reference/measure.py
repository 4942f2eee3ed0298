"""What the reference reads around its probe, and the peak that it makes of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReading:
    """What the reference measures around its probe, in bytes.

    total_bytes           the driver's total, read at run time
    torch_peak_bytes      peak allocated by torch during the probe: model and activations
    torch_used_bytes      still allocated by torch afterwards: the model
    device_used_bytes     total - free afterwards, the temporary pool and other processes included
    temporary_pool_bytes  the pool that existed only for the probe
    """

    total_bytes: int
    torch_peak_bytes: int
    torch_used_bytes: int
    device_used_bytes: int
    temporary_pool_bytes: int

    @property
    def extra_cost_bytes(self) -> int:
        """All the device holds that torch does not count as live: context, graphs, libraries, strangers, and the
        temporary pool itself."""
        return max(self.device_used_bytes - self.torch_used_bytes, 0)

    @property
    def peak_bytes(self) -> int:
        """A sum of two maxima, although they are of different moments."""
        return self.torch_peak_bytes + self.extra_cost_bytes


def unprofiled_reading(*, total_bytes: int, used_bytes: int) -> ProbeReading:
    """What stands for the measurement where there is no probe: the memory in use now, no activations, no pool."""
    return ProbeReading(
        total_bytes=total_bytes,
        torch_peak_bytes=0,
        torch_used_bytes=0,
        device_used_bytes=used_bytes,
        temporary_pool_bytes=0,
    )
