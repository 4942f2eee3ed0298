"""Tables of plans, runs and differences, from values made by hand: what must be said, and that it fits."""

from __future__ import annotations

import io
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_samples import entry, line, make_audit, make_plan, make_run, make_snapshot, with_fragmentation
from rich.console import Console

from tonnage.config import Knobs, LimitKnobs, Origin, Setting
from tonnage.report import PlanFile, RunFile, diff_files, diff_text
from tonnage.report.diff_table import show_diff
from tonnage.report.draw import console_for, grid, share, show, slice_bar, spread
from tonnage.report.run_table import planned_own_bytes, show_run
from tonnage.report.table import show_plan
from tonnage.terms import HostPlan, How, KVPool, LineKind, MemoryPlan, Rank, Source
from tonnage.units import GiB, MiB

WIDTHS = [40, 80, 100, 160]


def drawn(show: object, *values: object, width: int = 100, **options: object) -> str:
    out = io.StringIO()
    show(*values, Console(file=out, width=width, highlight=False, markup=False, emoji=False), **options)  # type: ignore[operator]
    return out.getvalue()


def flat(text: str) -> str:
    """The same words with single spaces: what is said, without how it is laid out."""
    return " ".join(text.split())


def test_a_plan_says_where_every_byte_goes() -> None:
    text = drawn(show_plan, make_plan())
    assert "llama-3.1-8b on 80GiB: 80 GiB (85,899,345,920 bytes)" in text
    assert "max_seq_len 8,192 (--max-seq-len), max_batch_size 256 (default)" in text
    assert "kv_fraction 90% (--kv-fraction), without claim a, without claim b" in text
    for each in make_plan().lines:
        assert each.name in text
        assert each.reason in text
    assert "assumed, 400 – 640 MiB" in text
    assert "predicted, 700 MiB – 2 GiB" in text
    assert "480,000 tokens in 30,000 blocks of 16 tokens" in text
    assert "131,072 bytes a token, 2 MiB a block" in text
    assert "room for 58 full-length sequences of 8,192 tokens" in text
    assert "480,000 tokens guaranteed, 480,512 while scratch is lent" in text
    assert "> device     58.67 GiB  --memory (binds)" in text
    assert "9/10 of what remains" in text
    assert "! the size of the CUDA context is assumed, not measured" in text


@pytest.mark.parametrize("width", WIDTHS)
def test_every_view_fits_its_width(width: int) -> None:
    diff = diff_files(RunFile(make_run()), RunFile(make_run(other_plan())), names=("a.json", "b.json"))
    views = [drawn(show_plan, make_plan(), width=width), drawn(show_diff, diff, width=width)]
    views.append(drawn(show_run, make_run(), width=width, with_plan=True))
    if width >= 80:
        assert max(len(row) for view in views for row in view.splitlines()) <= width


def test_no_colour_in_a_pipe_and_colour_on_a_terminal() -> None:
    piped = io.StringIO()
    show_plan(make_plan(), console_for(piped))
    assert "\x1b" not in piped.getvalue()
    assert max(len(row) for row in piped.getvalue().splitlines()) <= 100
    terminal = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=100)
    show_plan(make_plan(), terminal)
    assert "\x1b[" in terminal.file.getvalue()  # type: ignore[attr-defined]


def test_names_that_look_like_markup_are_printed_as_they_are() -> None:
    text = drawn(show_plan, make_plan(model_name="[bold]x[/] :smile:", warnings=("[red]not markup",)))
    assert "[bold]x[/] :smile:" in text
    assert "! [red]not markup" in text


def test_a_plan_with_nothing_in_it_is_still_a_view() -> None:
    kv = KVPool(
        layout=replace(make_plan().kv.layout, groups=()),
        num_slabs=0,
        bytes=0,
        tokens=0,
        guaranteed_tokens=0,
        reachable_tokens=0,
    )
    empty = make_plan(lines=(), device_bytes=0, steps=(), caps=(), warnings=(), kv=kv, knobs=Knobs())
    text = drawn(show_plan, empty)
    assert "0 tokens in 0 blocks" in text
    assert "How the pool was found" not in text


def test_one_is_not_plural() -> None:
    assert "room for 1 full-length sequence of" in drawn(show_plan, make_plan(max_concurrency=1))


def test_ranks_and_origins_are_told() -> None:
    fit = LimitKnobs(max_seq_len=Setting(4096, None, Origin.FIT), max_num_tokens=Setting(1, "1", Origin.API))
    text = drawn(show_plan, make_plan(rank=Rank(index=3, size=8, tp=8), limit_knobs=fit, attended_cap=99))
    assert "rank 3 of 8" in text
    assert "max_seq_len 8,192 (the largest that fits)" in text
    assert "max_num_tokens 8,192 (api)" in flat(text)
    assert "at most 99 attended tokens in one step" in text


def test_a_run_says_what_was_served_and_what_it_held() -> None:
    text = drawn(show_run, make_run(), with_plan=False)
    assert "llama-3.1-8b on 80GiB: 80 GiB, KV for 480,000 tokens" in text
    assert "62 finished, 1 failed, 1 cancelled; 40 had to wait for memory, 7 suspensions" in text
    assert "2 steps ran out of memory and had to be tried again smaller: penalties: 4,096 bytes" in text
    assert "4,096 generated from 12,345 of prompt in 98.7 s, 41.4 a second" in text
    assert "cached    8,192 prompt tokens (66 %) found in the KV cache\n" in text
    assert "host tier 300 blocks (600 MiB) to host memory, 1 block (2 MiB) back\n" in text
    rows = {row.split("  ")[0].strip(): " ".join(row.split()) for row in text.splitlines()}
    assert rows["transient"] == "transient 912 MiB 410 MiB 930 MiB over by 18 MiB sampled"
    assert rows["context"] == "context 520 MiB – – – nobody counts it"
    assert rows["keep_free"] == "keep_free 256 MiB – – – left free"
    assert rows["unattributed"] == "unattributed 0 B 12 MiB 20 MiB unexplained own less accounts"
    assert rows["this engine"].startswith("this engine 79.75 GiB 73.96 GiB 70 GiB within")
    assert "surprise allocated for the first time after start-up: +4 KiB in step 3" in text
    assert "How the pool was found" not in text
    assert "How the pool was found" in drawn(show_run, make_run(), with_plan=True)


def test_where_nothing_was_cached_nothing_is_told_of_it() -> None:
    text = drawn(show_run, make_run(cached_prompt_tokens=0, offloaded_blocks=0, loaded_blocks=0), with_plan=False)
    assert "cached    " not in text
    assert "host tier " not in text


def with_tier(**limits: object) -> MemoryPlan:
    plan = make_plan(host=HostPlan(kv_bytes=63 * MiB, taken_bytes=62 * MiB))
    return replace(plan, limits=replace(plan.limits, **{"prefix_caching": True, **limits}))  # type: ignore[arg-type]


def test_a_run_says_how_large_its_host_tier_is() -> None:
    quiet = {"offloaded_blocks": 0, "loaded_blocks": 0}
    text = drawn(show_run, make_run(with_tier(), **quiet), with_plan=False)
    assert "host tier 31 blocks, 62 MiB (63 MiB asked)\n" in text
    text = drawn(show_run, make_run(with_tier()), with_plan=False)
    told = "host tier 31 blocks, 62 MiB (63 MiB asked); 300 blocks (600 MiB) to host memory, 1 block (2 MiB) back"
    assert told in flat(text)
    text = drawn(show_run, make_run(with_tier(prefix_caching=False), **quiet), with_plan=False)
    assert "host tier none (63 MiB asked): no prefixes are cached" in text
    older = replace(with_tier(), host=HostPlan(kv_bytes=63 * MiB))
    assert "host tier 63 MiB asked\n" in drawn(show_run, make_run(older, **quiet), with_plan=False)


@pytest.mark.parametrize(("cached", "told"), [(0, None), (8_169, 66), (8_271, 67), (12_345, 100), (61, 0), (62, 1)])
def test_the_share_that_was_cached_is_rounded(cached: int, told: int | None) -> None:
    text = drawn(show_run, make_run(cached_prompt_tokens=cached), with_plan=False)
    assert (f"({told} %)" in text) == (told is not None)


def pool_row(phase: str, *, now: int = 0, high: int = 8 * GiB, **fields: object) -> str:
    """The KV row of a run whose pool is planned at 1 GiB, and now holds so much more."""
    plan = make_plan(kv_blocks=512)
    held = replace(entry(LineKind.KV, GiB + now, high=high), high_water_phase=phase, **fields)  # type: ignore[arg-type]
    snapshot = replace(make_snapshot(plan), entries=(held,))
    text = drawn(show_run, make_run(plan, snapshot=snapshot, audit=make_audit(plan, snapshot)), with_plan=False)
    return next(flat(row) for row in text.splitlines() if row.startswith("kv "))


def test_what_the_probes_held_before_there_was_a_plan_is_not_over_it() -> None:
    assert pool_row("probe") == "kv 1 GiB 1 GiB 8 GiB in probe within now counted"
    assert pool_row("probe/decode") == pool_row("probe")
    assert pool_row("probe", now=MiB) == "kv 1 GiB 1.00 GiB 8 GiB in probe over by 1 MiB now counted"
    assert pool_row("probe", high=GiB) == "kv 1 GiB 1 GiB 1 GiB within counted"
    for phase in ("build", "close", "serve", ""):
        assert pool_row(phase) == "kv 1 GiB 1 GiB 8 GiB over by 7 GiB counted"


def test_a_run_whose_own_memory_is_unknown_says_so() -> None:
    plan = make_plan()
    snapshot = replace(make_snapshot(plan), own=None, unattributed=None)
    text = drawn(show_run, make_run(plan, snapshot=snapshot, peak_own_bytes=None, audit=(), stages=()), with_plan=False)
    assert "this engine 79.75 GiB – – –" in flat(text)


def test_an_engine_that_held_more_than_its_plan_is_told() -> None:
    result = make_run(peak_own_bytes=81 * GiB)
    assert planned_own_bytes(result) == 80 * GiB - 256 * MiB
    assert "over by 1.25 GiB" in drawn(show_run, result, with_plan=False)


def other_plan() -> MemoryPlan:
    knobs = Knobs(kv_tokens=Setting.flag(448_000, "448k", "--kv-tokens"))
    plan = make_plan(kv_blocks=28_000, weights=16 * GiB, knobs=knobs, max_concurrency=54)
    first = replace(plan.lines[0], source=Source.MEASURED)
    return replace(plan, lines=(first, *plan.lines[1:-1], replace(plan.lines[-1], name="left over")))


def test_a_diff_says_what_moved_and_why() -> None:
    diff = diff_files(PlanFile(make_plan()), PlanFile(other_plan()), names=("a.json", "b.json"))
    assert {(change.name, change.before, change.after) for change in diff.settings} == {
        ("kv_tokens", None, 448_000),
        ("kv_fraction", "9/10", None),
        ("disabled_claims", "a, b", None),
    }
    moved = {change.name: change for change in diff.lines if change.delta_bytes}
    assert moved.keys() == {"weights", "kv", "rounding", "left over"}
    assert moved["weights"].why.startswith("derived before, measured now")
    assert moved["kv"].why == "limited by device"
    assert moved["rounding"].why == "gone"
    assert moved["left over"].why.startswith("new")
    assert sum(change.delta_bytes for change in diff.lines if change.top) == 0
    text = drawn(show_diff, diff)
    assert "a.json → b.json: 3 settings and 4 lines differ" in text
    assert "kv_fraction 9/10 not set" in flat(text)
    assert "kv.tokens 480,000 448,000 -32,000" in flat(text)


def test_a_diff_of_equal_files_says_so() -> None:
    text = drawn(show_diff, diff_files(PlanFile(make_plan()), PlanFile(make_plan()), names=("a", "b")))
    assert text == "a → b: nothing differs\n"


def test_a_diff_of_runs_compares_what_was_cached_and_the_host_tier() -> None:
    first = make_run(with_tier(), offloaded_blocks=0, cached_prompt_tokens=0)
    second = make_run(replace(with_tier(), host=HostPlan(kv_bytes=127 * MiB, taken_bytes=126 * MiB)), suspensions=9)
    diff = diff_files(RunFile(first), RunFile(second), names=("a", "b"))
    assert [(change.name, change.before, change.after) for change in (*diff.pool, *diff.run)] == [
        ("host.taken_bytes", 62 * MiB, 126 * MiB),
        ("suspensions", 7, 9),
        ("cached_prompt_tokens", 0, 8192),
        ("offloaded_blocks", 0, 300),
    ]
    assert "host.taken_bytes 62 MiB 126 MiB +64 MiB" in flat(drawn(show_diff, diff))


def test_a_diff_of_runs_compares_counts_too() -> None:
    first, second = make_run(), make_run(finished=64, elapsed_ms=80_000)
    diff = diff_files(RunFile(first), RunFile(second), names=("a", "b"))
    assert [change.name for change in diff.run] == ["finished", "elapsed_ms", "tokens_per_second"]
    assert "finished" in drawn(show_diff, diff)
    assert '"schema": "tonnage.diff/1"' in diff_text(diff)
    assert diff_files(RunFile(first), PlanFile(make_plan()), names=("a", "b")).run == ()


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=8), st.integers(1, 60))
def test_slices_stack_up_to_a_full_bar(sizes: list[int], width: int) -> None:
    whole, start, full = sum(sizes), 0, 0
    for size in sizes:
        bar = slice_bar(start, size, whole, width=width)
        assert len(bar) == width
        assert bool(bar.strip()) == (size > 0)
        full += bar.count("█")
        start += size
    assert full == (width if whole else 0)


def test_a_bar_without_unicode() -> None:
    assert slice_bar(0, 1, 2, width=4, ascii_only=True) == "##  "


@pytest.mark.parametrize(
    ("part", "whole", "told"),
    [(1, 3, "33.3 %"), (0, 5, "0.0 %"), (1, 10**9, "<0.1 %"), (5, 5, "100.0 %"), (1, 0, "-")],
)
def test_shares(part: int, whole: int, told: str) -> None:
    assert share(part, whole) == told


def test_ranges_say_the_unit_once() -> None:
    assert spread(400 * MiB, 640 * MiB) == "400 – 640 MiB"
    assert spread(400 * MiB, 2 * GiB) == "400 MiB – 2 GiB"
    assert spread(5, 5) == ""


@pytest.mark.parametrize(("tokens", "ms", "told"), [(4096, 98_765, "41.4"), (5, 0, "0.0"), (1, 3, "333.3")])
def test_tokens_per_second(tokens: int, ms: int, told: str) -> None:
    assert make_run(generated_tokens=tokens, elapsed_ms=ms).tokens_per_second == told


def test_a_line_over_several_accounts_names_every_way_it_is_known() -> None:
    plan = make_plan()
    snapshot = make_snapshot(plan)
    both = (*snapshot.entries, replace(entry(LineKind.TRANSIENT, 5), owner="other"))
    text = drawn(show_run, make_run(plan, snapshot=replace(snapshot, entries=both)), with_plan=False)
    assert "sampled, counted" in text


def test_an_account_that_is_the_remainder_says_so() -> None:
    plan = make_plan()
    snapshot = make_snapshot(plan)
    rest = entry(LineKind.CONTEXT, 500 * MiB, how=How.REMAINDER)
    snapshot = replace(snapshot, entries=(*snapshot.entries, rest))
    text = drawn(show_run, make_run(plan, snapshot=snapshot, audit=make_audit(plan, snapshot)), with_plan=False)
    assert "context 520 MiB 500 MiB 500 MiB within remainder" in flat(text)


def test_two_lines_of_one_kind_are_two_rows_of_a_plan_and_one_of_the_ledger() -> None:
    plan = with_fragmentation(make_plan())
    rows = [flat(row) for row in drawn(show_plan, plan).splitlines()]
    assert any(row.startswith("activations") and " 912 MiB " in row for row in rows)
    assert any(row.startswith("fragmentation") and " 200 MiB " in row for row in rows)
    told = [flat(row) for row in drawn(show_run, make_run(plan), with_plan=False).splitlines()]
    assert [row for row in told if row.startswith(("transient", "fragmentation"))] == [
        "transient 1.09 GiB 410 MiB 930 MiB within sampled"
    ]


def test_a_diff_matches_lines_of_one_kind_by_their_names() -> None:
    before = with_fragmentation(make_plan(), 200 * MiB)
    # in another order: neither the place nor the kind may decide
    after = with_fragmentation(make_plan(), 300 * MiB)
    after = replace(after, lines=(after.lines[-2], *after.lines[:-2], after.lines[-1]))
    diff = diff_files(RunFile(make_run(before)), RunFile(make_run(after)), names=("a", "b"))
    assert {change.name: change.delta_bytes for change in diff.lines if change.delta_bytes} == {
        "fragmentation": 100 * MiB,
        "rounding": -100 * MiB,
    }
    assert diff.run == ()
    gone = diff_files(PlanFile(before), PlanFile(make_plan()), names=("a", "b"))
    moved = {change.name: change.delta_bytes for change in gone.lines if change.delta_bytes}
    assert moved == {"fragmentation": -200 * MiB, "rounding": 200 * MiB}


def test_a_child_does_not_add_to_the_bar() -> None:
    parent = line(LineKind.TRANSIENT, 100, children=(line(LineKind.TRANSIENT, 60, name="prefill"),))
    plan = make_plan(lines=(parent, line(LineKind.KV, 100)), device_bytes=200)
    rows = [row for row in drawn(show_plan, plan).splitlines() if "█" in row]
    assert [row.split()[0] for row in rows] == ["transient", "kv"]


def test_settings_that_came_from_a_fraction_are_told_as_typed() -> None:
    plan = make_plan(knobs=Knobs(kv_fraction=Setting(Fraction(1, 3), "1/3", Origin.FILE, "knobs.json")))
    assert "kv_fraction 1/3 (knobs.json)" in drawn(show_plan, plan)


def test_a_reader_that_went_away_is_for_the_program_to_end() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        console_for(Closed()).print("a")


@pytest.mark.parametrize(("columns", "width"), [("0", 100), ("-5", 100), ("x", 100), ("", 100), ("1", 20), ("57", 57)])
def test_a_width_that_is_none_is_not_taken(monkeypatch: pytest.MonkeyPatch, columns: str, width: int) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert console_for(io.StringIO()).width == width


@pytest.mark.parametrize("width", [20, 40, 100])
def test_a_table_is_never_cut(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    show(
        [grid(["name", "tokens>", "what for"], [("a long name of a term", "450,032", "many words that may wrap")])],
        console,
    )
    assert isinstance(console.file, io.StringIO)
    told = console.file.getvalue()
    assert "a long name of a term" in told
    assert "450,032" in told
    assert console.width == width
