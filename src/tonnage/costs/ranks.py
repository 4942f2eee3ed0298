"""One rank's share of a model under tensor, context and pipeline parallelism: whole heads, whole layers."""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.costs.config import ModelConfig
from tonnage.costs.layers import Layer, Recurrent
from tonnage.errors import InvalidSetting
from tonnage.terms import Rank
from tonnage.units import ceil_div

#: More than any machine has beside each other; what a larger number is meant for is a typing error.
MOST_CONTEXT_RANKS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShape:
    """What one rank holds: global layer numbers, and counts or element sizes after the split."""

    layers: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    has_embeddings: bool
    has_head: bool


def rank_shape(config: ModelConfig, rank: Rank) -> RankShape:
    """The split. Ranks of one pipeline stage are numbered side by side (stage = index // (tp * cp)).

    KV heads are whole, ``ceil(num_kv_heads / tp)``: with fewer heads than ranks each is replicated. Tied
    embeddings lie on the first and on the last stage. Raises ``InvalidSetting`` where heads do not divide.
    """
    _check(config, rank)
    stage = stage_of(rank)
    return RankShape(
        layers=stage_layers(config.num_layers, num_stages=rank.pp, stage=stage, partition=rank.partition),
        num_heads=config.num_heads // attention_ranks(rank),
        num_kv_heads=rank_kv_heads(config.num_kv_heads, rank),
        intermediate_size=ceil_div(config.intermediate_size, rank.tp),
        vocab_size=ceil_div(config.vocab_size, rank.tp),
        has_embeddings=stage == 0,
        has_head=stage == rank.pp - 1,
    )


def stage_of(rank: Rank) -> int:
    """The pipeline stage, from 0."""
    return rank.index // (rank.tp * rank.cp)


def attention_ranks(rank: Rank) -> int:
    """Ranks that share the heads of one layer: all of tensor parallelism, or one where each serves its own requests."""
    return 1 if rank.attention_dp else rank.tp


def rank_kv_heads(num_kv_heads: int, rank: Rank) -> int:
    """Whole KV heads of one rank: fewer heads than ranks are replicated."""
    return ceil_div(num_kv_heads, attention_ranks(rank))


def stage_layers(num_layers: int, *, num_stages: int, stage: int, partition: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Layers of one pipeline stage: as ``partition`` counts them, or an even split whose first
    ``num_layers % num_stages`` stages get one more."""
    if partition:
        first = sum(partition[:stage])
        return tuple(range(first, first + partition[stage]))
    each, extra = divmod(num_layers, num_stages)
    first = stage * each + min(stage, extra)
    return tuple(range(first, first + each + (stage < extra)))


def _check(config: ModelConfig, rank: Rank) -> None:
    if min(rank.tp, rank.pp, rank.cp, rank.ep) < 1 or not 0 <= rank.index < rank.tp * rank.cp * rank.pp:
        sizes = f"tp {rank.tp} x pp {rank.pp}" + (f" x cp {rank.cp}" if rank.cp != 1 else "")
        remedy = "write numbers of ranks of at least 1, and an index among them"
        raise InvalidSetting("rank", rank.index, f"there are {sizes} ranks, numbered from 0", remedy=remedy)
    if rank.cp > MOST_CONTEXT_RANKS:
        what = f"a context is spread over at most {MOST_CONTEXT_RANKS:,} ranks"
        raise InvalidSetting("cp", rank.cp, what, remedy=f"write at most {MOST_CONTEXT_RANKS}")
    if (rank.tp * rank.cp) % rank.ep:
        raise InvalidSetting(
            "ep", rank.ep, f"experts are spread over the tp {rank.tp} x cp {rank.cp} ranks of a stage, and it does not "
            "divide them", remedy="choose an ep that divides tp x cp",
        )  # fmt: skip
    _check_stages(config, rank)
    if not rank.attention_dp and rank.tp > 1:
        for layer in {id(layer): layer for layer in config.layers}.values():
            _check_heads(config, layer, rank.tp)


def _check_stages(config: ModelConfig, rank: Rank) -> None:
    if rank.pp > config.num_layers:
        raise InvalidSetting(
            "pp", rank.pp, f"{config.name} has only {config.num_layers} layers",
            remedy=f"write at most {config.num_layers}",
        )  # fmt: skip
    parts = rank.partition
    if parts and (len(parts) != rank.pp or sum(parts) != config.num_layers or min(parts) < 1):
        raise InvalidSetting(
            "partition", parts, f"{config.name} has {config.num_layers} layers for pp {rank.pp} stages",
            remedy=f"give {rank.pp} counts of at least 1 whose sum is {config.num_layers}",
        )  # fmt: skip


def _check_heads(config: ModelConfig, layer: Layer, tp: int) -> None:
    """Heads are never cut: query heads and heads of a state (channels where it has none) must divide by ``tp``."""
    for mixer in layer.mixers:
        count, what = mixer.num_heads, "query heads"
        if isinstance(mixer, Recurrent):
            what = "heads of recurrent state" if count else "channels of recurrent state"
            count = count or mixer.conv_channels
        if count % tp:
            raise InvalidSetting(
                "tp", tp, f"{config.name} has {count} {what}, which do not divide by it",
                remedy=f"choose a tp that divides the {what}",
            )  # fmt: skip
