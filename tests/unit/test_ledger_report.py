"""What the report and the run file say of others and of host memory beside the device."""

from __future__ import annotations

import json
from dataclasses import replace

from report_samples import make_run

from tonnage.ledger import Ledger
from tonnage.report import parse_run, run_text
from tonnage.report.run_table import memory_text
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
    for key in ("foreign_low", "foreign_high", "host"):
        del document["ledger"][key]
    for event in document["ledger"]["first_uses"]:
        del event["line"], event["tag"]
    old = parse_run(json.dumps(document), file="x").result.snapshot
    assert replace(old, first_uses=()) == replace(make_run().snapshot, first_uses=())
    assert old.first_uses[0].line is None
