"""One rank's share of a model under tensor and pipeline parallelism: whole heads, whole layers, padded vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.costs.config import ModelConfig
from tonnage.errors import InvalidSetting
from tonnage.terms import Rank
from tonnage.units import ceil_div


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
    """The split. Ranks of one pipeline stage are numbered side by side (stage = index // tp).

    KV heads are whole, ``ceil(num_kv_heads / tp)``: with fewer heads than ranks each is replicated. Tied
    embeddings lie on the first and on the last stage. Raises ``InvalidSetting`` where heads do not divide.
    """
    _check(config, rank)
    attention_tp = 1 if rank.attention_dp else rank.tp
    stage = rank.index // rank.tp
    return RankShape(
        layers=stage_layers(config.num_layers, num_stages=rank.pp, stage=stage),
        num_heads=config.num_heads // attention_tp,
        num_kv_heads=ceil_div(config.num_kv_heads, attention_tp),
        intermediate_size=ceil_div(config.intermediate_size, rank.tp),
        vocab_size=ceil_div(config.vocab_size, rank.tp),
        has_embeddings=stage == 0,
        has_head=stage == rank.pp - 1,
    )


def stage_layers(num_layers: int, *, num_stages: int, stage: int) -> tuple[int, ...]:
    """Layers of one pipeline stage: an even split whose first ``num_layers % num_stages`` stages get one more."""
    each, extra = divmod(num_layers, num_stages)
    first = stage * each + min(stage, extra)
    return tuple(range(first, first + each + (stage < extra)))


def _check(config: ModelConfig, rank: Rank) -> None:
    if min(rank.tp, rank.pp) < 1 or not 0 <= rank.index < rank.tp * rank.pp:
        raise InvalidSetting("rank", rank.index, f"there are tp {rank.tp} x pp {rank.pp} ranks, numbered from 0")
    if max(rank.cp, rank.ep) > 1:
        raise InvalidSetting("rank", f"cp {rank.cp}, ep {rank.ep}", "not in this release", remedy="use tp and pp")
    if rank.pp > config.num_layers:
        raise InvalidSetting("pp", rank.pp, f"{config.name} has only {config.num_layers} layers")
    if not rank.attention_dp and config.num_heads % rank.tp:
        raise InvalidSetting(
            "tp",
            rank.tp,
            f"{config.name} has {config.num_heads} query heads, which do not divide by it",
            remedy="choose a tp that divides the query heads",
        )
