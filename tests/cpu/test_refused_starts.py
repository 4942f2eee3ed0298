"""Starts that are refused by arithmetic, before a table is made."""

from __future__ import annotations

import tracemalloc

import pytest

from tonnage.config import LimitKnobs, Setting
from tonnage.engine import EngineOptions, start
from tonnage.errors import DoesNotFit
from tonnage.units import GiB, MiB


@pytest.mark.parametrize("num_rows", [10**8, 10**12])
def test_tables_that_no_memory_holds_are_refused_before_they_are_made(tiny_llama, num_rows):
    stages: list[str] = []
    limits = LimitKnobs(max_batch_size=Setting.flag(num_rows, str(num_rows), "--max-batch-size"))
    options = EngineOptions(model=str(tiny_llama), memory_bytes=GiB, limit_knobs=limits)
    tracemalloc.start()
    try:
        with pytest.raises(DoesNotFit, match="To change: lower max_batch_size to") as refused:
            start(options, on_stage=stages.append)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refused.value.need_bytes > GiB
    assert "probe" not in stages
    assert peak < 64 * MiB
