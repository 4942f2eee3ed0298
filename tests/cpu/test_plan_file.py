"""A start that measured leaves a file; the next one runs no probes and has the same pool, or says why not."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from test_engine import ask, drain, options, texts

from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.device.host import HostDriver
from tonnage.engine import start
from tonnage.engine.plan_file import WOBBLE_BYTES, PlanFile, agreed
from tonnage.engine.probe import Prober
from tonnage.errors import InputError
from tonnage.hardware import HOST_PAGE_BYTES
from tonnage.report import StartFigures, parse_start, plan_text, read_file, start_text
from tonnage.terms import LineKind, Measured, Quantity, Rank, Source
from tonnage.units import MiB

pytestmark = pytest.mark.usefixtures("light_collector")


@pytest.fixture
def asked(tiny_llama, tmp_path):
    return replace(options(tiny_llama), plan_file=tmp_path / "plan.json")


@pytest.fixture
def num_probes(monkeypatch):
    """How often probe stages were measured since; warm-ups do not count."""
    found, measure = [], Prober.measure

    def counted(self):
        found.append(1)
        return measure(self)

    monkeypatch.setattr(Prober, "measure", counted)
    return lambda: len(found)


def started(asked, make_driver=HostDriver):
    with start(asked, make_driver=make_driver) as engine:
        ask(engine, "r", length=30, max_tokens=8)
        return engine.plan, engine.result(), texts(drain(engine))


def lines(plan):
    return {(line.name, line.kind): line.bytes for line in plan.lines}


def test_the_next_start_runs_no_probes_and_has_the_same_pool(asked, num_probes):
    first, result, text = started(asked)
    assert num_probes() == 1
    assert "was not there" in result.plan_file
    for _ in range(2):
        plan, result, again = started(asked)
        assert num_probes() == 1
        assert result.plan_file == f"{asked.plan_file} was used: no probes were run"
        assert (plan.kv, lines(plan), again) == (first.kv, lines(first), text)


def test_the_file_is_the_plan_and_is_not_written_again(asked):
    started(asked)
    before = asked.plan_file.read_bytes(), asked.plan_file.stat().st_mtime_ns
    plan, _ = parse_start(before[0].decode(), file="x")
    assert [path.name for path in asked.plan_file.parent.iterdir()] == ["plan.json"]  # nothing half written beside it
    again, _, _ = started(asked)
    assert (asked.plan_file.read_bytes(), asked.plan_file.stat().st_mtime_ns) == before
    assert lines(again) == lines(plan)
    file = read_file(asked.plan_file)  # as `tonnage report` reads any plan, and writes it again
    assert plan_text(file.plan) == plan_text(plan)
    assert json.loads(file.text()) == json.loads(before[0])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"limit_knobs": LimitKnobs(max_num_tokens=Setting(32))}, "limits.max_num_tokens 64 and is 32 now"),
        ({"dtype": "bfloat16"}, "dtype float32 and is bfloat16 now"),
        ({"memory_bytes": 350 * MiB}, f"device_bytes {320 * MiB} and is {350 * MiB} now"),
    ],
)
def test_a_start_that_would_measure_something_else_says_what_and_measures(asked, num_probes, change, named):
    started(asked)
    changed = replace(asked, **change)
    if "limit_knobs" in change:
        changed = replace(changed, limit_knobs=replace(asked.limit_knobs, **_set(change["limit_knobs"])))
    _, result, _ = started(changed)
    assert num_probes() == 2
    assert named in result.plan_file
    assert "the probes were run again" in result.plan_file
    _, result, _ = started(changed)  # the file is of that start now
    assert num_probes() == 2
    assert "was used" in result.plan_file


def _set(knobs):
    return {name: setting for name, setting in knobs.items() if setting.is_set}


def test_other_money_needs_no_other_measurement(asked, num_probes):
    started(asked)
    plan, _, _ = started(replace(asked, knobs=Knobs(kv_tokens=Setting(512))))
    assert (num_probes(), plan.kv.tokens) == (1, 512)
    assert PlanFile.read(asked.plan_file).plan.kv.tokens == 512  # and the file shows the plan of today


def test_others_that_hold_more_now_make_the_pool_smaller_and_it_says_so(asked, num_probes):
    started(replace(asked, plan_file=None))  # whatever the first start of a process keeps, it keeps now
    first, _, _ = started(asked)
    kept = asked.plan_file.read_bytes()

    def crowded(capacity):
        driver = HostDriver(capacity)
        driver.foreign_bytes = 48 * MiB
        return driver

    plan, _, _ = started(asked, crowded)
    assert num_probes() == 2  # of the two starts before
    assert plan.bytes_of(LineKind.FOREIGN) == 48 * MiB
    assert abs(first.kv.bytes - plan.kv.bytes - 48 * MiB) <= 2 * WOBBLE_BYTES
    (told,) = [told for told in plan.warnings if "smaller than the plan file has it" in told]
    assert "others hold 48 MiB instead of 0 B" in told
    assert asked.plan_file.read_bytes() == kept
    again, _, _ = started(asked)  # they have gone
    assert again.kv == first.kv


def test_repeated_starts_without_a_file_differ_by_a_thousandth_or_one_page(tiny_llama):
    """In processes of their own, as starts are. What a host's heap takes is measured in pages of the system, and the
    pool is made of larger ones."""
    import subprocess
    import sys

    code = (
        "import sys; from tonnage.engine import EngineOptions, start; from tonnage.config import LimitKnobs, Setting\n"
        "limits = LimitKnobs(max_seq_len=Setting(128), max_batch_size=Setting(8), max_num_tokens=Setting(64))\n"
        "options = EngineOptions(model=sys.argv[1], memory_bytes=2 * 2**30, limit_knobs=limits, fence=False)\n"
        "with start(options) as engine: print(engine.plan.kv.bytes)"
    )
    found = [
        int(subprocess.run([sys.executable, "-c", code, str(tiny_llama)], capture_output=True, check=True).stdout)
        for _ in range(3)
    ]
    assert max(found) - min(found) <= max(min(found) // 1000, HOST_PAGE_BYTES)


FIGURES = {"rank": Rank(), "device_bytes": 2**30, "stages": (), "trial_pool_bytes": 0}


def figures(*, weights=0, context=0, libraries=0, graphs=None, foreign=0):
    def of(num_bytes):
        return Quantity.exact(num_bytes, Source.MEASURED, "")

    return Measured(
        weights=of(weights), context=of(context), libraries=of(libraries),
        graphs=None if graphs is None else of(graphs), foreign_bytes=of(foreign), **FIGURES,
    )  # fmt: skip


def test_what_is_counted_with_is_then_or_now_and_never_a_mixture():
    then = figures(context=500 * MiB, libraries=100 * MiB, graphs=60 * MiB, foreign=3 * MiB)
    less = figures(context=500 * MiB, libraries=90 * MiB, graphs=66 * MiB, foreign=3 * MiB)
    assert agreed(then, less, keep_free_bytes=256 * MiB) == (then, "")
    wobbly = figures(context=508 * MiB, libraries=100 * MiB, graphs=60 * MiB, foreign=3 * MiB)
    assert agreed(then, wobbly, keep_free_bytes=256 * MiB) == (then, "")
    measured, told = agreed(then, wobbly, keep_free_bytes=0)  # nothing pays for a wobble
    assert (measured, "8 MiB smaller" in told) == (wobbly, True)
    more = figures(context=480 * MiB, libraries=100 * MiB, graphs=90 * MiB, foreign=1003 * MiB)
    measured, told = agreed(then, more, keep_free_bytes=256 * MiB)
    assert measured == more
    assert "others hold 1003 MiB instead of 3 MiB" in told
    assert "graphs keep 90 MiB instead of 60 MiB" in told
    assert "context" not in told


def written(asked):
    started(asked)
    return json.loads(asked.plan_file.read_text())


def changed_figures(document):
    document["start"]["measured"]["context"]["bytes"] += 1
    return json.dumps(document)


BROKEN = {
    "empty": (lambda document: "", "is empty"),
    "cut": (lambda document: json.dumps(document)[:-40], "cut short"),
    "not of ours": (lambda document: '{"schema": "something/1"}', "has schema 'something/1'"),
    "a plan without figures": (lambda document: _without(document), "that no start has measured"),
    "edited": (changed_figures, "was changed since a start wrote it"),
    "of a later release": (lambda document: json.dumps(document | {"schema": "tonnage.plan/9"}), "this release reads"),
}


def _without(document):
    del document["start"]
    return json.dumps(document)


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_or_foreign_file_is_refused_in_one_paragraph_and_left_alone(asked, how):
    spoil, told = BROKEN[how]
    asked.plan_file.write_text(spoil(written(asked)))
    before = asked.plan_file.read_bytes()
    with pytest.raises(InputError, match=r"plan\.json") as refused:
        start(asked)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)
    assert refused.value.remedy
    assert asked.plan_file.read_bytes() == before


def test_a_place_where_no_file_can_be_is_refused_before_the_model_is_read(asked, tmp_path):
    for place in (tmp_path, tmp_path / "no folder" / "plan.json"):
        with pytest.raises(InputError, match="name a file"):
            start(replace(asked, plan_file=place))


def test_a_file_that_cannot_be_written_in_the_end_ends_no_engine(asked, monkeypatch):
    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    _, result, _ = started(asked)
    assert "but it was not kept" in result.plan_file
    assert "No space left" in result.plan_file
    assert list(asked.plan_file.parent.iterdir()) == []


def test_the_text_is_canonical_and_comes_back(asked):
    plan, _ = parse_start(json.dumps(written(asked)), file="x")
    _, found = parse_start(asked.plan_file.read_text(), file="x")
    text = start_text(plan, found)
    assert text == asked.plan_file.read_text()
    assert parse_start(text, file="x") == (plan, StartFigures(key=found.key, measured=found.measured))
