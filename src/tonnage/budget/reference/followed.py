"""Which of the reference's knobs no plan follows: they are refused by name, so that none is ignored in silence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from tonnage.budget.reference.environment import Environment
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


def _refuse(unfollowed: Mapping[str, str], given: object, usual: object) -> None:
    for name, functions in unfollowed.items():
        value = getattr(given, name)
        if value == getattr(usual, name):
            continue
        where = f"; the arithmetic is in tonnage.budget.reference: {functions}" if functions else ""
        raise InvalidSetting(
            name,
            _shown(value),
            f"plans by the reference policy do not follow it in this release{where}",
            remedy=f"leave {name} out",
        )


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def knob_names() -> tuple[str, ...]:
    """Every knob, those of the environment too."""
    knobs = (field.name for field in fields(ReferenceKnobs) if field.name != "environment")
    return (*knobs, *(field.name for field in fields(Environment)))
