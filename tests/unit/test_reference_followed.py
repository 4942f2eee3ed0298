"""No knob of the reference is ignored in silence: each changes a plan, or is refused by name."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import shapes

from tonnage.budget.reference import environment
from tonnage.budget.reference.environment import Environment
from tonnage.budget.reference.followed import UNFOLLOWED, UNFOLLOWED_VARIABLES, knob_names
from tonnage.budget.reference.knobs import ReferenceKnobs, Snapshots, Speculation
from tonnage.config import LimitKnobs, Setting
from tonnage.costs.config import ModelConfig
from tonnage.costs.layers import Tower
from tonnage.errors import DoesNotFit, InvalidSetting
from tonnage.hardware import find_card, generic_card
from tonnage.planner import plan_without_device
from tonnage.terms import LineKind, MemoryPlan, Rank
from tonnage.units import GiB, MiB

ROOT = Path(__file__).parents[2]
DENSE = ModelConfig.read(ROOT / "examples/configs/llama-3.1-8b")
LATENT = ModelConfig.read(ROOT / "examples/configs/deepseek-v2-lite")
HYBRID, WINDOWS = shapes.config("qwen3-next-80b-a3b"), shapes.config("gpt-oss-20b")
CROSS = shapes.config("llama-3.2-11b-vision")
SEES = replace(
    DENSE,
    towers=(Tower(kind="vision", num_layers=2, hidden_size=64, num_heads=4, intermediate_size=128),),
)
HALF = Fraction(1, 2)
#: Knobs that are variables of its environment.
VARIABLES = tuple(name for name in knob_names() if hasattr(Environment(), name))


@dataclass(frozen=True, kw_only=True)
class Case:
    """``value`` of a knob beside ``others``, on a model where it matters."""

    value: Any
    model: ModelConfig = DENSE
    others: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    backend: str = "trtllm"


V2 = {"manager": "V2"}
FP8 = {"kv_dtype": "fp8"}
CASES: dict[str, Case] = {
    "free_gpu_memory_fraction": Case(value=HALF),
    "max_tokens": Case(value=200_000),
    "max_gpu_total_bytes": Case(value=20 * GiB, others=V2),
    "tokens_per_block": Case(value=64),
    "max_beam_width": Case(value=2),
    "has_seat_headroom": Case(value=False),
    "is_overlapped": Case(value=False),
    "max_attention_window": Case(value=(4096, 131_072)),
    "kv_dtype": Case(value="fp8"),
    "state_dtype": Case(value="bfloat16", model=HYBRID),
    "enable_block_reuse": Case(value=False, model=LATENT, others=FP8),
    "enable_chunked_prefill": Case(value=True, model=LATENT, others=FP8),
    "fp8_context_mla_kv_len_cap": Case(value=8192, model=LATENT, others=FP8),
    "max_util_for_resume": Case(value=HALF, others={**V2, "max_tokens": 200_000}),
    "host_cache_bytes": Case(value=GiB),
    "disk_cache_bytes": Case(value=GiB, others={**V2, "disk_cache_path": str(ROOT)}),
    "disk_cache_path": Case(value=str(ROOT), others={**V2, "disk_cache_bytes": GiB}),
    "encoder_cache_max_bytes": Case(value=GiB, model=SEES),
    "encoder_max_num_tokens": Case(value=65_536, model=SEES),
    "cross_kv_cache_fraction": Case(value=HALF, model=CROSS, limits={"max_encoder_tokens": 1601}),
    "manager": Case(value="V2", model=WINDOWS),
    "skip_estimation": Case(value=True),
    "window_shares": Case(value=(Fraction(1, 4), Fraction(3, 4)), model=WINDOWS),
}
REFUSED: dict[str, Case] = {
    "speculation": Case(value=Speculation(draft_tokens=3, max_draft_tokens=3)),
    "snapshots": Case(value=Snapshots(interval_tokens=256), model=HYBRID),
    "enable_pool_rebalance": Case(value=True, others=V2),
    "pool_ratio": Case(value=(Fraction(1, 4), Fraction(3, 4)), model=WINDOWS, others=V2),
    "avg_seq_len": Case(value=4096, model=HYBRID, others=V2),
    "encoder_max_batch_size": Case(value=2, model=SEES),
    "indexer_elements": Case(value=2**30),
    "mha_threshold_tokens": Case(value=1024),
    "warn_fraction": Case(value=HALF),
    "info_fraction": Case(value=HALF),
    "least_bytes": Case(value=GiB),
}


def knobs(**given: Any) -> ReferenceKnobs:
    variables = {name: given.pop(name) for name in list(given) if name in VARIABLES}
    return ReferenceKnobs(**given, environment=Environment(**variables))


def made(case: Case, **given: Any) -> MemoryPlan:
    limits = LimitKnobs(max_seq_len=Setting(16_384), **{name: Setting(size) for name, size in case.limits.items()})
    card = generic_card(200 * GiB) if case.model is not LATENT else find_card("RTX 5090")
    rank = Rank(tp=2, size=2) if case.model is LATENT else Rank()
    return plan_without_device(
        case.model,
        card=card,
        rank=rank,
        backend=case.backend,
        limit_knobs=limits,
        reference=knobs(**case.others, **given),
    )


def told(plan: MemoryPlan) -> MemoryPlan:
    """What the plan says beside the question."""
    return replace(plan, fingerprint="")


def answer(case: Case, **given: Any) -> object:
    """The plan, or why there is none."""
    try:
        return told(made(case, **given))
    except (DoesNotFit, InvalidSetting) as error:
        return str(error)


def test_every_knob_is_in_one_of_the_two_tables():
    assert {*CASES} | {*REFUSED} == set(knob_names())
    assert not {*CASES} & {*REFUSED}
    assert tuple(environment.VARIABLES) == VARIABLES
    assert {*REFUSED} == {*UNFOLLOWED} | {*UNFOLLOWED_VARIABLES}


@pytest.mark.parametrize("name", CASES)
def test_a_knob_that_is_followed_changes_a_plan(name):
    case = CASES[name]
    changed = answer(case, **{name: case.value})
    assert isinstance(changed, MemoryPlan)
    # Without a folder there is no tier on disk, and without a share no plan for an encoder and a decoder.
    assert changed != answer(case)


@pytest.mark.parametrize("name", REFUSED)
def test_a_knob_that_is_not_followed_is_refused_by_name(name):
    case = REFUSED[name]
    assert isinstance(answer(case), MemoryPlan)
    told = environment.VARIABLES.get(name, name)
    with pytest.raises(InvalidSetting, match=f"^{told} = .*do not follow it in this release.*leave {told} out"):
        made(case, **{name: case.value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_util_for_resume", HALF),
        ("state_dtype", "float16"),
        ("fp8_context_mla_kv_len_cap", 16_384),
        ("disk_cache_path", str(ROOT)),
        ("window_shares", (HALF, HALF)),
        ("max_tokens", 0),
    ],
)
def test_a_knob_that_this_plan_has_no_use_for_is_told(name, value):
    case = Case(value=value)
    plan = made(case, **{name: value})
    assert [text for text in plan.warnings if text.startswith(f"{name} has no effect")]
    assert plan.kv == made(case).kv
    assert not [text for text in made(case).warnings if "no effect" in text]
    used = made(CASES[name], **{name: CASES[name].value})
    assert not [text for text in used.warnings if "no effect" in text]


def test_the_page_says_which():
    text = (ROOT / "docs/reference-policy.md").read_text(encoding="utf-8")
    for name in knob_names():
        assert f"`{name}`" in text, f"{name} is not on the page"


class TestBeams:
    def test_one_sequence_needs_blocks_for_each(self):
        one, two = made(Case(value=2)), made(Case(value=2), max_beam_width=2)
        assert two.max_concurrency == two.kv.tokens // 32 // (2 * 513)
        assert one.kv.tokens > two.kv.tokens
        case = Case(value=2, limits={"max_batch_size": 4})
        held = 3 * 16_416
        with pytest.raises(DoesNotFit, match="in 4 beams"):
            made(case, max_beam_width=4, max_tokens=held)
        assert made(case, max_beam_width=2, max_tokens=held).max_concurrency == 1

    def test_the_page_manager_has_none(self):
        plan = made(Case(value=2), max_beam_width=2, manager="V2")
        assert any("the block manager is used" in warning for warning in plan.warnings)
        assert plan.kv == made(Case(value=2), max_beam_width=2).kv

    def test_tables_hold_a_count_for_each(self):
        """0.9 of 256 seats more than there are sequences, 128,256 tokens, four bytes more for the second beam."""
        one, two = made(Case(value=2)), made(Case(value=2), max_beam_width=2)
        assert (one.kv.bytes - two.kv.bytes) == pytest.approx(256 * 128_256 * 4 * 9 // 10, abs=2**22)


class TestWindows:
    def test_one_window_is_a_uniform_pool(self):
        """All of the bytes hold tokens in windows; texts of any length pass through them."""
        usual, windowed = made(Case(value=0)), made(Case(value=0), max_attention_window=(4096,))
        assert windowed.kv.bytes == pytest.approx(usual.kv.bytes, abs=64 * MiB)
        assert windowed.kv.tokens > 3 * usual.kv.tokens

    def test_resumed_requests_of_windows_alone_have_no_bound(self):
        plan = made(Case(value=0), max_attention_window=(4096,), **V2)
        assert "may fill any number of tokens, 19/20 of the quota" in plan.line(LineKind.KV).reason

    def test_as_long_as_the_longest_sequence_is_none(self):
        assert made(Case(value=0), max_attention_window=(16_384,)).kv == made(Case(value=0)).kv

    def test_the_page_manager_leaves_full_layers_full(self):
        case = Case(value=0, model=WINDOWS)
        assert made(case, max_attention_window=(64,), **V2).kv.layout.groups[0].window is None
        assert {group.window for group in made(case, max_attention_window=(64,)).kv.layout.groups} == {64}

    @pytest.mark.parametrize(
        ("model", "windows"),
        [(LATENT, (4096,)), (HYBRID, (4096,)), (DENSE, (4096, -1))],
        ids=["latent", "hybrid", "a state"],
    )
    def test_other_layers_are_refused(self, model, windows):
        with pytest.raises(InvalidSetting, match=r"max_attention_window.*plain attention"):
            made(Case(value=0, model=model), max_attention_window=windows)
