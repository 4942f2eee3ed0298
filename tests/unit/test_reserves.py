"""Reserves: what each claims, when it does not apply and why, and that every formula gives its worked figures."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tonnage.reserves
from tonnage.budget.reference import charges as reference
from tonnage.config import Limits
from tonnage.costs.activations import encoder_output_bytes
from tonnage.costs.config import ModelConfig
from tonnage.costs.layers import Attention, Dense, Experts, Latent, Layer, Recurrent, Tower
from tonnage.layout import penalty_table_bytes
from tonnage.reserves import COUNTED, RESERVES, Declared, ReserveInputs, reserve_claims
from tonnage.reserves.adapters import adapted_features, adapter_bytes, between_bytes
from tonnage.reserves.context import attended_worst_tokens
from tonnage.reserves.drafts import draft_probability_bytes
from tonnage.reserves.encoder import encoder_reserve_bytes
from tonnage.reserves.fragmentation import fragmentation
from tonnage.reserves.indexer import indexer_logits_bytes
from tonnage.reserves.penalties import EXTRA_PENALTY_TABLES, penalty_bytes
from tonnage.reserves.prompt_logprobs import prompt_logprob_bytes, whole_bytes
from tonnage.terms import (
    Chip,
    Claim,
    Fixed,
    Lifetime,
    LineKind,
    PerBlock,
    Quantity,
    Rank,
    ReferenceSide,
    Scratch,
    Source,
    StepShape,
)
from tonnage.units import GiB, MiB

LLAMA_8B = ModelConfig.read(Path(__file__).parents[2] / "examples/configs/llama-3.1-8b")
SEES = replace(
    LLAMA_8B,
    towers=(Tower(kind="vision", num_layers=2, hidden_size=64, num_heads=4, intermediate_size=128),),
)
LATENT = Latent(
    num_heads=32, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, q_lora_rank=1536
)
LATENT_MODEL = replace(
    LLAMA_8B,
    layers=tuple(
        Layer(
            mixer=LATENT,
            feed_forward=Experts(
                num_experts=64, num_experts_per_token=8, intermediate_size=1024, shared_intermediate_size=2048
            ),
        )
        for _ in range(32)
    ),
)
DEFAULTS = Limits(max_seq_len=4096, max_batch_size=64, max_num_tokens=512, max_logits_rows=64)
#: Everything switched on.
ALL = replace(
    DEFAULTS,
    max_logprobs=20,
    max_draft_tokens=3,
    lookahead_steps=1,
    max_adapters=4,
    max_adapter_rank=16,
    max_encoder_tokens=1024,
    encoder_cache_bytes=128 * MiB,
    prompt_logprobs=True,
    graph_batch_sizes=(1, 8, 64),
    penalties=True,
)


class Grows(Scratch):
    """A backend whose scratch grows with what a step attends to."""

    def bytes_at(self, shape: StepShape, chip: Chip) -> int:
        return 100 * shape.attended_tokens


def scratch(**changes: object) -> Scratch:
    return Grows(**{"backend": "grows", "name": "scratch", "share": "attention", "source": "test", **changes})


def inputs(config: ModelConfig = LLAMA_8B, limits: Limits = ALL, **changes: object) -> ReserveInputs:
    known = {"rank": Rank(), "dtype": "bfloat16", "algorithm": "none"}
    return ReserveInputs(config=config, limits=limits, **{**known, **changes})


def by_name(config: ModelConfig = LLAMA_8B, limits: Limits = ALL, **changes: object) -> dict[str, Claim]:
    claimed = reserve_claims(inputs(config, limits, **changes))
    found = {claim.name: claim for claim in claimed}
    assert len(found) == len(claimed), "two claims have one name"
    return found


def size(claim: Claim) -> int:
    assert isinstance(claim.cost, Fixed | PerBlock)
    return claim.cost.bytes if isinstance(claim.cost, Fixed) else claim.cost.bytes_per_block


# -- the table ---------------------------------------------------------------------------------------------------------


def test_every_file_has_a_row_and_says_what_it_is():
    modules = [name for _, name, _ in pkgutil.iter_modules(tonnage.reserves.__path__) if name != "base"]
    rows = {importlib.import_module(f"tonnage.reserves.{name}").RESERVE for name in modules}
    assert rows == set(RESERVES.values())
    for name in modules:
        about = importlib.import_module(f"tonnage.reserves.{name}").__doc__ or ""
        for word in ("Trigger:", "Formula:", "Lifetime:", "Reason:", "reference"):
            assert word in about, f"{name} does not say its {word}"


def test_rows_name_themselves():
    for name, row in RESERVES.items():
        assert row.name == name
        assert row.trigger
        assert row.formula


RANKS = st.sampled_from([Rank(), Rank(tp=4, size=4), Rank(index=1, pp=2, size=2), Rank(pp=2, size=2)])
CONFIGS = st.sampled_from([LLAMA_8B, SEES, LATENT_MODEL])
LIMITS = st.builds(
    Limits,
    max_seq_len=st.integers(1, 200_000),
    max_batch_size=st.integers(1, 512),
    max_num_tokens=st.integers(512, 9000),
    max_logits_rows=st.integers(1, 512),
    max_logprobs=st.integers(0, 20),
    max_draft_tokens=st.integers(0, 4),
    lookahead_steps=st.integers(0, 2),
    max_adapters=st.integers(0, 8),
    max_adapter_rank=st.integers(1, 64),
    max_encoder_tokens=st.integers(0, 5000),
    encoder_cache_bytes=st.integers(0, 10**9),
    prompt_logprobs=st.booleans(),
    graph_batch_sizes=st.sampled_from([(), (1, 2, 4)]),
    penalties=st.booleans(),
)
COUNTS = st.sets(st.sampled_from(sorted(COUNTED))).map(frozenset)


@given(
    config=CONFIGS,
    limits=LIMITS,
    rank=RANKS,
    device_kind=st.sampled_from(["cuda", "host"]),
    algorithm=st.sampled_from(["none", "dsa", "deepseek_v4"]),
    counted=COUNTS,
)
def test_every_claim_explains_itself(config, limits, rank, device_kind, algorithm, counted):
    declared = (Declared(scratch=scratch(), label="8 heads"), Declared(scratch=scratch(name="other"), is_context=True))
    asked = inputs(
        config, limits, rank=rank, device_kind=device_kind, algorithm=algorithm, counted=counted, scratch=declared
    )
    for reserve in RESERVES.values():
        for claim in reserve.claims(asked):
            assert claim.applies is (claim.because == "")
            assert claim.ref
            assert len(claim.reason.split()) >= 6
            assert not claim.reason.endswith(".")
            assert claim.reference_side in (reserve.reference_side, None)
            if isinstance(claim.cost, Fixed):
                low = size(claim) if claim.low is None else claim.low
                high = size(claim) if claim.high is None else claim.high
                assert 0 <= low <= size(claim) <= high
            # What does not live inside a step needs a line that the budget adds up.
            if claim.lifetime != Lifetime.STEP:
                assert claim.line in (
                    LineKind.WEIGHTS,
                    LineKind.SCRATCH,
                    LineKind.GRAPHS,
                    LineKind.LIBRARIES,
                    LineKind.TABLES,
                )
            else:
                assert claim.line == LineKind.TRANSIENT


@given(config=CONFIGS, limits=LIMITS, name=st.sampled_from([f.name for f in fields(Limits)]), more=st.integers(1, 500))
def test_never_less_at_a_higher_limit(config, limits, name, more):
    if name == "graph_batch_sizes":
        grown = replace(limits, graph_batch_sizes=(1, 2, 4, 8))
    else:
        value = getattr(limits, name)
        grown = replace(limits, **{name: True if isinstance(value, bool) else value + more})
    before, after = by_name(config, limits), by_name(config, grown)
    for claim in before.values():
        # Look-ahead past the end of a sequence widens its row of the page table; nothing else may shrink either.
        if claim.applies and claim.name != "context workspace":
            assert after[claim.name].applies
            assert size(after[claim.name]) >= size(claim)


# -- which apply -------------------------------------------------------------------------------------------------------


def test_a_plain_dense_model_pays_for_tables_alone():
    applying = {name for name, claim in by_name(limits=replace(DEFAULTS, penalties=True)).items() if claim.applies}
    assert applying == {"page table", "step inputs", "penalty tables"}


@pytest.mark.parametrize(
    ("changes", "name", "because"),
    [
        ({"config": LLAMA_8B}, "encoder output", "the model has no encoder"),
        ({"config": SEES, "limits": replace(ALL, max_encoder_tokens=0)}, "encoder output", "max_encoder_tokens is 0"),
        ({"config": SEES, "limits": replace(ALL, encoder_cache_bytes=0)}, "encoder cache", "encoder_cache_bytes is 0"),
        ({"config": SEES, "rank": Rank(index=1, pp=2, size=2)}, "encoder cache", "only the first pipeline stage"),
        ({"limits": replace(ALL, max_adapters=0)}, "adapters", "no adapters"),
        ({"limits": replace(ALL, max_draft_tokens=0)}, "draft probabilities", "no tokens are drafted"),
        ({"limits": replace(ALL, lookahead_steps=0)}, EXTRA_PENALTY_TABLES, "no step is launched before"),
        ({"rank": Rank(index=1, pp=2, size=2)}, EXTRA_PENALTY_TABLES, "no step is launched before"),
        ({"rank": Rank(pp=2, size=2)}, "penalty tables", "only the last stage samples"),
        ({"limits": replace(ALL, penalties=False)}, "penalty tables", "may not have penalties"),
        ({"limits": replace(ALL, prompt_logprobs=False)}, "prompt log-probs", "may not ask for log-probs"),
        ({"rank": Rank(pp=2, size=2)}, "prompt log-probs", "only the last pipeline stage"),
        ({"rank": Rank(pp=2, size=2), "counted": frozenset()}, "sampler rows", "only the last pipeline stage"),
        ({}, "sampler rows", "counted in the sampler stage"),
        ({}, "cuda graphs", "counted in the line of graphs"),
        ({"device_kind": "host", "counted": frozenset()}, "cuda graphs", "a host captures no graphs"),
        ({"limits": replace(ALL, graph_batch_sizes=()), "counted": frozenset()}, "cuda graphs", "no batch size"),
        ({}, "allocator fragmentation", "counted in the line of fragmentation"),
        ({}, "collectives", "one rank"),
        ({}, "indexer logits", "no layer has a sparse indexer"),
        ({"reads": "reads its pages where they lie"}, "context workspace", "sdpa reads its pages where they lie"),
        ({"device_kind": "host"}, "step inputs", "made anew in each step"),
        ({}, "block metadata", "kept in host memory"),
    ],
)
def test_why_a_reserve_does_not_apply(changes, name, because):
    claim = by_name(**changes)[name]
    assert not claim.applies
    assert because in claim.because


@pytest.mark.parametrize(
    ("changes", "name", "side", "switchable"),
    [
        ({"config": SEES}, "encoder output", ReferenceSide.PEAK, True),
        ({"config": SEES}, "encoder cache", ReferenceSide.PEAK, True),
        ({}, "penalty tables", None, True),  # the reference leaves the base seats to its slack
        ({}, EXTRA_PENALTY_TABLES, ReferenceSide.PEAK, True),
        ({"algorithm": "deepseek_v4"}, "indexer logits", ReferenceSide.POOL, False),
        ({"algorithm": "dsa"}, "indexer logits", None, False),  # the same buffer, which the reference leaves out
        ({"rank": Rank(tp=2, size=2)}, "collectives", None, False),
        ({}, "adapters", None, True),
        ({}, "adapter activations", None, True),
        ({}, "prompt log-probs", None, True),
        ({}, "draft probabilities", None, True),
        ({"counted": frozenset()}, "cuda graphs", None, True),
        ({"counted": frozenset()}, "allocator fragmentation", None, False),
        ({"counted": frozenset()}, "sampler rows", None, False),
    ],
)
def test_how_the_reference_charges_it_and_whether_it_can_be_switched_off(changes, name, side, switchable):
    claim = by_name(**changes)[name]
    assert claim.applies
    assert (claim.reference_side, claim.can_disable) == (side, switchable)
    assert size(claim) > 0


# -- attention's declarations ------------------------------------------------------------------------------------------


def test_scratch_becomes_a_claim():
    served = Declared(scratch=scratch(keeps_state=False))
    library = Declared(scratch=scratch(name="inside", served=False), label="4 heads")
    context = Declared(scratch=scratch(name="context", chunk_bounded=False), is_context=True)
    gather = Declared(scratch=scratch(name="gather"), is_context=True, in_reference=False)
    found = by_name(scratch=(served, library, context, gather))
    fixed, inside = found["grows: scratch"], found["grows: inside (4 heads)"]
    assert (fixed.lendable, inside.lendable) == (True, False)
    assert (fixed.maker.value, inside.maker.value) == ("arena", "torch")
    assert fixed.reference_side == inside.reference_side == ReferenceSide.PEAK
    assert found["grows: context"].reference_side == ReferenceSide.POOL
    assert found["grows: gather"].reference_side is None
    assert "262,144" in found["grows: context"].reason
    assert "is split or waits" in found["grows: context"].reason
    assert "set aside whole" in found["grows: gather"].reason
    assert "context workspace" not in found
    assert all(found[name].cost == one.scratch for name, one in
               (("grows: scratch", served), ("grows: context", context)))  # fmt: skip


@pytest.mark.parametrize(("asked", "tokens"), [(None, 262_144), (100_000, 100_000), (1_000, 4_096), (10**12, 262_144)])
def test_the_most_a_step_may_attend_to(asked, tokens):
    bounds = replace(DEFAULTS, max_num_tokens=8192)
    assert attended_worst_tokens(bounds, asked=asked) == tokens


# -- the reference's formulas, in a room that cannot see this one ----


@given(
    extra=st.integers(1, 5000),
    beam=st.integers(1, 8),
    vocab=st.integers(1, 10**6),
    tokens=st.integers(1, 10**5),
    length=st.integers(1, 10**7),
    output=st.integers(0, 10**9),
    profiled=st.integers(0, 10**9),
    cache=st.integers(0, 10**9),
    active=st.booleans(),
)
def test_both_rooms_have_the_same_formulas(extra, beam, vocab, tokens, length, output, profiled, cache, active):
    assert penalty_bytes(extra, vocab, beam_width=beam) == reference.penalty_reserve(
        num_sequences=extra + 7, num_base_sequences=7, beam_width=beam, vocab_size=vocab
    )
    assert indexer_logits_bytes(tokens, length) == reference.indexer_reserve(max_num_tokens=tokens, max_seq_len=length)
    known = {
        "output_budget_bytes": output,
        "profiled_output_bytes": profiled,
        "cache_bytes": cache,
        "is_cache_active": active,
    }
    assert encoder_reserve_bytes(**known) == reference.encoder_reserve(**known)


# -- formulas ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "length", "budget", "expected"),
    [
        (4096, 4096, 2**31, 67_108_864),
        (8192, 131_072, 2**31, 4 * GiB),
        (8192, 1_048_576, 2**31, 8 * GiB),
        (None, None, 1024, 4_096),
        (0, 4096, 1024, 4_096),
    ],
)
def test_indexer(tokens, length, budget, expected):
    assert indexer_logits_bytes(tokens, length, element_budget=budget) == expected


@pytest.mark.parametrize(
    ("seats", "base", "beam", "vocab", "extra"),
    [(512, 256, 1, 129_280, 165_478_400), (4096, 2048, 1, 151_936, 1_555_824_640), (1024, 0, 1, 151_936, 777_912_320)],
)
def test_penalties(seats, base, beam, vocab, extra):
    assert penalty_bytes(seats - base, vocab, beam_width=beam) == extra


def test_penalties_of_beams_and_of_the_engines_tables():
    assert penalty_bytes(3, 1000, beam_width=4) == 3 * 1000 * (4 * 4 + 1)
    assert penalty_bytes(64, 49_152) == penalty_table_bytes(max_batch_size=64, vocab_size=49_152)
    assert penalty_bytes(0, 49_152) == 0


def test_beams_count_in_tables_of_every_seat():
    found = by_name(beam_width=3)
    for name in ("penalty tables", EXTRA_PENALTY_TABLES):
        assert size(found[name]) == 64 * 128_256 * 13


def test_we_charge_every_seat_and_the_reference_the_extra_ones():
    found = by_name()
    every = penalty_bytes(128, LLAMA_8B.vocab_size)
    charged = size(found["penalty tables"]) + size(found[EXTRA_PENALTY_TABLES])
    assert charged == every == 2 * size(found[EXTRA_PENALTY_TABLES])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"output_budget_bytes": 512, "profiled_output_bytes": 400}, 112),
        ({"output_budget_bytes": 0, "cache_bytes": 64, "is_cache_active": True}, 64),
        ({"output_budget_bytes": 0, "cache_bytes": 64}, 0),
        ({"output_budget_bytes": 100, "profiled_output_bytes": 400, "cache_bytes": 64, "is_cache_active": True}, 64),
    ],
)
def test_encoder(changes, expected):
    assert encoder_reserve_bytes(**changes) == expected


def test_encoder_claims():
    found = by_name(SEES)
    assert size(found["encoder output"]) == encoder_output_bytes(SEES, num_tokens=1024) == 8 * MiB
    assert size(found["encoder cache"]) == 128 * MiB
    assert found["encoder output"].stage is None  # it lies beside every stage
    probed = by_name(SEES, profiled_output_bytes=3 * MiB)["encoder output"]
    assert (size(probed), probed.probed_bytes) == (8 * MiB, 3 * MiB)
    assert by_name(SEES, profiled_output_bytes=GiB)["encoder output"].probed_bytes == 8 * MiB


def test_levels_that_are_fed_into_deeper_layers_are_kept_too():
    deep = replace(SEES, raw={**SEES.raw, "vision_config": {"deepstack_visual_indexes": [5, 11, 17]}})
    assert size(by_name(deep)["encoder output"]) == 4 * size(by_name(SEES)["encoder output"])


def test_models_that_attend_to_an_encoder_have_one_without_a_tower():
    cross = replace(LLAMA_8B.layers[0].mixer, is_cross=True)
    hears = replace(LLAMA_8B, layers=(replace(LLAMA_8B.layers[0], mixer=cross), *LLAMA_8B.layers[1:]))
    assert by_name(hears)["encoder output"].applies


def test_800_mb_of_draft_probabilities():
    """512 seats, three drafts of a vocabulary of 129,280."""
    assert draft_probability_bytes(512, 3, 129_280) == 794_296_320
    assert size(by_name()["draft probabilities"]) == 128 * 3 * LLAMA_8B.vocab_size * 4


class TestPromptLogprobs:
    def test_in_slices(self):
        """8,192 tokens of 4,096: 64 MiB of hidden states, 256 rows of logits, a tile of 32 rows twice as floats."""
        size = prompt_logprob_bytes(
            num_tokens=8192, slice_rows=256, hidden_size=4096, vocab_size=128_256, dtype="bfloat16", tile_elements=2**22
        )
        assert size == 64 * MiB + 256 * 128_256 * 2 + 32 * 128_256 * 8
        assert whole_bytes(8192, 128_256) == 4_202_692_608 > 20 * size

    def test_float32_logits_are_their_own_numbers(self):
        known = {"num_tokens": 32, "slice_rows": 32, "hidden_size": 0, "vocab_size": 1000, "tile_elements": 2**18}
        narrow = prompt_logprob_bytes(**known, dtype="bfloat16", num_told=20)
        wide = prompt_logprob_bytes(**known, dtype="float32", num_told=20)
        assert narrow == 32 * 1000 * 2 + 32 * (8000 + 320)
        assert wide == 32 * 1000 * 4 + 32 * (4000 + 320)

    @pytest.mark.parametrize(
        ("dtype", "vocab", "tracked"),
        [
            ("float32", 49_152, 983_120),
            ("float32", 1000, 128_256),
            ("bfloat16", 49_152, 1_966_160),
            ("bfloat16", 1000, 256_256),
        ],
    )
    def test_against_what_a_tracker_counted(self, dtype, vocab, tracked):
        """Storages alive while the sampler told 20 tokens of each of 32 rows, logits excluded."""
        known = {"num_tokens": 32, "slice_rows": 32, "hidden_size": 0, "tile_elements": 2**18, "num_told": 20}
        logits = 32 * vocab * (4 if dtype == "float32" else 2)
        beside = prompt_logprob_bytes(**known, vocab_size=vocab, dtype=dtype) - logits
        assert tracked <= beside <= 1.1 * tracked

    def test_the_reason_says_what_it_spares(self):
        assert "64 rows at a time; all at once would take 250.50 MiB" in by_name()["prompt log-probs"].reason


class TestAdapters:
    def test_a_dense_layer_by_hand(self):
        """Llama 8B: q, k, v, o, gate, up, down, of 32 layers."""
        pairs = [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 14_336), (4096, 14_336), (14_336, 4096)]
        features = 32 * sum(a + b for a, b in pairs)
        assert adapted_features(inputs()) == features
        # A rank-16 adapter of this model has 41,943,040 parameters.
        assert 16 * features == 41_943_040
        assert size(by_name()["adapters"]) == adapter_bytes(
            num_adapters=4, max_rank=16, num_features=features, element_bytes=2
        ) == 4 * 2 * 41_943_040  # fmt: skip

    def test_one_of_each_pair_is_split(self):
        features = adapted_features(inputs(rank=Rank(tp=4, size=4)))
        pairs = [(4096, 1024), (4096, 256), (4096, 256), (1024, 4096), (4096, 3584), (4096, 3584), (3584, 4096)]
        assert features == 32 * sum(a + b for a, b in pairs)

    def test_a_latent_layer_by_hand(self):
        pairs = [(4096, 1536), (1536, 32 * 192), (4096, 576), (512, 32 * 256), (32 * 128, 4096)]
        shared = [(4096, 2048), (4096, 2048), (2048, 4096)]
        assert adapted_features(inputs(LATENT_MODEL)) == 32 * sum(a + b for a, b in (*pairs, *shared))

    def test_layers_that_keep_no_keys_and_layers_that_are_not_adapted(self):
        attention = Attention(num_heads=2, num_kv_heads=1, head_dim=8, v_head_dim=8, kv_from=0)
        state = Recurrent(kind="mamba2", num_heads=2, head_dim=8, state_size=4, conv_channels=24, conv_kernel=4)
        routed = Experts(num_experts=4, num_experts_per_token=1, intermediate_size=64)
        layers = (
            Layer(mixer=attention, feed_forward=Dense(intermediate_size=32, is_gated=False)),
            Layer(mixer=state, feed_forward=routed),
            Layer(mixer=None, feed_forward=None),
        )
        tiny = replace(LLAMA_8B, num_layers=3, hidden_size=16, layers=layers)
        assert adapted_features(inputs(tiny)) == (16 + 16) + (16 + 16) + (16 + 32) + (32 + 16)

    def test_tokens_between_the_two_matrices(self):
        assert between_bytes(num_tokens=512, max_rank=16) == 512 * 16 * 12 == size(by_name()["adapter activations"])


def test_graphs_declared():
    """Three graphs: one pool for 64 rows, a MiB for each, where nobody has counted them."""
    found = by_name(counted=frozenset())["cuda graphs"]
    assert found.low is not None
    assert found.high is not None
    assert size(found) - found.low == 3 * MiB
    assert found.high - size(found) == 3 * 6 * MiB
    assert found.line == LineKind.GRAPHS


def test_fragmentation_is_reserved_less_allocated():
    peak = Quantity(bytes=100 * MiB, low=80 * MiB, high=110 * MiB, source=Source.PREDICTED, ref="test")
    found = fragmentation(peak, device_kind="cuda")
    assert (found.bytes, found.low, found.high) == (25 * MiB, 12 * MiB, 110 * MiB * 156 // 100 - 110 * MiB)
    assert fragmentation(peak, device_kind="host").bytes == 5 * MiB
    assert by_name(counted=frozenset())["allocator fragmentation"].applies


@pytest.mark.parametrize(
    ("rank", "applies"),
    [(Rank(), False), (Rank(tp=2, size=2), True), (Rank(pp=2, size=2), True), (Rank(attention_dp=True), False)],
)
def test_collectives(rank, applies):
    claim = by_name(rank=rank)["collectives"]
    assert claim.applies is applies
    assert size(claim) == (512 * MiB if applies else 0)


@pytest.mark.parametrize(
    ("limits", "rank", "seats"),
    [
        (DEFAULTS, Rank(), 64),
        (replace(DEFAULTS, lookahead_steps=1), Rank(), 128),
        (replace(DEFAULTS, lookahead_steps=2), Rank(), 128),
        (replace(DEFAULTS, lookahead_steps=1), Rank(pp=2, size=2), 64),
    ],
)
def test_seats(limits, rank, seats):
    assert inputs(limits=limits, rank=rank).num_seats == seats
