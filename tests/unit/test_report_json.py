"""Plan and run files: round trips, unknown keys kept, every fault told with its place."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_samples import DEVICE_BYTES, entry, layout, line, make_plan, make_run, make_snapshot, with_fragmentation

from tonnage.config import Knobs, Limits, Origin, Setting
from tonnage.errors import InputError
from tonnage.report import (
    PlanFile,
    RunFile,
    parse_plan,
    parse_run,
    plan_document,
    plan_text,
    read_file,
    run_document,
    run_text,
    write_file,
)  # fmt: skip
from tonnage.terms import Cap, How, KVPool, LineKind, MemoryPlan, Source, Step

names = st.text(max_size=12)
sizes = st.integers(0, 2**50)
lines = st.builds(line, st.sampled_from(LineKind), sizes, name=names, source=st.sampled_from(Source), reason=names)


@st.composite
def plans(draw: st.DrawFn) -> MemoryPlan:
    some = st.builds(line, st.sampled_from(LineKind), sizes, children=st.tuples(lines))
    top = [line(LineKind.WEIGHTS, draw(st.integers(1, 2**50))), *draw(st.lists(some, max_size=4))]
    block_tokens = draw(st.integers(1, 300))
    blocks, block_bytes = draw(st.integers(0, 2**40)), draw(st.integers(1, 2**40))
    pool = KVPool(
        layout=layout(block_bytes=block_bytes, block_tokens=block_tokens), num_slabs=blocks, bytes=draw(sizes),
        tokens=draw(sizes), guaranteed_tokens=draw(sizes), reachable_tokens=draw(sizes),
    )  # fmt: skip
    fraction = draw(st.fractions(min_value=0, max_value=1))
    knobs = Knobs(
        kv_fraction=Setting(fraction, str(fraction), draw(st.sampled_from(Origin)), draw(st.none() | names)),
        kv_tokens=Setting(draw(st.none() | sizes)), disabled_claims=draw(st.frozensets(names, max_size=3)),
    )  # fmt: skip
    limits = Limits(
        max_seq_len=draw(st.integers(1, 2**50)), max_batch_size=1, max_num_tokens=2, max_logits_rows=3,
        graph_batch_sizes=tuple(draw(st.lists(sizes, max_size=3))), penalties=draw(st.booleans()),
    )  # fmt: skip
    return make_plan(
        lines=tuple(top), device_bytes=sum(each.bytes for each in top), kv=pool, knobs=knobs, limits=limits,
        steps=tuple(draw(st.lists(st.builds(Step, name=names, op=names, reason=names, before=sizes, operand=sizes,
                                            after=sizes), max_size=3))),
        caps=tuple(draw(st.lists(st.builds(Cap, name=names, kv_bytes=sizes, setting=names, binding=st.booleans()),
                                 min_size=1, max_size=3))),
        attended_cap=draw(st.none() | sizes), warnings=tuple(draw(st.lists(names, max_size=2))),
    )  # fmt: skip


@settings(deadline=None)
@given(plans())
def test_a_plan_survives_its_file(plan: MemoryPlan) -> None:
    text = plan_text(plan)
    read = parse_plan(text, file="plan.json")
    assert read.plan == plan
    assert not read.extra
    assert read.text() == text


@settings(deadline=None)
@given(plans())
def test_a_run_survives_its_file(plan: MemoryPlan) -> None:
    result = make_run(plan, peak_own_bytes=None)
    read = parse_run(run_text(result), file="run.json")
    assert read.result == result
    assert read.text() == run_text(result)


def test_the_plan_file_holds_what_readers_look_for() -> None:
    document = plan_document(make_plan())
    assert document["schema"] == "tonnage.plan/1"
    assert sum(each["bytes"] for each in document["lines"]) == document["device_bytes"] == DEVICE_BYTES
    kv = {name: value for name, value in document["kv"].items() if name != "layout"}
    assert kv == {
        "bytes": 30_000 * 2**21, "tokens": 480_000, "blocks": 30_000, "num_slabs": 30_000, "block_bytes": 2**21,
        "block_tokens": 16, "bytes_per_token": 131_072, "guaranteed_tokens": 480_000, "reachable_tokens": 480_512,
    }  # fmt: skip
    assert document["knobs"]["kv_fraction"] == {
        "value": "9/10", "text": "90%", "origin": "flag", "where": "--kv-fraction"
    }  # fmt: skip
    assert document["max_concurrency"] == 58
    text = plan_text(make_plan())
    assert text == json.dumps(json.loads(text), sort_keys=True, indent=2) + "\n"


def test_a_token_that_costs_no_whole_number_of_bytes_is_told_as_a_fraction() -> None:
    odd = layout(block_bytes=100, block_tokens=16)
    pool = KVPool(layout=odd, num_slabs=1, bytes=100, tokens=16, guaranteed_tokens=16, reachable_tokens=16)
    document = plan_document(make_plan(kv=pool))
    assert document["kv"]["bytes_per_token"] == "25/4"


def test_the_run_file_holds_what_readers_look_for() -> None:
    document = run_document(make_run())
    assert document["requests"] == {"finished": 62, "failed": 1, "cancelled": 1, "waited": 40, "suspensions": 7}
    assert document["retried_steps"] == ["penalties: 4,096 bytes"] * 2
    assert document["tokens"] == {"prompt": 12_345, "cached": 8_192, "generated": 4_096, "per_second": "41.4"}
    assert document["host_tier"] == {"offloaded_blocks": 300, "loaded_blocks": 1}
    assert {"entries", "own", "unattributed", "foreign", "free", "own_source"} <= document["ledger"].keys()
    assert document["plan"] == plan_document(make_plan())
    assert "float" not in {type(value).__name__ for value in _leaves(document)}


def test_unknown_keys_are_kept_wherever_they_are() -> None:
    document = run_document(make_run())
    document["later"] = {"deep": [1]}
    document["plan"]["lines"][2]["children"][0]["colour"] = "red"
    document["plan"]["knobs"]["kv_fraction"]["who"] = None
    document["ledger"]["entries"][1]["peer"] = 7
    file = parse_run(json.dumps(document), file="run.json")
    assert json.loads(file.text()) == document
    plan = parse_plan(json.dumps(document["plan"]), file="plan.json")
    assert json.loads(plan.text()) == document["plan"]


def test_missing_keys_that_have_defaults_take_them() -> None:
    document = plan_document(make_plan())
    for name in ("warnings", "limit_knobs"):
        del document[name]
    del document["limits"]["penalties"]
    assert parse_plan(json.dumps(document), file="f").plan.warnings == ()


def _broken(*path: str | int, value: object = ...) -> str:
    """A plan file with one value replaced, or removed."""
    document = plan_document(make_plan())
    place = document
    for step in path[:-1]:
        place = place[step]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "f.json is empty"),
        ("  \n", "f.json is empty"),
        (plan_text(make_plan())[:5000], "f.json ends too early"),
        ('{"schema": "tonnage.pl', "f.json ends too early"),
        ("schema: 1", "f.json is not JSON at line 1, column 1"),
        ('{"a": 1,}', "f.json is not JSON at line 1"),
        ("[1]", "f.json holds an array, not an object"),
        ("12", "f.json holds 12, not an object"),
        ("[" * 100_000, "f.json"),
        ('{"schema": 1}', "f.json has schema 1, not 'tonnage.plan/1'"),
        ("{}", "f.json has schema None"),
        ('{"schema": "tonnage.plan/2"}', "f.json has schema 'tonnage.plan/2'; this release reads tonnage.plan/1"),
        (_broken("device_bytes", value="80GiB"), 'device_bytes: expected a whole number, found "80GiB"'),
        (_broken("device_bytes", value=1.5), "1.5 is not a whole number"),
        (_broken("device_bytes", value=float("nan")), "NaN is not a whole number"),
        (_broken("device_bytes", value=True), "device_bytes: expected a whole number, found true"),
        (_broken("device_bytes", value=7), "lines: the lines come to 85,899,345,920 bytes, the device has 7"),
        (_broken("device_bytes"), "device_bytes: is missing"),
        (_broken("lines", value={}), "lines: expected an array, found an object"),
        (_broken("lines", 3, "bytes", value=None), "lines[3].bytes: expected a whole number, found null"),
        (_broken("lines", 0, "bytes", value=-1), "lines[0].bytes: is -1, and cannot be less than 0"),
        (_broken("lines", 2, "children", 1, "bytes", value=-1), "lines[2].children[1].bytes: is -1, and cannot"),
        (_broken("lines", value=[]), "lines: the lines come to 0 bytes"),
        (_broken("device_bytes", value=0), "device_bytes: is 0, and cannot be less than 1"),
        (_broken("device_bytes", value=10**30), "device_bytes: is too large a number: 1000000000000000"),
        (_broken("steps", 0, "operand", value=10**400), "steps[0].operand: is too large a number: 1000"),
        (_broken("limits", "max_seq_len", value=0), "limits.max_seq_len: is 0, and cannot be less than 1"),
        (_broken("limits", "max_batch_size", value=0), "limits.max_batch_size: is 0, and cannot be less than 1"),
        (_broken("limits", "max_num_tokens", value=-1), "limits.max_num_tokens: is -1, and cannot be less than 1"),
        (_broken("rank", "tp", value=0), "rank.tp: is 0, and cannot be less than 1"),
        (_broken("rank", "index", value=1), "rank.index: is 1, but there are 1 ranks from 0"),
        (_broken("caps", value=[]), "caps: is empty"),
        (_broken("caps", 0, "kv_bytes", value=-1), "caps[0].kv_bytes: is -1, and cannot be less than 0"),
        (_broken("max_concurrency", value=-1), "max_concurrency: is -1, and cannot be less than 0"),
        (_broken("kv", "tokens", value=-1), "kv.tokens: is -1, and cannot be less than 0"),
        (_broken("kv", "layout", "slab_bytes", value=0), "kv.layout.slab_bytes: is 0, and cannot be less than 1"),
        (_broken("kv", "layout", "groups", value=[]), "kv.layout.groups: is empty"),
        (
            _broken("kv", "layout", "groups", 0, "block_tokens", value=0),
            "kv.layout.groups[0].block_tokens: is 0, and cannot be less than 1",
        ),
        (
            _broken("kv", "layout", "groups", 0, "block_bytes", value=0),
            "kv.layout.groups[0].block_bytes: is 0, and cannot be less than 1",
        ),
        (_broken("lines", 0, value="weights"), 'lines[0]: expected an object, found "weights"'),
        (_broken("lines", 0, "kind", value="wieghts"), "lines[0].kind: expected one of weights, kv,"),
        (_broken("lines", 0, "kind", value=[1]), "lines[0].kind: expected one of"),
        (_broken("limits", "penalties", value=1), "limits.penalties: expected true or false, found 1"),
        (_broken("model_name", value=5), "model_name: expected text, found 5"),
        (_broken("knobs", "kv_fraction", "value", value="1/0"), "knobs.kv_fraction.value: expected a fraction"),
        (_broken("knobs", "kv_fraction", "value", value=1), "knobs.kv_fraction.value: expected a fraction"),
        (_broken("kv", "layout", "groups", 0, "parts", 1, "dtype", value=0), "kv.layout.groups[0].parts[1].dtype:"),
        (_broken("kv", value=[]), "kv: expected an object, found an array"),
        (_broken("kv", "blocks", value=1), "kv.blocks: is 1, but the layout makes it 30000"),
        (_broken("kv", "bytes_per_token", value="x"), "kv.bytes_per_token: is 'x', but the layout makes it 131072"),
    ],
)
def test_a_broken_plan_file_is_refused_with_its_place(text: str, told: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_plan(text, file="f.json")
    assert "f.json" in str(refused.value)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"schema": "tonnage.run/9"}, "this release reads tonnage.run/1"),
        ({"plan": None}, "plan: is missing"),
        ({"plan": 3}, "plan: expected an object"),
        ({"plan": {**plan_document(make_plan()), "device_bytes": "x"}}, "plan.device_bytes: expected a whole number"),
        ({"requests": {"finished": 1, "failed": 0}}, "requests.waited: is missing"),
        ({"requests": {"finished": 1, "failed": 0, "waited": -1}}, "requests.waited: is -1, and cannot be less than 0"),
        ({"elapsed_ms": -1}, "elapsed_ms: is -1, and cannot be less than 0"),
        ({"plan": {**plan_document(make_plan()), "caps": []}}, "plan.caps: is empty"),
        ({"plan": {**plan_document(make_plan()), "device_bytes": 0}}, "plan.device_bytes: is 0, and cannot be"),
    ],
)
def test_a_broken_run_file_is_refused_with_its_place(change: dict[str, object], told: str) -> None:
    with pytest.raises(InputError, match=r"r\.json") as refused:
        parse_run(json.dumps(run_document(make_run()) | change), file="r.json")
    assert told in str(refused.value)


def test_nesting_without_end_is_refused_with_its_place() -> None:
    child = plan_document(make_plan())["lines"][0]
    for _ in range(400):
        child = {**child, "children": [child]}
    deep: list[object] = []
    for _ in range(400):
        deep = [deep]
    for text, told in (
        (_broken("lines", 3, value=child), "f.json: lines[3].children[0]: is nested more than"),
        (_broken("later", value=deep), "f.json: later[0][0][0]: is nested more than"),
    ):
        with pytest.raises(InputError) as refused:
            parse_plan(text, file="f.json")
        assert told in str(refused.value)


def test_nesting_that_is_let_in_can_be_written_again() -> None:
    child = plan_document(make_plan())["lines"][0]
    for _ in range(20):
        child = {**child, "children": [child]}
    text = _broken("lines", 0, value=child)
    assert json.loads(parse_plan(text, file="f.json").text()) == json.loads(text)


def test_how_an_account_is_known_survives_its_file() -> None:
    plan = make_plan()
    snapshot = make_snapshot(plan)
    rest = entry(LineKind.CONTEXT, 500, how=How.REMAINDER)
    result = make_run(plan, snapshot=replace(snapshot, entries=(*snapshot.entries, rest)))
    document = run_document(result)
    assert document["ledger"]["entries"][-1]["how"] == "remainder"
    assert parse_run(json.dumps(document), file="r.json").result == result


def test_two_lines_of_one_kind_survive_their_file() -> None:
    plan = with_fragmentation(make_plan())
    document = plan_document(plan)
    transient = [each["name"] for each in document["lines"] if each["kind"] == "transient"]
    assert transient == ["activations", "fragmentation"]
    assert parse_plan(json.dumps(document), file="f").plan == plan


def test_read_file_knows_which_kind_it_is(tmp_path: Path) -> None:
    write_file(tmp_path / "p.json", plan_text(make_plan()), force=False, flag="--output")
    write_file(tmp_path / "r.json", run_text(make_run()), force=False, flag="--output")
    assert isinstance(read_file(tmp_path / "p.json"), PlanFile)
    assert isinstance(read_file(tmp_path / "r.json"), RunFile)


def test_files_are_not_written_over_unasked(tmp_path: Path) -> None:
    there = tmp_path / "there.json"
    there.write_text("precious")
    with pytest.raises(InputError, match=r"exists.*--force"):
        write_file(there, "new", force=False, flag="--output")
    assert there.read_text() == "precious"
    write_file(there, "new", force=True, flag="--output")
    assert there.read_text() == "new"


@pytest.mark.parametrize(
    ("name", "told"), [("nowhere/x.json", "there is no folder"), (".", "is a folder")], ids=["no folder", "a folder"]
)
def test_places_that_cannot_be_written_are_told_early(tmp_path: Path, name: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        write_file(tmp_path / name, "new", force=True, flag="--output")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda _: None, "there is no file"),
        (lambda path: path.mkdir(), "cannot be read: Is a directory"),
        (lambda path: path.write_bytes(b"\xff\xfe{}"), "is not UTF-8 text (byte 0)"),
        (lambda path: path.write_text('{"schema": "other/1"}'), "neither a plan nor a run"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, make: object, told: str) -> None:
    path = tmp_path / "f.json"
    make(path)  # type: ignore[operator]
    with pytest.raises(InputError) as refused:
        read_file(path)
    assert str(path) in str(refused.value)
    assert told in str(refused.value)


def test_fractions_come_back_exact() -> None:
    plan = make_plan(knobs=Knobs(kv_fraction=Setting.flag(Fraction(1, 3), "1/3", "--kv-fraction")))
    assert parse_plan(plan_text(plan), file="f").plan.knobs.kv_fraction.value == Fraction(1, 3)


def _leaves(value: object) -> list[object]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]
