"""From what a plan is asked to a launch of another engine: weights of the rank, settings of both in its own words."""

from __future__ import annotations

from collections.abc import Mapping

from tonnage.config import Knobs, LimitKnobs
from tonnage.costs.checkpoint import Checkpoint
from tonnage.costs.config import ModelConfig
from tonnage.costs.dtypes import WEIGHT_DTYPES, parse_dtype
from tonnage.errors import InvalidSetting, UserError
from tonnage.hardware import Card
from tonnage.peers.launch import Launch, Value
from tonnage.peers.loading import PACKINGS, as_loaded
from tonnage.peers.own_settings import DTYPE, KV_DTYPE, QUANTIZATION, ours_as_theirs
from tonnage.peers.which import Asked
from tonnage.planner.weights import weights_of
from tonnage.terms import Rank

#: Knobs that say how many tokens are drafted: then layers for multi-token prediction are loaded too.
_DRAFTING = ("num_speculative_tokens", "speculative_num_draft_tokens", "max_draft_len")


def launch_of(
    asked: Asked,
    config: ModelConfig,
    *,
    card: Card,
    rank: Rank,
    settings: Mapping[str, Value],
    dtype: str | None = None,
    checkpoint: Checkpoint | None = None,
    draft: ModelConfig | None = None,
) -> Launch:
    """The launch of one rank. ``settings`` may hold the launch's own fields (``own_settings``).

    Raises ``InvalidSetting`` for a dtype, a packing that is not known, or a rank that does not divide the model.
    """
    own = dict(settings)
    element = own.pop(DTYPE, None) or dtype
    kv_dtype = own.pop(KV_DTYPE, None)
    weights_dtype = parse_dtype(str(element or config.dtype), knob="dtype", allowed=WEIGHT_DTYPES)
    drafts = any(own.get(name) for name in _DRAFTING)
    loaded = as_loaded(config, own.get(QUANTIZATION))
    if loaded is None:
        raise InvalidSetting(
            QUANTIZATION,
            str(own[QUANTIZATION]),
            "what becomes of weights that are not packed is not known",
            remedy=f"write {' or '.join(PACKINGS)}, or give the checkpoint that is packed",
        )
    if loaded is not config:
        config, checkpoint = loaded, None  # its headers say how it is stored
    weights = weights_of(config, dtype=weights_dtype, rank=rank, checkpoint=checkpoint, drafts=drafts, draft=draft)
    return Launch(
        engine=asked.name,
        version=asked.version,
        config=config,
        weights=weights,
        card=card,
        rank=rank,
        dtype=None if element is None else weights_dtype,
        kv_dtype=None if kv_dtype is None else str(kv_dtype),
        settings={name: value for name, value in own.items() if value is not None},
        draft=draft,
    )


def given_limits(knobs: Knobs, limits: LimitKnobs) -> dict[str, Value]:
    """What was set in our own words, by name."""
    given: dict[str, Value] = {name: setting.value for name, setting in limits.items() if setting.is_set}
    return given | {name: setting.value for name, setting in knobs.items() if setting.is_set}


def settings_for(
    asked: Asked, own: Mapping[str, Value], given: Mapping[str, Value], *, is_compared: bool
) -> dict[str, Value]:
    """The engine's own settings with ours in its words; its own win nothing: saying one thing twice is refused.

    Ours that it has no word for are refused, unless our own plan stands beside it (``is_compared``).
    """
    theirs, without = ours_as_theirs(asked.name, given)
    if without and not is_compared:
        raise UserError(
            f"--{without[0].replace('_', '-')} has no counterpart in {asked.known.title}",
            need="knobs of that engine, or those that both have",
            remedy=f"leave it out, or say it as --like {asked.name}:KNOB=VALUE",
        )
    twice = sorted(set(theirs) & set(own))
    if twice:
        raise UserError(
            f"--like {asked.name}:{twice[0]} and a flag of ours both set {twice[0]}", remedy="keep one of them"
        )
    return {**theirs, **own}
