"""Whether the reference probes at all, and what stands in for the probe where it does not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Literal, TypeAlias

from tonnage.budget.reference.knobs import ReferenceKnobs
from tonnage.errors import DoesNotFit, InvalidSetting

ContextParallel: TypeAlias = Literal["none", "helix", "other"]


class Method(StrEnum):
    PROBE = "probe"
    UNPROFILED = "unprofiled"  # the fraction of what is free now, then the same reserves and caps
    HELIX_QUOTA = "helix quota"  # a quota of bytes, given or the fraction of what is free
    NO_CAPACITY_STEP = "no capacity step"  # nothing is derived; the manager sizes itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimation:
    method: Method
    because: str


def estimation(
    knobs: ReferenceKnobs,
    *,
    is_encoder_decoder: bool = False,
    context_parallel: ContextParallel = "none",
    backend: str = "TRTLLM",
) -> Estimation:
    """How the budget of this start comes about; the first row that applies."""
    if context_parallel == "helix" and knobs.manager == "V2":
        return Estimation(method=Method.HELIX_QUOTA, because="helix splits the context over ranks")
    if context_parallel != "none":
        return Estimation(method=Method.NO_CAPACITY_STEP, because="context parallelism is not probed")
    if backend.upper() == "VANILLA":
        return Estimation(method=Method.NO_CAPACITY_STEP, because="the VANILLA backend is not probed")
    if is_encoder_decoder:
        return Estimation(method=Method.UNPROFILED, because="the model has an encoder and a decoder")
    if knobs.environment.skip_estimation:
        return Estimation(method=Method.UNPROFILED, because="TRTLLM_SKIP_KV_CACHE_ESTIMATION=1")
    return Estimation(method=Method.PROBE, because="")


def helix_quota(knobs: ReferenceKnobs, *, free_bytes: int) -> int:
    """V2's quota under helix: the one given, else the fraction of what is free.

    ``max_tokens`` does not enter, since it would be inflated on its way to a quota. Raises ``InvalidSetting`` where
    it is set to nothing, ``DoesNotFit`` where nothing is free.
    """
    if knobs.max_tokens is not None and knobs.max_tokens <= 0:
        raise InvalidSetting("max_tokens", knobs.max_tokens, "must be above 0 under helix", remedy="leave it out")
    quota = knobs.max_gpu_total_bytes or int(free_bytes * knobs.free_gpu_memory_fraction)
    if quota <= 0:
        raise DoesNotFit("no memory is free for the cache under helix", need_bytes=1, have_bytes=max(0, free_bytes))
    return quota


def self_sized_bytes(knobs: ReferenceKnobs, *, free_bytes: int) -> int:
    """What the manager takes where there is no capacity step: V1 the fraction of what is free at that moment.

    V2 has only a quota that was given; without one its assertion fails, and here ``InvalidSetting`` is raised.
    """
    if knobs.manager == "V1":
        return int(Fraction(free_bytes) * knobs.free_gpu_memory_fraction)
    if not knobs.max_gpu_total_bytes:
        what = "quota not set, and nothing derives one here"
        raise InvalidSetting("max_gpu_total_bytes", 0, what, remedy='set it, or use manager "V1"')
    return knobs.max_gpu_total_bytes
