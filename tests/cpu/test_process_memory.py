"""What the process holds: figures, fence and heap. What could harm the test process runs in another one."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tonnage.device import _libc
from tonnage.device.process import ProcessMemory, process_memory, reset_peak, settle_heap, trim_heap
from tonnage.errors import DriverUnsupported

MIB = 2**20


def run(code: str) -> str:
    """The output of a fresh Python process."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def write_proc(root: Path, **files: str) -> Path:
    (root / "self").mkdir()
    for name, text in files.items():
        (root / "self" / name).write_text(text)
    return root


def test_the_figures_are_those_of_the_kernel() -> None:
    memory = process_memory()
    assert (memory.supported, memory.reason) == (True, "")
    assert memory.resident_bytes >= memory.anon_bytes > 0
    assert memory.peak_bytes >= memory.resident_bytes
    assert memory.data_bytes > 0
    assert memory.own_bytes == memory.anon_bytes + memory.shmem_bytes


def test_a_status_file_is_read_in_bytes(tmp_path: Path) -> None:
    names = {
        "Name": "x",
        "VmHWM": "90 kB",
        "VmRSS": "60 kB",
        "RssAnon": "10 kB",
        "RssFile": "20 kB",
        "RssShmem": "30 kB",
    }
    status = "".join(f"{name}:\t {value}\n" for name, value in {**names, "VmData": "5 kB"}.items())
    memory = process_memory(proc=write_proc(tmp_path, status=status))
    assert memory == ProcessMemory(
        supported=True,
        anon_bytes=10 * 1024,
        file_bytes=20 * 1024,
        shmem_bytes=30 * 1024,
        resident_bytes=60 * 1024,
        peak_bytes=90 * 1024,
        data_bytes=5 * 1024,
    )
    assert (memory.own_bytes, memory.peak_own_bytes) == (40 * 1024, 70 * 1024)


def test_without_proc_everything_is_unknown_and_says_why(tmp_path: Path) -> None:
    memory = process_memory(proc=tmp_path)
    assert not memory.supported
    assert "cannot be read" in memory.reason
    assert (memory.own_bytes, memory.peak_own_bytes) == (None, None)
    assert not reset_peak(proc=tmp_path)


def test_a_kernel_that_tells_less_is_unsupported_by_name(tmp_path: Path) -> None:
    memory = process_memory(proc=write_proc(tmp_path, status="VmRSS:\t 60 kB\nVmHWM: 1 kB\nVmData: 1 kB\n"))
    assert (memory.supported, memory.own_bytes) == (False, None)
    assert memory.reason.endswith("lacks RssAnon, RssFile, RssShmem")


def test_the_peak_starts_again() -> None:
    block = bytearray(64 * MIB)
    del block
    high = process_memory().peak_bytes
    assert reset_peak()
    assert process_memory().peak_bytes < high - 32 * MIB


def test_a_settled_heap_gives_large_blocks_straight_back() -> None:
    out = run("""
        import ctypes
        from tonnage.device.process import process_memory, settle_heap
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        libc.free.argtypes = [ctypes.c_void_p]
        assert settle_heap(65536)
        start = process_memory().anon_bytes
        for _ in range(3):  # glibc would raise its threshold at the first free
            blocks = [libc.malloc(1 << 20) for _ in range(64)]
            for block in blocks:
                ctypes.memset(block, 1, 1 << 20)
            assert process_memory().anon_bytes - start > 60 << 20
            for block in blocks[:-1]:
                libc.free(block)
            print((process_memory().anon_bytes - start) >> 20)
            libc.free(blocks[-1])  # the last one lay above the others and would have kept a heap from shrinking
    """)
    assert all(int(left) <= 3 for left in out.split())


def test_where_the_c_library_has_no_such_calls_they_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_libc, "_libc", object())
    assert (settle_heap(65536), trim_heap()) == (False, False)


def test_a_fence_fails_python_and_torch_with_an_error_and_unfence_restores() -> None:
    pytest.importorskip("torch")
    out = run("""
        import resource, torch
        from tonnage.device.host import HostDriver
        from tonnage.device.process import fence, process_memory, settle_heap, unfence
        settle_heap(65536)
        torch.ones(1000, 1000) @ torch.ones(1000, 1000)  # threads and buffers that come once
        before = fence(process_memory().data_bytes + (64 << 20))
        for make in (lambda: bytearray(256 << 20), lambda: torch.zeros(256 << 20, dtype=torch.uint8)):
            try:
                make()
            except (MemoryError, RuntimeError) as error:
                print(type(error).__name__)
        assert torch.ones(1 << 20).sum() == 1 << 20  # what fits still works, after a failure too
        driver = HostDriver(512 << 20)
        driver.mem_alloc(256 << 20)  # shared memory is outside the fence
        unfence(before)
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] == before
        torch.zeros(256 << 20, dtype=torch.uint8)
        print("restored")
    """)
    assert out.split() == ["MemoryError", "RuntimeError", "restored"]


def test_a_fence_above_the_hard_limit_is_refused() -> None:
    out = run("""
        import resource
        from tonnage.device.process import fence, unfence
        from tonnage.errors import DriverUnsupported
        resource.setrlimit(resource.RLIMIT_DATA, (1 << 33, 1 << 34))
        try:
            fence(1 << 35)
        except DriverUnsupported as error:
            print("refused" if "hard limit" in str(error) else error)
        assert fence(1 << 33) == 1 << 33
        unfence()
        assert resource.getrlimit(resource.RLIMIT_DATA) == (1 << 34, 1 << 34)
    """)
    assert out.strip() == "refused"


def test_a_fence_is_refused_where_the_kernel_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from tonnage.device.process import fence

    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(DriverUnsupported, match="darwin"):
        fence(2**40)
