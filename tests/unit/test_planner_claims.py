"""What the planner lists beside weights, cache and probes, and what switching a claim off does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import shapes
from test_planner import LLAMA_8B, SMOLLM2, checked, limits

from tonnage.budget.charges import charges
from tonnage.config import Knobs, Limits
from tonnage.costs.config import ModelConfig
from tonnage.costs.kv import kv_layout
from tonnage.costs.layers import Recurrent
from tonnage.errors import InvalidSetting
from tonnage.hardware import generic_card, host_card
from tonnage.layout import KVGroupKind, metadata_bytes_per_block, penalty_table_bytes, table_bytes
from tonnage.planner import claims_for, plan_ranks, plan_without_device, resolve_limits
from tonnage.planner.claims import step_input_bytes, without
from tonnage.planner.limits import HOST_MAX_BATCH_SIZE
from tonnage.terms import (
    Chip,
    Claim,
    Fixed,
    LineKind,
    Measured,
    PerBlock,
    Quantity,
    Rank,
    ReferenceSide,
    Scratch,
    Source,
    worst_shape,
)
from tonnage.units import GiB


def test_claims_that_cannot_be_switched_off():
    with pytest.raises(InvalidSetting, match="disabled_claims"):
        plan_without_device(SMOLLM2, card=host_card(2 * GiB), knobs=Knobs(disabled_claims=frozenset({"weights"})))


def test_books_of_the_host_tier_lie_where_the_engines_objects_do():
    made, _ = resolve_limits(SMOLLM2, limits(max_seq_len=100), device_kind="host")
    layout = kv_layout(SMOLLM2, kv_dtype="float32", block_tokens=8)
    asked = {"block_tokens": 8, "layout": layout, "host_kv_bytes": 10 * layout.slab_bytes + 9}
    on_host, on_card = (
        {claim.name: claim for claim in claims_for(SMOLLM2, made, device_kind=kind, **asked)}
        for kind in ("host", "cuda")
    )
    each = metadata_bytes_per_block(block_tokens=8, prefix_caching=True)
    assert on_host["host block metadata"].applies
    assert on_host["host block metadata"].cost == Fixed(bytes=10 * each)
    assert not on_card["host block metadata"].applies
    assert "host block metadata" not in {claim.name for claim in claims_for(SMOLLM2, made, device_kind="host")}


def test_tables_on_the_host_are_what_the_formulas_of_the_layout_say():
    """Managers claim by the same names and formulas; a plan takes each name once."""
    made, _ = resolve_limits(SMOLLM2, limits(max_seq_len=100), device_kind="host")
    tables = {
        claim.name: claim.cost
        for claim in claims_for(SMOLLM2, made, block_tokens=8, device_kind="host")
        if claim.line == LineKind.TABLES and claim.applies
    }
    table = table_bytes(max_batch_size=HOST_MAX_BATCH_SIZE, max_seq_len=100, block_tokens=8)
    assert tables == {
        "page table": Fixed(bytes=2 * table),  # of slots, and of ids
        "block metadata": PerBlock(bytes_per_block=metadata_bytes_per_block(block_tokens=8, prefix_caching=True)),
        "slot of no block": Fixed(bytes=4),
        "penalty tables": Fixed(bytes=penalty_table_bytes(max_batch_size=HOST_MAX_BATCH_SIZE, vocab_size=49_152)),
    }


def test_claims_of_this_path():
    made, _ = resolve_limits(SMOLLM2, limits(max_seq_len=100, max_batch_size=4, max_num_tokens=64))
    found = {claim.name: claim for claim in claims_for(SMOLLM2, made, device_kind="cuda")}
    assert found["page table"].cost == Fixed(bytes=4 * 7 * 4)
    assert found["step inputs"].cost == Fixed(bytes=step_input_bytes(made)) == Fixed(bytes=8 * (3 * 64 + 3 * 5))
    assert found["penalty tables"].cost == Fixed(bytes=4 * 49_152 * (4 + 1))
    assert not found["block metadata"].applies
    assert [claim.source for claim in found.values() if claim.line == LineKind.SCRATCH and claim.applies] == [
        Source.DECLARED
    ]


@pytest.mark.parametrize("card", [generic_card(80 * GiB), host_card(2 * GiB)], ids=lambda card: card.name)
def test_penalty_tables_are_paid_from_the_start_unless_they_are_switched_off(card):
    """256 sequences on a card and 32 on the host, over 49,152 tokens: an int32 and a bool each."""
    made = checked(plan_without_device(SMOLLM2, card=card))
    size = {256: 62_914_560, 32: 7_864_320}[made.limits.max_batch_size]
    assert [c.bytes for c in made.line(LineKind.TABLES).children if c.name == "penalty tables"] == [size]
    assert (made.limits.penalties, made.limits.max_logprobs) == (True, 20)
    off = Knobs(disabled_claims=frozenset({"penalty tables"}))
    without = checked(plan_without_device(SMOLLM2, card=card, knobs=off))
    assert not without.limits.penalties
    assert without.bytes_of(LineKind.TABLES) < made.bytes_of(LineKind.TABLES)
    assert without.kv.bytes > made.kv.bytes + size // 2
    assert without.fingerprint != made.fingerprint


#: A latent model with experts, as config.json has it.
LATENT = ModelConfig.from_dict(
    {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "intermediate_size": 18_432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "first_k_dense_replace": 3, "vocab_size": 129_280,
        "max_position_embeddings": 163_840, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    },
    name="latent",
)  # fmt: skip
#: Two sizes of heads: windows of 8 heads of 128, full layers of 2 heads of 256.
TWO_KINDS = replace(
    LLAMA_8B,
    layers=(
        *LLAMA_8B.layers[:16],
        *(
            replace(layer, mixer=replace(layer.mixer, num_kv_heads=2, head_dim=256, v_head_dim=256))
            for layer in LLAMA_8B.layers[16:]
        ),
    ),
)
STATE = Recurrent(kind="mamba2", num_heads=64, head_dim=64, state_size=128, conv_channels=4352, conv_kernel=4)
CHIP = Chip(name="H200", sm=90, num_sms=132, total_bytes=150_109_880_320)
LONG = Limits(
    max_seq_len=65_536,
    max_batch_size=256,
    max_num_tokens=8192,
    max_logits_rows=256,
    prefix_caching=True,
    penalties=True,
)


def scratch_of(*claims: Claim) -> dict[str, Claim]:
    return {claim.name: claim for claim in claims if claim.line == LineKind.SCRATCH and claim.applies}


def nothing_measured(device_bytes: int) -> Measured:
    none = Quantity.exact(0, Source.MEASURED, "test")
    return Measured(
        rank=Rank(),
        device_bytes=device_bytes,
        weights=none,
        context=none,
        libraries=none,
        stages=(),
        graphs=None,
        foreign_bytes=none,
    )


class TestLatentContext:
    """A latent model whose backend expands what it attends to: two demands that share the budget with the cache."""

    @pytest.mark.parametrize(
        ("rank", "rate", "gather"),
        [
            (Rank(tp=8, size=8, attention_dp=True), 40_960, 114_688),
            (Rank(tp=8, size=8), 5_120, 14_336),
        ],
    )
    def test_both_are_rated(self, rank, rate, gather):
        listed = claims_for(LATENT, LONG, backend="trtllm", kv_dtype="fp8", rank=rank, chip=CHIP)
        charged = charges(nothing_measured(CHIP.total_bytes), listed, limits=LONG, chip=CHIP)
        assert {one.claim.name: one.bytes_per_token for one in charged.rated} == {
            "trtllm: context dequantisation": rate,
            "trtllm: context gather": gather,
        }
        assert all(one.most_tokens == 256 * 65_536 for one in charged.rated)
        assert charged.line(LineKind.SCRATCH).bytes == 0

    def test_the_reference_knows_of_one(self):
        found = scratch_of(*claims_for(LATENT, LONG, backend="trtllm", kv_dtype="fp8", chip=CHIP))
        assert {name: claim.reference_side for name, claim in found.items()} == {
            "trtllm: context dequantisation": ReferenceSide.POOL,
            "trtllm: context gather": None,
        }

    def test_chunks_bound_it_on_later_chips(self):
        later = replace(CHIP, sm=100)
        listed = claims_for(LATENT, LONG, backend="trtllm", kv_dtype="fp8", chip=later)
        charged = charges(nothing_measured(CHIP.total_bytes), listed, limits=LONG, chip=later)
        assert charged.rated == ()
        assert charged.line(LineKind.SCRATCH).bytes == (8192 + 8 * 8192) * (40_960 + 114_688)

    def test_a_backend_that_reads_pages_has_none(self):
        (claim,) = (c for c in claims_for(LATENT, LONG, backend="flashinfer") if c.name == "context workspace")
        assert (claim.applies, claim.because) == (False, "flashinfer reads its pages where they lie")


class TestKindsOfLayers:
    def test_each_kind_is_told_apart_and_the_largest_counts(self):
        listed = claims_for(TWO_KINDS, LONG, backend="sdpa")
        found = scratch_of(*listed)
        assert set(found) == {
            "sdpa: gathered pages and masks (32 heads of 128 on 8)",
            "sdpa: gathered pages and masks (32 heads of 256 on 2)",
        }
        charged = charges(nothing_measured(CHIP.total_bytes), listed, limits=LONG, chip=CHIP)
        (only,) = scratch_of(*claims_for(LLAMA_8B, LONG, backend="sdpa")).values()
        alone = charges(nothing_measured(CHIP.total_bytes), [only], limits=LONG, chip=CHIP)
        assert charged.line(LineKind.SCRATCH).bytes == alone.line(LineKind.SCRATCH).bytes

    def test_what_is_declared_alike_is_said_once(self):
        found = scratch_of(*claims_for(TWO_KINDS, LONG, backend="flashinfer"))
        assert sorted(found) == [
            "flashinfer: plans and floats (32 heads of 128 on 8)",
            "flashinfer: plans and floats (32 heads of 256 on 2)",
        ]


@pytest.mark.parametrize("backend", ["flashinfer", "fa3", "triton", "trtllm"])
def test_other_backends_price_a_dense_model(backend):
    listed = claims_for(LLAMA_8B, replace(LONG, graph_batch_sizes=(256,)), backend=backend)
    for claim in scratch_of(*listed).values():
        assert isinstance(claim.cost, Scratch)
        assert claim.reference_side == ReferenceSide.PEAK
        assert 0 < claim.cost.bytes_at(worst_shape(LONG), CHIP) < GiB


def test_an_unknown_backend_is_refused_even_where_no_layer_attends():
    with pytest.raises(InvalidSetting, match="flash9"):
        claims_for(LLAMA_8B, LONG, backend="flash9")
    states = replace(LLAMA_8B, layers=tuple(replace(layer, mixer=None) for layer in LLAMA_8B.layers))
    with pytest.raises(InvalidSetting, match="flash9"):
        claims_for(states, LONG, backend="flash9")
    assert not scratch_of(*claims_for(states, LONG))


def test_every_claim_that_can_be_switched_off_is_then_charged_nothing():
    bounds = replace(
        LONG, max_adapters=2, max_adapter_rank=8, max_draft_tokens=2, lookahead_steps=1, prompt_logprobs=True
    )
    listed = claims_for(LLAMA_8B, bounds)
    names = {claim.name for claim in listed if claim.can_disable and claim.applies}
    assert names == {
        "adapter activations",
        "adapters",
        "draft probabilities",
        "penalty tables",
        "penalty tables of look-ahead seats",
        "prompt log-probs",
    }
    for claim in without(listed, frozenset(names)):
        assert (claim.name in names) <= (not claim.applies and claim.because == "switched off")


class TestPageTables:
    """A table for each group of layers, int32, a row a sequence; rows of 65,536 tokens."""

    def table(self, config, *, rank=None, limits=LONG, block_tokens=16, **changes):
        layout = kv_layout(config, block_tokens=block_tokens, rank=rank, **changes)
        listed = claims_for(config, limits, block_tokens=block_tokens, rank=rank, layout=layout)
        return next(c for c in listed if c.name == "page table"), layout

    def test_a_dense_model_has_one(self):
        claim, _ = self.table(LLAMA_8B)
        without = next(c for c in claims_for(LLAMA_8B, LONG) if c.name == "page table")
        assert claim == without
        assert claim.cost == Fixed(bytes=256 * 4096 * 4)

    @pytest.mark.parametrize("name", ["gpt-oss-20b", "gemma-3-12b", "qwen3-next-80b-a3b", "deepseek-v4-flash"])
    def test_by_hand(self, name):
        config = shapes.config(name)
        claim, layout = self.table(config)
        wide = [group.block_tokens for group in layout.groups if group.kind is not KVGroupKind.STATE]
        assert len(layout.groups) > 1
        assert claim.cost == Fixed(bytes=sum(256 * -(-65_536 // tokens) * 4 for tokens in wide))

    def test_a_window_is_as_wide_as_the_whole(self):
        claim, layout = self.table(shapes.config("gpt-oss-20b"))
        assert [group.window for group in layout.groups] == [None, 128]
        assert claim.cost == Fixed(bytes=2 * 256 * 4096 * 4)

    def test_an_encoders_blocks_have_one_of_their_own(self):
        bounds = replace(LONG, max_encoder_tokens=1601)
        claim, layout = self.table(shapes.config("llama-3.2-11b-vision"), limits=bounds)
        found = {group.kind: group.block_tokens for group in layout.groups}
        cross = -(-1601 // found[KVGroupKind.CROSS])
        assert claim.cost == Fixed(bytes=256 * 4 * (-(-65_536 // found[KVGroupKind.FULL]) + cross))

    def test_states_have_none(self):
        states = replace(LLAMA_8B, layers=tuple(replace(layer, mixer=STATE) for layer in LLAMA_8B.layers))
        claim, _ = self.table(states)
        assert (claim.applies, claim.cost) == (False, Fixed(bytes=0))

    @pytest.mark.parametrize("length", [65_536, 65_537, 100])
    def test_context_parallel_ranks_list_their_own(self, length):
        claim, _ = self.table(LLAMA_8B, rank=Rank(cp=4, size=4), limits=replace(LONG, max_seq_len=length))
        blocks = -(-length // 16)
        assert claim.cost == Fixed(bytes=256 * -(-blocks // 4) * 4)


class TestPenaltiesOfStages:
    @pytest.mark.parametrize("index", [0, 1])
    def test_every_stage_lists_them(self, index):
        rank = Rank(index=index, pp=2, size=2)
        claim = next(c for c in claims_for(LLAMA_8B, LONG, rank=rank) if c.name == "penalty tables")
        assert claim.applies is (index == 1)
        assert claim.applies or claim.because == "only the last stage samples"

    def test_one_name_switches_them_off_on_all(self):
        knobs = Knobs(disabled_claims=frozenset({"penalty tables"}))
        asked = {"card": generic_card(80 * GiB), "rank": Rank(pp=2, size=2)}
        usual, off = plan_ranks(LLAMA_8B, **asked), plan_ranks(LLAMA_8B, knobs=knobs, **asked)
        saved = [a.bytes_of(LineKind.TABLES) - b.bytes_of(LineKind.TABLES) for a, b in zip(usual, off, strict=True)]
        assert saved == [0, penalty_table_bytes(max_batch_size=256, vocab_size=128_256)]


def test_dtypes_default_to_the_models():
    listed = {c.name: c for c in claims_for(LLAMA_8B, replace(LONG, max_adapters=1, max_adapter_rank=1))}
    wide = {c.name: c for c in claims_for(LLAMA_8B, replace(LONG, max_adapters=1, max_adapter_rank=1), dtype="float32")}
    assert wide["adapters"].cost.bytes == 2 * listed["adapters"].cost.bytes
    scratch = [c["sdpa: gathered pages and masks"].cost.element_bytes for c in (listed, wide)]
    assert scratch == [2, 4]
