"""Whether the knobs make sense by themselves, before any model or device is looked at."""

from __future__ import annotations

from fractions import Fraction

from tonnage.config import Knobs, LimitKnobs, parse_admission
from tonnage.costs.dtypes import parse_dtype
from tonnage.errors import InvalidSetting
from tonnage.units import LARGEST, shown

#: Where scratch grows with what a step attends to: "cap" keeps steps within what is left, "reserve" pays for the worst.
SCRATCH_POLICIES = ("cap", "reserve")
#: Knobs and limits of which a plan knows what they cost, and which the engine cannot obey yet.
PLANNED_ONLY = (
    "disk_kv_bytes",
    "state_dtype",
    "scratch",
    "attended_tokens",
    "max_draft_tokens",
    "lookahead_steps",
    "snapshot_tokens",
    "max_adapters",
    "max_adapter_rank",
    "max_encoder_tokens",
    "encoder_cache_bytes",
)
_TEXTS = ("kv_dtype", "graphs")


def check_knobs(knobs: Knobs) -> None:
    """Raise ``InvalidSetting`` for values out of range, and for ``disk_kv_bytes``, whose room does not exist yet."""
    for name, setting in knobs.items():
        if setting.value is None or name in _TEXTS:
            continue
        if name == "disk_kv_bytes":
            raise InvalidSetting(name, setting.text or setting.value, "not in this release", remedy=f"leave {name} out")
        if name == "kv_fraction":
            _check_fraction(setting.value)
        elif name == "admission":
            parse_admission(setting.value)
        elif name == "state_dtype":
            parse_dtype(str(setting.value), knob=name)
        elif name == "scratch":
            _check_scratch(setting.value)
        else:
            _check_size(name, setting.value, least=0 if name in ("keep_free_bytes", "host_kv_bytes") else 1)


def refuse_planned_only(knobs: Knobs, limits: LimitKnobs) -> None:
    """Raise ``InvalidSetting`` for what a plan knows and the engine cannot obey: it would have no effect."""
    for name, setting in knobs.items() + limits.items():
        if name in PLANNED_ONLY and setting.is_set:
            raise InvalidSetting(
                name,
                setting.text or setting.value,
                "the engine does not obey it in this release; only plans do",
                remedy=f"leave {name} out",
            )


def _check_fraction(value: object) -> None:
    if not isinstance(value, Fraction | int) or not 0 < value <= 1:
        raise InvalidSetting("kv_fraction", value, "outside 0 < share <= 1", remedy="write a share such as 0.9 or 9/10")


def _check_scratch(value: object) -> None:
    if value == "lend":
        raise InvalidSetting(
            "scratch",
            value,
            "attention of this release runs in an arena of its own, which cannot be lent to cached blocks",
            remedy="use cap or reserve; tonnage curve shows what lending would give",
        )
    if value not in SCRATCH_POLICIES:
        raise InvalidSetting("scratch", value, "no such policy", remedy=f"write {' or '.join(SCRATCH_POLICIES)}")


def _check_size(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        told = "not a whole number above 0" if least else "not a whole number of at least 0"
        raise InvalidSetting(name, shown(value), told, remedy=f"write {least} or more")
    if value > LARGEST:
        raise InvalidSetting(name, shown(value), "larger than any there is", remedy=f"write at most {LARGEST}")
