"""The demo of the README, in a file of its own: it is the longest test, and files are what runs beside each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_run_command import tonnage

from tonnage.units import MiB

ROOT = Path(__file__).parents[2]
NUM_REQUESTS = 14


@pytest.mark.model
def test_the_demo_finishes_inside_its_plan(tmp_path):
    """All requests finish, many after waiting; what no line explains stays small; nothing passes the cap. The first
    of the demo's 64, in a pool that is smaller by as much: the others tell nothing more and take two minutes."""
    kept, asked = tmp_path / "answers.jsonl", tmp_path / "asked.jsonl"
    asked.write_text("".join((ROOT / "examples" / "demo.jsonl").read_text().splitlines(keepends=True)[:NUM_REQUESTS]))
    memory = 1024 * MiB
    done = tonnage("run", "smollm2", "--input", str(asked), "--output", str(kept), "--memory", "1GiB",
                   "--max-seq-len", "1024", "--kv-tokens", "1536", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)
    assert run["requests"]["finished"] == NUM_REQUESTS
    assert run["requests"]["failed"] == 0
    assert run["requests"]["waited"] >= NUM_REQUESTS // 3
    answers = [json.loads(line) for line in kept.read_text().splitlines()]
    assert len({answer["id"] for answer in answers}) == NUM_REQUESTS
    assert all(answer["text"].strip() for answer in answers)
    plan, ledger = run["plan"], run["ledger"]
    assert sum(line["bytes"] for line in plan["lines"]) == plan["device_bytes"] == memory
    unattributed = ledger["unattributed"]
    print(
        f"\nunattributed {unattributed / MiB:.2f} MiB, peak {run['peak_own_bytes'] / MiB:.1f} of {memory / MiB:.0f} MiB"
    )
    assert unattributed <= max(32 * MiB, memory * 3 // 100)
    # The same from outside: memory after the imports, less every line that the plan says is in use.
    idle = {"keep_free", "slack", "rounding", "transient"}
    planned = sum(line["bytes"] for line in plan["lines"] if line["kind"] not in idle)
    assert ledger["own"] - planned <= max(32 * MiB, memory * 3 // 100)
    assert run["peak_own_bytes"] <= memory
