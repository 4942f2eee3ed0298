"""All that the arithmetic of a plan sees."""

from __future__ import annotations

from dataclasses import dataclass, field

from tonnage.config import Knobs, LimitKnobs, Limits
from tonnage.layout import KVLayout
from tonnage.terms import Chip, Claim, Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """``limit_knobs`` says where each limit came from; it does not change numbers.

    page_bytes       arenas (weights, scratch, KV) are committed in whole pages of this size
    ranks_tokens     what the smallest rank's pool holds; None: the only rank, or the others are not known yet.
                     ranks_sequences: how many of full length; ranks_attended: what it can attend to in a step
    """

    device_name: str
    model_name: str
    chip: Chip
    measured: Measured
    claims: tuple[Claim, ...]
    layout: KVLayout
    page_bytes: int
    knobs: Knobs
    limits: Limits
    limit_knobs: LimitKnobs = field(default_factory=LimitKnobs)
    fingerprint: str = ""
    warnings: tuple[str, ...] = ()
    ranks_tokens: int | None = None
    ranks_sequences: int | None = None
    ranks_attended: int | None = None
