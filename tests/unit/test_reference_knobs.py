"""The reference's knobs: defaults, what is refused, and the switches of its environment."""

from __future__ import annotations

from fractions import Fraction

import pytest

from tonnage.budget.reference.environment import Environment, first_look, torch_fraction
from tonnage.budget.reference.knobs import (
    ReferenceKnobs,
    Snapshots,
    check_group_count,
    cross_fraction,
    snapshot_interval,
)
from tonnage.errors import InvalidSetting
from tonnage.units import GiB, MiB


def test_defaults():
    knobs = ReferenceKnobs()
    assert (knobs.free_gpu_memory_fraction, knobs.max_util_for_resume) == (Fraction(9, 10), Fraction(19, 20))
    assert (knobs.tokens_per_block, knobs.max_beam_width, knobs.encoder_cache_max_bytes) == (32, 1, 128 * MiB)
    assert (knobs.max_tokens, knobs.max_gpu_total_bytes, knobs.manager) == (None, 0, "V1")


@pytest.mark.parametrize(
    ("named", "knob"),
    [
        ({"free_gpu_memory_fraction": Fraction(11, 10)}, "free_gpu_memory_fraction"),
        ({"free_gpu_memory_fraction": Fraction(-1, 10)}, "free_gpu_memory_fraction"),
        ({"cross_kv_cache_fraction": Fraction(2)}, "cross_kv_cache_fraction"),
        ({"max_util_for_resume": Fraction(0)}, "max_util_for_resume"),
        ({"max_gpu_total_bytes": -1}, "max_gpu_total_bytes"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"encoder_max_num_tokens": -1}, "encoder_max_num_tokens"),
        ({"manager": "V3"}, "manager"),
        ({"avg_seq_len": 0}, "avg_seq_len"),
        ({"tokens_per_block": 1}, "tokens_per_block"),
        ({"tokens_per_block": 48}, "tokens_per_block"),
        ({"max_attention_window": ()}, "max_attention_window"),
        ({"max_attention_window": (128, 0)}, "max_attention_window"),
        ({"max_attention_window": (128, True)}, "max_attention_window"),
        ({"kv_dtype": "int3"}, "kv_dtype"),
        ({"kv_dtype": "fp8_ds_mla", "enable_pool_rebalance": True}, "kv_dtype"),
        ({"state_dtype": "fp8"}, "state_dtype"),
        ({"pool_ratio": ()}, "pool_ratio"),
        ({"pool_ratio": (Fraction(1), Fraction(0))}, "pool_ratio"),
        ({"pool_ratio": (Fraction(1, 2), Fraction(1, 3))}, "pool_ratio"),
        ({"snapshots": Snapshots(interval_tokens=-1)}, "periodic_snapshot_interval"),
        ({"snapshots": Snapshots(from_end=(128,))}, "additional_snapshot_offsets"),
        ({"disk_cache_bytes": 1}, "disk_cache_bytes"),
        ({"disk_cache_bytes": 1, "manager": "V2"}, "disk_cache_path"),
        ({"disk_cache_bytes": 1, "manager": "V2", "disk_cache_path": "/no/such/folder"}, "disk_cache_path"),
    ],
)
def test_refused(named, knob):
    with pytest.raises(InvalidSetting) as caught:
        ReferenceKnobs(**named)
    assert caught.value.knob == knob
    assert caught.value.remedy


@pytest.mark.parametrize(
    "named",
    [
        {"free_gpu_memory_fraction": Fraction(1)},
        {"free_gpu_memory_fraction": Fraction(0)},
        {"max_attention_window": (128, -2147483647)},
        {"pool_ratio": (Fraction(1, 3), Fraction(666_667, 10**6))},
        {"snapshots": Snapshots(from_start=(1,), from_end=(2, 3)), "manager": "V2"},
    ],
)
def test_accepted(named):
    ReferenceKnobs(**named)


def test_a_disk_tier_in_a_folder(tmp_path):
    ReferenceKnobs(disk_cache_bytes=1, manager="V2", disk_cache_path=str(tmp_path))


def test_shares_for_groups_and_encoders():
    knobs = ReferenceKnobs(pool_ratio=(Fraction(1, 2), Fraction(1, 2)))
    check_group_count(knobs, num_layer_groups=2)
    check_group_count(ReferenceKnobs(), num_layer_groups=9)
    with pytest.raises(InvalidSetting, match="2 shares for 3 groups"):
        check_group_count(knobs, num_layer_groups=3)
    half = ReferenceKnobs(cross_kv_cache_fraction=Fraction(1, 2))
    assert cross_fraction(half, is_encoder_decoder=True) == Fraction(1, 2)
    assert cross_fraction(ReferenceKnobs(), is_encoder_decoder=False) is None
    for knobs, both in ((half, False), (ReferenceKnobs(), True)):
        with pytest.raises(InvalidSetting):
            cross_fraction(knobs, is_encoder_decoder=both)


def test_snapshots():
    assert [snapshot_interval(interval=a, old_alias=b) for a, b in ((256, None), (None, 64), (None, None))] == [
        256,
        64,
        0,
    ]
    with pytest.raises(InvalidSetting, match="both"):
        snapshot_interval(interval=1, old_alias=1)
    assert Snapshots(interval_tokens=256).effective_interval_tokens == 256
    assert Snapshots(interval_tokens=256, is_per_conversation=True).effective_interval_tokens == 0


def test_environment():
    assert Environment.read({}) == Environment()
    found = Environment.read(
        {
            "TRTLLM_SKIP_KV_CACHE_ESTIMATION": "1",
            "TLLM_INDEXER_MQA_LOGITS_ELEM_BUDGET": "1024",
            "TRTLLM_MLA_SHORT_SEQ_MHA_THRESHOLD": "512",
            "TRTLLM_WINDOW_SIZE_SHARES": "0.4, 0.6",
            "TLLM_STARTUP_FREE_MEM_WARN_RATIO": "0.5",
            "TLLM_STARTUP_FREE_MEM_MIN_GIB": "1.5",
        }
    )
    assert (found.skip_estimation, found.indexer_elements, found.mha_threshold_tokens) == (True, 1024, 512)
    assert found.window_shares == (Fraction(2, 5), Fraction(3, 5))
    assert (found.warn_fraction, found.info_fraction, found.least_bytes) == (
        Fraction(1, 2),
        Fraction(9, 10),
        3 * GiB // 2,
    )


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "1.5", "many"])
def test_ratios_of_the_first_look_fall_back(text):
    """T"""
    assert Environment.read({"TLLM_STARTUP_FREE_MEM_WARN_RATIO": text}).warn_fraction == Fraction(3, 4)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("TLLM_INDEXER_MQA_LOGITS_ELEM_BUDGET", "2^31"),
        ("TLLM_INDEXER_MQA_LOGITS_ELEM_BUDGET", "0"),
        ("TRTLLM_MLA_SHORT_SEQ_MHA_THRESHOLD", "-1"),
        ("TRTLLM_WINDOW_SIZE_SHARES", "a,b"),
    ],
)
def test_other_variables_are_refused(name, text):
    with pytest.raises(InvalidSetting) as caught:
        Environment.read({name: text})
    assert caught.value.knob == name


@pytest.mark.parametrize(
    ("free", "strangers", "want"), [(79, False, ""), (70, False, "info"), (50, False, "warning"), (79, True, "warning")]
)
def test_first_look(free, strangers, want):
    found = first_look(free_bytes=free * GiB, total_bytes=80 * GiB, environment=Environment(), has_strangers=strangers)
    assert found == want


def test_torch_share():
    assert torch_fraction(free_bytes=MiB, reserved_bytes=63 * MiB, total_bytes=64 * MiB) == Fraction(1, 2)
    assert torch_fraction(free_bytes=0, reserved_bytes=0, total_bytes=64 * MiB) == 0
