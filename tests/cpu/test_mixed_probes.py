"""Where steps are held to what they have used, kinds of them that no stage shows run before."""

from __future__ import annotations

import pytest
from test_engine import ask, assert_idle, drain, options

from tonnage.engine import start
from tonnage.engine.executor import Executor
from tonnage.engine.host_site import HostSite

pytestmark = pytest.mark.usefixtures("light_collector")


@pytest.mark.parametrize(("max_batch_size", "max_num_tokens"), [(8, 64), (1, 64), (8, 8), (2, 2)])
def test_every_mixture_of_rows_runs_before_the_boundary_is_closed(
    tiny_llama, monkeypatch, max_batch_size, max_num_tokens
):
    seen = set()
    launch = Executor.launch

    def watched(self, inputs):
        shape = inputs.plan.shape
        seen.add((shape.decode_rows, shape.prefill_tokens))
        return launch(self, inputs)

    monkeypatch.setattr(Executor, "launch", watched)
    monkeypatch.setattr(HostSite, "is_capped_by_use", True)
    with start(options(tiny_llama, max_batch_size=max_batch_size, max_num_tokens=max_num_tokens)) as engine:
        most = min(max_batch_size - 1, max_num_tokens - 2)
        assert {(num, 2) for num in (1, most) if 0 < num <= most} | {(0, 1)} <= seen
        ask(engine, "r", length=9, max_tokens=3)
        drain(engine)
        assert_idle(engine)
