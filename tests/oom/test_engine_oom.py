"""Fail every allocation of an engine's start, and of its steps, in turn: reported cleanly, nothing lost, nothing kept.

The device's allocations fail through ``FaultDriver``, torch's through a dispatch mode that refuses the nth operation
the way torch's CPU allocator does.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tonnage.config import LimitKnobs, Setting
from tonnage.device.fault import FaultDriver
from tonnage.device.host import HostDriver
from tonnage.device.process import process_memory
from tonnage.engine import EngineOptions, Finish, start
from tonnage.errors import StartupError, UserError
from tonnage.sampling import SamplingParams
from tonnage.units import MiB

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
from loop import FailTorch, num_points
from tiny import save_tiny_llama

pytestmark = pytest.mark.usefixtures("light_collector")


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    folder = save_tiny_llama(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)
    limits = LimitKnobs(max_seq_len=Setting(64), max_batch_size=Setting(2), max_num_tokens=Setting(32))
    return EngineOptions(model=str(folder), memory_bytes=300 * MiB, limit_knobs=limits, fence=False)


def failure(options, make_driver) -> StartupError | UserError | None:
    try:
        start(options, make_driver=make_driver).close()
    except (StartupError, UserError) as error:
        return error
    return None


@pytest.mark.parametrize("forever", [False, True], ids=["once", "for ever"])
def test_every_device_allocation_of_a_start_may_fail(options, forever):
    before = process_memory().shmem_bytes

    def attempt(nth):
        devices: list[tuple[HostDriver, FaultDriver]] = []

        def make_driver(capacity):
            host = HostDriver(capacity)
            devices.append((host, FaultDriver(host, nth, forever=forever)))
            return devices[0][1]

        error = failure(options, make_driver)
        assert error is None or error.remedy
        if isinstance(error, StartupError):
            assert error.stage
            assert "INJECTED" in str(error)
        host, fault = devices[0]
        assert host.used_bytes == 0, f"call {nth} left memory on the device"
        assert process_memory().shmem_bytes == before
        return fault.num_injected

    reached = num_points(attempt)
    print(f"\n{reached} device allocations failed in turn")
    assert reached > 10


def serve(engine):
    for i in range(2):
        engine.submit(engine.request(f"r{i}", SamplingParams(max_tokens=2, ignore_eos=True), token_ids=[5 + i, 9, 11]))
    done = {}
    for _ in range(50):
        if not engine.has_work:
            break
        done.update({completion.request_id: completion for completion in engine.step()})
    return done


@pytest.mark.parametrize("forever", [False, True], ids=["once", "for ever"])
def test_every_torch_allocation_of_a_step_may_fail(options, forever):
    with start(options) as engine:
        truth = {name: completion.token_ids for name, completion in serve(engine).items()}
        booked = engine.ledger.accounted_bytes

        def attempt(nth):
            with FailTorch(nth, forever=forever) as mode:
                done = serve(engine)
            assert set(done) == {"r0", "r1"}, f"operation {nth}: a request was lost"
            for name, completion in done.items():
                if completion.finish_reason is Finish.ERROR:
                    assert "can't allocate memory" in completion.error
                else:
                    assert completion.token_ids == truth[name]
            progress = engine.progress()
            assert (progress.num_running, progress.num_waiting, progress.kv_used_tokens) == (0, 0, 0)
            assert engine.ledger.accounted_bytes == booked
            return mode.num_injected

        reached = num_points(attempt)
        print(f"\n{reached} torch operations failed in turn")
        assert reached > 50
        assert {name: completion.token_ids for name, completion in serve(engine).items()} == truth
    torch.manual_seed(0)
