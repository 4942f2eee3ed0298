"""The other stages of a pipeline: the smallest worker decides how many blocks all have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tonnage.costs.price import weights_price
from tonnage.costs.ranks import stage_of
from tonnage.peers.launch import Launch
from tonnage.peers.version import Version
from tonnage.peers.vllm import eras
from tonnage.terms import Quantity, Rank

#: From here on layers that are left over go to the stages before the last; to the last one before.
_SPREAD_REST = (0, 7)


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
    """With the engine's own split over stages, where none is asked for. The weights stay what they are."""
    rank = launch.rank
    if rank.pp == 1 or rank.partition:
        return launch
    parts = partition(launch.config.num_layers, rank.pp, launch.version)
    return replace(launch, rank=replace(rank, partition=parts))


def other_stages(launch: Launch) -> Iterator[Launch]:
    """One rank of each other stage, its weights scaled from this one's by what both are priced at."""
    rank = launch.rank
    own = weights_price(launch.config, dtype=launch.dtype, rank=rank).quantity.bytes
    for stage in range(rank.pp):
        if stage == stage_of(rank):
            continue
        there: Rank = replace(rank, index=stage * rank.tp * rank.cp)
        price = weights_price(launch.config, dtype=launch.dtype, rank=there).quantity.bytes
        yield replace(launch, rank=there, weights=_scaled(launch.weights, price, own))


def _scaled(weights: Quantity, price: int, own: int) -> Quantity:
    return replace(
        weights,
        bytes=weights.bytes * price // own,
        low=weights.low * price // own,
        high=weights.high * price // own,
        ref=f"{weights.ref}, scaled to another stage",
    )
