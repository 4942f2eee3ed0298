"""Once an engine serves, nothing edits the page table: growing, mapping and unmapping belong to its start."""

from __future__ import annotations

from pathlib import Path

from tiny import save_tiny_llama

from tonnage.config import LimitKnobs, Setting
from tonnage.device.fault import FaultDriver
from tonnage.device.host import HostDriver
from tonnage.engine import EngineOptions, start
from tonnage.sampling import SamplingParams
from tonnage.units import MiB

EDITS = frozenset({"va_reserve", "va_free", "phys_create", "phys_release", "map", "unmap", "set_access"})


def test_serving_makes_no_page_table_edit(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path, num_hidden_layers=1)
    limits = LimitKnobs(max_seq_len=Setting(64), max_batch_size=Setting(4), max_num_tokens=Setting(64))
    options = EngineOptions(model=str(folder), memory_bytes=300 * MiB, limit_knobs=limits, fence=False)
    drivers: list[FaultDriver] = []

    def make_driver(capacity: int) -> FaultDriver:
        drivers.append(FaultDriver(HostDriver(capacity), calls=EDITS))
        return drivers[0]

    with start(options, make_driver=make_driver) as engine:
        driver = drivers[0]
        assert driver.num_calls > 0  # the start does edit: the count is a count
        # The first request with penalties allocates their tables, once.
        for name, penalty in (("first", 1.5), ("second", 1.5), ("plain", 0.0)):
            params = SamplingParams(max_tokens=20, ignore_eos=True, presence_penalty=penalty)
            for number in range(6):
                engine.submit(engine.request(f"{name}-{number}", params, token_ids=[5 + number, 9, 11]))
            if name == "second":
                driver.arm(None, calls=EDITS)
            while engine.has_work:
                engine.step()
        assert driver.by_call == {}
