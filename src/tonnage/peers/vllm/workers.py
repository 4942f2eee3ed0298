"""The other stages of a pipeline: the smallest worker decides how many blocks all have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tonnage.costs.price import weights_price
from tonnage.costs.ranks import rank_shape, stage_of
from tonnage.peers.launch import Launch
from tonnage.peers.version import Version
from tonnage.peers.vllm import eras
from tonnage.terms import Quantity, Rank, Source

#: From here on layers that are left over go to the stages before the last; to the last one before.
_SPREAD_REST = (0, 7)
#: Weights that are known by arithmetic or from headers, of the rank that was asked about.
PRICED = (Source.DERIVED, Source.PREDICTED)


def partition(num_layers: int, num_stages: int, version: Version) -> tuple[int, ...]:
    """Layers of each stage by this engine's own rule: what does not divide goes to later stages, not to the first."""
    each, rest = divmod(num_layers, num_stages)
    layers = [each] * num_stages
    if not eras.is_from(version, _SPREAD_REST):
        layers[-1] += rest
        return tuple(layers)
    for place in range(2, rest + 2):
        layers[-min(place, num_stages)] += 1
    return tuple(layers)


def placed(launch: Launch) -> Launch:
    """With the engine's own split over stages, where none is asked for; predicted weights are scaled to it."""
    rank = launch.rank
    if rank.pp == 1 or rank.partition:
        return launch
    there = replace(rank, partition=partition(launch.config.num_layers, rank.pp, launch.version))
    return _moved(launch, there) if launch.weights.source in PRICED else replace(launch, rank=there)


def other_stages(launch: Launch) -> Iterator[Launch]:
    """One rank of each other stage, its weights scaled from this one's by what both are priced at."""
    rank = launch.rank
    for stage in range(rank.pp):
        if stage != stage_of(rank):
            yield _moved(launch, replace(rank, index=stage * rank.tp * rank.cp))


def _moved(launch: Launch, there: Rank) -> Launch:
    return replace(
        launch, rank=there, weights=_scaled(launch.weights, _price(launch, there), _price(launch, launch.rank))
    )


def _price(launch: Launch, rank: Rank) -> int:
    """Of a rank, and of the draft where it is on the last stage."""
    own = weights_price(launch.config, dtype=launch.dtype, rank=rank).quantity.bytes
    if launch.draft is None or not rank_shape(launch.config, rank).has_head:
        return own
    beside = replace(rank, index=0, size=rank.tp * rank.cp, pp=1, partition=())
    return own + weights_price(launch.draft, rank=beside).quantity.bytes


def _scaled(weights: Quantity, price: int, own: int) -> Quantity:
    return replace(
        weights,
        bytes=weights.bytes * price // own,
        low=weights.low * price // own,
        high=weights.high * price // own,
        ref=f"{weights.ref}, scaled to another stage",
    )
