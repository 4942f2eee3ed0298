"""The closed form against peaks that were measured, on a card and by a tracker of storages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tonnage.costs.activations import forward_peak, predicted, reserved_for, sampler_bytes, sampler_scratch_bytes
from tonnage.costs.config import ModelConfig
from tonnage.costs.context import collective_bytes, context_bytes, graph_bytes, library_bytes
from tonnage.costs.models import find_config
from tonnage.hardware import find_card
from tonnage.terms import Quantity, Rank, Source
from tonnage.units import MiB

LLAMA_8B = ModelConfig.read(Path(__file__).parents[2] / "examples/configs/llama-3.1-8b")
SMOLLM2 = find_config("smollm2")


@pytest.mark.parametrize(
    ("config", "tokens", "rows", "mib", "phase"),
    [
        (LLAMA_8B, 2048, 256, 233.0, "mlp"),
        (LLAMA_8B, 8192, 256, 932.0, "mlp"),
        (LLAMA_8B, 16_384, 256, 1864.0, "mlp"),
        (SMOLLM2, 512, 64, 13.75, "mlp"),
        (SMOLLM2, 1536, 64, 41.25, "mlp"),
        (SMOLLM2, 512, 512, 98.25, "logits"),
    ],
)
def test_measured_peaks(config, tokens, rows, mib, phase):
    peak = forward_peak(config, num_tokens=tokens, logits_rows=rows)
    assert peak.bytes == int(mib * MiB)
    assert peak.phase == phase


def test_the_bar_holds_compiled_layers_and_what_the_allocator_took():
    """8,192 tokens: 708 MiB compiled, 932 MiB eager, 1,120 MiB reserved; 2,048 tokens: 233 and 364 MiB."""
    peak = predicted(forward_peak(LLAMA_8B, num_tokens=8192, logits_rows=256).bytes, ref="")
    assert peak.low <= 708 * MiB <= 932 * MiB <= peak.high
    reserved = reserved_for(peak, device_kind="cuda")
    assert reserved.low <= 1120 * MiB <= reserved.high
    small = predicted(233 * MiB, ref="")
    assert reserved_for(small, device_kind="cuda").high >= 364 * MiB


def test_the_peak_grows_with_everything():
    small = forward_peak(LLAMA_8B, num_tokens=100, logits_rows=10).bytes
    assert forward_peak(LLAMA_8B, num_tokens=200, logits_rows=10).bytes > small
    assert forward_peak(LLAMA_8B, num_tokens=100, logits_rows=100).bytes > small
    assert forward_peak(LLAMA_8B, num_tokens=100, logits_rows=10, dtype="float32").bytes == 2 * small
    assert forward_peak(LLAMA_8B, num_tokens=1000, logits_rows=10, rank=Rank(tp=8, size=8)).bytes < 10 * small


def test_only_the_last_pipeline_stage_has_logits():
    first, last = Rank(index=0, size=2, pp=2), Rank(index=1, size=2, pp=2)
    shape = {"num_tokens": 512, "logits_rows": 512}
    assert forward_peak(SMOLLM2, rank=last, **shape).phase == "logits"
    assert forward_peak(SMOLLM2, rank=first, **shape).phase == "mlp"
    graphs = {"device_kind": "cuda", "max_batch_size": 512, "num_graphs": 1, "dtype": "float32"}
    assert graph_bytes(SMOLLM2, rank=first, **graphs).bytes < graph_bytes(SMOLLM2, rank=last, **graphs).bytes


def test_the_sampler_holds_all_logits_and_works_on_a_tile_of_them():
    """By hand: 28 bytes for each logit of a tile and 2,314 longs for each of its rows; 4,194,304 logits are 85 rows of
    SmolLM2's vocabulary and 32 of Llama's, 262,144 are 5 and 2. tests/cpu compares with what is really held."""
    assert sampler_bytes(SMOLLM2, logits_rows=256) == 256 * 49_152 * 4 + 85 * (49_152 * 28 + 18_512)
    assert sampler_bytes(LLAMA_8B, logits_rows=256) == 256 * 128_256 * 2 + 32 * (128_256 * 28 + 18_512)
    assert sampler_bytes(SMOLLM2, logits_rows=32, device_kind="host") == 32 * 49_152 * 4 + 5 * (49_152 * 28 + 18_512)
    assert sampler_bytes(LLAMA_8B, logits_rows=1, device_kind="host") == 128_256 * 2 + 128_256 * 28 + 18_512


def test_greedy_rows_need_exponentials_and_a_copy_where_logits_are_narrow():
    shape = {"num_rows": 4, "vocab_size": 1000, "tile_elements": 2000}
    assert sampler_scratch_bytes(**shape, greedy_dtype="float32") == 2 * (1000 * 4 + 64)
    assert sampler_scratch_bytes(**shape, greedy_dtype="bfloat16") == 2 * (1000 * 8 + 64)
    assert sampler_scratch_bytes(4, 1000, tile_elements=1) == 1000 * 28 + 18_512


def in_order(quantity: Quantity) -> bool:
    return 0 <= quantity.low <= quantity.bytes <= quantity.high


def test_the_measured_card_and_the_others():
    h200, l4 = find_card("H200"), find_card("L4")
    measured = context_bytes(h200.kind, known=h200.context)
    assert (measured.bytes, measured.source) == (524 * MiB, Source.CATALOGUE)
    assert library_bytes(h200.kind, known=h200.libraries).bytes == 164 * MiB
    assumed = context_bytes(l4.kind, known=l4.context)
    assert assumed.source == Source.ASSUMED
    assert all(
        in_order(q) for q in (measured, assumed, context_bytes("host"), library_bytes("host"), library_bytes("cuda"))
    )


def test_graphs_and_collectives():
    kwargs = {"max_batch_size": 256, "num_graphs": 86, "dtype": "bfloat16", "rank": Rank()}
    assert graph_bytes(LLAMA_8B, device_kind="host", **kwargs) is None
    logged = graph_bytes(LLAMA_8B, device_kind="cuda", **kwargs)
    assert logged is not None
    assert in_order(logged)
    assert logged.low <= int(0.59 * 1024) * MiB <= logged.high
    assert collective_bytes(Rank()).bytes == 0
    assert in_order(collective_bytes(Rank(tp=2, size=2)))
