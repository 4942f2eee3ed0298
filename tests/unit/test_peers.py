"""Knobs of other engines: each row of the table reads as that engine writes it, and what does not fit is told."""

from __future__ import annotations

from dataclasses import fields
from fractions import Fraction
from pathlib import Path

import pytest
from report_samples import line, make_plan

from tonnage.config import Knobs, LimitKnobs, Origin, Setting
from tonnage.errors import InvalidSetting, UserError
from tonnage.hardware import find_card
from tonnage.peers import ENGINES, KNOBS, Match, Translated, help_text, parse_like, translate
from tonnage.peers.table import By
from tonnage.planner import check_knobs, find_config, plan_without_device
from tonnage.terms import LineKind, MemoryPlan
from tonnage.units import GiB, MiB

PAGE = (Path(__file__).parents[2] / "docs/peers.md").read_text()
SMOLLM2, H100 = find_config("smollm2"), find_card("H100")
H100_BYTES, OUTSIDE = 85_029_027_840, (524 + 164) * MiB


def on_h100(knobs: Knobs, limits: LimitKnobs) -> MemoryPlan:
    return plan_without_device(SMOLLM2, card=H100, knobs=knobs, limit_knobs=limits)


def never(knobs: Knobs, limits: LimitKnobs) -> MemoryPlan:
    raise AssertionError("no plan is needed for this")


def asked(*likes: str, knobs: Knobs | None = None, limits: LimitKnobs | None = None) -> Translated:
    return translate(likes, knobs=knobs, limit_knobs=limits, plan_with=never)


#: typed -> our knob and its value; None: our knob stays as it is.
VALUES: list[tuple[str, str, object]] = [
    ("vllm:max_model_len=4096", "max_seq_len", 4096),
    ("vllm:max_model_len=8k", "max_seq_len", 8000),
    ("vllm:max_model_len=8K", "max_seq_len", 8192),
    ("vllm:max-model-len=25.6k", "max_seq_len", 25_600),
    ("vllm:max_model_len=-1", "max_seq_len", None),
    ("vllm:max_model_len=auto", "max_seq_len", None),
    ("vllm:max_num_seqs=64", "max_batch_size", 64),
    ("VLLM:--max-num-seqs=64", "max_batch_size", 64),
    ("vllm:max_num_batched_tokens=2K", "max_num_tokens", 2048),
    ("sglang:context_length=8Ki", "max_seq_len", 8192),
    ("sglang:max_total_tokens=8k", "kv_tokens", 8000),
    ("vllm:max_num_seqs=8_192", "max_batch_size", 8192),
    ("vllm:kv_cache_memory_bytes=25G", "kv_bytes", 25 * GiB),
    ("vllm:kv_cache_memory_bytes=25g", "kv_bytes", 25 * 10**9),
    ("vllm:kv-cache-memory=4G", "kv_bytes", 4 * GiB),
    ("vllm:kv_cache_memory_bytes=48318382080", "kv_bytes", 48_318_382_080),
    ("vllm:block_size=32", "block_tokens", 32),
    ("vllm:kv_cache_dtype=fp8", "kv_dtype", "float8_e4m3fn"),
    ("vllm:kv_cache_dtype=fp8_e5m2", "kv_dtype", "float8_e5m2"),
    ("vllm:kv_cache_dtype=auto", "kv_dtype", None),
    ("vllm:num_gpu_blocks_override=1000", "kv_tokens", 16_000),
    ("vllm:enforce_eager", "graphs", "none"),
    ("vllm:enforce_eager=True", "graphs", "none"),
    ("vllm:enforce_eager=false", "graphs", None),
    ("vllm:cudagraph_capture_sizes=[1, 2, 4]", "graphs", "1,2,4"),
    ("vllm:compilation_config.cudagraph_mode=NONE", "graphs", "none"),
    ("vllm:cudagraph_mode=FULL_DECODE_ONLY", "graphs", None),
    ("vllm:max_loras=4", "max_adapters", 4),
    ("vllm:max_lora_rank=32", "max_adapter_rank", 32),
    ("vllm:enable_prefix_caching", "prefix_caching", True),
    ("vllm:enable-prefix-caching=false", "prefix_caching", False),
    ("vllm:--no-enable-prefix-caching", "prefix_caching", False),
    ("vllm:kv_offloading_size=1.5", "host_kv_bytes", 3 * GiB // 2),
    ("sglang:max_total_tokens=100000", "kv_tokens", 100_000),
    ("sgl:chunked-prefill-size=4096", "max_num_tokens", 4096),
    ("sglang:max_running_requests=128", "max_batch_size", 128),
    ("sglang:context_length=2048", "max_seq_len", 2048),
    ("sglang:page_size=64", "block_tokens", 64),
    ("sglang:kv_cache_dtype=fp8_e4m3", "kv_dtype", "float8_e4m3fn"),
    ("sglang:disable_cuda_graph", "graphs", "none"),
    ("sglang:cuda_graph_bs=1 2 4 8", "graphs", "1,2,4,8"),
    ("sglang:max_loras_per_batch=3", "max_adapters", 3),
    ("sglang:max_lora_rank=8", "max_adapter_rank", 8),
    ("sglang:disable_radix_cache", "prefix_caching", False),
    ("sglang:disable-radix-cache=false", "prefix_caching", True),
    ("sglang:hicache_size=30", "host_kv_bytes", 30 * 10**9),
    ("trtllm:free_gpu_memory_fraction=0.9", "kv_fraction", Fraction(9, 10)),
    ("tensorrt-llm:kv_cache_config.free_gpu_memory_fraction=0.85", "kv_fraction", Fraction(17, 20)),
    ("trtllm:max_tokens=5000", "kv_tokens", 5000),
    ("trtllm:max_gpu_total_bytes=1073741824", "kv_bytes", GiB),
    ("trtllm:max_gpu_total_bytes=0", "kv_bytes", None),
    ("trtllm:max_batch_size=16", "max_batch_size", 16),
    ("trtllm:max_num_tokens=512", "max_num_tokens", 512),
    ("trtllm:max_seq_len=1024", "max_seq_len", 1024),
    ("trtllm:tokens_per_block=32", "block_tokens", 32),
    ("trtllm:dtype=fp8", "kv_dtype", "float8_e4m3fn"),
    ("trtllm:mamba_ssm_cache_dtype=bfloat16", "state_dtype", "bfloat16"),
    ("trtllm:cuda_graph_config=null", "graphs", "none"),
    ("trtllm:cuda_graph_config.batch_sizes=[1,2]", "graphs", "1,2"),
    ("trtllm:lora_config.max_loras=2", "max_adapters", 2),
    ("trtllm:max_lora_rank=64", "max_adapter_rank", 64),
    ("trtllm:kv_cache_config.enable_block_reuse=false", "prefix_caching", False),
    ("trtllm:enable_block_reuse=True", "prefix_caching", True),
    ("trtllm:host_cache_size=45000000000", "host_kv_bytes", 45 * 10**9),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "ours", "value"), VALUES)
def test_a_value_is_read_as_its_engine_writes_it(typed: str, ours: str, value: object) -> None:
    made = asked(typed)
    setting = made.setting(ours)
    assert setting.value == value
    if value is None:
        assert made == Translated(knobs=Knobs(), limit_knobs=LimitKnobs())
        return
    assert (setting.origin, setting.where) == (Origin.PEER, f"--like {typed}")
    assert type(setting.value) is type(value)
    check_knobs(made.knobs)
    about = parse_like(typed).knob.match is Match.ABOUT
    assert [note.startswith(f"--like {typed}: ") for note in made.notes] == [True] * about


@pytest.mark.parametrize("text", ["4GB", "-1", "1e-12", "x", ""])
@pytest.mark.parametrize(("knob", "unit"), [("vllm:kv_offloading_size", "GiB"), ("sglang:hicache_size", "GB")])
def test_a_bare_number_is_told_as_it_was_typed(knob: str, unit: str, text: str) -> None:
    with pytest.raises(InvalidSetting, match=f"--like {knob} = '{text}': not a number of {unit}"):
        asked(f"{knob}={text}")


def test_every_knob_that_needs_no_plan_is_in_the_table_above() -> None:
    tried = {parse_like(typed).knob.full_name for typed, _, _ in VALUES}
    assert tried == {k.full_name for k in KNOBS if k.match is not Match.NONE and k.by is not By.PLAN}


def test_every_row_names_one_of_our_knobs_and_says_what_differs() -> None:
    ours = {f.name for f in fields(Knobs)} | {f.name for f in fields(LimitKnobs)}
    assert len({knob.full_name for knob in KNOBS}) == len(KNOBS)
    for knob in KNOBS:
        assert (knob.ours in ours) == (knob.match is not Match.NONE), knob
        assert bool(knob.differs) == (knob.match is not Match.EXACT), knob


def test_utilization_is_a_share_of_the_device_beside_what_was_there_before() -> None:
    typed = "vllm:gpu_memory_utilization=0.9"
    made = translate([typed], plan_with=on_h100)
    budget = -(-H100_BYTES * 9 // 10)
    assert budget == 76_526_125_056
    assert made.knobs.total_bytes.value == budget + OUTSIDE == 77_247_545_344
    assert made.knobs.keep_free_bytes.value == 0
    assert made.knobs.total_bytes.text == "71.94 GiB (71.27 GiB + 688 MiB outside)"
    (note,) = made.notes
    assert "leaves out the context and library handles" in note


def test_utilization_that_vllm_itself_would_refuse_is_told() -> None:
    made = translate(["vllm:gpu_memory_utilization=0.999"], plan_with=on_h100)
    assert any("vLLM would refuse to start, for it wants 79.11 GiB free" in note for note in made.notes)
    assert on_h100(made.knobs, made.limit_knobs).kv.tokens > 0


def test_a_static_fraction_is_a_share_of_what_is_free_before_weights() -> None:
    plain = on_h100(Knobs(), LimitKnobs())
    made = translate(["sglang:mem_fraction_static=0.85"], plan_with=on_h100)
    both = (H100_BYTES - OUTSIDE) * 85 // 100
    assert both == 71_661_466_419
    assert made.knobs.kv_bytes.value == both - plain.bytes_of(LineKind.WEIGHTS)
    assert on_h100(made.knobs, made.limit_knobs).kv.bytes <= made.knobs.kv_bytes.value


@pytest.mark.parametrize(
    ("before", "weights", "fraction", "logged"),
    # GiB times 100, from start-up logs: before load, lost by loading, the flag, the pool
    [(1470, 98, "0.15", 122), (9361, 3660, "0.6", 1958)],
    ids=["Qwen2.5-0.5B on 16 GB", "DeepSeek-V4-Flash on H20"],
)
def test_static_fractions_give_the_pools_that_sglang_logged(
    before: int, weights: int, fraction: str, logged: int
) -> None:
    lines = (line(LineKind.WEIGHTS, weights * GiB // 100), line(LineKind.SLACK, (before - weights) * GiB // 100))
    device = sum(each.bytes for each in lines)
    plan = make_plan(lines=lines, device_bytes=device)
    made = translate([f"sglang:mem_fraction_static={fraction}"], plan_with=lambda *_: plan)
    assert abs((made.knobs.kv_bytes.value or 0) - logged * GiB // 100) <= 2 * GiB // 100


def test_a_static_fraction_below_the_weights_says_the_least() -> None:
    with pytest.raises(InvalidSetting, match=r"weights alone take 513.*use at least (0\.\d{4})") as refused:
        translate(["sglang:mem_fraction_static=0.005"], plan_with=on_h100)
    assert refused.value.knob == "--like sglang:mem_fraction_static"
    share = str(refused.value).split("use at least ")[1].rstrip(".")
    made = translate([f"sglang:mem_fraction_static={share}"], plan_with=on_h100)
    assert on_h100(made.knobs, made.limit_knobs).max_concurrency >= 1


@pytest.mark.parametrize(
    ("typed", "instead"),
    [
        ("vllm:tensor_parallel_size=4", "use --tp 4"),
        ("vllm:pipeline-parallel-size=2", "use --pp 2"),
        ("sglang:tp_size=8", "use --tp 8"),
        ("sglang:tp=8", "use --tp 8"),
        ("sglang:pp_size=2", "use --pp 2"),
        ("trtllm:tensor_parallel_size", "use --tp N"),
        ("trtllm:pp_size=2", "use --pp 2"),
    ],
)
def test_numbers_of_ranks_have_flags_of_ours(typed: str, instead: str) -> None:
    with pytest.raises(UserError) as refused:
        translate([typed], plan_with=on_h100)
    assert refused.value.remedy == instead


def test_what_is_kept_free_in_our_own_words_stays() -> None:
    own = Knobs(keep_free_bytes=Setting.flag(GiB, "1GiB", "--keep-free-bytes"))
    made = asked("trtllm:free_gpu_memory_fraction=0.9", knobs=own)
    assert made.knobs.keep_free_bytes == own.keep_free_bytes
    assert asked("trtllm:free_gpu_memory_fraction=0.9").knobs.keep_free_bytes.value == 0
    assert not asked("sglang:max_total_tokens=5000").knobs.keep_free_bytes.is_set


def test_blocks_are_counted_in_the_block_that_was_asked_for() -> None:
    assert asked("vllm:num_gpu_blocks_override=10", "vllm:block_size=32").knobs.kv_tokens.value == 320
    own = Knobs(block_tokens=Setting.flag(64, "64", "--block-tokens"))
    assert asked("vllm:num_gpu_blocks_override=10", knobs=own).knobs.kv_tokens.value == 640


def test_a_chunk_below_the_batch_is_raised_to_it() -> None:
    made = asked("sglang:chunked_prefill_size=64", "sglang:max_running_requests=128")
    assert made.limit_knobs.max_num_tokens.value == 128
    assert any("raised to max_batch_size = 128" in note for note in made.notes)
    enough = asked("sglang:chunked_prefill_size=256", "sglang:max_running_requests=128")
    assert enough.limit_knobs.max_num_tokens.value == 256


def test_vllm_ignores_its_share_beside_a_size() -> None:
    made = asked("vllm:gpu_memory_utilization=0.5", "vllm:kv_cache_memory_bytes=1G")
    assert (made.knobs.kv_bytes.value, made.knobs.total_bytes.value) == (GiB, None)
    assert "--like vllm:gpu_memory_utilization=0.5 has no effect beside --like vllm:kv_cache" in made.notes[0]


#: what was typed -> pieces of the paragraph, between bars
BAD = {
    "gpu_memory_utilization=0.9": "names no engine|ENGINE:KNOB=VALUE|--like help",
    "vlm:max_num_seqs=1": "no engine 'vlm'|did you mean vllm?|one of vllm, sglang, trtllm",
    "ollama:num_ctx=1": "no engine 'ollama'",
    "vllm:gpu_memory_utilisation=0.9": "no knob 'gpu_memory_utilisation' of vLLM|did you mean gpu_memory_utilization?",
    "sglang:mem_fraction=0.9": "did you mean mem_fraction_static?|Need: one of mem_fraction_static, max_total_tokens",
    "trtllm:tokens_per_blok=32": "did you mean tokens_per_block?",
    "vllm:zzz=1": "no knob 'zzz' of vLLM is known here. Need",
    "vllm:max_num_seqs": "has no value|--like vllm:max_num_seqs=VALUE",
    "vllm:max_num_seqs=": "--like vllm:max_num_seqs = ''|not a whole number",
    "vllm:max_num_seqs=0": "zero",
    "vllm:max_num_seqs=1.5": "not a whole number",
    "vllm:max_num_seqs=8K": "not a whole number in digits, and the engine reads no such suffix here|write digits alone",
    "vllm:max_num_seqs=8,192": "not a whole number in digits|To change: write digits alone, such as 8192",
    "vllm:block_size=1k": "the engine reads no such suffix",
    "vllm:cudagraph_capture_sizes=1,8K": "the engine reads no such suffix",
    "vllm:max_model_len=1.5K": "no decimals before a suffix of 1,024|or 8k (8,000) or 8K (8,192)",
    "vllm:kv_cache_memory_bytes=4GiB": "not a whole number in digits|or 8k (8,000) or 8K (8,192)",
    "sglang:context_length=8K": "reads no such suffix here|or 8k (8,000) or 8Ki (8,192)",
    "sglang:max_running_requests=1Ki": "reads no such suffix here",
    "sglang:chunked_prefill_size=8k": "reads no such suffix here",
    "trtllm:max_num_tokens=8k": "reads no such suffix here",
    "trtllm:host_cache_size=4G": "reads no such suffix here",
    "vllm:max_seqs=4": "To change: write --like vllm:max_num_seqs or --like vllm:max_loras; tonnage plan",
    "vllm:seqs=4": "To change: write --like vllm:max_num_seqs; tonnage plan MODEL --like help lists every knob",
    "sglang:mem=0.5": "To change: write --like sglang:mem_fraction_static; tonnage plan",
    "vllm:": "To change: leave it out; tonnage plan MODEL --like help lists every knob",
    "vllm:max_model_len=0.0001k": "not a whole number of at least 1",
    "vllm:enforce_eager=maybe": "neither true nor false",
    "vllm:kv_cache_dtype=int3": "not a dtype",
    "vllm:kv_offloading_size=-1": "not a number of GiB",
    "vllm:gpu_memory_utilization=1.1": "outside 0 < share <= 1",
    "vllm:cpu_offload_gb=4": "no counterpart: weights stay on the device|leave it out",
    "vllm:cudagraph_capture_sizes=[]": "no sizes",
    "vllm:cudagraph_mode=FULL_AND_PIECEWISE": "only steps of decodes have graphs|write FULL_DECODE_ONLY",
    "sglang:enable_piecewise_cuda_graph": "no counterpart: only steps of decodes|leave it out",
    "trtllm:torch_compile_config.enable_piecewise_cuda_graph=true": "no counterpart: only steps of decodes",
    "sglang:chunked_prefill_size=-1": "without chunks",
    "sglang:swa_full_tokens_ratio=0.5": "no counterpart",
    "trtllm:free_gpu_memory_fraction=0": "outside 0 < share",
    "trtllm:cuda_graph_config=x": "only null is understood",
    "trtllm:cross_kv_cache_fraction=0.5": "no counterpart",
    "trtllm:enable_block_reuse": "has no value",
    "sglang:disable_radix_cache=0.5": "neither true nor false",
}


@pytest.mark.parametrize(("typed", "told"), BAD.items())
def test_what_cannot_be_translated_is_told(typed: str, told: str) -> None:
    with pytest.raises(UserError) as refused:
        translate([typed], plan_with=on_h100)
    for piece in told.split("|"):
        assert piece in str(refused.value)


@pytest.mark.parametrize(
    ("likes", "own", "told"),
    [
        (["vllm:kv_cache_memory_bytes=1G"], "kv_bytes", "--kv_bytes and --like vllm:kv_cache_memory_bytes=1G both set"),
        (["sglang:mem_fraction_static=0.8"], "kv_bytes", "--kv_bytes and --like sglang:mem_fraction_static=0.8 both"),
        (["vllm:max_num_seqs=1", "sglang:max_running_requests=1"], "kv_bytes", "both set max_batch_size"),
        (["vllm:max_num_seqs=1", "vllm:max_num_seqs=2"], "kv_bytes", "max_num_seqs=1 and --like vllm:max_num_seqs=2"),
        (["sglang:max_total_tokens=1", "vllm:num_gpu_blocks_override=1"], "kv_bytes", "both set kv_tokens"),
    ],
)
def test_two_flags_for_one_knob_are_refused(likes: list[str], own: str, told: str) -> None:
    with pytest.raises(UserError, match="one of them") as refused:
        asked(*likes, knobs=Knobs(**{own: Setting.flag(1, "1", f"--{own}")}))
    assert told in str(refused.value)


def test_limits_in_our_own_words_conflict_too() -> None:
    own = LimitKnobs(max_seq_len=Setting.flag(1, "1", "--max-seq-len"))
    with pytest.raises(UserError, match="--max-seq-len and --like vllm:max_model_len=auto both set max_seq_len"):
        asked("vllm:max_model_len=auto", limits=own)


def test_the_page_shows_every_row_of_the_table_and_no_other() -> None:
    rows = [tuple(cell.strip() for cell in row.strip("|").split("|")) for row in PAGE.splitlines() if row[:3] == "| `"]
    assert rows == [(f"`{k.full_name}`", f"`{k.ours}`" if k.ours else "none", str(k.match), k.differs) for k in KNOBS]


def test_the_page_and_the_help_name_every_engine_with_its_version() -> None:
    for engine in ENGINES:
        assert f"{engine.title} {engine.version}" in PAGE
        for name, value in engine.defaults:
            assert f"`{name}` {value}" in PAGE
    told = help_text().splitlines()
    assert [row.split()[0] for row in told] == [knob.full_name for knob in KNOBS]
