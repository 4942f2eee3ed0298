"""The rules of SGLang, TensorRT-LLM and llama.cpp against every logged start that tells enough, and the docs' table."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_records import GRAPHS, Row, graph_mib, launch_of, record, rows
from shapes import starts

from tonnage.peers.asked_settings import Settings
from tonnage.peers.llamacpp import rules as llamacpp_rules
from tonnage.peers.sglang import after
from tonnage.peers.sglang import rules as sglang_rules
from tonnage.peers.sglang.fraction import static_fraction
from tonnage.peers.start import Rule
from tonnage.peers.trtllm import rules as trtllm_rules
from tonnage.units import GiB, MiB

ROWS = tuple(rows())
PAGE = (Path(__file__).parents[2] / "docs/engines.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.id}-{row.what}")
def test_a_rule_gives_what_was_logged(row: Row) -> None:
    assert abs(row.error) <= row.within, f"{row.logged:,} logged, {row.predicted:,} predicted"


def test_most_rows_are_within_half_a_percent() -> None:
    exact = [row for row in ROWS if row.what != "decode graphs" and row.what != "free after the pools"]
    assert len(exact) == 42
    assert sum(abs(row.error) <= 0.005 for row in exact) >= 37


def test_the_figures_of_a_graph_are_those_of_the_logs() -> None:
    found = sorted(graph_mib().values())
    span = after.GRAPH_MIB
    assert (round(found[0]), round(found[-1])) in {(8, 28)}
    assert span.low <= found[0]
    assert found[-1] <= span.high
    assert found[1] <= span.best <= found[-2]
    assert {record(name)["engine"] for name in GRAPHS} == {"sglang"}


def test_a_default_that_is_not_explained() -> None:
    """0.859 by the log, on a card that the record infers: what was typed is not known."""
    row = record("fs-55068335887")
    logged = row["logged"]
    share = (
        1
        - (logged["avail_after_weights_gib"] - logged["kv_k_gib"] - logged["kv_v_gib"])
        / (logged["avail_before_load_gib"])
    )
    launch = launch_of(row)
    assert round(share, 3) == 0.859
    assert float(static_fraction(launch, Settings(launch)).high) < 0.7


def test_what_is_free_before_a_load() -> None:
    """The context of one process on two H100s, each predicted by the other: within 0.03 GiB."""
    one = record("fs-65830671609")
    before = one["logged"]["avail_after_weights_gib"] + one["logged"]["weights_gib"]
    other = record("sg-fs-70920711276")
    found = (one["gpu_mem_gib"] - before, other["gpu_mem_gib"] - other["logged"]["avail_before_load_gib"])
    assert abs(found[0] - found[1]) < 0.03
    from tonnage.peers.outside import OUTSIDE_BYTES

    assert all(OUTSIDE_BYTES.low <= each * GiB <= OUTSIDE_BYTES.high for each in found)
    assert abs(OUTSIDE_BYTES.best - sum(found) / 2 * GiB) < 4 * MiB


@pytest.mark.parametrize("room", [sglang_rules, trtllm_rules, llamacpp_rules])
def test_rules_cite_what_there_is(room: object) -> None:
    known = {row["id"] for row in starts()}
    rules = [value for value in vars(room).values() if isinstance(value, Rule)]
    assert rules
    for rule in rules:
        assert set(rule.records) <= known, rule.name
        assert rule.records or rule.source, f"{rule.name} has no source"
        assert rule.says.endswith("."), rule.name


def test_the_page_shows_every_row() -> None:
    for row in ROWS:
        assert shown(row) in PAGE


def shown(row: Row) -> str:
    """One row of the table in docs/engines.md."""
    return (
        f"| {row.engine} {row.version} | {row.model} | {row.what} | {figure(row, row.logged)} | "
        f"{figure(row, row.predicted)} | {row.error:+.2%} | {row.note} |"
    )


def figure(row: Row, value: float) -> str:
    if row.unit == "count":
        return f"{value:,.0f}"
    return f"{value / GiB:.3f} GiB" if row.logged > MiB else f"{value:,.2f} B"
