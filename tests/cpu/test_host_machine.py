"""The machine's memory and the control group's limit, over made-up /proc and cgroup trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from tonnage.device.machine import HostMemory, host_memory

GIB = 2**30
MEMINFO = f"MemTotal: {16 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {8 * GIB // 1024} kB\nHugePages_Total: 0\n"


@pytest.fixture
def trees(tmp_path: Path) -> tuple[Path, Path]:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    write(proc, {"meminfo": MEMINFO})
    cgroup.mkdir()
    return proc, cgroup


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def look(trees: tuple[Path, Path]) -> HostMemory:
    return host_memory(proc=trees[0], cgroup=trees[1])


def test_no_group_leaves_the_machine(trees: tuple[Path, Path]) -> None:
    memory = look(trees)
    assert (memory.total_bytes, memory.available_bytes, memory.limit_bytes) == (16 * GIB, 8 * GIB, None)
    assert memory.available_source.endswith("meminfo")
    assert memory.source.endswith("meminfo")


def test_version_2_the_tightest_ancestor_counts(trees: tuple[Path, Path]) -> None:
    write(trees[0], {"self/cgroup": "0::/a/b\n"})
    write(
        trees[1],
        {
            "cgroup.controllers": "memory\n",
            "a/memory.max": f"{4 * GIB}\n",
            "a/memory.current": f"{3 * GIB}\n",
            "a/memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
            "a/b/memory.max": "max\n",
        },
    )
    memory = look(trees)
    assert (memory.total_bytes, memory.limit_bytes) == (4 * GIB, 4 * GIB)
    assert memory.available_bytes == GIB + GIB // 2
    assert memory.available_source.endswith("a/memory.max")
    assert memory.source.endswith("a/memory.max")


def test_version_2_inside_a_container_the_root_is_our_group(trees: tuple[Path, Path]) -> None:
    write(trees[0], {"self/cgroup": "0::/\n"})
    write(trees[1], {"cgroup.controllers": "memory\n", "memory.max": f"{2 * GIB}\n", "memory.current": "0\n"})
    assert look(trees).total_bytes == 2 * GIB


def test_version_1_with_a_path_that_only_the_host_knows(trees: tuple[Path, Path]) -> None:
    write(trees[0], {"self/cgroup": "5:cpu:/x\n4:memory:/docker/abc\n0::/\n"})
    write(
        trees[1],
        {
            "memory/memory.limit_in_bytes": f"{3 * GIB}\n",
            "memory/memory.usage_in_bytes": f"{1 * GIB}\n",
            "memory/memory.stat": "total_inactive_file 4096\n",
        },
    )
    memory = look(trees)
    assert (memory.total_bytes, memory.available_bytes) == (3 * GIB, 2 * GIB + 4096)


def test_version_1_writes_no_limit_as_a_large_number(trees: tuple[Path, Path]) -> None:
    write(trees[0], {"self/cgroup": "4:memory:/\n"})
    write(trees[1], {"memory/memory.limit_in_bytes": "9223372036854771712\n"})
    assert look(trees).limit_bytes is None


def test_a_limit_above_the_machine_does_not_count_as_its_total(trees: tuple[Path, Path]) -> None:
    write(trees[0], {"self/cgroup": "0::/\n"})
    write(trees[1], {"cgroup.controllers": "", "memory.max": f"{64 * GIB}\n", "memory.current": "0\n"})
    memory = look(trees)
    assert (memory.total_bytes, memory.available_bytes, memory.limit_bytes) == (16 * GIB, 8 * GIB, 64 * GIB)


def test_nothing_to_read_is_unknown(tmp_path: Path) -> None:
    memory = host_memory(proc=tmp_path, cgroup=tmp_path)
    assert memory == HostMemory(total_bytes=None, available_bytes=None, limit_bytes=None, source="unknown")


def test_this_machine_has_memory() -> None:
    memory = host_memory()
    assert memory.total_bytes is not None
    assert memory.available_bytes is not None
    assert 0 < memory.available_bytes <= memory.total_bytes
