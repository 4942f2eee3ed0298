"""The inverse of a fit: the smallest device, and the fewest devices, that a workload can be had on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Unpack

from tonnage.budget.fit import wanted
from tonnage.budget.search import smallest
from tonnage.config import LimitKnobs
from tonnage.costs.config import ModelConfig
from tonnage.errors import DoesNotFit, UserError
from tonnage.planner.asked import Asked, on_rank
from tonnage.planner.dimensions import dimensions
from tonnage.planner.fit import Fit, fit_site
from tonnage.planner.remedies import MOST_BYTES
from tonnage.planner.site import Plans, Site, holds
from tonnage.planner.unfit import can_hold, workload_refusal
from tonnage.planner.workload import Workload, check_workload
from tonnage.terms import Rank
from tonnage.units import MiB

#: Engines of more devices than this are not looked for.
MOST_RANKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemory:
    """``device_bytes`` (whole MiB) is enough and a MiB less is not; ``fit`` is the answer on a device of that size.

    comfortable_bytes  enough with nothing given up; None where no size is
    """

    device_bytes: int
    comfortable_bytes: int | None
    fit: Fit


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastRanks:
    """``tp * pp`` devices are enough, and no fewer are. ``tried`` holds the (tp, pp) that were refused before it."""

    tp: int
    pp: int
    tried: tuple[tuple[int, int], ...]
    fit: Fit

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp


def least_memory(config: ModelConfig, *, workload: Workload, **asked: Unpack[Asked]) -> LeastMemory:
    """The smallest device like ``card`` (its own size is not looked at) with every user of the workload resident.

    Raises ``UnsupportedModel``, ``InvalidSetting``, or ``DoesNotFit`` where a cap that was set keeps every size out.
    """
    site = Site.of(config, **asked)
    check_workload(workload, config, site.first.limit_knobs, has_draft=site.first.draft is not None)
    users, length = workload.num_users, workload.seq_tokens
    order = dimensions(site.first, least_rows=users, least_seq_len=length)

    def met(plans: Plans) -> bool:
        return holds(plans, num_sequences=users, seq_tokens=length)

    low = max(stage.weights.bytes for stage in site.stages) // MiB
    least = _smallest_size(lambda mib: can_hold(site.on(mib * MiB), users, length), low=low)
    if least is None:
        raise workload_refusal(site.on(MOST_BYTES), workload, order)
    comfortable = _smallest_size(lambda mib: site.on(mib * MiB).reaches(wanted(order), met), low=least)
    return LeastMemory(
        device_bytes=least * MiB,
        comfortable_bytes=None if comfortable is None else comfortable * MiB,
        fit=fit_site(site.on(least * MiB), workload),
    )


def _smallest_size(enough: Callable[[int], bool], *, low: int) -> int | None:
    """The smallest number of MiB, found by doubling and then by halving; None where ``MOST_BYTES`` are not enough."""
    low, most = max(1, low), MOST_BYTES // MiB
    high = low
    while high < most and not enough(high):
        low, high = high, min(2 * high, most)
    return smallest(enough, low=low, high=high)


def least_ranks(config: ModelConfig, *, workload: Workload, **asked: Unpack[Asked]) -> LeastRanks:
    """The fewest devices like ``card`` with every user of the workload resident; among equal numbers the most tensor
    parallel, which splits the cache of every layer.

    Raises ``UnsupportedModel``, ``InvalidSetting``, or ``DoesNotFit`` where ``MOST_RANKS`` are not enough either.
    """
    has_draft = asked.get("draft") is not None
    check_workload(workload, config, asked.get("limit_knobs") or LimitKnobs(), has_draft=has_draft)
    tried: list[tuple[int, int]] = []
    widest: Site | None = None
    for tp, pp in splits(config):
        rank = Rank(size=tp * pp, tp=tp, pp=pp)
        try:
            site = Site.of(config, **on_rank(asked, rank))
        except UserError:
            if tp * pp == 1:
                raise
            continue  # this split does not suit the model
        if can_hold(site, workload.num_users, workload.seq_tokens):
            return LeastRanks(tp=tp, pp=pp, tried=tuple(tried), fit=fit_site(site, workload))
        tried.append((tp, pp))
        if widest is None or tp * pp > widest.first.rank.size:
            widest = site
    raise _no_ranks(widest, workload)


def splits(config: ModelConfig) -> Iterator[tuple[int, int]]:
    """(tp, pp) by their product, the larger tp first: tp divides the query heads, pp is at most the layers."""
    tps = [tp for tp in range(1, min(config.num_heads, MOST_RANKS) + 1) if config.num_heads % tp == 0]
    found = [(tp, pp) for tp in tps for pp in range(1, min(config.num_layers, MOST_RANKS // tp) + 1)]
    return iter(sorted(found, key=lambda split: (split[0] * split[1], split[1])))


def _no_ranks(widest: Site | None, workload: Workload) -> DoesNotFit:
    """The refusal on the most devices that were tried, with the fewest stages."""
    if widest is None:
        raise AssertionError("one rank is always a split")
    order = dimensions(widest.first, least_rows=workload.num_users, least_seq_len=workload.seq_tokens)
    refusal = workload_refusal(widest, workload, order)
    return refusal.told_as(what=f"{refusal.what}, on up to {widest.first.rank.size} devices")
