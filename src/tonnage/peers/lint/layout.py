"""Findings about how a model is spread over GPUs, and in what form its cache is kept."""

from __future__ import annotations

from collections.abc import Iterator

from tonnage.costs.layers import Attention, Latent, Recurrent
from tonnage.costs.ranks import rank_shape
from tonnage.errors import InvalidSetting
from tonnage.peers.commands.command import Command
from tonnage.peers.lint.case import Case, held, number_of
from tonnage.peers.lint.finding import Finding, Severity
from tonnage.peers.lint.parallel import Parallel, rank_of, with_sizes
from tonnage.peers.lint.remedies import can_fp8, flags_text, fp8_changes
from tonnage.peers.start import Start
from tonnage.units import GiB, format_bytes

#: Shared memory below which ranks in a container were seen to fail: the runtimes' default is 64 MiB.
LEAST_SHM_BYTES = GiB
#: The setting by which ranks that hold the same heads, or latents, divide the tokens.
_SHARED = {"vllm": "decode_context_parallel_size", "sglang": "dcp_size", "trtllm": ""}


def split(case: Case) -> Iterator[Finding]:
    """Whether the model can be spread at all; nothing else can be asked where it cannot."""
    parallel = case.parallel()
    try:
        rank_shape(case.config, rank_of(parallel, case.config))
    except InvalidSetting as fault:
        yield Finding(
            code="TN030",
            severity=Severity.ERROR,
            what=f"{parallel.tp} tensor-parallel ranks: {fault.what.partition(': ')[2] or fault.what}",
            why="each rank takes whole heads",
            change=tuple(_divisors(case, parallel)),
        )


def _divisors(case: Case, parallel: Parallel) -> Iterator[str]:
    """The next sizes below and above that divide and start."""
    below = (tp for tp in range(parallel.tp - 1, 0, -1))
    above = (tp for tp in range(parallel.tp + 1, 2 * parallel.tp + 1))
    for sizes in (below, above):
        for tp in sizes:
            changes = with_sizes(case.engine, tp=tp, dp=parallel.dp)
            if case.tried(changes) is not None:
                yield flags_text(case, changes)
                break


def gpus(command: Command, parallel: Parallel, *, num_gpus: int | None, is_spread: bool) -> Iterator[Finding]:
    """GPUs that it is given against those that it needs. ``is_spread``: over several nodes, of which this is one."""
    need = parallel.num_gpus
    if num_gpus is not None and num_gpus < need and not is_spread:
        yield Finding(
            code="TN032",
            severity=Severity.ERROR,
            what=f"it makes {need} ranks and is given {num_gpus} GPU{'s' * (num_gpus != 1)}",
            why=_sizes(parallel),
            change=(f"{need} GPUs",),
        )
    elif num_gpus is not None and num_gpus > need:
        yield Finding(
            code="TN033",
            severity=Severity.WARNING,
            what=f"it is given {num_gpus} GPUs and uses {need}",
            why=_sizes(parallel),
        )
    shm = command.place.shm_bytes
    if need > 1 and shm is not None and shm < LEAST_SHM_BYTES:
        yield Finding(
            code="TN034",
            severity=Severity.WARNING,
            what=f"{need} ranks share {format_bytes(shm)} of /dev/shm",
            why="ranks of a container pass messages through it (vllm-project/vllm#1710, gpustack/gpustack#5014)",
            change=("--shm-size 16g, --ipc host, or a volume in memory at /dev/shm",),
        )


def _sizes(parallel: Parallel) -> str:
    inside = parallel.attention_dp
    sizes = (("tensor", parallel.tp), ("pipeline", parallel.pp), ("context", parallel.cp))
    named = [f"{name} {size}" for name, size in (*sizes, ("data", 1 if inside else parallel.dp)) if size > 1]
    return " x ".join(named) or "one rank"


def replicated(case: Case, start: Start) -> Iterator[Finding]:
    """Key and value heads that several ranks hold alike, and latents, which all do."""
    parallel = case.parallel()
    if start.starts is False or parallel.tp == 1 or parallel.attention_dp:
        return
    if (shared := number_of(case, start, _SHARED[case.engine]) or 1) > 1:
        if case.engine != "vllm":
            yield _shared_tokens(case, shared)
        return
    mixers = [mixer for layer in case.config.layers for mixer in layer.mixers]
    if any(isinstance(mixer, Latent) for mixer in mixers):
        yield from _latents(case, start, parallel)
        return
    heads = min((mixer.num_kv_heads for mixer in mixers if isinstance(mixer, Attention)), default=parallel.tp)
    if heads >= parallel.tp:
        return
    changes = with_sizes(case.engine, tp=heads, dp=parallel.dp * (parallel.tp // heads))
    tried = case.tried(changes) if case.engine != "trtllm" and parallel.tp % heads == 0 else None
    gains = tried is not None and _together(case, tried, changes) > held(start) * parallel.replicas
    yield Finding(
        code="TN031",
        severity=Severity.WARNING if gains else Severity.NOTE,
        what=f"{heads} KV heads on {parallel.tp} ranks: each is held {-(-parallel.tp // heads)} times",
        why=_gain(case, start, tried, changes),
        change=((flags_text(case, changes),) if gains else ()) + _divided(case, start, parallel.tp // heads),
    )


def _divided(case: Case, start: Start, ranks: int) -> tuple[str, ...]:
    """The flag by which ranks that hold the same tokens divide them, where this release reads it and holds more."""
    name = _SHARED["vllm"]
    tried = case.tried({name: ranks}) if case.engine == "vllm" and ranks > 1 else None
    return (flags_text(case, {name: ranks}),) if tried is not None and held(tried) > held(start) else ()


def _shared_tokens(case: Case, ranks: int) -> Finding:
    """Ranks that would hold the same tokens and divide them instead: no rule here knows it."""
    return Finding(
        code="TN008",
        severity=Severity.WARNING,
        what=f"the tokens that {ranks} ranks divide among them are not predicted: they hold more than is told here, up "
        f"to {ranks} times",
        why=f"{_SHARED[case.engine]} {ranks}",
    )


def _latents(case: Case, start: Start, parallel: Parallel) -> Iterator[Finding]:
    by_engine: dict[str, dict[str, object]] = {
        "vllm": {
            "tensor_parallel_size": 1,
            "data_parallel_size": parallel.tp * parallel.dp,
            "enable_expert_parallel": True,
        },
        "sglang": {"dp_size": parallel.tp, "enable_dp_attention": True},
        "trtllm": {"enable_attention_dp": True},
    }
    changes = by_engine[case.engine]
    tried = case.tried(changes)
    gains = tried is not None and _together(case, tried, changes) > held(start) * parallel.replicas
    yield Finding(
        code="TN035",
        severity=Severity.WARNING if gains else Severity.NOTE,
        what=f"the latent of a token is held by all {parallel.tp} ranks, for it has no heads to split",
        why=f"{_gain(case, start, tried, changes)} (vllm-project/recipes#762: 7.7 times on eight GPUs)",
        change=((flags_text(case, changes),) if gains else ()) + _divided(case, start, parallel.tp),
    )


def _together(case: Case, start: Start, changes: dict[str, object]) -> int:
    return held(start) * case.parallel(changes).replicas


def _gain(case: Case, start: Start, tried: Start | None, changes: dict[str, object]) -> str:
    now = held(start) * case.parallel().replicas
    told = f"all ranks together hold {now:,} tokens"
    return told if tried is None else f"{told}; split over requests they would hold {_together(case, tried, changes):,}"


def eight_bits(case: Case, start: Start) -> Iterator[Finding]:
    """What a cache in eight bits would hold."""
    if start.starts is False or not can_fp8(case) or start.tokens is None:
        return
    tried = case.tried(fp8_changes(case))
    if tried is None or tried.tokens is None or tried.tokens.best * 10 < start.tokens.best * 11:
        return
    yield Finding(
        code="TN040",
        severity=Severity.NOTE,
        what=f"in eight bits the cache would hold {tried.tokens.best:,} tokens instead of {start.tokens.best:,}",
        why="by predicting again; it costs some accuracy",
        change=(flags_text(case, fp8_changes(case)),),
    )


def eager(case: Case, start: Start) -> Iterator[Finding]:
    """Graphs that are switched off: what they would take."""
    name = {"vllm": "enforce_eager", "sglang": "disable_cuda_graph"}.get(case.engine)
    if name is None or not case.settings.get(name) or start.starts is False:
        return
    tried = case.tried({name: None})
    if tried is None:
        return
    graphs = sum(term.bytes.bytes for term in tried.terms if "graph" in term.name)
    yield Finding(
        code="TN041",
        severity=Severity.WARNING,
        what=f"--{name.replace('_', '-')} is set: every decode step launches its kernels one by one",
        why=f"with graphs, of about {format_bytes(graphs)}, it starts too",
        change=(f"leave --{name.replace('_', '-')} out",),
    )


def in_full(case: Case, start: Start) -> Iterator[Finding]:
    """Layers with windows or states that a flag makes hold everything."""
    name = {"vllm": "disable_hybrid_kv_cache_manager", "sglang": "disable_hybrid_swa_memory"}.get(case.engine)
    if name is None or not case.settings.get(name) or start.tokens is None:
        return
    mixers = [mixer for layer in case.config.layers for mixer in layer.mixers]
    if not any(isinstance(m, Recurrent) or (isinstance(m, Attention) and m.window) for m in mixers):
        return
    tried = case.tried({name: None})
    if tried is None or tried.tokens is None or tried.tokens.best * 10 < start.tokens.best * 11:
        return
    yield Finding(
        code="TN042",
        severity=Severity.WARNING,
        what=f"--{name.replace('_', '-')} makes layers with windows hold every token",
        why=f"without it the cache holds {tried.tokens.best:,} tokens instead of {start.tokens.best:,}",
        change=(f"leave --{name.replace('_', '-')} out",),
    )
