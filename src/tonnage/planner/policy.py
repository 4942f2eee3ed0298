"""Which policy answers a question: our own, or the reference's derivation with the reference's own knobs."""

from __future__ import annotations

from tonnage.budget.inputs import PlanInputs
from tonnage.budget.plan import plan
from tonnage.budget.reference.knobs import ReferenceKnobs
from tonnage.budget.reference.plan import reference_plan
from tonnage.config import Knobs
from tonnage.costs.config import ModelConfig
from tonnage.declarations import attention_shapes
from tonnage.declarations.trtllm_mla import reference_chunk_bounded
from tonnage.errors import InvalidSetting
from tonnage.terms import MemoryPlan

#: Our knobs about money: the reference has its own, so a set value would have no effect.
_OURS = ("total_bytes", "keep_free_bytes", "kv_bytes", "kv_tokens", "kv_fraction", "block_tokens", "kv_dtype")
_OURS_TOO = ("state_dtype", "attended_tokens", "scratch", "host_kv_bytes")


def answered(inputs: PlanInputs, *, config: ModelConfig, kv_dtype: str, reference: ReferenceKnobs | None) -> MemoryPlan:
    """The plan by our own policy, or by the reference's where its knobs are given. Raises as they do."""
    if reference is None:
        return plan(inputs)
    shapes = attention_shapes(config, kv_dtype=kv_dtype, rank=inputs.measured.rank)
    bounded = all(reference_chunk_bounded(shape, inputs.chip.sm) for shape in shapes)
    return reference_plan(inputs, reference, is_chunk_bounded=bounded)


def refuse_own_money(knobs: Knobs) -> None:
    """Raise ``InvalidSetting`` for one of our knobs that the reference policy does not look at."""
    for name, setting in knobs.items():
        if setting.is_set and name in (*_OURS, *_OURS_TOO):
            raise InvalidSetting(
                name,
                setting.text or setting.value,
                "the reference policy has knobs of its own",
                remedy=f"leave {name} out, or use the knob of the reference that is nearest",
            )
