"""Starts of SGLang, TensorRT-LLM and llama.cpp: partitions, directions, worked vectors, checks and their remedies."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shapes import config

from tonnage.config import LimitKnobs, Setting
from tonnage.errors import InvalidSetting, UserError
from tonnage.hardware import find_card, generic_card
from tonnage.peers.asked_settings import Settings
from tonnage.peers.launch import Launch, Value
from tonnage.peers.log_lines import log_lines
from tonnage.peers.partition import fitted
from tonnage.peers.predict import predict
from tonnage.peers.sglang.cells import cells
from tonnage.peers.sglang.fraction import static_fraction
from tonnage.peers.start import Rule, Start, Term
from tonnage.peers.version import Version
from tonnage.planner import plan_without_device
from tonnage.planner.weights import weights_of
from tonnage.terms import Quantity, Rank, Source
from tonnage.units import GiB, MiB

MODELS = ("llama-3.1-8b", "qwen3.6-27b", "deepseek-v3", "gpt-oss-20b", "gemma-4-31b", "deepseek-v4-flash", "lfm2-700m",
          "qwen3-30b-a3b")  # fmt: skip
RELEASES = (
    *(("sglang", text) for text in ("0.4.6", "0.4.10", "0.5.6", "0.5.23", "2026-08")),
    *(("trtllm", text) for text in ("0.16", "1.2")),
    ("llamacpp", "late 2026"),
)


def launch(
    model: str = "llama-3.1-8b", *, engine: str = "sglang", version: str = "0.5.23", card: str = "H100",
    weights: int | None = None, rank: Rank | None = None, kv_dtype: str | None = None, **settings: Value,
) -> Launch:  # fmt: skip
    rank = rank or Rank()
    made = weights_of(config(model), dtype="bfloat16", rank=rank)
    if weights is not None:
        made = Quantity.exact(weights, Source.MEASURED, "given")
    return Launch(
        engine=engine, version=Version.read(version), config=config(model), weights=made, card=find_card(card),
        rank=rank, kv_dtype=kv_dtype, settings=settings,
    )  # fmt: skip


def check(start: Start, name: str):
    return next(check for check in start.checks if check.name == name)


@given(
    model=st.sampled_from(MODELS),
    release=st.sampled_from(RELEASES),
    total=st.integers(2 * GiB, 300 * GiB),
    weights=st.integers(MiB, 120 * GiB),
    bar=st.integers(0, 2 * GiB),
)
def test_terms_are_a_partition(model: str, release: tuple[str, str], total: int, weights: int, bar: int) -> None:
    quantity = Quantity(
        bytes=weights, low=max(weights - bar, 0), high=weights + bar, source=Source.PREDICTED, ref="drawn"
    )
    start = predict(
        Launch(
            engine=release[0], version=Version.read(release[1]), config=config(model), weights=quantity,
            card=generic_card(total),
        )
    )  # fmt: skip
    assert sum(term.bytes.bytes for term in start.terms) == total
    for term in start.terms:
        assert 0 <= term.bytes.low <= term.bytes.bytes <= term.bytes.high, term.name
        assert term.rule.says
        assert term.rule.records or term.rule.source
    assert start.pool.low <= start.pool.bytes <= start.pool.high
    assert start.tokens is not None
    assert start.tokens.low <= start.tokens.best <= start.tokens.high
    assert start.starts is not True or start.tokens.best > 0
    for one in start.checks:
        assert one.passes is True or one.remedy, one.name


@pytest.mark.parametrize("release", [each for each in RELEASES if each[0] != "llamacpp"], ids=str)
def test_a_larger_card_holds_no_less(release: tuple[str, str]) -> None:
    made = launch(engine=release[0], version=release[1])
    pools = []
    for gib in (40, 64, 79, 120, 139):
        start = predict(replace(made, card=generic_card(gib * GiB), settings=_fixed(release[0])))
        pools.append(start.pool.bytes)
    assert pools == sorted(pools)
    assert pools[0] > 0


def _fixed(engine: str) -> dict[str, Value]:
    """What would else follow the card."""
    if engine == "sglang":
        return {"mem_fraction_static": Fraction(8, 10), "chunked_prefill_size": 4096, "cuda_graph_max_bs": 64}
    return {"max_seq_len": 8192, "max_batch_size": 64}


@pytest.mark.parametrize(
    ("version", "card", "rank", "expected"),
    [
        ("0.4.6", "H100", Rank(), "0.88"),
        ("0.4.6", "H100", Rank(tp=8, size=8), "0.81"),
        ("0.4.10", "H100", Rank(), "0.874"),
        ("0.5.6", "H100", Rank(), "0.835"),
        ("0.5.23", "H100", Rank(), "0.83"),  # the worked example: 13.9 GB of reserve
        ("0.5.23", "H200", Rank(tp=8, size=8), "0.893"),
        ("0.5.23", "T4", Rank(), "0.736"),
    ],
)
def test_the_fraction_that_is_guessed(version: str, card: str, rank: Rank, expected: str) -> None:
    made = launch("qwen3-8b", version=version, card=card, rank=rank)
    assert float(static_fraction(made, Settings(made)).best) == float(expected)


def test_releases_whose_guess_is_not_known_span_both() -> None:
    made = launch(version="0.5.12")
    share = static_fraction(made, Settings(made))
    assert (share.low, share.high) == (Fraction(830, 1000), Fraction(835, 1000))
    start = predict(made)
    assert any("not known for sure" in note for note in start.notes)
    assert start.pool.high - start.pool.low > int(0.005 * 78 * GiB)


@pytest.mark.parametrize(
    ("model", "settings", "kv_dtype", "token"),
    [
        ("deepseek-v3", {}, None, 70_272),
        ("deepseek-v3", {}, "float8_e4m3fn", 35_136),
        ("glm-5", {}, "float8_e4m3fn", 78 * (656 + 132)),
        ("qwen3.6-27b", {}, None, 65_536),
        ("gpt-oss-20b", {}, None, 12 * 2048 + Fraction(8, 10) * 12 * 2048),
        ("gpt-oss-20b", {"disable_hybrid_swa_memory": True}, None, 24 * 2048),
        ("gemma-3-27b", {}, None, 62 * 8192),  # its windows have no pool of their own there
        ("llama-3.1-8b", {"speculative_algorithm": "EAGLE"}, None, 131_072 * Fraction(33, 32)),
        ("deepseek-v4-flash", {}, None, Fraction("7763.85")),
    ],
)
def test_bytes_of_a_token(model: str, settings: dict, kv_dtype: str | None, token: Fraction) -> None:
    made = launch(model, kv_dtype=kv_dtype, **settings)
    assert cells(made, Settings(made)).token == token


def test_a_latent_is_whole_on_every_rank_and_heads_are_not() -> None:
    eight = Rank(tp=8, size=8)
    latent, heads = launch("deepseek-v3", rank=eight), launch("llama-3.1-8b", rank=eight)
    assert cells(latent, Settings(latent)).token == 70_272
    assert cells(heads, Settings(heads)).token == 131_072 // 8


def test_states_come_first_and_bound_what_runs() -> None:
    start = predict(launch("qwen3.6-27b", weights=28 * GiB, context_length=8192))
    states, tokens = start.term("state pool").bytes.bytes, start.term("token pool").bytes.bytes
    assert abs(states / (states + tokens) - 9 / 19) < 0.01
    capped = predict(launch("qwen3.6-27b", weights=28 * GiB, context_length=8192, max_mamba_cache_size=30))
    assert capped.term("state pool").bytes.bytes == 31 * (48 * 3 * MiB + 48 * 10_240 * 3 * 2)
    assert capped.tokens.best > start.tokens.best
    assert capped.concurrency.best == 10_000
    alone = predict(
        launch("qwen3.6-27b", weights=28 * GiB, disable_radix_cache=True, max_running_requests=30, context_length=8192)
    )
    assert alone.concurrency.best == 30_000


@pytest.mark.parametrize(("given", "same"), [(512, (512,)), ([512, 8192], (512, 8192)), ("512,8192", (512, 8192))])
def test_windows_of_an_options_file_are_one_or_several(given: Value, same: tuple[int, ...]) -> None:
    asked, tidy = (launch(engine="trtllm", version="1.2", max_attention_window=each) for each in (given, same))
    assert predict(asked).pool == predict(tidy).pool
    with pytest.raises(InvalidSetting, match="max_attention_window"):
        predict(launch(engine="trtllm", version="1.2", max_attention_window="x"))


@pytest.mark.parametrize("length", [100, 8192])
def test_sequences_of_full_length_are_tokens_over_length(length: int) -> None:
    start = predict(launch("llama-3.1-8b", context_length=length))
    assert start.tokens is not None
    assert start.concurrency is not None
    assert start.concurrency.best == start.tokens.best * 1000 // length


def test_states_that_are_more_than_the_card_are_no_pool() -> None:
    """It fails before it makes any: no pool, and nothing that its log would say of one."""
    start = predict(launch("qwen3.6-27b", weights=28 * GiB, disable_radix_cache=True, max_running_requests=4096))
    assert start.starts is False
    assert (start.pool.bytes, start.pool.high) == (0, 0)
    assert log_lines(start) == ()
    assert sum(term.bytes.bytes for term in start.terms) == start.launch.card.total_bytes


def test_drafts_keep_states_of_their_own() -> None:
    start = predict(
        launch(
            "qwen3.5-9b", card="H100-NVL", weights=18 * GiB, speculative_algorithm="DFLASH",
            speculative_num_draft_tokens=16, max_running_requests=64, disable_radix_cache=True,
            mem_fraction_static=Fraction(97, 100),
        )
    )  # fmt: skip
    assert start.term("verification states").bytes.bytes / GiB == pytest.approx(49.178, abs=0.001)


def test_no_slot_for_a_request_stops_the_start() -> None:
    start = predict(launch("qwen3.6-27b", weights=28 * GiB, max_mamba_cache_size=2))
    assert (start.starts, check(start, "state slots").passes) == (False, False)


def test_a_negative_pool_names_the_smallest_fraction() -> None:
    made = launch(card="RTX 4090", mem_fraction_static=Fraction(1, 2), context_length=4096)
    start = predict(made)
    told = check(start, "pool above zero")
    assert (start.starts, told.passes, start.pool.bytes) == (False, False, 0)
    assert "0.656" in told.says
    again = predict(replace(made, settings={**made.settings, "mem_fraction_static": _share(told.remedy)}))
    assert check(again, "pool above zero").passes is True
    assert again.tokens.low >= 4096


def test_what_dies_after_the_pool() -> None:
    made = launch(card="RTX 4090", mem_fraction_static=Fraction(97, 100), cuda_graph_max_bs=256, context_length=8192)
    start = predict(made)
    told = check(start, "rest holds graphs and activations")
    assert told.passes is False
    assert start.term("left free").bytes.bytes == 0
    lower = predict(replace(made, settings={**made.settings, "mem_fraction_static": _share(told.remedy)}))
    assert check(lower, told.name).passes is True
    between = predict(replace(made, settings={**made.settings, "mem_fraction_static": _share(told.remedy) + Fraction(
        5, 100)}))  # fmt: skip
    assert check(between, told.name).passes is None
    assert between.starts is None


def _share(remedy: str) -> Fraction:
    found = re.search(r"0\.\d+", remedy)
    assert found, remedy
    return Fraction(found[0])


def test_fewer_requests_where_no_fraction_is_enough() -> None:
    made = launch(card="RTX 4090", mem_fraction_static=Fraction(75, 100))
    # A table of 1,048,576 tokens a request.
    made = replace(made, config=replace(made.config, max_position_embeddings=1_048_576))
    told = check(predict(made), "rest holds graphs and activations")
    assert told.passes is False
    flags = dict(zip(*[iter(told.remedy.split())] * 2, strict=True))
    again = {name.strip("-").replace("-", "_"): int(value) for name, value in flags.items()}
    assert check(predict(replace(made, settings={**made.settings, **again})), told.name).passes is True


def test_weights_larger_than_the_card() -> None:
    start = predict(launch(card="T4"))
    assert [one.name for one in start.checks if one.passes is False] == ["pool above zero"] or [
        one.name for one in start.checks
    ] == ["weights load"]
    huge = predict(launch(card="T4", weights=200 * GiB))
    assert [one.name for one in huge.checks] == ["weights load"]
    assert sum(term.bytes.bytes for term in huge.terms) == find_card("T4").total_bytes


def test_settings_of_another_type_are_refused() -> None:
    for name, value in (("mem_fraction_static", Fraction(1)), ("max_total_tokens", "many"), ("cuda_graph_bs", 8),
                        ("disable_cuda_graph", "yes"), ("page_size", 0)):  # fmt: skip
        with pytest.raises(InvalidSetting, match=name):
            predict(launch(**{name: value}))
    with pytest.raises(UserError, match="no rules of an engine 'tgi'"):
        predict(launch(engine="tgi"))


def test_the_pytorch_backend_is_the_reference_policy() -> None:
    from tonnage.budget.reference.knobs import ReferenceKnobs

    card = find_card("H100")
    start = predict(launch(engine="trtllm", version="1.2", max_batch_size=256, max_seq_len=8192, batch_sizes=(1, 2, 4)))
    plan = plan_without_device(
        config("llama-3.1-8b"), card=card, reference=ReferenceKnobs(), backend="trtllm", dtype="bfloat16",
        limit_knobs=LimitKnobs(
            max_batch_size=Setting(256), max_seq_len=Setting(8192), max_num_tokens=Setting(8192)
        ),
        knobs=_graphs("1,2,4"),
    )  # fmt: skip
    assert (start.pool.bytes, start.tokens.best) == (plan.kv.bytes, plan.kv.tokens)
    assert {term.name: term.bytes.bytes for term in start.terms} == {
        line.name: line.bytes for line in plan.lines if line.bytes
    }


def _graphs(text: str):
    from tonnage.config import Knobs

    return Knobs(graphs=Setting(text))


def test_a_step_too_large_for_the_card_has_a_remedy_that_plans() -> None:
    made = launch("qwen3.6-27b", engine="trtllm", version="1.2", weights=28 * GiB)
    start = predict(made)
    told = check(start, "pool holds one sequence")
    assert (start.starts, start.pool.bytes) == (False, 0)
    rows, tokens = (int(each) for each in re.findall(r"\d+", told.remedy))
    assert predict(replace(made, settings={"max_batch_size": rows, "max_num_tokens": tokens})).starts is True


def test_a_built_engine_rounds_blocks_up() -> None:
    start = predict(launch("llama-2-7b", engine="trtllm", version="0.16", tokens_per_block=64))
    assert start.tokens.best % 64 == 0
    assert start.pool.bytes == start.tokens.best * start.bytes_per_token
    capped = predict(launch("llama-2-7b", engine="trtllm", version="0.16", max_tokens=1000))
    assert capped.tokens.best == 1024


def test_fit_shortens_the_context_before_it_moves_layers() -> None:
    length = config("llama-3.1-8b").max_position_embeddings
    roomy = predict(launch(engine="llamacpp", card="H200", cache_type_k="q4_0", cache_type_v="q4_0"))
    small = predict(launch(engine="llamacpp", card="RTX 4090", weights=15 * GiB))
    assert (roomy.tokens.best, small.tokens.best % 256) == (length, 0)
    assert 4096 <= small.tokens.best < length
    assert not any("go to the host" in note for note in small.notes)
    tiny = predict(launch(engine="llamacpp", card="T4", weights=15 * GiB))
    assert tiny.tokens.best == 4096
    assert any("whole layers go to the host" in note for note in tiny.notes)
    free = tiny.term("left free").bytes.bytes
    assert 1024 * MiB <= free < 1600 * MiB  # the margin, and less than a layer
    mixture = predict(launch("qwen3-30b-a3b", engine="llamacpp", card="RTX 4090", weights=40 * GiB))
    assert any("layers' experts go to the host" in note for note in mixture.notes)


def test_fit_leaves_what_was_set() -> None:
    asked = predict(launch(engine="llamacpp", card="RTX 4090", weights=15 * GiB, ctx_size=131_072))
    assert asked.tokens.best == 131_072
    stuck = predict(launch(engine="llamacpp", card="T4", weights=15 * GiB, n_gpu_layers=99))
    assert stuck.starts is False
    assert "leave --n-gpu-layers out" in stuck.checks[0].remedy
    with pytest.raises(InvalidSetting, match="whole layers"):
        predict(launch(engine="llamacpp", rank=Rank(tp=2, size=2)))
    with pytest.raises(InvalidSetting, match="no such type of cache"):
        predict(launch(engine="llamacpp", cache_type_k="q3_0"))


def test_a_quantised_cache_is_smaller() -> None:
    plain = predict(launch(engine="llamacpp", ctx_size=8192))
    packed = predict(launch(engine="llamacpp", ctx_size=8192, cache_type_k="q8_0", cache_type_v="q8_0"))
    assert packed.pool.bytes * 32 == plain.pool.bytes * 17


def test_the_compute_buffer_of_a_thread() -> None:
    """Qwen2.5 3B, 512 tokens of a ubatch, flash attention: 300.75 MiB."""
    start = predict(launch("qwen2.5-3b", engine="llamacpp", flash_attn="on"))
    assert start.term("compute buffer").bytes.bytes == int(300.75 * MiB)


def test_what_does_not_fit_is_cut_and_keeps_its_high() -> None:
    rule = Rule(name="x", says="X.", source="here")

    def term(name: str, size: int) -> Term:
        return Term(name=name, bytes=Quantity.exact(size, Source.DERIVED, ""), rule=rule)

    made = fitted([term("a", 6), term("b", 6), term("c", 1), term("rest", 0)], 10)
    assert [each.bytes.bytes for each in made] == [6, 4, 0, 0]
    assert [each.bytes.high for each in made] == [6, 6, 1, 0]


def test_what_was_given_and_decides_nothing_is_told() -> None:
    built = predict(launch("llama-2-7b", engine="trtllm", version="0.16", max_beam_width=4))
    assert "max_beam_width was given, and decides nothing here." in built.notes
    for engine, version in RELEASES:
        quiet = predict(launch(engine=engine, version=version))
        told = predict(launch(engine=engine, version=version, no_such_knob=1))
        assert set(told.notes) - set(quiet.notes) == {"no_such_knob was given, and decides nothing here."}


def test_drafts_of_no_named_algorithm_are_counted() -> None:
    made = launch(speculative_num_draft_tokens=4)
    assert cells(made, Settings(made)).token == 131_072 * Fraction(33, 32)
    start = predict(made)
    assert ("max_running_requests", "48", "with drafts, where it is left out") in start.defaults
    assert any("as one of the target's layers" in note for note in start.notes)
