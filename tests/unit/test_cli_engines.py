"""``plan --engine``, ``--compare`` and ``diff --engine``: what is printed, how it ends, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_fakes import Ended, tonnage_fixture  # noqa: F401 - a fixture

from tonnage.peers.corrections import Correction, dumps
from tonnage.peers.launch import Launch
from tonnage.peers.loading import PACKINGS
from tonnage.peers.own_settings import OURS, OWN
from tonnage.peers.predict import RULES
from tonnage.peers.start import Count, Start
from tonnage.peers.which import KNOWN
from tonnage.units import GiB

Program = Callable[..., Ended]

REAL = RULES["vllm"]
LLAMA = str(Path(__file__).resolve().parents[2] / "examples" / "configs" / "llama-3.1-8b")
H100 = (LLAMA, "--device", "H100")


@pytest.fixture(autouse=True)
def paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "vllm", "fake_vllm:predict")


def start_of(tonnage: Program, *flags: str, code: int = 0) -> dict:
    ended = tonnage("plan", *H100, "--json", *flags)
    assert (ended.code, ended.err) == (code, "")
    return json.loads(ended.out)


def refused(tonnage: Program, *argv: str) -> str:
    ended = tonnage(*argv)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.count("\n") == 1
    return ended.err


def test_a_start_is_told_whole(tonnage: Program) -> None:
    ended = tonnage("plan", *H100, "--engine", "sglang==0.5.23", "--like", "sglang:context-length=8192")
    assert ended.code == 0
    for piece in (
        *("SGLang 0.5.23: llama-3.1-8b on H100-80GB", "context_length = 8,192", "token pool", "outside its budget"),
        *("max_total_num_tokens=", "context_len=8192", "Defaults taken", "mem_fraction_static   0.830"),
        *("pool above zero: yes", "rest holds graphs and activations: yes", "since 0.5.10", "source of 0.5.23"),
    ):
        assert piece in ended.out, piece
    assert "none was named" not in ended.out


def test_json_says_the_same(tonnage: Program) -> None:
    made = start_of(tonnage, "--engine", "sglang==0.5.23", "--like", "sglang:mem_fraction_static=0.85")
    assert (made["schema"], made["engine"], made["version"]) == ("tonnage.engine-start/1", "sglang", "0.5.23")
    assert made["settings"] == {"mem_fraction_static": "17/20"}
    assert sum(term["bytes"] for term in made["terms"]) == made["device_bytes"]
    assert made["starts"] is True
    assert all(term["rule"]["says"] for term in made["terms"])


def test_a_name_alone_is_the_newest_and_says_so(tonnage: Program) -> None:
    assert start_of(tonnage, "--engine", "sgl")["version"] == "0.5.23"
    assert "0.5.23 is the newest whose rules are known" in tonnage("plan", *H100, "--engine", "sglang").out
    assert start_of(tonnage, "--engine", "llama.cpp==b9265")["version"] == "b9265"


def test_our_limits_are_theirs_too(tonnage: Program) -> None:
    ours = start_of(
        tonnage, "--engine", "sglang", "--max-seq-len", "8192", "--max-batch-size", "64", "--graphs", "none",
        "--kv-dtype", "fp8", "--tp", "2",
    )  # fmt: skip
    theirs = start_of(
        tonnage, "--engine", "sglang", "--like", "sglang:context_length=8192", "--like",
        "sglang:max_running_requests=64", "--like", "sglang:disable_cuda_graph", "--like",
        "sglang:kv_cache_dtype=fp8_e4m3", "--tp", "2",
    )  # fmt: skip
    assert ours == theirs
    assert (ours["kv_dtype"], ours["rank"]["tp"]) == ("float8_e4m3fn", 2)
    assert start_of(tonnage, "--engine", "trtllm", "--graphs", "1,2,4")["settings"] == {"batch_sizes": [1, 2, 4]}


def test_what_a_log_taught_is_in_the_start_and_told(
    tonnage: Program, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setitem(RULES, "vllm", REAL)
    asked = ("--engine", "vllm==0.19")
    before = start_of(tonnage, *asked)
    name = next(term["name"] for term in before["terms"] if term["name"].startswith("non-torch"))
    taught = Correction(
        engine="vllm", minor="0.19", card=before["device"], tp=1, pp=1, model=before["model"], log="vllm.log",
        terms={name: 2**30}, rules={name: next(t["bytes"] for t in before["terms"] if t["name"] == name)},
    )  # fmt: skip
    kept = tmp_path / "kept.json"
    kept.write_text(dumps([taught]))
    after = start_of(tonnage, *asked, "--corrections", str(kept))
    assert before["pool"]["bytes"] - after["pool"]["bytes"] == pytest.approx(2**30, rel=0.01)
    assert "corrected by a log: vllm.log" in after["notes"][-1]
    moved = json.loads(
        tonnage("diff", *H100, "--json", *asked, "--engine", "vllm==0.20", "--corrections", str(kept)).out
    )
    assert moved["before_pool_bytes"] == after["pool"]["bytes"]
    assert "starts of other engines" in refused(tonnage, "plan", *H100, "--corrections", str(kept))


def test_plain_weights_may_be_packed_as_they_are_loaded(tonnage: Program) -> None:
    def weights(engine: str, *packing: str) -> int:
        likes = [word for name in packing for word in ("--like", f"{engine}:quantization={name}")]
        made = start_of(tonnage, "--engine", engine, *likes)
        return next(term["bytes"] for term in made["terms"] if term["name"] == "weights")

    for engine in ("vllm", "sglang"):
        found = weights(engine), *(weights(engine, name) for name in PACKINGS)
        assert found == pytest.approx((14.96 * GiB, 8.46 * GiB, 5.61 * GiB), rel=2e-3)
    told = refused(tonnage, "plan", *H100, "--engine", "vllm", "--like", "vllm:quantization=awq")
    assert "write fp8 or bitsandbytes, or give the checkpoint that is packed" in told


def test_a_refused_start_is_shown_and_ends_with_2(tonnage: Program) -> None:
    ended = tonnage(
        "plan", LLAMA, "--memory", "24GiB", "--engine", "sglang", "--like", "sglang:mem_fraction_static=0.3"
    )
    assert (ended.code, ended.err) == (2, "")
    assert "starts  no: see the checks" in ended.out
    assert "to change: --mem-fraction-static 0." in ended.out


def test_a_start_that_depends_ends_with_0(tonnage: Program) -> None:
    made = start_of(tonnage, "--engine", "sglang", "--like", "sglang:mem_fraction_static=0.93")
    assert made["starts"] is None
    out = tonnage("plan", *H100, "--engine", "sglang", "--like", "sglang:mem_fraction_static=0.93").out
    assert "it depends: see the checks" in out


def test_several_stand_beside_our_own_plan(tonnage: Program) -> None:
    flags = ("--engine", "vllm==0.19", "--engine", "sglang==0.5.23", "--max-seq-len", "4096", "--kv-fraction", "0.9")
    ended = tonnage("plan", *H100, *flags)
    assert ended.code == 0
    for piece in ("vLLM 0.19", "SGLang 0.5.23", "Tonnage", "what gives way first", "own budget would hold"):
        assert piece in ended.out
    made = json.loads(tonnage("plan", *H100, *flags, "--json").out)
    assert made["schema"] == "tonnage.engine-compare/1"
    assert [row["told"] for row in made["rows"]] == ["vLLM 0.19", "SGLang 0.5.23", "Tonnage"]
    own = json.loads(tonnage("plan", *H100, "--max-seq-len", "4096", "--kv-fraction", "0.9", "--json").out)
    assert made["rows"][-1]["tokens"] == own["kv"]["tokens"]
    assert {row["seq_len"] for row in made["rows"]} == {4096}


def test_the_rules_of_vllm_itself(tonnage: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "vllm", REAL)
    made = start_of(tonnage, "--engine", "vllm==0.19", "--like", "vllm:max_num_seqs=256", "--max-seq-len", "8192")
    assert sum(term["bytes"] for term in made["terms"]) == made["device_bytes"]
    assert any(line.startswith("GPU KV cache size: ") for line in made["log"])
    out = tonnage("diff", *H100, "--engine", "vllm==0.19", "--engine", "vllm==0.21", "--max-seq-len", "8192").out
    told = " ".join(out.split())
    assert "gpu_memory_utilization, 0.92 where it was 0.9" in told
    assert "graphs (-" in told
    assert start_of(tonnage, "--engine", "vllm==0.21", "--like", "vllm:max_model_len=auto")["starts"] is True


def test_a_context_of_several_slots_is_that_of_all(tonnage: Program) -> None:
    made = start_of(tonnage, "--engine", "llamacpp", "--max-seq-len", "4096", "--max-batch-size", "8")
    assert (made["tokens"]["best"], made["max_model_len"]) == (32_768, 4096)
    assert made["concurrency_thousandths"]["best"] == 8000


def test_compare_alone_takes_all(tonnage: Program) -> None:
    made = json.loads(tonnage("plan", *H100, "--compare", "--json").out)
    assert [start["engine"] for start in made["starts"]] == [known.name for known in KNOWN]
    assert "vLLM 0.33, SGLang 0.5.23, TensorRT-LLM 1.2, llama.cpp b9900" in made["notes"][0]
    split = json.loads(tonnage("plan", *H100, "--compare", "--tp", "2", "--json").out)
    assert [start["engine"] for start in split["starts"]] == ["vllm", "sglang", "trtllm"]
    assert "whole layers" in split["notes"][0]


def test_of_several_stages_the_smallest_is_told(tonnage: Program) -> None:
    flags = ("--engine", "sglang", "--pp", "2", "--stage-layers", "20,12")
    assert start_of(tonnage, *flags)["rank"]["index"] == 0
    last = start_of(tonnage, *flags, "--stage", "1")
    assert last["rank"]["index"] == 1
    assert last["tokens"]["best"] > start_of(tonnage, *flags)["tokens"]["best"]


def test_of_several_stages_one_that_fails_is_told(tonnage: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds more tokens than the other, and ends the start all the same."""
    from dataclasses import replace

    from tonnage.peers import predict as module

    real = module.predict

    def predict(launch: Launch) -> Start:
        found = real(launch)
        if launch.rank.index == 0:
            return found
        assert found.tokens is not None
        failed = replace(found.checks[0], passes=False)
        return replace(found, checks=(failed,), tokens=Count.exact(10 * found.tokens.best))

    monkeypatch.setattr(module, "predict", predict)
    made = start_of(tonnage, "--engine", "sglang", "--pp", "2", code=2)
    assert (made["rank"]["index"], made["starts"]) == (1, False)


def test_what_pushes_against_is_told_too(tonnage: Program) -> None:
    out = tonnage("diff", *H100, "--engine", "vllm==0.19", "--engine", "sglang==0.4.6", "--max-seq-len", "4096").out
    told = " ".join(out.split())
    assert "because of how it is sized (-2." in told
    up = tonnage("diff", *H100, "--engine", "vllm==0.21", "--engine", "sglang==0.4.6", "--max-seq-len", "4096").out
    assert "because of graphs (+10 GiB: no longer deducted" in " ".join(up.split())
    assert "; against it, how it is sized (-2." in " ".join(up.split())


def test_a_comparison_outlives_our_own_refusal(tonnage: Program) -> None:
    flags = ("--engine", "llamacpp", "--compare", "--memory", "10GiB")
    ended = tonnage("plan", LLAMA, *flags)
    assert ended.code == 0
    assert "Tonnage has no plan:" in ended.out
    assert json.loads(tonnage("plan", LLAMA, *flags, "--json").out)["refused"]


def test_an_upgrade_says_what_moves_and_why(tonnage: Program) -> None:
    argv = ("diff", *H100, "--engine", "vllm==0.19", "--engine", "vllm==0.21")
    ended = tonnage(*argv)
    assert ended.code == 0
    told = " ".join(ended.out.split())
    assert "Going from vLLM 0.19 to vLLM 0.21 moves your pool by -18 % (56.3 -> 46.3 GiB), because of graphs" in told
    assert "(-10 GiB: deducted before the pool now: Graphs are deducted before the pool, since 0.21)" in told
    made = json.loads(tonnage(*argv, "--json").out)
    assert made["schema"] == "tonnage.engine-diff/1"
    sizes = [abs(term["delta_bytes"]) for term in made["terms"]]
    assert sizes == sorted(sizes, reverse=True)
    graphs = next(term for term in made["terms"] if term["name"] == "graphs")
    assert (graphs["delta_bytes"], graphs["on_pool_bytes"]) == (0, -10 * 2**30)


def test_a_default_that_moves_the_pool_is_the_reason(tonnage: Program) -> None:
    out = tonnage("diff", *H100, "--engine", "sglang==0.4.6", "--engine", "sglang==0.5.23").out
    told = " ".join(out.split())
    assert "because of mem_fraction_static, 0.830 where it was 0.880 (-3.92 GiB: leaves 512 MiB" in told
    same = tonnage("diff", *H100, "--engine", "sglang==0.5.22", "--engine", "sglang==0.5.23").out
    assert "leaves your pool as it is" in same


def test_two_engines_are_told_apart(tonnage: Program) -> None:
    out = tonnage("diff", *H100, "--engine", "vllm==0.19", "--engine", "trtllm==1.2", "--max-seq-len", "4096").out
    assert "TensorRT-LLM 1.2 in the place of vLLM 0.19 moves your pool" in " ".join(out.split())


BAD: list[tuple[tuple[str, ...], str]] = [
    (("plan", *H100, "--engine", "vlm"), "no rules of an engine 'vlm' here; did you mean vllm"),
    (("plan", *H100, "--engine", "vllm=0.19"), "write vllm==0.19"),
    (("plan", *H100, "--engine", "vllm=="), "no release behind the name"),
    (("plan", *H100, "--engine", "vllm==abc"), "no release has such a name"),
    (("plan", *H100, "--engine", "llamacpp==1.0"), "write one such as b9265"),
    (("plan", *H100, "--engine", "vllm", "--engine", "vllm"), "named twice"),
    (("plan", *H100, "--engine", "sglang", "--kv-fraction", "0.5"), "--kv-fraction has no counterpart in SGLang"),
    (("plan", *H100, "--engine", "sglang", "--explain"), "--explain is about our own plan"),
    (("plan", *H100, "--engine", "sglang", "--attention", "triton"), "--attention is about our own plan"),
    (("plan", *H100, "--engine", "vllm==0.0.0"), "vLLM began with 0.1. To change: write 0.1 or a later one"),
    (("plan", *H100, "--engine", "trtllm==0.4.9"), "TensorRT-LLM began with 0.5"),
    (("plan", *H100, "--engine", "sglang", "--like", "vllm:max_num_seqs=4"), "no start of it is asked for"),
    (("plan", *H100, "--engine", "sglang", "--like", "sglang:tp_size=2"), "use --tp N"),
    (("plan", *H100, "--engine", "sglang", "--like", "sglang:mem_fraction=1"), "did you mean mem_fraction_static"),
    (("plan", *H100, "--engine", "sglang", "--like", "sglang:page_size"), "has no value"),
    (("plan", *H100, "--engine", "sglang", "--like", "sglang:page_size=many"), "sglang:page_size = 'many'"),
    (("plan", *H100, "--engine", "sglang", "--like", "page_size=1"), "names no engine"),
    (("plan", *H100, "--engine", "sglang", "--like", "sglang:page_size=1", "--like", "sglang:page-size=2"),
     "page_size is set twice"),
    (("plan", *H100, "--engine", "sglang", "--like", "sglang:page_size=1", "--block-tokens", "2"),
     "both set page_size"),
    (("plan", LLAMA, "--device", "host", "--memory", "8GiB", "--engine", "vllm"), "the device is host memory"),
    (("plan", *H100, "--engine", "llamacpp", "--tp", "2"), "write --pp 2"),
    (("diff", LLAMA, "--engine", "vllm"), "1 --engine was given"),
    (("diff", LLAMA, "other", "--engine", "vllm", "--engine", "sglang"), "a second file, other,"),
    (("diff", LLAMA, "--engine", "vllm", "--engine", "sglang"), "tonnage diff does not know the device"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "piece"), BAD, ids=lambda each: " ".join(each[-2:]) if isinstance(each, tuple) else ""
)
def test_what_cannot_be_is_told_in_one_paragraph(tonnage: Program, argv: tuple[str, ...], piece: str) -> None:
    assert piece in refused(tonnage, *argv)


def test_every_engine_has_words_for_what_it_reads() -> None:
    assert set(OWN) == set(OURS) == set(RULES) == {known.name for known in KNOWN}
    for engine, words in OURS.items():
        names = {knob.field or knob.name for knob in OWN[engine]}
        assert set(words.values()) <= names | {"kv_dtype"}, engine
        spellings = [each for knob in OWN[engine] for each in (knob.name, *knob.aliases)]
        assert len(set(spellings)) == len(spellings), engine


def test_help_lists_every_engines_own_knobs(tonnage: Program) -> None:
    told = tonnage("plan", "x", "--like", "help")
    assert told.code == 0
    for engine, knobs in OWN.items():
        assert f"{engine}: {', '.join(knob.name for knob in knobs)}" in told.out


def test_the_page_shows_what_is_printed(tonnage: Program) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "engines.md").read_text(encoding="utf-8")
    told = tonnage("diff", *H100, "--engine", "sglang==0.4.6", "--engine", "sglang==0.5.23").out
    headline = " ".join(told.split("\n\n")[0].split())
    assert headline in " ".join(page.split())


def test_a_release_beyond_the_rules_says_whose_rules_are_taken(tonnage: Program) -> None:
    told = "is newer than 0.5.23, the newest release whose rules are known"
    assert told in start_of(tonnage, "--engine", "sglang==0.9")["notes"][-1]
    for known in ("sglang==0.5.23", "sglang==0.5.23.post1", "sglang==0.5.2"):
        assert not any("is newer than" in note for note in start_of(tonnage, "--engine", known)["notes"])
    compared = json.loads(tonnage("plan", *H100, "--engine", "sglang==0.9", "--compare", "--json").out)
    assert any(told in note for note in compared["notes"])


def test_sequences_are_counted_alike_for_all_rows(tonnage: Program) -> None:
    asked = ("--engine", "sglang==0.5.23", "--compare", "--json", "--like", "sglang:context_length=131072")
    rows = json.loads(tonnage("plan", *H100, *asked).out)["rows"]
    for row in rows:
        assert row["concurrency"] == row["tokens"] * 1000 // row["seq_len"]
    assert rows[-1]["concurrency"] % 1000
