"""The flags of other engines at the end of a plan, in its file, and on the command line."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
from cli_fakes import Ended, tonnage_fixture  # noqa: F401 - a fixture
from report_samples import line, make_plan
from rich.console import Console

from tonnage.config import Knobs, Limits, Setting
from tonnage.hardware import find_card
from tonnage.layout import KVGroupKind
from tonnage.peers import ENGINES, KNOBS, equivalents
from tonnage.peers.equivalent import ONE
from tonnage.peers.which import KNOWN
from tonnage.planner import find_config, plan_without_device
from tonnage.report import parse_plan, plan_document, plan_text
from tonnage.report.flags import command, equivalent_document, flags_text
from tonnage.report.table import show_plan
from tonnage.terms import LineKind
from tonnage.units import GiB

Program = Callable[..., Ended]
SMOLLM2, H100 = find_config("smollm2"), find_card("H100")
PLAN = plan_without_device(SMOLLM2, card=H100)
DEVICE, OUTSIDE, KV = 85_029_027_840, 688 * 2**20, PLAN.kv.bytes


def flat(text: str) -> str:
    return " ".join(text.split())


def known(**values: object) -> Knobs:
    return Knobs(**{name: Setting.flag(value, value, f"--{name}") for name, value in values.items()})


def test_every_flag_is_a_knob_that_can_be_typed_back() -> None:
    understood = {knob.full_name for knob in KNOBS}
    eager = replace(PLAN, limits=replace(PLAN.limits, graph_batch_sizes=()), knobs=known(kv_dtype="bfloat16"))
    for plan in (PLAN, eager):
        for each in equivalents(plan):
            assert {text.split("=")[0] for text in (*each.likes(), *each.likes(by_fraction=True))} <= understood


def test_the_numbers_of_a_plan_in_three_tongues() -> None:
    document = equivalent_document(PLAN)
    assert list(document) == [engine.name for engine in ENGINES] == ["vllm", "sglang", "trtllm"]
    assert document["vllm"]["exact"] == {"kv_cache_memory_bytes": str(KV)}
    assert document["sglang"]["exact"]["max_total_tokens"] == str(PLAN.kv.tokens)
    trtllm = document["trtllm"]["exact"]
    assert (trtllm["max_tokens"], trtllm["max_gpu_total_bytes"]) == (str(PLAN.kv.tokens), str(KV))
    assert document["vllm"]["limits"] == {
        "max_model_len": "8192", "max_num_seqs": "256", "max_num_batched_tokens": "8192", "block_size": "16",
    }  # fmt: skip


def test_fractions_are_cut_where_they_decide_and_rounded_up_where_a_size_does() -> None:
    document = equivalent_document(PLAN)
    left = sum(each.bytes for each in PLAN.lines if each.name in ("keep_free", "part of a block"))
    vllm = Fraction(DEVICE - left - OUTSIDE, DEVICE)
    assert document["vllm"]["fraction"] == {"gpu_memory_utilization": f"0.{int(vllm * ONE):04d}"}
    before = DEVICE - OUTSIDE
    sglang = Fraction(KV + PLAN.bytes_of(LineKind.WEIGHTS), before)
    assert document["sglang"]["fraction"] == {"mem_fraction_static": f"0.{int(sglang * ONE):04d}"}
    assert document["sglang"]["exact"]["mem_fraction_static"] == f"0.{int(sglang * ONE) + 1:04d}"
    for engine in ("sglang", "trtllm"):
        ((name, down),) = document[engine]["fraction"].items()
        assert Fraction(document[engine]["exact"][name]) - Fraction(down) == Fraction(1, ONE)


def test_caps_do_not_change_what_a_fraction_is_a_share_of() -> None:
    half = plan_without_device(SMOLLM2, card=H100, knobs=known(kv_fraction=Fraction(1, 2), keep_free_bytes=0))
    share = Fraction(equivalent_document(half)["trtllm"]["fraction"]["free_gpu_memory_fraction"])
    assert Fraction(1, 2) - Fraction(2, ONE) <= share <= Fraction(1, 2)
    capped = plan_without_device(SMOLLM2, card=H100, knobs=known(total_bytes=40 * GiB))
    vllm = Fraction(equivalent_document(capped)["vllm"]["fraction"]["gpu_memory_utilization"])
    assert abs(vllm - Fraction(40 * GiB - OUTSIDE, DEVICE)) <= Fraction(2, ONE)


@pytest.mark.parametrize(
    ("dtype", "vllm", "trtllm"),
    [
        (None, None, None), ("float8_e4m3fn", "fp8_e4m3", "fp8"), ("bfloat16", "bfloat16", "bfloat16"),
        ("float8_e5m2", "fp8_e5m2", "a cache in float8_e5m2 has no name here"),
        ("float32", "a cache in float32 has no name here", "a cache in float32 has no name here"),
    ],
)  # fmt: skip
def test_the_type_of_the_cache_is_said_where_it_was_asked_for(
    dtype: str | None, vllm: str | None, trtllm: str | None
) -> None:
    document = equivalent_document(replace(PLAN, knobs=Knobs() if dtype is None else known(kv_dtype=dtype)))
    for engine, name, wanted in (("vllm", "kv_cache_dtype", vllm), ("trtllm", "dtype", trtllm)):
        told = document[engine]["limits"].get(name), "; ".join(document[engine]["notes"])
        assert told == (None, "") if wanted is None else wanted in (told[0] or "") + told[1]


def test_graphs_blocks_and_kinds_of_layers_that_need_a_word() -> None:
    limits = Limits(max_seq_len=8192, max_batch_size=256, max_num_tokens=8192, max_logits_rows=256)
    (full,) = PLAN.kv.layout.groups
    window = replace(full, kind=KVGroupKind.WINDOW, window=128)
    pool = replace(PLAN.kv, layout=replace(PLAN.kv.layout, groups=(window,)))
    odd = replace(PLAN, knobs=known(block_tokens=48), limits=limits, kv=pool)
    document = equivalent_document(odd)
    assert document["vllm"]["limits"]["enforce_eager"] == "true"
    assert document["sglang"]["limits"]["disable_cuda_graph"] == "true"
    assert document["trtllm"]["limits"]["cuda_graph_config"] == "null"
    assert document["vllm"]["limits"]["no_enable_prefix_caching"] == "true"
    assert document["sglang"]["limits"]["disable_radix_cache"] == "true"
    assert document["trtllm"]["limits"]["enable_block_reuse"] == "false"
    cache = command(equivalents(odd)[2], equivalents(odd)[2].limits).partition("kv_cache_config")[2]
    assert "enable_block_reuse: false" in cache
    notes = document["trtllm"]["notes"]
    assert notes[0] == "tokens_per_block must be a power of two above 1, and this plan has 48"
    assert "a pool for each window" in notes[1]
    assert "--enforce-eager " in command(equivalents(odd)[0], [*equivalents(odd)[0].limits, ("x", "y")])


def test_a_plan_with_nothing_to_share_has_no_fraction() -> None:
    context = (line(LineKind.CONTEXT, 5 * GiB),)
    empty = make_plan(
        lines=context, device_bytes=5 * GiB, steps=(), kv=replace(PLAN.kv, bytes=0, tokens=0, num_slabs=0)
    )
    for each in equivalents(empty):
        assert (each.exact, each.fraction) == ((), ())
        assert flags_text(empty, 80)


@pytest.mark.parametrize("width", [40, 80, 100, 160])
def test_the_view_ends_with_them_and_fits_its_width(width: int) -> None:
    out = io.StringIO()
    show_plan(PLAN, Console(file=out, width=width, highlight=False, markup=False, emoji=False))
    end = out.getvalue()[out.getvalue().index("About the same pool elsewhere") :]
    told = flat(end.replace(" \\\n", " "))
    assert f"--block-size 16 --kv-cache-memory-bytes {KV} by its share alone: gpu_memory_utilization 0." in told
    assert f"--max-total-tokens {PLAN.kv.tokens} by its share alone: mem_fraction_static 0." in told
    assert "kv_cache_config: {tokens_per_block: 16, free_gpu_memory_fraction: 0." in told
    assert told.endswith("free_gpu_memory_fraction 0.9, tokens_per_block 32")
    for engine in ENGINES:
        assert f"its defaults (version {engine.version}):" in told
    longest = max(len(word) for word in end.split()) + 14 + len(" \\")
    assert max(len(row) for row in end.splitlines()) <= max(width, longest)


def test_the_file_has_them_and_does_not_read_them() -> None:
    document = plan_document(PLAN)
    assert document["equivalent"] == equivalent_document(PLAN)
    for other in ({"vllm": "something else"}, None, 3):
        read = parse_plan(json.dumps({**document, "equivalent": other}), file="p.json")
        assert (read.plan, dict(read.extra)) == (PLAN, {})
        assert read.text() == plan_text(PLAN)
    del document["equivalent"]
    assert parse_plan(json.dumps(document), file="p.json").text() == plan_text(PLAN)


def test_the_verb_takes_them(tonnage: Program) -> None:
    like = ["--like", "vllm:gpu_memory_utilization=0.5", "--like", "vllm:max_model_len=4K"]
    ended = tonnage("plan", "smollm2", "--device", "H100", "--json", *like)
    assert (ended.code, ended.err) == (0, "")
    made = parse_plan(ended.out, file="stdout").plan
    assert made.knobs.total_bytes.value == DEVICE // 2 + OUTSIDE
    assert made.limits.max_seq_len == 4096
    assert made.knobs.total_bytes.where == "--like vllm:gpu_memory_utilization=0.5"
    assert any(text.startswith("--like vllm:gpu_memory_utilization=0.5: a share") for text in made.warnings)
    used = made.device_bytes - sum(each.bytes for each in made.lines if each.kind in (LineKind.SLACK,))
    assert used <= DEVICE // 2 + OUTSIDE


def test_the_verb_lists_them_whatever_else_was_typed(tonnage: Program) -> None:
    ended = tonnage("plan", "--like", "help")
    assert (ended.code, ended.err) == (0, "")
    translated, own = ended.out.split("\n\n")
    assert [row.split()[0] for row in translated.splitlines()] == [knob.full_name for knob in KNOBS]
    told, *engines = own.splitlines()
    assert "--engine" in told
    assert [row.partition(":")[0] for row in engines] == [known.name for known in KNOWN]


def test_the_verb_tells_what_it_cannot_translate(tonnage: Program) -> None:
    ended = tonnage("plan", "smollm2", "--device", "H100", "--like", "vllm:max_num_seq=3")
    assert (ended.code, ended.out) == (2, "")
    assert "did you mean max_num_seqs?" in ended.err
    ended = tonnage("plan", "smollm2", "--device", "H100", "--kv-tokens", "9000", "--like", "trtllm:max_tokens=9000")
    assert "--kv-tokens and --like trtllm:max_tokens=9000 both set kv_tokens" in ended.err
