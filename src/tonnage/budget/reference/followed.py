"""Which of the reference's knobs no plan follows: they are refused by name, so that none is ignored in silence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from tonnage.budget.reference.environment import VARIABLES, Environment
from tonnage.budget.reference.knobs import ReferenceKnobs
from tonnage.errors import InvalidSetting

#: Knob -> what computes with it in this package, and what else can be said.
UNFOLLOWED: Mapping[str, str] = {
    "speculation": "probe.extra_probe_tokens, probe.manager_max_seq_len; max_draft_tokens is a limit that plans follow",
    "snapshots": "states.v1_runtime_cost, states.v2_cost",
    "enable_pool_rebalance": "",
    "pool_ratio": "knobs.check_group_count",
    "avg_seq_len": "states.default_avg_seq_len",
    "encoder_max_batch_size": "",
}
#: The same for its environment variables.
UNFOLLOWED_VARIABLES: Mapping[str, str] = {
    "indexer_elements": "charges.indexer_reserve",
    "mha_threshold_tokens": "",
    "warn_fraction": "environment.first_look",
    "info_fraction": "environment.first_look",
    "least_bytes": "environment.first_look",
}


def refuse_unfollowed(knobs: ReferenceKnobs) -> None:
    """Raise ``InvalidSetting`` for a knob that is not at its default and that no plan follows."""
    usual = ReferenceKnobs()
    _refuse(UNFOLLOWED, knobs, usual)
    _refuse(UNFOLLOWED_VARIABLES, knobs.environment, usual.environment)


def without_effect(knobs: ReferenceKnobs, *, has_states: bool, has_shares: bool, has_cap: bool) -> list[str]:
    """A sentence for each knob that was set and that this plan has no use for.

    has_states  the cache holds recurrent states;  has_shares: V1 shares bytes between windows
    has_cap     scratch is reserved for attended tokens
    """
    used = {
        "max_util_for_resume": (knobs.manager == "V2", "only the page manager keeps part of its quota"),
        "state_dtype": (has_states, "no layer of this rank keeps a state"),
        "max_tokens": (knobs.max_tokens, "0 caps nothing"),
        "fp8_context_mla_kv_len_cap": (has_cap, "no scratch is reserved for attended tokens"),
        "disk_cache_path": (knobs.disk_cache_bytes, "disk_cache_bytes is not set"),
        "window_shares": (has_shares, "the block manager has one window here, or another manager runs"),
    }
    usual = ReferenceKnobs()
    return [
        f"{name} has no effect: {why}"
        for name, (is_used, why) in used.items()
        if not is_used and _value(knobs, name) != _value(usual, name)
    ]


def _value(knobs: ReferenceKnobs, name: str) -> object:
    return getattr(knobs if hasattr(knobs, name) else knobs.environment, name)


def _refuse(unfollowed: Mapping[str, str], given: object, usual: object) -> None:
    for name, functions in unfollowed.items():
        value = getattr(given, name)
        if value == getattr(usual, name):
            continue
        told = VARIABLES.get(name, name)
        where = f"; the arithmetic is in tonnage.budget.reference: {functions}" if functions else ""
        raise InvalidSetting(
            told,
            _shown(value),
            f"plans by the reference policy do not follow it in this release{where}",
            remedy=f"leave {told} out",
        )


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def knob_names() -> tuple[str, ...]:
    """Every knob, those of the environment too."""
    knobs = (field.name for field in fields(ReferenceKnobs) if field.name != "environment")
    return (*knobs, *(field.name for field in fields(Environment)))
