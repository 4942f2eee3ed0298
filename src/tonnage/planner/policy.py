"""Which policy answers a question: our own, or the reference's derivation with the reference's own knobs.

The reference's rooms are imported where its knobs are given: most plans are ours, and a plan should be quick.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tonnage.budget.inputs import PlanInputs
from tonnage.budget.plan import plan
from tonnage.config import Knobs, LimitKnobs, Limits
from tonnage.costs.config import ModelConfig
from tonnage.costs.layers import Attention
from tonnage.errors import InvalidSetting
from tonnage.terms import MemoryPlan, Rank

if TYPE_CHECKING:
    from tonnage.budget.reference.knobs import ReferenceKnobs

#: Our knobs about money: the reference has its own, so a set value would have no effect.
_OURS = (
    *("total_bytes", "keep_free_bytes", "kv_bytes", "kv_tokens", "kv_fraction", "block_tokens", "kv_dtype"),
    *("state_dtype", "attended_tokens", "scratch", "host_kv_bytes"),
)
#: Our limits that it does not know, and what to do instead.
_NOT_ITS_LIMITS = {
    "lookahead_steps": "leave it out; has_seat_headroom and is_overlapped decide",
    "snapshot_tokens": "leave it out; its plans keep no states for prefixes in this release",
    "prefix_caching": "leave it out; enable_block_reuse decides",
}


def answered(inputs: PlanInputs, *, config: ModelConfig, kv_dtype: str, reference: ReferenceKnobs | None) -> MemoryPlan:
    """The plan by our own policy, or by the reference's where its knobs are given. Raises as they do."""
    if reference is None:
        return plan(inputs)
    from tonnage.budget.reference.plan import reference_plan
    from tonnage.declarations import attention_shapes
    from tonnage.declarations.trtllm_mla import reference_chunk_bounded

    shapes = attention_shapes(config, kv_dtype=kv_dtype, rank=inputs.measured.rank)
    bounded = all(reference_chunk_bounded(shape, inputs.chip.sm) for shape in shapes)
    return reference_plan(inputs, reference, is_chunk_bounded=bounded)


def refuse_own_money(knobs: Knobs) -> None:
    """Raise ``InvalidSetting`` for one of our knobs that the reference policy does not look at."""
    for name, setting in knobs.items():
        if setting.is_set and name in _OURS:
            raise InvalidSetting(
                name,
                setting.text or setting.value,
                "the reference policy has knobs of its own",
                remedy=f"leave {name} out, or use the knob of the reference that is nearest",
            )


def limits_by(reference: ReferenceKnobs | None, limits: Limits, *, asked: LimitKnobs, rank: Rank) -> Limits:
    """The limits as the reference's knobs have them; as they are under our own policy.

    A step prepared while one runs takes a token more of every sequence, and with one pipeline stage every seat twice.
    Its own reuse, chunks and encoder are followed too. Raises ``InvalidSetting`` where a limit of ours and a knob of
    the reference say the same thing twice, for a limit that its plans do not follow, and for an encoder that the model
    does not have.
    """
    if reference is None:
        return limits
    for name, remedy in _NOT_ITS_LIMITS.items():
        setting = getattr(asked, name)
        if setting.is_set:
            what = "the reference policy has knobs of its own"
            raise InvalidSetting(name, setting.text or setting.value, what, remedy=remedy)
    is_ahead = reference.has_seat_headroom and reference.is_overlapped and rank.pp == 1
    return replace(
        limits,
        lookahead_steps=int(is_ahead),
        chunked_prefill=reference.enable_chunked_prefill,
        prefix_caching=reference.enable_block_reuse,
        **_encoder_limits(reference, limits, asked),
    )


def windows_by(reference: ReferenceKnobs | None, config: ModelConfig, *, max_seq_len: int) -> ModelConfig:
    """The model with the windows that the reference's ``max_attention_window`` gives its layers, repeated in turn.

    A window of ``max_seq_len`` or more is none. The page manager leaves the full layers of a model with windows full.
    Raises ``InvalidSetting`` for a model with layers that are not plain attention: their windows mean something else.
    """
    pattern = None if reference is None else reference.max_attention_window
    if reference is None or pattern is None:
        return config
    from tonnage.budget.reference.windows import layer_windows

    mixers = [mixer for layer in config.layers for mixer in layer.mixers]
    if not _is_plain(config) or min(pattern) < 0:
        raise InvalidSetting(
            "max_attention_window",
            ", ".join(map(str, pattern)),
            "plans by the reference policy follow it for models of plain attention layers only",
            remedy="leave it out",
        )
    keeps_full = reference.manager == "V2" and any(isinstance(m, Attention) and m.window for m in mixers)
    layers = []
    for layer, window in zip(config.layers, layer_windows(pattern, len(config.layers)), strict=True):
        assert isinstance(layer.mixer, Attention)
        is_full = (keeps_full and layer.mixer.window is None) or window is None or window >= max_seq_len
        layers.append(replace(layer, mixer=replace(layer.mixer, window=None if is_full else window)))
    return replace(config, layers=tuple(layers))


def _is_plain(config: ModelConfig) -> bool:
    return bool(config.layers) and all(
        isinstance(layer.mixer, Attention)
        and layer.beside is None
        and not layer.mixer.is_cross
        and layer.mixer.compress_ratio == 1
        for layer in config.layers
    )


def refuse_engine_beams(reference: ReferenceKnobs | None) -> None:
    """Raise ``InvalidSetting`` for more than one beam where our engine runs: it has none."""
    if reference is not None and reference.max_beam_width > 1:
        raise InvalidSetting(
            "max_beam_width",
            reference.max_beam_width,
            "this engine continues a request in one way only",
            remedy="leave it out, or plan without a device",
        )


#: Knob of the reference -> the limit that it sets.
_ENCODER_LIMITS = {"encoder_cache_max_bytes": "encoder_cache_bytes", "encoder_max_num_tokens": "max_encoder_tokens"}


def _encoder_limits(reference: ReferenceKnobs, limits: Limits, asked: LimitKnobs) -> dict[str, Any]:
    usual, found = type(reference)(), {}
    has_encoder = bool(limits.max_encoder_tokens or limits.encoder_cache_bytes)
    for knob, limit in _ENCODER_LIMITS.items():
        value, is_default = getattr(reference, knob), getattr(reference, knob) == getattr(usual, knob)
        if not is_default and getattr(asked, limit).is_set:
            raise InvalidSetting(knob, value, f"{limit} says the same and is set too", remedy=f"leave {limit} out")
        if not is_default and not has_encoder:
            raise InvalidSetting(knob, value, "the model has no encoder", remedy=f"leave {knob} out")
        if value is not None and has_encoder and not getattr(asked, limit).is_set:
            found[limit] = value
    return found
