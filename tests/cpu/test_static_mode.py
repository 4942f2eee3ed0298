"""Without virtual memory the pool is sized before anything is captured; everything else is as with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_engine import ask, drain, options, texts

from tonnage.device.host import HostDriver
from tonnage.device.without import WithoutVirtualMemory
from tonnage.engine import start
from tonnage.engine.target import Target
from tonnage.errors import DriverUnsupported
from tonnage.hardware import find_card
from tonnage.planner import plan_without_device
from tonnage.terms import LineKind
from tonnage.units import MiB

pytestmark = pytest.mark.usefixtures("light_collector")


def without(capacity):
    return HostDriver(capacity, without=frozenset({"vmm"}))


def served(asked, make_driver=HostDriver):
    with start(asked, make_driver=make_driver) as engine:
        for i in range(4):
            ask(engine, f"r{i}", length=10 + 9 * i, max_tokens=12)
        return engine.plan, engine.result(), texts(drain(engine))


@pytest.fixture(scope="module")
def virtual(tiny_llama):
    return served(options(tiny_llama, kv_tokens=4096))


WAYS = {"no device for it": ({}, without), "not used": ({"static_pool": True}, HostDriver)}


@pytest.mark.parametrize("way", WAYS)
def test_text_and_report_are_those_of_a_device_that_has_it(tiny_llama, virtual, way):
    change, make_driver = WAYS[way]
    plan, result, text = served(replace(options(tiny_llama, kv_tokens=4096), **change), make_driver)
    wanted_plan, wanted, wanted_text = virtual
    assert text == wanted_text
    assert [line.name for line in plan.lines] == [line.name for line in wanted_plan.lines]
    assert plan.kv == wanted_plan.kv
    assert [row.line for row in result.audit] == [row.line for row in wanted.audit]
    assert sum(line.bytes for line in plan.lines) == plan.device_bytes
    assert any("sized before anything was captured, without virtual memory" in told for told in plan.warnings)
    kv = next(row for row in result.audit if row.line is LineKind.KV)
    assert kv.actual_bytes == kv.planned_bytes


def test_a_pool_that_takes_what_is_left_is_made_of_one_piece_and_given_back(tiny_llama):
    made = []

    def make_driver(capacity):
        made.append(HostDriver(capacity, without=frozenset({"vmm"})))
        return made[-1]

    with start(options(tiny_llama), make_driver=make_driver) as engine:
        arena = engine._runtime.site.driver
        assert arena.used_bytes >= engine.plan.kv.bytes > 8 * MiB
        assert engine.plan.bytes_of(LineKind.KV) == engine.plan.kv.bytes
    assert made[0].used_bytes == 0


def test_both_ways_measure_for_themselves(tiny_llama, tmp_path):
    asked = replace(options(tiny_llama), plan_file=tmp_path / "plan.json")
    served(asked)
    _, result, _ = served(replace(asked, static_pool=True))
    assert "virtual_memory True and is False now" in result.plan_file


def test_graphs_are_declared_as_the_planner_predicts_them(tiny_llama):
    """On a machine without a card: by the sizes that a card would capture."""
    target = Target.read(options(tiny_llama, max_batch_size=16))
    assert target.declared_graphs() is None
    sizes = (1, 2, 4, 8, 16)
    asked = replace(target.options, device="cuda", memory_bytes=None)
    target = replace(target, options=asked, limits=replace(target.limits, graph_batch_sizes=sizes))
    plan = plan_without_device(
        target.config, card=find_card("H200"), dtype=target.dtype, limit_knobs=asked.limit_knobs, knobs=asked.knobs
    )
    assert plan.limits.graph_batch_sizes == sizes
    assert target.declared_graphs().bytes == plan.bytes_of(LineKind.GRAPHS) > 0


def test_a_driver_whose_virtual_memory_is_not_used_refuses_it_and_does_everything_else():
    inner = HostDriver(64 * MiB)
    driver = WithoutVirtualMemory(inner, "because")
    found = driver.capabilities()
    assert (found.vmm, found.exportable, found.pools) == (False, False, inner.capabilities().pools)
    assert found.reasons["vmm"] == "because"
    for call in (lambda: driver.va_reserve(2 * MiB, align=2 * MiB), lambda: driver.phys_create(2 * MiB)):
        with pytest.raises(DriverUnsupported, match="because"):
            call()
    addr = driver.mem_alloc(2 * MiB)
    assert driver.used_bytes == inner.used_bytes == 2 * MiB
    driver.mem_free(addr)
    assert driver.close() == ()
