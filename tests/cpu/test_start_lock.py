"""One start at a time on a device: the second waits, is told for whom, and gives up in the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tonnage.device.start_lock import start_lock
from tonnage.errors import UserError

HOLDS = """
import sys, time
from pathlib import Path
from tonnage.device.start_lock import start_lock
with start_lock("GPU-1", Path(sys.argv[1])):
    print("holds", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline().strip() == "holds"
    yield process
    process.kill()
    process.communicate()


def test_the_second_start_names_the_first_and_gives_up(tmp_path, holder):
    told = []
    second = start_lock("GPU-1", tmp_path, timeout_s=0.3, on_wait=told.append)
    with pytest.raises(UserError, match=f"process {holder.pid}") as refused:
        second.__enter__()
    assert told == [f"wait for process {holder.pid}"]
    assert refused.value.remedy
    with start_lock("GPU-2", tmp_path, timeout_s=0):  # another device is another lock
        pass


def test_it_waits_until_the_first_is_done(tmp_path, holder):
    began = []

    def let_go(_):
        began.append(time.monotonic())
        holder.stdin.write("\n")
        holder.stdin.flush()

    with start_lock("GPU-1", tmp_path, timeout_s=60, on_wait=let_go):
        assert began
        assert (tmp_path / "start-GPU-1.lock").read_text() == f"{os.getpid()}\n"
    assert (tmp_path / "start-GPU-1.lock").read_text() == ""


def test_a_holder_that_is_killed_holds_nothing(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with start_lock("GPU-1", tmp_path, timeout_s=10):
        pass


def test_two_starts_in_one_process_take_turns_and_a_failure_gives_it_back(tmp_path):
    second = start_lock("GPU-1", tmp_path, timeout_s=0)
    with start_lock("GPU-1", tmp_path, timeout_s=0), pytest.raises(UserError, match=f"process {os.getpid()}"):
        second.__enter__()
    with pytest.raises(ZeroDivisionError), start_lock("GPU-1", tmp_path, timeout_s=0):
        raise ZeroDivisionError
    with start_lock("GPU-1", tmp_path, timeout_s=0):
        pass


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_keep_it(tmp_path):
    """Compilers fork workers while an engine starts, which have the file open as well."""
    with start_lock("GPU-1", tmp_path, timeout_s=0):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    try:
        with start_lock("GPU-1", tmp_path, timeout_s=0):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
