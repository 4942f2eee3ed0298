"""What the report and the run file say of others and of host memory beside the device."""

from __future__ import annotations

import json
from dataclasses import replace

from report_samples import make_run

from tonnage.ledger import Ledger
from tonnage.report import StageRecord, WatchRecord, parse_run, run_text
from tonnage.report.run_table import memory_text, plan_file_text, stages_table
from tonnage.terms import LineKind, MemoryKind, Reading, Snapshot

MIB = 2**20


def snapshot_of(*foreign: int, host: int = 0) -> Snapshot:
    ledger = Ledger(0, 1000 * MIB, host_is_device=False)
    ledger.seal()
    for held in foreign:
        reading = Reading(
            phase="x", at_ns=0, total_bytes=1000 * MIB, free_bytes=(900 - held) * MIB, own_bytes=100 * MIB,
            own_source="nvml",
        )  # fmt: skip
        ledger.sample(reading)
    if host:
        ledger.open(owner="tier", line=LineKind.KV, memory=MemoryKind.PINNED_POOL, tag="pages").add(
            host, host, stream=5
        )
    return ledger.snapshot()


def told(snapshot: Snapshot) -> str:
    return memory_text(make_run(snapshot=snapshot)).plain


def test_the_most_that_others_held_is_told_where_it_is_more_than_now() -> None:
    assert "40 MiB held by others (70 MiB at most)" in told(snapshot_of(70, 40))
    assert "at most" not in told(snapshot_of(40, 70))
    assert "at most" not in told(snapshot_of())


def test_host_memory_beside_the_device_is_told() -> None:
    assert "30 MiB of host memory beside it" in told(snapshot_of(0, host=30 * MIB))
    assert "host memory" not in told(snapshot_of(0))


def test_a_run_file_keeps_all_of_it() -> None:
    run = make_run(snapshot=snapshot_of(70, 40, host=30 * MIB))
    again = parse_run(run_text(run), file="x").result
    assert again.snapshot == run.snapshot
    (event,) = again.snapshot.first_uses
    assert (event.line, event.tag, event.stream) == (LineKind.KV, "pages", 5)


def test_a_run_file_from_before_is_read() -> None:
    document = json.loads(run_text(make_run()))
    for key in ("foreign_low", "foreign_high", "host", "free_low"):
        del document["ledger"][key]
    del document["watch"], document["plan_file"]
    for stage in document["stages"]:
        for key in ("free_before_bytes", "free_after_bytes", "foreign_before_bytes", "foreign_after_bytes"):
            del stage[key]
    for event in document["ledger"]["first_uses"]:
        del event["line"], event["tag"]
    old = parse_run(json.dumps(document), file="x").result.snapshot
    assert replace(old, first_uses=()) == replace(make_run().snapshot, first_uses=())
    assert old.first_uses[0].line is None


WATCHED = WatchRecord(interval_ms=100, num_looks=4_800, lowest_free_bytes=150 * MIB, highest_foreign_bytes=3_072 * MIB)


def test_what_the_watch_saw_is_told_and_kept() -> None:
    run = make_run(watch=WATCHED, plan_file="plan.json was used: no probes were run")
    text = memory_text(run).plain
    assert "4,800 looks, one every 100 ms while it served: at least 150 MiB free, others held 3 GiB at most" in text
    assert "ended early" not in text
    ended = make_run(watch=replace(WATCHED, problem="DeviceLost: gone"))
    assert "they ended early: DeviceLost: gone" in memory_text(ended).plain
    assert "watch" not in memory_text(make_run()).plain
    again = parse_run(run_text(run), file="x").result
    assert (again.watch, again.plan_file) == (WATCHED, run.plan_file)
    assert plan_file_text(again).plain == "plan file plan.json was used: no probes were run"


def test_the_table_of_stages_tells_others_only_where_they_moved() -> None:
    stage = StageRecord(
        name="probe", own_before_bytes=0, own_after_bytes=MIB, elapsed_ms=1,
        free_before_bytes=9 * MIB, free_after_bytes=5 * MIB, foreign_before_bytes=0, foreign_after_bytes=3 * MIB,
    )  # fmt: skip
    moved = stages_table(make_run(stages=(stage,)))
    headers = [column.header for column in moved.columns]
    assert headers == ["stage", "time", "held after", "change", "free after", "others"]
    assert [next(iter(column.cells)) for column in moved.columns][3:] == ["+1 MiB", "5 MiB", "+3 MiB"]
    still = stages_table(make_run(stages=(replace(stage, foreign_after_bytes=0),)))
    assert [column.header for column in still.columns][-1] == "free after"
    assert len(stages_table(make_run()).columns) == 5  # files of before know neither
