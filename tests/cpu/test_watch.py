"""A thread looks at the device while an engine serves: it sees others, disturbs nothing, and ends with the engine."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace

import pytest
from test_engine import MEMORY, ask, drain, options, texts

from tonnage.device.host import HostDriver
from tonnage.device.reading import Sampler, wait_until_stable
from tonnage.engine import start
from tonnage.engine.host_site import HostSite
from tonnage.errors import DeviceLost
from tonnage.ledger import OTHERS, Ledger
from tonnage.report import parse_run, run_text
from tonnage.units import MiB


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "tonnage sampler"]


class Crowded(HostDriver):
    """The test plays another process on it."""

    made: list[HostDriver] = []  # noqa: RUF012

    def __init__(self, capacity):
        super().__init__(capacity)
        self.made.append(self)


def until(condition):
    end = time.monotonic() + 120  # a machine may have much else to do
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.002)


@pytest.fixture(scope="module")
def watched(tiny_llama):
    with start(replace(options(tiny_llama), watch_interval_s=0.005), make_driver=Crowded) as engine:
        yield engine
    assert threads() == []


def test_another_process_is_seen_while_the_engine_serves_and_its_own_steps_are_not_it(watched):
    driver, watch = Crowded.made[-1], watched.watch
    before = watched.result().snapshot
    ask(watched, "a", length=60, max_tokens=30)
    watched.step()
    free = watch.lowest_free_bytes
    driver.foreign_bytes = 64 * MiB
    until(lambda: watch.highest_foreign_bytes == 64 * MiB)
    drain(watched)
    driver.foreign_bytes = 0
    until(lambda: watched.ledger.snapshot().foreign == 0)
    result = watched.result()
    assert [event.delta for event in watched.ledger.history(owner=OTHERS)][-2:] == [64 * MiB, -64 * MiB]
    assert result.watch.highest_foreign_bytes == 64 * MiB
    assert result.watch.num_looks > 2
    assert result.watch.lowest_free_bytes <= free - 64 * MiB + 8 * MiB
    assert abs(result.snapshot.unattributed - before.unattributed) <= 8 * MiB
    assert parse_run(run_text(result), file="x").result.watch == result.watch


def test_heap_of_earlier_work_that_is_given_back_is_nobody_elses():
    """What the process held when the device was opened, and holds no longer, makes none of its pages another's."""
    earlier = bytearray(b"x") * (64 * MiB)
    site = HostSite(256 * MiB, index=0, make_driver=HostDriver)
    try:
        pages = site.driver.mem_alloc(8 * MiB)
        del earlier
        assert site.ledger.foreign_of(site.read("given back")) == 0
        site.driver.foreign_bytes = 16 * MiB
        assert site.ledger.foreign_of(site.read("others")) == 16 * MiB
        site.driver.mem_free(pages)
    finally:
        site.close()


def test_there_is_none_on_the_host_unless_asked_and_text_is_the_same(tiny_llama, watched):
    with start(options(tiny_llama)) as engine:
        assert engine.watch.is_on is False
        ask(engine, "a", length=25)
        ask(watched, "a", length=25)
        assert texts(drain(engine)) == texts(drain(watched))
        assert engine.result().watch is None


def test_the_thread_ends_with_a_start_that_fails(tiny_llama, monkeypatch):
    def fails(self):
        raise RuntimeError("no plan")

    monkeypatch.setattr("tonnage.engine.startup._Startup.make_plan", fails)
    before = len(threads())
    with pytest.raises(Exception, match="no plan"):
        start(replace(options(tiny_llama), watch_interval_s=0.005))
    assert len(threads()) == before


def test_a_device_that_is_lost_ends_the_looks_and_is_told(watched):
    """Last of those on this engine: nobody looks afterwards."""
    watch, sampler = watched.watch, watched.watch._sampler

    def lost():
        raise DeviceLost("cuMemGetInfo", "ILLEGAL_ADDRESS")

    real, sampler._free = sampler._free, lost
    until(lambda: watch.problem)
    assert "ILLEGAL_ADDRESS" in watched.result().watch.problem
    sampler._free = real


def test_a_sampler_that_nobody_holds_is_gone_and_so_is_its_thread():
    driver = HostDriver(64 * MiB)
    sampler = Sampler(driver, Ledger(0, 64 * MiB), interval_s=0.002)
    sampler.start()
    gone = weakref.ref(sampler)
    (thread,) = threads()
    del sampler
    until(lambda: gc.collect() is not None and gone() is None)
    thread.join(20)
    assert not thread.is_alive()
    driver.close()


def test_a_process_that_forgets_the_engine_ends_all_the_same(tiny_llama):
    code = (
        "import sys; from tonnage.engine import EngineOptions, start; from tonnage.config import LimitKnobs, Setting\n"
        "limits = LimitKnobs(max_seq_len=Setting(64), max_batch_size=Setting(2), max_num_tokens=Setting(32))\n"
        f"engine = start(EngineOptions(model=sys.argv[1], memory_bytes={MEMORY}, limit_knobs=limits, fence=False,\n"
        "    watch_interval_s=0.001)); print(engine.watch.is_on)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_llama)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr


def test_free_memory_is_waited_for_until_it_stands_still():
    figures = iter([900 * MiB, 700 * MiB, 500 * MiB, 500 * MiB + MiB // 2, 500 * MiB, 400 * MiB])
    assert wait_until_stable(lambda: next(figures), interval_s=0) == (500 * MiB, True)
    assert next(figures) == 400 * MiB
    restless = iter(range(10**9))
    assert wait_until_stable(lambda: next(restless) * 2 * MiB, interval_s=0.001, timeout_s=0.05)[1] is False
    assert wait_until_stable(lambda: None) == (None, True)
