"""How much memory this process may lock (RLIMIT_MEMLOCK), which is what pinned memory is where the system counts it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

#: The capability to lock any amount, by its bit: see capabilities(7).
_CAP_IPC_LOCK = 14


def lockable_bytes(*, proc: Path = Path("/proc")) -> int | None:
    """Bytes that may be locked; None where nothing bounds them: no limit, a process that is exempt, or a system that
    has no such limit. Never raises."""
    if not sys.platform.startswith("linux") or _is_exempt(proc / "self" / "status"):
        return None
    import resource

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _is_exempt(status: Path) -> bool:
    """Whether the process has the capability; root has it as a rule, but not in every container."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return os.geteuid() == 0
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> _CAP_IPC_LOCK & 1)
