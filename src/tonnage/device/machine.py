"""How much memory this machine lets us have: its own total, and the limit of the control group we run in.

A container sees the whole machine in /proc/meminfo; its limit is written in the cgroup file system, version 1 or 2.
The smaller of the two counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# Version 1 writes "no limit" as the largest multiple of a page that fits in 63 bits; pages go up to 64 KiB.
_UNLIMITED = 2**63 - 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Bytes of host memory; None where the system does not tell.

    total_bytes      the machine's, or the control group's limit if that is smaller
    available_bytes  what could be taken now without swapping, by the machine's figure and the group's
    limit_bytes      the group's limit, None for none; ``source`` names where ``total_bytes`` came from, and
                     ``available_source`` the same of ``available_bytes``: the tightest group's file or the machine's
    """

    total_bytes: int | None
    available_bytes: int | None
    limit_bytes: int | None
    source: str
    available_source: str = "unknown"


@dataclass(frozen=True, slots=True)
class _Group:
    """One control group that limits us: its limit and what is left of it, in bytes."""

    limit: int
    left: int
    path: Path


def host_memory(*, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> HostMemory:
    """Read both sources. Never raises: what cannot be read is None."""
    machine = _meminfo(proc / "meminfo")
    total, available = machine.get("MemTotal"), machine.get("MemAvailable")
    groups = _limiting_groups(proc / "self" / "cgroup", cgroup)
    limits = [group.limit for group in groups]
    source = str(proc / "meminfo") if total is not None else "unknown"
    if limits and (total is None or min(limits) < total):
        total = min(limits)
        source = str(min(groups, key=lambda group: group.limit).path)
    known = [(group.left, str(group.path)) for group in groups]
    if available is not None:
        known.append((available, str(proc / "meminfo")))
    left, left_source = min(known, default=(None, "unknown"))
    return HostMemory(
        total_bytes=total,
        available_bytes=left,
        limit_bytes=min(limits, default=None),
        source=source,
        available_source=left_source,
    )


def _meminfo(path: Path) -> dict[str, int]:
    found = {}
    for line in _read(path).splitlines():
        name, _, rest = line.partition(":")
        fields = rest.split()
        if fields and fields[0].isdigit():
            found[name] = int(fields[0]) * 1024
    return found


def _limiting_groups(path: Path, cgroup: Path) -> list[_Group]:
    """Our group and all its ancestors that set a limit: each of them binds."""
    for line in _read(path).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0" and (cgroup / "cgroup.controllers").exists():
            return _walk(cgroup, group, limit="memory.max", usage="memory.current", idle="inactive_file")
        if "memory" in controllers.split(","):
            names = {"limit": "memory.limit_in_bytes", "usage": "memory.usage_in_bytes"}
            return _walk(cgroup / "memory", group, **names, idle="total_inactive_file")
    return []


def _walk(root: Path, group: str, *, limit: str, usage: str, idle: str) -> list[_Group]:
    # Inside a container the path may be the host's and not exist here; the root of the mount is then our group.
    parts = PurePosixPath(group.lstrip("/"))
    folders = [root / part for part in (parts, *parts.parents)]
    groups = []
    for folder in folders:
        text = _read(folder / limit).strip()
        if text.isdigit() and int(text) < _UNLIMITED:
            groups.append(_Group(int(text), _left(folder, int(text), usage=usage, idle=idle), folder / limit))
    return groups


def _left(folder: Path, limit: int, *, usage: str, idle: str) -> int:
    used = _read(folder / usage).strip()
    stat = dict(line.split(maxsplit=1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
    # File pages that nobody has touched lately are dropped when memory is wanted.
    droppable = int(stat.get(idle, 0))
    return max(0, min(limit, limit - int(used or 0) + droppable))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
