"""A stage tells what it found and left; a failure tells of all before it and of itself."""

from __future__ import annotations

import pytest

from tonnage.engine.stages import StageMonitor
from tonnage.errors import DeviceLost, InputError, StartupError
from tonnage.ledger import Ledger
from tonnage.terms import Reading
from tonnage.units import GiB, MiB

TOTAL = 8 * GiB


class Device:
    """Own and foreign bytes as a test sets them."""

    def __init__(self):
        self.own, self.foreign, self.is_lost = 0, 0, False

    def read(self, phase):
        if self.is_lost:
            raise DeviceLost("cuMemGetInfo", "ILLEGAL_ADDRESS")
        free = TOTAL - (self.own or 0) - self.foreign
        return Reading(phase=phase, at_ns=0, total_bytes=TOTAL, free_bytes=free, own_bytes=self.own, own_source="nvml")


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def monitor(device):
    return StageMonitor(Ledger(0, TOTAL, host_is_device=False), device.read)


def test_a_stage_notes_own_free_and_foreign_before_and_after(device, monitor):
    device.foreign = 100 * MiB
    with monitor.stage("weights", remedy=""):
        device.own, device.foreign = 3 * GiB, 612 * MiB
    (record,) = monitor.records
    assert (record.own_before_bytes, record.own_after_bytes) == (0, 3 * GiB)
    assert (record.foreign_before_bytes, record.foreign_after_bytes) == (100 * MiB, 612 * MiB)
    assert (record.free_before_bytes, record.free_after_bytes) == (TOTAL - 100 * MiB, TOTAL - 3 * GiB - 612 * MiB)


def test_a_failure_tells_stage_history_and_advice(device, monitor):
    with monitor.stage("weights", remedy="a smaller dtype"):
        device.own = 3 * GiB

    def crowded():
        device.foreign = 2 * GiB
        raise RuntimeError("a kernel fell over")

    with pytest.raises(StartupError) as failed, monitor.stage("probe", remedy="lower max_num_tokens"):
        crowded()
    error = failed.value
    assert (error.stage, error.remedy) == ("probe", "lower max_num_tokens")
    assert "a kernel fell over" in error.cause
    weights, probe = error.history
    assert weights.startswith("weights: held 0 B -> 3 GiB, free 8 GiB -> 5 GiB, others' 0 B -> 0 B in ")
    assert probe.startswith("probe: held 3 GiB -> 3 GiB, free 5 GiB -> 3 GiB, others' 0 B -> 2 GiB in ")
    assert probe.endswith("when it failed")
    assert all(part in str(error) for part in (weights, probe, "lower max_num_tokens"))


def test_a_device_that_does_not_answer_hides_no_failure(device, monitor):
    def lost():
        device.is_lost = True
        raise RuntimeError("first")

    with pytest.raises(StartupError) as failed, monitor.stage("close", remedy=""):
        lost()
    assert "first" in failed.value.cause
    assert "the device does not answer" in failed.value.history[-1]


def test_what_is_not_known_is_told_as_that(device, monitor):
    device.own = None
    with monitor.stage("weights", remedy=""):
        pass
    assert "held unknown -> unknown" in monitor.history()[0]


def test_a_users_error_passes_as_it_is(monitor):
    with pytest.raises(InputError), monitor.stage("plan", remedy=""):
        raise InputError("yours")
    assert monitor.records == []
