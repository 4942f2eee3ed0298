"""What NVML knows of a card: its memory, and how much of it each process holds.

Nothing here raises for want of the package, the library or an answer: ``reason`` says why there is none. NVML counts
the card, so its total holds what the driver keeps for itself, which ``mem_info`` of a driver does not.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

#: The inode of the first pid namespace, the machine's own: fixed in Linux.
_MACHINE_PIDS = 0xEFFFFFFC


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlMemory:
    """Bytes of the card; ``reserved_bytes`` is the driver's own part, None where this NVML does not tell it apart."""

    total_bytes: int
    used_bytes: int
    free_bytes: int
    reserved_bytes: int | None


@dataclass(frozen=True, slots=True)
class NvmlProcess:
    """A process on the card; ``num_bytes`` is None where NVML does not say (WSL, slices, virtual cards)."""

    pid: int
    num_bytes: int | None


class Nvml:
    """The card with this ``uuid``. ``reason`` is why the last question had no answer, "" when it had one.

    ``module`` stands in for ``pynvml``, ``proc`` for /proc in tests.
    """

    def __init__(self, uuid: str, *, module: Any = None, proc: Path = Path("/proc")) -> None:
        self.uuid, self.reason = uuid, ""
        self._module, self._proc = module, proc
        self._handle: Any = None
        self._pid_of_handle = 0
        self._trusts_pids = False

    def memory(self) -> NvmlMemory | None:
        return self._asked(self._memory)

    def processes(self) -> tuple[NvmlProcess, ...] | None:
        """Everyone with a context on the card, ourselves too, by pid; those that NVML can see from here."""
        return self._asked(self._processes)

    def own_bytes(self) -> int | None:
        """Bytes of this process on the card, or None.

        A container may number its processes differently from NVML. Then our pid is not in the list, or, worse, is
        somebody else's there: the list is not believed while it names processes that do not exist here.
        """
        listed = self.processes()
        if listed is None:
            return None
        own = next((one for one in listed if one.pid == os.getpid()), None)
        if own is None:
            self.reason = (
                f"NVML lists {len(listed)} processes on {self.uuid} but not pid {os.getpid()}: it has no context "
                "there, or runs in a container that numbers its processes differently"
            )
        elif own.num_bytes is None:
            self.reason = f"NVML does not tell how much of {self.uuid} each process holds"
        elif not self._are_ours(listed):
            self.reason = "NVML lists processes that do not exist in this container: its pids are not ours"
        else:
            return own.num_bytes
        return None

    def driver_version(self) -> str | None:
        """Of the NVIDIA driver: "580.159.04"."""
        return self._asked(lambda nvml, _: str(nvml.nvmlSystemGetDriverVersion()))

    def others(self) -> tuple[NvmlProcess, ...] | None:
        """Everyone else on the card, or None where we cannot tell ourselves from them."""
        listed = self.processes()
        if listed is None or self.own_bytes() is None:
            return None
        return tuple(one for one in listed if one.pid != os.getpid())

    def _memory(self, nvml: Any, handle: Any) -> NvmlMemory:
        try:
            found = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
            reserved = int(found.reserved)
        except (AttributeError, TypeError, nvml.NVMLError):  # an older library
            found, reserved = nvml.nvmlDeviceGetMemoryInfo(handle), None
        return NvmlMemory(
            total_bytes=int(found.total),
            used_bytes=int(found.used),
            free_bytes=int(found.free),
            reserved_bytes=reserved,
        )

    def _processes(self, nvml: Any, handle: Any) -> tuple[NvmlProcess, ...]:
        """A process that computes and draws is in both lists, each time with all its bytes."""
        found: dict[int, int | None] = {}
        for listing in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
            for one in listing(handle):
                num_bytes = None if one.usedGpuMemory is None else int(one.usedGpuMemory)
                found[int(one.pid)] = max(num_bytes or 0, found.get(int(one.pid)) or 0) or num_bytes
        return tuple(NvmlProcess(pid, num_bytes) for pid, num_bytes in sorted(found.items()))

    def _are_ours(self, listed: tuple[NvmlProcess, ...]) -> bool:
        """Whether NVML numbers processes as we do; once seen, it stays so."""
        if not self._trusts_pids:
            try:
                is_machine = (self._proc / "self" / "ns" / "pid").stat().st_ino == _MACHINE_PIDS
            except OSError:
                is_machine = False
            self._trusts_pids = is_machine or all((self._proc / str(one.pid)).exists() for one in listed)
        return self._trusts_pids

    def _asked(self, question: Callable[[Any, Any], T]) -> T | None:
        """The answer, or None and a reason."""
        nvml = self._loaded()
        if nvml is None:
            return None
        try:
            if self._handle is None or self._pid_of_handle != os.getpid():
                # Counted by the library, so that others' use of it is not disturbed; once more after a fork.
                nvml.nvmlInit()
                self._handle, self._pid_of_handle = nvml.nvmlDeviceGetHandleByUUID(self.uuid), os.getpid()
            answer = question(nvml, self._handle)
        except nvml.NVMLError as error:
            self.reason = f"NVML: {error}"
            return None
        self.reason = ""
        return answer

    def _loaded(self) -> Any:
        if self._module is None:
            try:
                import pynvml
            except ImportError as error:
                self.reason = f"the Python package nvidia-ml-py is not installed or cannot be loaded: {error}"
                return None
            self._module = pynvml
        return self._module
