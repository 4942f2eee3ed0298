# ruff: noqa: E501 - lines of logs are as long as they are
"""Start-up logs: figures that strangers logged, printed in each engine's words, are read back and add up.

Figures are those of tests/data/shapes/starts.jsonl; the wording is that of the releases that the patterns name.
"""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import fake_rules
import peer_rows
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import raw_config, starts

from tonnage.errors import InputError, UserError
from tonnage.hardware import Card, find_card
from tonnage.peers.commands.invocation import command_of
from tonnage.peers.commands.shell import Word
from tonnage.peers.corrections import Correction, corrected, dumps, load_corrections, parse, save_correction
from tonnage.peers.logs import Log, read_log
from tonnage.peers.logs.consistency import consistency, settings_in_log
from tonnage.peers.logs.explanation import Ended, Explanation
from tonnage.peers.logs.failures import KINDS
from tonnage.peers.version import Version
from tonnage.peers.vllm import start as vllm_start
from tonnage.planner.explaining import ExplainAsked, explain_log
from tonnage.report.log_json import explanation_text
from tonnage.terms import Source
from tonnage.units import GiB, MiB

H100 = find_card("H100")
#: Records with every figure of vLLM's sum, by the core that printed them.
SUMS = ("weights_gib", "non_torch_gib", "activation_peak_gib", "kv_cache_gib", "total_gpu_memory_gib")


def _old(row: dict) -> str:
    """The words of vLLM's first core."""
    had, share = row["logged"], row["flags"]["gpu_memory_utilization"]
    total = had["total_gpu_memory_gib"]
    return (
        f"INFO 01-16 09:40:00 worker.py:238] the current vLLM instance can use total_gpu_memory ({total:.2f}GiB) x "
        f"gpu_memory_utilization ({share:.2f}) = {total * share:.2f}GiB\n"
        f"INFO 01-16 09:40:00 worker.py:238] model weights take {had['weights_gib']:.2f}GiB; non_torch_memory takes "
        f"{had['non_torch_gib']:.2f}GiB; PyTorch activation peak memory takes {had['activation_peak_gib']:.2f}GiB; the "
        f"rest of the memory reserved for KV Cache is {had['kv_cache_gib']:.2f}GiB.\n"
    )


def _new(row: dict) -> str:
    """The words of vLLM from 0.11 on."""
    had, share = row["logged"], row["flags"]["gpu_memory_utilization"]
    total = had["total_gpu_memory_gib"]
    lines = [
        f"(APIServer pid=1) INFO 04-02 10:00:00 [utils.py:233] vLLM API server version {row['engine_version']}",
        "(APIServer pid=1) INFO 04-02 10:00:00 [utils.py:253] non-default args: {'model_tag': 'org/m', 'model': "
        f"'org/m', 'gpu_memory_utilization': {share}}}",
        f"(EngineCore pid=2) INFO [gpu_model_runner.py:4821] Model loading took {had['weights_gib']} GiB memory and "
        "3.5 seconds",
        f"(EngineCore pid=2) INFO [gpu_worker.py:436] Available KV cache memory: {had['kv_cache_gib']} GiB",
    ]
    if "kv_cache_tokens" in had:
        lines.append(f"(EngineCore pid=2) INFO [x.py:1] GPU KV cache size: {had['kv_cache_tokens']:,} tokens")
    lines.append(
        f"(EngineCore pid=2) INFO [gpu_worker.py:640] Free memory on device ({total - 0.5:.2f}/{total:.2f} GiB) on "
        f"startup. Desired GPU memory utilization is ({share}, {total * share:.2f} GiB). Actual usage is "
        f"{had['weights_gib']} GiB for weight, {had['activation_peak_gib']} GiB for peak activation, "
        f"{had['non_torch_gib']} GiB for non-torch memory, and {had.get('cuda_graph_gib', 0.0)} GiB for CUDAGraph "
        "memory."
    )
    return "\n".join(lines)


def summed() -> list[dict]:
    return [
        row for row in starts()
        if row["engine"] == "vllm" and "gpu_memory_utilization" in row["flags"]
        and all(isinstance(row["logged"].get(name), int | float) for name in SUMS)
    ]  # fmt: skip


@pytest.mark.parametrize("words", [_old, _new], ids=["first core", "0.19"])
def test_logged_sums_are_read_back_and_add_up(words) -> None:
    rows = summed()
    assert len(rows) > 20
    apart = []
    for row in rows:
        log = read_log(words(row))
        for name in SUMS:
            figure = log.figure(name.removesuffix("_gib"))
            assert figure is not None, (row["id"], name)
            assert abs(figure.value - row["logged"][name] * GiB) <= figure.rounding + MiB, (row["id"], name)
        checked = {each.name: each for each in consistency(log, settings_in_log(log))}
        assert {"requested", "kv cache"} <= set(checked)
        if not checked["kv cache"].agrees:
            apart.append(row["id"])
    assert len(apart) <= len(rows) // 10  # a share that was printed with two digits and had more


SGLANG = """
[2025-11-20 10:00:00] server_args=ServerArgs(model_path='org/m', tokenizer_path='org/m', mem_fraction_static=0.851, \
tp_size=2, context_length=None, cuda_graph_bs=[1, 2, 4], disable_radix_cache=False, kv_cache_dtype='auto')
[2025-11-20 10:00:05 TP0] Init torch distributed ends. mem usage=1.96 GB
[2025-11-20 10:00:06 TP0] Load weight begin. avail mem=137.34 GB
[2025-11-20 10:00:06 TP1] Load weight begin. avail mem=136.20 GB
[2025-11-20 10:00:26 TP0] Load weight end. type=X, dtype=torch.bfloat16, avail mem=80.84 GB, mem usage=56.50 GB.
[2025-11-20 10:00:27 TP0] KV Cache is allocated. #tokens: 834,615, K size: 30.19 GB, V size: 30.19 GB
[2025-11-20 10:00:27 TP0] Memory pool end. avail mem=20.31 GB
[2025-11-20 10:00:40 TP0] Capture cuda graph end. Time elapsed: 11.39 s. mem usage=1.00 GB. avail mem=19.31 GB.
[2025-11-20 10:00:41 TP0] max_total_num_tokens=834615, chunked_prefill_size=8192, max_prefill_tokens=16384, \
max_running_requests=2048, context_len=40960, available_gpu_mem=19.31 GB
"""
TRTLLM = """
[TensorRT-LLM] TensorRT-LLM version: 1.2.0
[01/16/2026-06:20:15] [TRT-LLM] [I] Peak memory during memory usage profiling (torch + non-torch): 91.46 GiB, available \
KV cache memory when calculating max tokens: 41.10 GiB, fraction is set 0.85, kv size is 35136. device total memory \
139.81 GiB, , tmp kv_mem 0.00 GiB
[01/16/2026-06:20:16] [TRT-LLM] [I] Estimated max tokens in KV cache : 1256000
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 41.10 GiB for max tokens in paged KV cache (1256000).
"""


def test_sglang_in_its_words() -> None:
    log = read_log(SGLANG)
    assert (log.engine, log.model, log.rank) == ("sglang", "org/m", "TP0")
    told = settings_in_log(log)
    assert told == {
        "mem_fraction_static": Fraction(851, 1000), "tp_size": 2, "cuda_graph_bs": (1, 2, 4),
        "disable_radix_cache": False, "kv_cache_dtype": "auto",
    }  # fmt: skip
    rows = {row.name: row for row in consistency(log, told)}
    assert all(row.agrees for row in rows.values())
    assert set(rows) == {"weights", "kv cache", "free after pool"}
    assert log.spread("avail_before_load") is not None
    assert log.figure("max_running_requests").value == 2048  # type: ignore[union-attr]


def test_tensorrt_llm_in_its_words() -> None:
    log = read_log(TRTLLM)
    assert (log.engine, log.version) == ("trtllm", "1.2.0")
    rows = {row.name: row for row in consistency(log, {})}
    assert rows["kv cache"].agrees
    assert rows["kv cache"].found == (log.figure("total_gpu_memory").value - log.figure("peak").value) * 85 // 100  # type: ignore[union-attr]
    assert abs(rows["tokens"].difference) < 200


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("INFO worker.py:243] total_gpu_memory     79.22GiB", "total_gpu_memory", 79.22),
        ("INFO worker.py:243] model weights take   14.96GiB", "weights", 14.96),
        ("INFO worker.py:243] available_kv_cache_memory    -1.05GiB", "kv_cache", -1.05),
        ("INFO model_runner.py:1099] Loading model weights took 7.9692 GB", "weights", 7.9692),
        ("INFO [gpu_model_runner.py:6243] Graph capturing finished in 2 secs, took 0.11 GiB", "cuda_graph", 0.11),
        ("INFO CUDA graph pool memory: 4.13 GiB (actual), 4.99 GiB (estimated), difference: 0.86 GiB (20.9%).",
         "cuda_graph_estimated", 4.99),
        ("Actual usage is 15.26 GiB for consumed memory (weights + non-torch), 1.44 GiB for peak activation",
         "consumed", 15.26),
        ("DEBUG Memory profiling takes 1 seconds. Total non KV cache memory: 3.0GiB; torch peak memory increase: "
         "1.2GiB; non-torch forward increase memory: 0.1GiB; weights memory: 1.7GiB.", "activation_peak", 1.2),
    ],
)  # fmt: skip
def test_lines_of_vllm(line: str, name: str, value: float) -> None:
    figure = read_log(line, engine="vllm").figure(name)
    assert figure is not None
    assert abs(figure.value - value * GiB) < MiB


def test_the_last_start_of_a_log_counts_and_ranks_are_told_apart() -> None:
    first = "INFO vLLM API server version 0.11.0\nINFO Available KV cache memory: 1.00 GiB\n"
    second = (
        "INFO vLLM API server version 0.19.1\n(Worker_TP0 pid=7) INFO Available KV cache memory: 6.87 GiB\n"
        "(Worker_TP1 pid=8) INFO Available KV cache memory: 7.25 GiB\n"
    )
    log = read_log("\x1b[32m" + first + second)
    assert log.version == "0.19.1"
    assert [(figure.rank, figure.line) for figure in log.figures] == [("TP0", 4), ("TP1", 5)]
    spread = log.spread("kv_cache")
    assert spread is not None
    assert (spread[0].rank, spread[1].rank) == ("TP0", "TP1")


FAILURES = [
    ("one request", "ValueError: To serve at least one request with the models's max seq len (118000), (6.30 GiB KV cache "
     "is needed, which is larger than the available KV cache memory (6.11 GiB). Based on the available memory, the "
     "estimated maximum model length is 114432.", {"max_model_len": 118000, "estimated_max_model_len": 114432}),
    ("one request", "The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in KV "
     "cache (10000).", {"max_model_len": 32768, "kv_cache_tokens": 10000}),
    ("no pool", "ValueError: No available memory for the cache blocks. Try increasing it", {}),
    ("no pool", "Not enough memory. Please try to increase --mem-fraction-static.", {}),
    ("free memory", "ValueError: Free memory on device cuda:0 (15.32/22.04 GiB) on startup is less than desired GPU memory "
     "utilization (0.88, 19.39 GiB).", {"free_at_start": round(Fraction("15.32") * GiB)}),
    ("state blocks", "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (969).",
     {"max_num_seqs": 1024, "state_blocks": 969}),
    ("sampler", "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests",
     {"max_num_seqs": 1024}),
    ("out of memory", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 524.00 MiB. GPU 0 has a total capacity "
     "of 15.77 GiB of which 137.12 MiB is free.", {"asked": 524 * MiB}),
    ("arguments", "api_server.py: error: unrecognized arguments: --swap-space 4", {}),
    ("profiling", "Error in memory profiling. Initial free memory 12746588160, current free memory 149023916032.", {}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "line", "numbers"), FAILURES, ids=[f"{row[0]}-{n}" for n, row in enumerate(FAILURES)])
def test_how_a_start_ends(kind: str, line: str, numbers: dict[str, int]) -> None:
    log = read_log(f"x\n(EngineCore pid=2) ERROR {line}\nERROR {line}\n", engine="vllm")
    (failure,) = log.failures
    assert (failure.kind, failure.line) == (kind, 2)
    assert kind in KINDS
    assert numbers.items() <= failure.numbers.items()


@pytest.fixture(name="fake")
def fake_fixture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setattr("tonnage.peers.predict.RULES", {"vllm": "fake_rules:predict", "sglang": "fake_rules:predict"})
    (tmp_path / "config.json").write_text(json.dumps({**raw_config("llama-3.1-8b"), "max_position_embeddings": 131072}))
    return str(tmp_path)


LOG = """
INFO vLLM API server version 0.19.0
INFO non-default args: {{'model_tag': 'org/m', 'max_model_len': 8192, 'gpu_memory_utilization': 0.9}}
INFO Available KV cache memory: {pool} GiB
INFO Free memory on device (78.66/79.19 GiB) on startup. Desired GPU memory utilization is (0.9, 71.27 GiB). Actual \
usage is 14.96 GiB for weight, {peak} GiB for peak activation, {other} GiB for non-torch memory, and 0.5 GiB for \
CUDAGraph memory.
"""


def explained(fake: str, *, peak: str, other: str = "0.0", pool: str = "51.41", more: str = "") -> Explanation:
    text = LOG.format(pool=pool, peak=peak, other=other) + more
    asked = ExplainAsked(card=H100, model=fake)
    return explain_log(read_log(text), name="logs/a.log", text=text, asked=asked)


def test_a_log_that_the_rules_foretell(fake: str) -> None:
    found = explained(fake, peak="4.89", pool="51.42")
    assert all(row.agrees for row in found.own)
    assert {row.name: row.agrees for row in found.rows} == dict.fromkeys(
        ("device", "weights", "non-torch", "activation peak", "graphs", "kv cache"), True
    )
    assert (found.worst, found.if_so) == (None, ())
    assert json.loads(explanation_text(found))["worst"] is None


def test_a_length_that_was_left_open_is_the_one_that_the_log_resolved(fake: str) -> None:
    text = LOG.format(pool="51.42", peak="4.89", other="0.0").replace("8192", "-1")
    text += "INFO Maximum concurrency for 4,096 tokens per request: 100.00x\n"
    found = explain_log(read_log(text), name="a.log", text=text, asked=ExplainAsked(card=H100, model=fake))
    assert found.start is not None
    assert found.start.max_model_len == 4096


def test_the_term_that_differs_is_named_with_the_setting_that_explains_it(fake: str) -> None:
    found = explained(fake, peak="1.22", pool="55.09")
    assert found.worst is not None
    assert found.worst.name == "activation peak"
    assert found.if_so == ("--max-num-seqs 256",)
    assert found.why


def test_a_failed_start_is_given_what_starts_by_the_corrected_prediction(fake: str) -> None:
    line = FAILURES[0][1].replace("118000", "8192")
    found = explained(fake, peak="4.89", other="51.00", pool="0.42", more=line)
    assert found.worst is not None
    assert found.worst.name == "non-torch"
    (ended,) = found.ended
    assert ended.failure.kind == "one request"
    assert found.start is not None
    assert found.start.starts
    assert found.correction is not None
    assert corrected(found.start, [found.correction]).starts is False
    assert ended.change[0].startswith("--max-model-len 114432")
    # 4.89 GiB of peak are more than the pool lacks: fewer sequences do it, and so does a shorter length.
    assert "--max-num-seqs 256" in ended.change


def test_without_a_model_the_log_is_still_checked(fake: str) -> None:
    text = LOG.format(pool="51.41", peak="4.89", other="0.0")
    text = text.replace("org/m", "./nowhere/at/all")
    found = explain_log(read_log(text), name="a.log", text=text, asked=ExplainAsked(card=H100))
    assert "no such folder" in found.unpredicted
    assert found.own
    assert not found.rows
    with pytest.raises(InputError, match="no line of a start"):
        read_log("hello\nworld")


def test_a_correction_moves_terms_and_pool_and_says_so(fake: str, tmp_path: Path) -> None:
    found = explained(fake, peak="4.89", other="2.00", pool="49.42")
    start, correction = found.start, found.correction
    assert start is not None
    assert correction is not None
    assert (correction.engine, correction.minor, correction.card) == ("vllm", "0.19", "H100-80GB")
    moved = corrected(start, [correction])
    assert moved.term("non-torch").bytes.bytes == 2 * GiB
    assert moved.term("non-torch").bytes.source is Source.MEASURED
    assert moved.term("non-torch").bytes.ref == correction.log
    assert moved.notes[-1].startswith("corrected by a log: a.log (")
    taken = sum(
        new.bytes.bytes - old.bytes.bytes
        for new, old in zip(moved.terms, start.terms, strict=True)
        if old.is_budgeted and old.name != "pool"
    )
    assert moved.pool.bytes == start.pool.bytes - taken
    assert moved.term("pool").bytes == moved.pool
    assert moved.launch == start.launch
    assert sum(term.bytes.bytes for term in moved.terms) == sum(term.bytes.bytes for term in start.terms)
    assert moved.tokens is not None
    assert start.tokens is not None
    assert moved.tokens.best < start.tokens.best
    assert moved.pool.low <= moved.pool.bytes <= moved.pool.high


@pytest.mark.parametrize("field", ["engine", "minor", "card", "tp", "pp"])
def test_a_correction_of_another_machine_changes_nothing(fake: str, field: str) -> None:
    found = explained(fake, peak="4.89", other="2.00", pool="49.42")
    assert found.start is not None
    assert found.correction is not None
    other = replace(found.correction, **{field: 3 if field in ("tp", "pp") else "other"})
    assert corrected(found.start, [other]) is found.start
    assert corrected(found.start, []) is found.start


def test_of_another_model_only_what_is_the_machines_is_taken(fake: str) -> None:
    found = explained(fake, peak="1.22", other="2.00", pool="53.09")
    assert found.start is not None
    assert found.correction is not None
    moved = corrected(found.start, [replace(found.correction, model="another")])
    assert moved.term("non-torch").bytes.bytes == 2 * GiB
    assert moved.term("sampler peak") == found.start.term("sampler peak")


def test_a_correction_is_not_of_other_settings(fake: str) -> None:
    """A peak of 1,024 sequences says nothing of 16, and graphs nothing of a start without any."""
    found = explained(fake, peak="5.89", other="2.00", pool="48.42")
    assert found.start is not None
    assert found.correction is not None
    own = found.start.launch
    for changes, name in (({"max_num_seqs": 16}, "sampler peak"), ({"enforce_eager": True}, "graphs")):
        start = fake_rules.predict(replace(own, settings={**own.settings, **changes}))
        moved = corrected(start, [found.correction])
        assert moved.term(name) == start.term(name) != found.start.term(name)
        assert f"decide {name}, left" in moved.notes[-1]
        assert moved.term("non-torch").bytes.bytes == 2 * GiB
        assert sum(term.bytes.bytes for term in moved.terms) == sum(term.bytes.bytes for term in start.terms)


def test_what_no_log_told_stays_as_uncertain_as_it_was() -> None:
    """Of another model only non-torch is known: the pool keeps the errors of its peak, and is not called measured."""
    asked = peer_rows.launch_of(peer_rows.records()["llmd-qwen-qwen2-5-7b-instruc-h100-80gb-tp1pp1dp1-16384"])
    start = vllm_start.predict(asked)
    said = start.term("non-torch").bytes.bytes
    taught = _correction(card=asked.card.name, terms={"non-torch": GiB}, rules={"non-torch": said})
    moved = corrected(start, [taught])
    peak = start.term("activation peak").bytes
    assert moved.pool.bytes < start.pool.bytes
    assert moved.pool.bytes - moved.pool.low >= peak.high - peak.bytes
    assert moved.pool.source is not Source.MEASURED
    assert moved.pool.high - moved.pool.low < start.pool.high - start.pool.low


def _correction(**fields: object) -> Correction:
    given = {
        "engine": "vllm",
        "minor": "0.19",
        "card": "T4",
        "tp": 1,
        "pp": 1,
        "model": "m",
        "log": "l",
        "terms": {"a": 1},
        "rules": {"a": 5},
    }
    return Correction(**{**given, **fields})  # type: ignore[arg-type]


def test_corrections_are_kept_whole_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert load_corrections() == ()
    file = save_correction(_correction())
    assert file == tmp_path / "data/tonnage/corrections.json"
    save_correction(_correction(model="n"))
    save_correction(_correction(terms={"a": 2}))
    assert [(each.model, each.terms) for each in load_corrections()] == [("n", {"a": 1}), ("m", {"a": 2})]
    assert [each.name for each in file.parent.iterdir()] == ["corrections.json"]
    assert parse(dumps(load_corrections()), file="x") == load_corrections()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"schema": "tonnage.corrections/2"}', '{"schema": "tonnage.corrections/2", "corrections": [{}]}',
     dumps([_correction()]).replace("0.19", "0.19").replace('"tp": 1', '"tp": "1"'), "[" * 5000],
)  # fmt: skip
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(InputError, match="holds no corrections"):
        load_corrections(tmp_path / "c.json")
    with pytest.raises(InputError):
        load_corrections(tmp_path / "nowhere.json")


def test_a_file_that_cannot_be_written_is_told() -> None:
    with pytest.raises(InputError, match="cannot be written"):
        save_correction(_correction(), Path("/proc/nowhere/c.json"))


_LINES = st.one_of(
    st.text(max_size=40),
    st.sampled_from([*LOG.splitlines(), *SGLANG.splitlines(), *TRTLLM.splitlines(), *[row[1] for row in FAILURES],
                     "non-default args: {", "server_args=ServerArgs(a=", "# GPU blocks: 99999999999999999",
                     "Model loading took 999999999999.999 GiB", "KV cache size: ,,, tokens"]),
)  # fmt: skip


@settings(max_examples=60)
@given(st.lists(_LINES, max_size=8).map("\n".join))
def test_any_text_is_read_or_refused_in_words(text: str) -> None:
    try:
        log = read_log(text)
    except UserError:
        return
    assert isinstance(log, Log)
    assert consistency(log, settings_in_log(log)) is not None
    assert Version.read(log.version or "") is not None


def _by_the_rules() -> list[dict]:
    """Starts of one team's sweep on one card, unpacked weights: release and flags are all known."""
    return [row for row in summed() if row["id"].startswith("llmd-") and row["quant"] == "none" and row["pp"] == 1]


def test_with_vllms_own_rules_a_correction_gives_the_logged_pool(tmp_path: Path) -> None:
    rows = _by_the_rules()
    assert len(rows) >= 5
    for row in rows:
        key = row["hf_config_key"]
        folder = tmp_path / key
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**raw_config(key), "max_position_embeddings": 131072}))
        text = _new(row)
        typed = f"--max-model-len={row['flags']['max_model_len']} --tensor-parallel-size={row['tp']}"
        flags = command_of("vllm", [Word(word) for word in typed.split()]).flags
        asked = ExplainAsked(card=H100, model=str(folder), flags=flags)
        found = explain_log(read_log(text), name=row["id"], text=text, asked=asked)
        assert found.start is not None, found.unpredicted
        assert found.correction is not None
        assert {each.name for each in found.rows} >= {"weights", "non-torch", "activation peak", "kv cache"}
        logged = row["logged"]["kv_cache_gib"] * GiB
        moved = corrected(found.start, [found.correction])
        assert abs(moved.pool.bytes - logged) < GiB // 10, row["id"]
        assert abs(moved.pool.bytes - logged) <= abs(found.start.pool.bytes - logged) + GiB // 50, row["id"]
        assert sum(term.bytes.bytes for term in moved.terms) == sum(term.bytes.bytes for term in found.start.terms)


def test_the_first_cores_line_of_settings_is_read() -> None:
    line = "INFO llm_engine.py:70] Initializing an LLM engine with config: model='org/m', max_seq_len=4096, seed=0)"
    log = read_log(line)
    assert (log.model, {flag.name: flag.text for flag in log.flags}["max_model_len"]) == ("org/m", "4096")


def ended_by(fake: str, line: str, *, card: Card | None = H100, settings: str = "") -> tuple[Explanation, Ended]:
    text = f"INFO vLLM API server version 0.19.0\nINFO non-default args: {{'model': 'm'{settings}}}\nERROR {line}\n"
    found = explain_log(read_log(text), name="a.log", text=text, asked=ExplainAsked(card=card, model=fake))
    return found, found.ended[0]


def test_a_pool_that_was_too_small_is_never_told_to_ask_for_less(fake: str) -> None:
    _, ended = ended_by(
        fake, "ValueError: No available memory for the cache blocks.", settings=", 'max_model_len': 8192"
    )
    assert "by the rules alone it starts" in ended.means
    shares = [float(text.split()[1]) for text in ended.change if text.startswith("--gpu-memory-utilization")]
    assert shares
    assert min(shares) > 0.9
    assert not any(text.startswith("--max-model-len") and int(text.split()[1]) >= 8192 for text in ended.change)
    full = "The model's max seq len (8192) is larger than the maximum number of tokens that can be stored in KV cache (5000)"
    _, ended = ended_by(fake, full, settings=", 'max_model_len': 8192")
    assert [text for text in ended.change if text.startswith("--max-model-len")] == [
        "--max-model-len 5000 (what the log's own pool holds)"
    ]


def test_what_was_free_is_the_share_to_ask_for(fake: str) -> None:
    line = "ValueError: Free memory on device ({}/79.19 GiB) on startup is less than desired GPU memory utilization (0.9, 71.27 GiB)"
    settings = ", 'max_model_len': 8192"
    found, ended = ended_by(fake, line.format("60.00"), card=None, settings=settings)
    assert found.start is not None
    assert found.start.launch.card.total_bytes == round(Fraction("79.19") * GiB)
    assert ended.change[0] == "--gpu-memory-utilization 0.75 (what was free)"
    assert len(ended_by(fake, line.format("2.00"), settings=settings)[1].change) == 1


def test_a_difference_next_to_nothing_is_not_named_for_a_large_one(fake: str) -> None:
    found = explained(fake, peak="4.89", other="0.01", pool="31.42")
    assert found.worst is not None
    assert found.worst.name == "kv cache"
