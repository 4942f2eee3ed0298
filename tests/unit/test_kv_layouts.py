"""Layouts of every kind of cache: groups, parts, slabs, and what one sequence costs."""

from __future__ import annotations

from fractions import Fraction

import pytest
import shapes
from hypothesis import given
from hypothesis import strategies as st

from tonnage.costs.config import ModelConfig
from tonnage.costs.kv import bytes_per_token, kv_layout
from tonnage.errors import InvalidSetting, UnsupportedModel
from tonnage.layout import (
    KVGroupKind,
    KVLayout,
    sequence_bytes,
    state_bytes_per_sequence,
    window_blocks,
)
from tonnage.terms import Rank

BASE = {
    "model_type": "llama",
    "num_hidden_layers": 6,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "max_position_embeddings": 100_000,
    "torch_dtype": "bfloat16",
}


def config(**changes) -> ModelConfig:
    return ModelConfig.from_dict({**BASE, **changes}, name="tiny")


#: The recurrent model of the reference's vectors: 27 recurrent and 4 attention layers, 128 heads of 80, 8 groups,
#: state 128, kernel 4; 8 KV heads of 128.
HYBRID = config(
    model_type="granitemoehybrid", num_hidden_layers=31, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    layer_types=(["mamba"] * 7 + ["attention"]) * 3 + ["mamba"] * 6 + ["attention"], mamba_n_heads=128,
    mamba_d_head=80, mamba_n_groups=8, mamba_d_state=128, mamba_d_conv=4,
)  # fmt: skip


def kinds(layout: KVLayout) -> list[str]:
    return [group.kind.value for group in layout.groups]


@pytest.mark.parametrize(
    ("state_dtype", "num_bytes"), [("bf16", 72_769_536), ("fp32", 143_548_416), (None, 143_548_416)]
)
def test_state_of_the_references_hybrid(state_dtype, num_bytes):
    layout = kv_layout(HYBRID, state_dtype=state_dtype)
    assert state_bytes_per_sequence(layout) == num_bytes
    assert bytes_per_token(layout) == 16_384


def test_config_names_the_state_dtype():
    raw = {**dict(HYBRID.raw), "mamba_ssm_cache_dtype": "bfloat16"}
    named = ModelConfig.from_dict(raw, name="named")
    assert state_bytes_per_sequence(kv_layout(named)) == 72_769_536
    assert state_bytes_per_sequence(kv_layout(named, state_dtype="float32")) == 143_548_416
    assert any("recurrent states in float32" in note for note in HYBRID.notes)
    assert not any("recurrent states" in note for note in named.notes)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_state_divides_by_ranks(tp):
    """Heads and their channels divide; with 8 groups so do B and C."""
    layout = kv_layout(HYBRID, rank=Rank(size=tp, tp=tp))
    assert state_bytes_per_sequence(layout) * tp == 143_548_416


def test_groups_fewer_than_ranks_are_replicated():
    """16 ranks and 8 groups: each keeps one whole group, twice its even share."""
    layout = kv_layout(HYBRID, rank=Rank(size=16, tp=16))
    conv, ssm = (128 * 80 // 16 + 2 * 1 * 128) * 3 * 2, 128 // 16 * 80 * 128 * 4
    assert state_bytes_per_sequence(layout) == 27 * (conv + ssm)


def test_attention_data_parallelism_divides_nothing():
    whole = kv_layout(HYBRID)
    assert kv_layout(HYBRID, rank=Rank(index=3, size=4, tp=4, attention_dp=True)) == whole


@pytest.mark.parametrize(
    ("dtype", "parts"),
    [
        (None, [("kv", "bfloat16", (6, 2, 16, 4, 32))]),
        ("fp8", [("kv", "float8_e4m3fn", (6, 2, 16, 4, 32))]),
        (
            "nvfp4",
            [("kv", "float4_e2m1fn_x2", (6, 2, 16, 4, 16)), ("kv_scale", "float8_e4m3fn", (6, 2, 16, 4, 2))],
        ),
    ],
)
def test_parts_of_plain_attention(dtype, parts):
    (group,) = kv_layout(config(), kv_dtype=dtype).groups
    assert [(part.name, part.dtype, part.shape) for part in group.parts] == parts
    assert group.parts[-1].offset_bytes + group.parts[-1].num_bytes == group.block_bytes


def test_four_bits_of_a_head_that_is_no_multiple_of_16():
    """A layer's elements are rounded up together: 2 * 4 * 20 = 160, 80 bytes and 10 scales."""
    layout = kv_layout(config(head_dim=20), kv_dtype="nvfp4")
    assert bytes_per_token(layout) == 6 * (80 + 10)


def test_llama_8b_in_four_bits():
    assert bytes_per_token(kv_layout(shapes.config("llama-3.1-8b"), kv_dtype="nvfp4")) == 36_864


LATENT = {
    "model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "n_routed_experts": None,
}  # fmt: skip


def test_sparse_indexer_parts():
    """A byte an element and a float32 scale per 128, whatever the dtype of the cache."""
    for dtype in ("bf16", "fp8"):
        (group,) = kv_layout(config(**LATENT, index_head_dim=192), kv_dtype=dtype, block_tokens=3).groups
        assert group.kind is KVGroupKind.LATENT
        assert [(part.name, part.shape) for part in group.parts] == [
            ("latent", (6, 3, 576)),
            ("index", (6, 3, 192)),
            ("index_scale", (6, 3, 2)),
        ]
        assert group.parts[2].offset_bytes % 4 == 0


def test_records_for_sparse_latent_attention():
    """512 bytes, four float32 scales and 64 rotary elements of 16 bits: 656."""
    assert bytes_per_token(kv_layout(config(**LATENT), kv_dtype="fp8_ds_mla")) == 6 * 656
    with pytest.raises(InvalidSetting, match=r"fp8_ds_mla.*latent"):
        kv_layout(config(), kv_dtype="fp8_ds_mla")


@pytest.mark.parametrize(("pp", "num_layers", "fp8_bytes"), [(4, (16, 15, 15, 15), (9_216, 8_640, 8_640, 8_640))])
def test_stages_of_a_latent_model(pp, num_layers, fp8_bytes):
    model = shapes.config("deepseek-v3")
    layouts = [kv_layout(model, kv_dtype="fp8", rank=Rank(index=i, size=pp, pp=pp)) for i in range(pp)]
    assert tuple(len(layout.groups[0].layers) for layout in layouts) == num_layers
    assert tuple(bytes_per_token(layout) for layout in layouts) == fp8_bytes


@pytest.mark.parametrize(("kv_dtype", "num_bytes"), [("fp8", 2_880), ("bf16", 5_760)])
def test_a_drafter_is_charged_in_the_dtype_of_its_pool(kv_dtype, num_bytes):
    assert bytes_per_token(kv_layout(config(**LATENT, num_hidden_layers=5), kv_dtype=kv_dtype)) == num_bytes


def test_a_partition_is_followed():
    model, parts = shapes.config("qwen3.6-27b"), (10, 30, 24)
    layouts = [kv_layout(model, rank=Rank(index=i, size=3, pp=3, partition=parts)) for i in range(3)]
    held = [sorted(number for group in layout.groups for number in group.layers) for layout in layouts]
    assert held == [list(range(10)), list(range(10, 40)), list(range(40, 64))]
    # Every fourth layer attends, wherever the cuts fall.
    assert [bytes_per_token(layout) // 4096 for layout in layouts] == [2, 8, 6]


@pytest.mark.parametrize(
    ("rank", "knob"),
    [
        (Rank(size=2, pp=2, partition=(1, 4)), "partition"),
        (Rank(size=2, pp=2, partition=(6,)), "partition"),
        (Rank(size=2, pp=2, partition=(6, 0)), "partition"),
        (Rank(size=3, tp=3), "tp"),
        (Rank(size=7, pp=7), "pp"),
        (Rank(size=4, tp=4, ep=3), "ep"),
        (Rank(index=4, size=4, tp=2, cp=2), "rank"),
    ],
)
def test_splits_that_do_not_work_name_the_knob(rank, knob):
    with pytest.raises(InvalidSetting) as caught:
        kv_layout(config(), rank=rank)
    assert caught.value.knob == knob


def test_heads_of_state_must_divide():
    with pytest.raises(InvalidSetting, match="heads of recurrent state"):
        kv_layout(shapes.config("nemotron-3-nano-30b"), rank=Rank(size=128, tp=128, attention_dp=False))


def test_context_parallelism_is_per_local_token():
    """Every second block of a sequence is here; what a block costs does not change."""
    assert kv_layout(config(), rank=Rank(index=3, size=4, tp=2, cp=2)) == kv_layout(
        config(), rank=Rank(index=1, size=2, tp=2)
    )


def test_experts_parallelism_does_not_touch_the_cache():
    model = shapes.config("qwen3-30b-a3b")
    assert kv_layout(model, rank=Rank(size=4, tp=4, ep=4)) == kv_layout(model, rank=Rank(size=4, tp=4))


def test_a_stage_without_any_memory_of_the_past():
    raw = {
        **BASE, "model_type": "nemotron_h", "hybrid_override_pattern": "*M--", "mamba_num_heads": 8,
        "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2,
    }  # fmt: skip
    model = ModelConfig.from_dict(raw, name="tiny")
    assert kinds(kv_layout(model, rank=Rank(size=2, pp=2)))[0] == "full"
    with pytest.raises(UnsupportedModel, match="keeps anything of the past"):
        kv_layout(model, rank=Rank(index=1, size=2, pp=2))


def test_shared_layers_cost_nothing():
    """Five layers, two of which read the caches of layers 1 and 2."""
    raw = {
        **BASE, "model_type": "gemma3n_text", "num_hidden_layers": 5, "num_kv_shared_layers": 2, "sliding_window": 64,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "full")],
    }  # fmt: skip
    model = ModelConfig.from_dict(raw, name="tiny")
    assert [layer.mixer.kv_from for layer in model.layers] == [None, None, None, 1, 2]
    layout = kv_layout(model)
    assert sorted(number for group in layout.groups for number in group.layers) == [0, 1, 2]
    assert bytes_per_token(layout) == 2 * 4 * 32 * 2


def test_cross_attention_counts_the_encoders_tokens():
    raw = {**BASE, "model_type": "mllama_text_model", "cross_attention_layers": [1, 4]}
    layout = kv_layout(ModelConfig.from_dict(raw, name="tiny"))
    assert bytes_per_token(layout) == 4 * 2 * 4 * 32 * 2
    cross = [group for group in layout.groups if group.kind is KVGroupKind.CROSS]
    assert sorted(number for group in cross for number in group.layers) == [1, 4]
    assert sequence_bytes(layout, 0, encoder_tokens=0) == 0
    assert sequence_bytes(layout, 0, encoder_tokens=1) == layout.slab_bytes * len(cross)


def test_encoder_decoder_keeps_both():
    raw = {
        "model_type": "whisper", "is_encoder_decoder": True, "d_model": 384, "encoder_layers": 4, "decoder_layers": 3,
        "encoder_attention_heads": 6, "decoder_attention_heads": 6, "decoder_ffn_dim": 1536, "encoder_ffn_dim": 1536,
        "num_hidden_layers": 4, "max_target_positions": 448, "max_source_positions": 1500, "vocab_size": 51865,
        "torch_dtype": "float16",
    }  # fmt: skip
    layout = kv_layout(ModelConfig.from_dict(raw, name="whisper"))
    assert bytes_per_token(layout) == 3 * 2 * 384 * 2
    cross = [group for group in layout.groups if group.kind is KVGroupKind.CROSS]
    assert sum(Fraction(group.block_bytes, group.block_tokens) for group in cross) == 3 * 2 * 384 * 2


def test_two_mixers_in_one_layer():
    raw = {**BASE, "model_type": "falcon_h1", "mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32,
           "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_conv": 4}  # fmt: skip
    layout = kv_layout(ModelConfig.from_dict(raw, name="tiny"))
    assert set(kinds(layout)) == {"full", "state"}
    assert bytes_per_token(layout) == 6 * 2 * 4 * 32 * 2
    assert state_bytes_per_sequence(layout) == 6 * (8 * 32 * 16 * 4 + (256 + 2 * 16) * 3 * 2)


def test_draft_layers_are_kept_on_the_last_stage():
    model = shapes.config("deepseek-v3")
    raw = {**dict(model.raw), "num_nextn_predict_layers": 1}
    with_draft = ModelConfig.from_dict(raw, name="v3")
    last = kv_layout(with_draft, kv_dtype="fp8", with_mtp=True, rank=Rank(index=3, size=4, pp=4))
    assert last.groups[0].layers == (*range(46, 61), 61)
    first = kv_layout(with_draft, kv_dtype="fp8", with_mtp=True, rank=Rank(index=0, size=4, pp=4))
    assert bytes_per_token(first) == 9_216
    assert bytes_per_token(kv_layout(with_draft, kv_dtype="fp8")) == 35_136


@pytest.mark.parametrize(
    ("window", "block", "blocks"), [(1, 16, 1), (16, 16, 2), (17, 16, 2), (18, 16, 3), (128, 64, 3)]
)
def test_blocks_a_window_can_touch(window, block, blocks):
    """Against every place where it can start."""
    touched = max((start + window - 1) // block - start // block + 1 for start in range(block))
    assert window_blocks(window, block) == touched == blocks


def test_names_are_unique_and_say_the_kind():
    for key in shapes.complete():
        layout = kv_layout(shapes.config(key))
        names = [group.name for group in layout.groups]
        assert len(set(names)) == len(names)
        assert all(name.startswith(group.kind.value) for name, group in zip(names, layout.groups, strict=True))
        assert all(group.block_tokens > 0 or group.kind is KVGroupKind.STATE for group in layout.groups)


def windowed(window: int | None, every: int, num_layers: int) -> ModelConfig:
    types = [
        "full_attention" if (i + 1) % every == 0 or window is None else "sliding_attention" for i in range(num_layers)
    ]
    return config(num_hidden_layers=num_layers, layer_types=types, sliding_window=window)


@given(
    window=st.integers(1, 4096), every=st.integers(1, 7), num_layers=st.integers(1, 24),
    num_tokens=st.integers(0, 20_000), block_tokens=st.sampled_from([1, 16, 48]),
)  # fmt: skip
def test_a_window_never_costs_more_than_full_attention(window, every, num_layers, num_tokens, block_tokens):
    """But for the padding of its slabs and the blocks it begins."""
    layout = kv_layout(windowed(window, every, num_layers), block_tokens=block_tokens)
    full = kv_layout(windowed(None, every, num_layers), block_tokens=block_tokens)
    padding = sum(
        (layout.slab_bytes - group.block_bytes) * -(-num_tokens // group.block_tokens) for group in layout.groups
    )
    begun = layout.slab_bytes * len(layout.groups)
    assert sequence_bytes(layout, num_tokens) <= sequence_bytes(full, num_tokens) + padding + begun
    assert bytes_per_token(layout) <= bytes_per_token(full)


@given(key=st.sampled_from(shapes.complete()), tp=st.sampled_from([1, 2, 4, 8]), data=st.data())
def test_splits_keep_every_byte(key, tp, data):
    """Stages together keep what the whole keeps; more ranks never cost one of them more; the rest is exact."""
    model = shapes.config(key)
    pp = data.draw(st.integers(1, min(8, model.num_layers // 8)))
    whole, stages = kv_layout(model), []
    for index in range(pp):
        stages.append(kv_layout(model, rank=Rank(index=index, size=pp, pp=pp)))
    assert sum(map(state_bytes_per_sequence, stages)) == state_bytes_per_sequence(whole)
    exact = [
        sum(Fraction(g.block_bytes, g.block_tokens) for g in each.groups if g.block_tokens) for each in (whole, *stages)
    ]
    assert sum(exact[1:]) == exact[0]
    if any(mixer.num_heads % tp for layer in model.layers for mixer in layer.mixers):
        return
    split = kv_layout(model, rank=Rank(size=tp, tp=tp))
    assert bytes_per_token(whole) <= bytes_per_token(split) * tp
    assert bytes_per_token(split) <= bytes_per_token(whole)
    assert state_bytes_per_sequence(split) <= state_bytes_per_sequence(whole)


@given(key=st.sampled_from(shapes.complete()), block_tokens=st.sampled_from([1, 7, 16, 64]))
def test_every_layout_is_sound(key, block_tokens):
    layout = kv_layout(shapes.config(key), block_tokens=block_tokens)
    assert layout.slab_bytes == max(group.block_bytes for group in layout.groups)
    for group in layout.groups:
        ends = [part.offset_bytes + part.num_bytes for part in group.parts]
        assert all(end <= part.offset_bytes for end, part in zip(ends, group.parts[1:], strict=False))
        assert ends[-1] == group.block_bytes
        assert group.block_tokens % block_tokens == 0
        assert all(part.shape[0] == len(group.layers) for part in group.parts)
