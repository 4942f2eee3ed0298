"""Prices of the cache against pools that other engines logged, and against the shapes of published models."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import shapes

from tonnage.costs.config import ModelConfig
from tonnage.costs.kv import bytes_per_token, kv_layout
from tonnage.costs.layers import Attention, Recurrent
from tonnage.layout import KVGroupKind, KVLayout, state_bytes_per_sequence
from tonnage.peers import vllm_padded_bytes_per_token
from tonnage.terms import Rank
from tonnage.units import GiB

#: Starts whose two logged figures do not belong together; nothing could reproduce them.
MISSES = {
    "vllm-13061": "pool and tokens of different ranks",
    "fs-38730122894": "pool and tokens of different ranks",
}
#: Starts that our own rate reproduces, and those that need the peer's rule for windows.
NUM_OWN, NUM_PADDED = 56, 5


def layout_of(row: shapes.Logged) -> KVLayout:
    config = shapes.config(row.key)
    # Left to themselves, these engines compute a model published in float32 in float16, and its cache follows.
    followed = "fp16" if config.dtype == "float32" else None
    return kv_layout(config, kv_dtype=row.kv_dtype or followed, rank=Rank(size=row.tp, tp=row.tp))


VERSIONS = {row["id"]: row["engine_version"] for row in shapes.starts()}


def padded_rate(row: shapes.Logged) -> Fraction | None:
    """What the peer's own rule makes of a start; None where our rate is what it divides by."""
    return vllm_padded_bytes_per_token(layout_of(row), version=VERSIONS[row.id]) if row.engine == "vllm" else None


def is_hit(row: shapes.Logged, rate: Fraction | int) -> bool:
    """Within 1 % of the logged pool."""
    return abs(float(rate) * row.tokens / row.pool_bytes - 1) <= 0.01


def test_logged_pools_are_reproduced():
    """Starts are counted apart: those divided by what layers keep, and those that a peer padded. No third kind."""
    rows = shapes.logged_rates()
    padded = {row.id: rate for row in rows if (rate := padded_rate(row)) is not None}
    own_hits = {row.id for row in rows if row.id not in padded and is_hit(row, bytes_per_token(layout_of(row)))}
    padded_hits = {row.id for row in rows if row.id in padded and is_hit(row, padded[row.id])}
    assert len(rows) == 63
    assert (len(own_hits), len(padded_hits), len(padded)) == (NUM_OWN, NUM_PADDED, NUM_PADDED)
    missed = {row.id for row in rows} - own_hits - padded_hits
    assert missed == set(MISSES)
    assert all(row.why_not for row in rows if row.id in missed)


def test_no_padded_start_is_a_hit_of_our_own_rate():
    """The peer's rule is there for a reason: where it padded, layers keep less than it charged."""
    rows = [row for row in shapes.logged_rates() if padded_rate(row) is not None]
    assert not [row.id for row in rows if is_hit(row, bytes_per_token(layout_of(row)))]


@pytest.mark.parametrize(
    ("key", "version", "num_bytes"),
    [
        ("gemma-3-27b", "0.19.0", 70 * 8192),
        ("gemma-3-27b", "v0.20.1rc1", 70 * 8192),
        ("gemma-3-27b", "0.9.x", 70 * 8192),
        ("gemma-3-27b", "0.21.0", None),
        ("gemma-3-27b", "1.0", None),
        ("gemma-3-27b", "unknown", None),
        ("gpt-oss-120b", "0.19", 36 * 2048),  # as many layers of each kind: nothing is padded, windows count in full
        ("llama-3.1-8b", "0.19", None),
        ("qwen3.6-27b", "0.19", None),
    ],
)
def test_the_rule_of_a_peer_that_pads(key, version, num_bytes):
    assert vllm_padded_bytes_per_token(kv_layout(shapes.config(key)), version=version) == num_bytes


def test_windows_alone_are_one_kind():
    layout = kv_layout(shapes.config("gpt-oss-120b"))
    windows = replace(layout, groups=tuple(group for group in layout.groups if group.kind is KVGroupKind.WINDOW))
    assert vllm_padded_bytes_per_token(windows, version="0.19") == 18 * 2048


STATES = {row["id"]: row for row in shapes.starts() if "mamba_conv_gib" in row["logged"]}


@pytest.mark.parametrize("name", STATES)
def test_logged_state_pools_are_reproduced(name):
    """A peer keeps one slot more than it serves; logged with two digits."""
    row = STATES[name]
    layout = kv_layout(shapes.config(row["hf_config_key"]), rank=Rank(size=row["tp"], tp=row["tp"]))
    slots = row["logged"]["max_mamba_cache_size"] + 1
    logged = (row["logged"]["mamba_conv_gib"] + row["logged"]["mamba_ssm_gib"]) * GiB
    assert abs(state_bytes_per_sequence(layout) * slots - logged) < 0.0101 * GiB


@pytest.mark.parametrize("key", shapes.complete())
def test_every_published_shape_has_a_layout(key):
    """With as many layers of each kind as the shape says."""
    config, shape = shapes.config(key), shapes.shapes()[key]
    layout = kv_layout(config)
    assert config.num_layers == shape["num_hidden_layers"]
    assert max(group.block_bytes for group in layout.groups) <= layout.slab_bytes
    if "full_attention_layers" in shape:
        full = [
            layer for layer in config.layers
            if layer.mixer is not None and not isinstance(layer.mixer, Recurrent)
            and not (isinstance(layer.mixer, Attention) and layer.mixer.window)
        ]  # fmt: skip
        assert len(full) == shape["full_attention_layers"]
    if "mamba_layers" in shape:
        assert sum(isinstance(layer.mixer, Recurrent) for layer in config.layers) == shape["mamba_layers"]


@pytest.mark.parametrize(
    ("key", "kv_dtype", "num_bytes"),
    [
        ("llama-3.1-70b", None, 327_680),
        ("qwen3-0.6b", None, 114_688),
        ("qwen3-32b", None, 262_144),
        ("qwen3.6-27b", None, 65_536),
        ("gemma-3-27b", None, 10 * 8192),
        ("deepseek-v3", None, 70_272),
        ("deepseek-v3", "fp8", 35_136),
        ("deepseek-v3", "nvfp4", 19_764),
        ("qwen3-30b-a3b", None, 98_304),
        ("glm-5", None, 78 * (576 * 2 + 132)),
        ("lfm2-700m", None, 12_288),
        ("gpt-oss-120b", None, 36_864),
        ("mimo-v2-flash", None, 9 * 4 * (192 + 128) * 2),
    ],
)
def test_mistakes_that_planners_make(key, kv_dtype, num_bytes):
    """Query heads for KV heads, hidden size over heads, every layer of a hybrid, windows at full length or not at
    all, latent attention as keys and values, the parameter count: each row catches one of them or more."""
    assert bytes_per_token(kv_layout(shapes.config(key), kv_dtype=kv_dtype)) == num_bytes


@pytest.mark.parametrize("index", range(8))
@pytest.mark.parametrize(("key", "kv_dtype"), [("deepseek-v3", "fp8"), ("kimi-k2", None), ("glm-5", None)])
def test_latent_attention_is_whole_on_every_rank(key, kv_dtype, index):
    config = shapes.config(key)
    split = kv_layout(config, kv_dtype=kv_dtype, rank=Rank(index=index, size=8, tp=8))
    assert split == kv_layout(config, kv_dtype=kv_dtype)


def test_state_of_a_slot():
    """48 layers: 3 MiB of matrix and 60 KiB of inputs each, 0.1406 GiB and a little."""
    layout = kv_layout(shapes.config("qwen3.6-27b"))
    assert state_bytes_per_sequence(layout) == 48 * (48 * 128 * 128 * 4 + (2 * 16 + 48) * 128 * 3 * 2)
    halved = kv_layout(shapes.config("qwen3.6-27b"), state_dtype="bf16")
    assert state_bytes_per_sequence(halved) == 48 * (48 * 128 * 128 * 2 + (2 * 16 + 48) * 128 * 3 * 2)


@pytest.mark.parametrize(
    ("key", "window_fraction", "heavy_per_token", "num_bytes"),
    [("deepseek-v4-flash", Fraction(1, 10), True, 15_955.85), ("deepseek-v4-pro", Fraction(3, 20), False, 13_735.04)],
)
def test_compressed_attention_as_a_peer_logs_it(key, window_fraction, heavy_per_token, num_bytes):
    """SGLang charges windows by the tokens of the pool: so many window tokens to one token of text, and with each the
    records of all layers and an eighth of the light compressor's state per 128; an older build adds the heavy one's.

    The figure of the smaller model counts its draft layer's window; that of the larger one comes from a build without
    the heavy state, at another share of window tokens."""
    config = shapes.config(key)
    layout = kv_layout(config, kv_dtype="fp8", with_mtp=heavy_per_token)
    by_kind = {kind: [group for group in layout.groups if group.kind is kind] for kind in KVGroupKind}
    text = sum(Fraction(group.block_bytes, group.block_tokens) for group in by_kind[KVGroupKind.FULL])
    window = sum(Fraction(group.block_bytes, group.block_tokens) for group in by_kind[KVGroupKind.WINDOW])
    rings = {part.shape[1:]: 0 for group in by_kind[KVGroupKind.STATE] for part in group.parts}
    for group in by_kind[KVGroupKind.STATE]:
        for part in group.parts:
            rings[part.shape[1:]] += len(group.layers)
    assert set(rings) == {(8, 2560), (128, 1024)}
    light = Fraction(rings[8, 2560] * 8 * 2560 * 4, 128)
    heavy = rings[128, 1024] * 1024 * 4 if heavy_per_token else 0
    assert float(text + window_fraction * (window + light + heavy)) == pytest.approx(num_bytes, abs=0.01)


def test_a_nested_text_model_takes_its_class_defaults():
    """Written as a difference to its class: 36 layers of latent attention, 256 + 64 elements each."""
    raw = {"model_type": "mistral3", "dtype": "bfloat16", "text_config": {"model_type": "mistral4"}}
    config = ModelConfig.from_dict(raw, name="nested")
    assert bytes_per_token(kv_layout(config)) == 23_040
    assert any("kv_lora_rank is absent: 256" in note for note in config.notes)
