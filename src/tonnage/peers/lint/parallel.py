"""How many ranks a launch makes, and which of them a prediction is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tonnage.costs.config import ModelConfig
from tonnage.costs.layers import Experts
from tonnage.terms import Rank

_NAMES = {
    "vllm": ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size"),
    "sglang": ("tp_size", "pp_size", "dp_size", ""),
    "trtllm": ("tp_size", "pp_size", "", "cp_size"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Sizes of the groups. ``attention_dp``: data-parallel ranks lie inside the tensor-parallel group."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    attention_dp: bool = False

    @property
    def num_gpus(self) -> int:
        """Devices that all replicas need together."""
        return self.tp * self.pp * self.cp * (1 if self.attention_dp else self.dp)

    @property
    def replicas(self) -> int:
        """Caches of their own: each serves other requests."""
        return self.dp


def parallel_of(engine: str, settings: Mapping[str, object]) -> Parallel:
    """The sizes that the settings ask for; what is left out is 1."""
    tp, pp, dp, cp = (_size(settings, name) for name in _NAMES[engine])
    if engine == "vllm":
        ep = tp * dp if settings.get("enable_expert_parallel") else 1
        return Parallel(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep)
    if engine == "sglang":
        inside = bool(settings.get("enable_dp_attention"))
        return Parallel(tp=tp, pp=pp, dp=dp, ep=_size(settings, "ep_size"), attention_dp=inside and dp > 1)
    inside = bool(settings.get("enable_attention_dp"))
    return Parallel(tp=tp, pp=pp, cp=cp, dp=tp if inside else 1, ep=_size(settings, "ep_size"), attention_dp=inside)


def with_sizes(engine: str, *, tp: int, dp: int) -> dict[str, object]:
    """The settings that give these two sizes."""
    names = _NAMES[engine]
    return {names[0]: tp, **({names[2]: dp} if names[2] and dp != 1 else {})}


def rank_of(parallel: Parallel, config: ModelConfig, *, stage: int = 0) -> Rank:
    """The first rank of a pipeline stage, in our terms.

    vLLM's data-parallel ranks of one tensor rank each share a model of experts among them: to us that is attention in
    parallel over requests, on ranks that split the rest. Other mixtures of the two (``overstates``) are taken without
    the sharing.
    """
    has_experts = _has_experts(config)
    tp, ep, inside = parallel.tp, parallel.ep, parallel.attention_dp
    if not inside and parallel.dp > 1 and tp == 1 and has_experts:
        tp, inside = parallel.dp, True
    group = tp * parallel.cp
    ep = ep if has_experts and ep >= 1 and group % ep == 0 else group if has_experts and ep > group else 1
    rank = Rank(size=group * parallel.pp, tp=tp, pp=parallel.pp, cp=parallel.cp, ep=ep, attention_dp=inside)
    return replace(rank, index=stage * group)


def overstates(parallel: Parallel, config: ModelConfig) -> bool:
    """Whether groups of several ranks share experts that ``rank_of`` counts for each group: vLLM splits those over all
    ranks of all groups."""
    return parallel.dp > 1 and parallel.tp > 1 and not parallel.attention_dp and _has_experts(config)


def _has_experts(config: ModelConfig) -> bool:
    return any(isinstance(layer.feed_forward, Experts) for layer in config.layers)


def _size(settings: Mapping[str, object], name: str) -> int:
    value = settings.get(name) if name else None
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 1 << 16 else 1
