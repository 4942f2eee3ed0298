"""Stages of a plan from forwards on fake tensors: what a start on that card would measure, an interval for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import transformers

from tonnage.config import Limits
from tonnage.costs.activations import reserved_for
from tonnage.costs.config import ModelConfig
from tonnage.costs.layers import Experts, Latent, Recurrent
from tonnage.costs.ranks import rank_shape
from tonnage.engine.exact.coefficients import PLAIN, RESERVED, RESERVED_APART, SAMPLER, coefficient
from tonnage.engine.exact.fusion import compiled_events
from tonnage.engine.exact.segments import CachingAllocator, Event
from tonnage.engine.exact.skeleton import Skeleton, Unrunnable
from tonnage.engine.exact.steps import forward, prompt_logprobs, sampling, tile_elements
from tonnage.engine.exact.trace import Trace, top_of
from tonnage.engine.family import FAMILIES
from tonnage.errors import UserError
from tonnage.hardware import Card
from tonnage.layout import DTYPE_BYTES
from tonnage.terms import Rank, StagePeak, StepShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One stage's run: the events that count, the highest point, its kind and name, and the peak uncompiled
    (None: nothing of it is compiled anyway)."""

    name: str
    shape: StepShape
    events: Sequence[Event]
    peak_bytes: int
    kind: str
    phase: str
    uncompiled_bytes: int | None


class FakeProbe:
    """Fills stages for the planner (``planner.predict.StageProbe``). ``notes`` say what it could not run, and why.

    Skeletons, traces and stages are kept: a planner asks again and again. ``compiled``: layers run compiled on a card.
    """

    def __init__(self, *, compiled: bool = True) -> None:
        self.notes: list[str] = []
        self._compiled = compiled
        self._skeletons: dict[object, Skeleton] = {}
        self._traces: dict[object, Trace] = {}
        self._stages: dict[object, tuple[StagePeak, ...] | None] = {}
        self._configs: dict[int, ModelConfig] = {}  # kept, so that no other gets the number of one

    @property
    def identity(self) -> str:
        return f"fake tensors: torch {torch.__version__}, transformers {transformers.__version__}"

    def stages(
        self, config: ModelConfig, *, card: Card, limits: Limits, rank: Rank, dtype: str
    ) -> tuple[StagePeak, ...] | None:
        """The stages of a step in the order of the engine's own probes; None where the class cannot be run."""
        self._configs[id(config)] = config
        if config.raw.get("quantization_config"):
            self._note(
                f"--exact runs {config.name} as if its weights were plain: what unpacks quantised ones is left out"
            )
        # What a step holds does not depend on the other limits, which a search for a plan changes.
        sizes = (limits.max_num_tokens, limits.max_logits_rows, limits.max_logprobs)
        key = (id(config), card.kind, rank, dtype, sizes, limits.prompt_logprobs, limits.penalties)
        if key not in self._stages:
            try:
                refuse(config, rank)
                self._stages[key] = self._run(config, card=card, limits=limits, rank=rank, dtype=dtype)
            except UserError:
                raise
            except Exception as error:  # noqa: BLE001 - a class of the library may raise what it likes
                self._note(f"--exact has nothing for {config.name}, whose activations are closed forms: {_told(error)}")
                self._stages[key] = None
        return self._stages[key]

    def _run(self, config: ModelConfig, *, card: Card, limits: Limits, rank: Rank, dtype: str) -> tuple[StagePeak, ...]:
        is_compiled = self._compiled and card.kind == "cuda"
        run_dtype = self._dtype(config, dtype)
        shape, rows = rank_shape(config, rank), limits.max_logits_rows
        skeleton = self._skeleton(config, rank, run_dtype)
        logits_rows = rows if shape.has_head else 0
        tokens = limits.max_num_tokens
        prefill = StepShape(num_tokens=tokens, prefill_tokens=tokens, prefill_rows=rows, logits_rows=logits_rows)
        decode = StepShape(num_tokens=rows, decode_rows=rows, logits_rows=logits_rows)
        found = []
        for name, step in (("prefill", prefill), ("decode", decode)):
            trace = self._trace(skeleton, num_tokens=step.num_tokens, logits_rows=logits_rows)
            found.append(seen_step(name, step, trace, config, is_compiled=is_compiled))
        if shape.has_head and card.kind == "host":
            found[1] = _with_draws(found[1], config, limits, dtype=dtype)
        if shape.has_head:
            found += _sampled(config, limits, prefill, decode, dtype=dtype, device_kind=card.kind)
        is_packed = config.model_type in FAMILIES and bool(FAMILIES[config.model_type].packs)
        reserved = RESERVED if is_packed or not is_compiled else RESERVED_APART
        return _peaks(found, device_kind=card.kind, is_compiled=is_compiled, reserved_kind=reserved)

    def _trace(self, skeleton: Skeleton, *, num_tokens: int, logits_rows: int) -> Trace:
        key = (skeleton, num_tokens, logits_rows)
        if key not in self._traces:
            self._traces[key] = forward(skeleton, num_tokens=num_tokens, logits_rows=logits_rows)
        return self._traces[key]

    def _skeleton(self, config: ModelConfig, rank: Rank, dtype: str) -> Skeleton:
        key = (id(config), rank, dtype)
        if key not in self._skeletons:
            family = FAMILIES.get(config.model_type)
            layers = list(rank_shape(config, rank).layers)
            self._skeletons[key] = Skeleton(config, dtype=dtype, layers=layers, family=family, tp=rank.tp)
        return self._skeletons[key]

    def _dtype(self, config: ModelConfig, dtype: str) -> str:
        """Grouped products have no fake form but in bfloat16; of the same size all else is the same."""
        if dtype == "bfloat16" or not any(isinstance(layer.feed_forward, Experts) for layer in config.layers):
            return dtype
        if DTYPE_BYTES[dtype] == DTYPE_BYTES["bfloat16"]:
            return "bfloat16"
        raise Unrunnable(f"torch has no grouped product of fake tensors in {dtype}")

    def _note(self, told: str) -> None:
        if told not in self.notes:
            self.notes.append(told)


def refuse(config: ModelConfig, rank: Rank) -> None:
    """Raises ``Unrunnable`` for what the library's class does otherwise than an engine, or not at all."""
    if any(isinstance(mixer, Recurrent) for layer in config.layers for mixer in layer.mixers):
        raise Unrunnable("without their kernels the library runs recurrent layers as loops, which no engine does")
    if rank.cp > 1 or rank.ep > 1 or rank.attention_dp:
        raise Unrunnable("ranks that share a context, experts or requests have shapes that no config.json describes")


def _told(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    told = lines[0].rstrip(".") if lines else "no detail"
    return told if isinstance(error, Unrunnable) else f"its class stopped ({type(error).__name__}: {told[:200]})"


def seen_step(name: str, shape: StepShape, trace: Trace, config: ModelConfig, *, is_compiled: bool) -> Seen:
    """What a trace comes to, with its layers compiled or not, before any coefficient."""
    uncompiled = top_of(trace.events)
    events, at = compiled_events(trace) if is_compiled else (trace.events, trace.at)
    top = top_of(events)
    number = at[top.event]
    op = trace.ops[number]
    is_inside = any(region.first_op <= number < region.last_op for region in trace.regions)
    kind = kind_of(op.module, config) if is_compiled and is_inside else PLAIN
    return Seen(
        name=name,
        shape=shape,
        events=events,
        peak_bytes=top.num_bytes,
        kind=kind,
        phase=_phase(op.module) or "logits",
        uncompiled_bytes=uncompiled.num_bytes,
    )


def _with_draws(seen: Seen, config: ModelConfig, limits: Limits, *, dtype: str) -> Seen:
    """A step of decodes with the draws behind it, which on a card are one kernel that holds nothing."""
    trace = sampling(
        hidden_bytes=_hidden_bytes(config, limits.max_logits_rows, dtype),
        logits_rows=limits.max_logits_rows,
        vocab_size=config.vocab_size,
        dtype=dtype,
        num_logprobs=0,
        penalties=False,
        tile_elements=tile_elements("host"),
        is_plain=True,
    )
    peak = max(seen.peak_bytes, top_of(trace.events).num_bytes)
    return replace(seen, events=(*seen.events, *trace.events), peak_bytes=peak, uncompiled_bytes=peak)


def _sampled(
    config: ModelConfig, limits: Limits, prefill: StepShape, decode: StepShape, *, dtype: str, device_kind: str
) -> list[Seen]:
    """The sampler with everything that may be asked, and a prompt's log-probabilities where they may."""
    rows, tile = limits.max_logits_rows, tile_elements(device_kind)
    common = {"logits_rows": rows, "vocab_size": config.vocab_size, "dtype": dtype, "tile_elements": tile}
    common["num_logprobs"] = limits.max_logprobs
    traces = []
    if limits.prompt_logprobs:
        hidden_bytes = _hidden_bytes(config, limits.max_num_tokens, dtype)
        traces.append(("prompt log-probs", prefill, prompt_logprobs(hidden_bytes=hidden_bytes, **common)))  # type: ignore[arg-type]
    hidden_bytes = _hidden_bytes(config, rows, dtype)
    drawn = sampling(hidden_bytes=hidden_bytes, penalties=limits.penalties, **common)
    traces.append(("sampler", decode, drawn))
    found = []
    for name, shape, trace in traces:
        top = top_of(trace.events)
        found.append(
            Seen(
                name=name,
                shape=shape,
                events=trace.events,
                peak_bytes=top.num_bytes,
                kind=SAMPLER if device_kind == "cuda" else PLAIN,
                phase=f"{rows:,} rows",
                uncompiled_bytes=None,
            )
        )
    return found


def _hidden_bytes(config: ModelConfig, num_tokens: int, dtype: str) -> int:
    """Last hidden states, which a step holds until its tokens are drawn."""
    return num_tokens * config.hidden_size * DTYPE_BYTES[dtype]


def _peaks(found: Sequence[Seen], *, device_kind: str, is_compiled: bool, reserved_kind: str) -> tuple[StagePeak, ...]:
    """Of the largest, the reserved bytes are what is taken when all run one after the other, twice, as probes do."""
    largest = max(found, key=lambda seen: seen.peak_bytes)
    together = reserved_by([events for _ in range(2) for events in (seen.events for seen in found)])
    peaks = []
    for seen in found:
        tokens = f"{seen.shape.num_tokens:,} tokens"
        factor = coefficient(seen.kind)
        at_most = seen.uncompiled_bytes if seen.kind not in (PLAIN, SAMPLER) else None
        told = f"fake tensors: {tokens}, {seen.phase}"
        allocated = factor.of(seen.peak_bytes, at_most=at_most, told=told)
        if device_kind == "host":
            reserved = reserved_for(allocated, device_kind=device_kind)
        else:
            taken = max(together, reserved_by([seen.events])) if seen is largest else reserved_by([seen.events])
            told = f"fake tensors: {tokens}, segments replayed"
            reserved = coefficient(reserved_kind).of(taken, at_most=None, told=told)
            least = {each: max(getattr(reserved, each), getattr(allocated, each)) for each in ("low", "bytes", "high")}
            reserved = replace(reserved, **least)
        peaks.append(
            StagePeak(
                stage=seen.name,
                shape=seen.shape,
                allocated=allocated,
                reserved=reserved,
                compiled=is_compiled and seen.uncompiled_bytes is not None,
                uncompiled_bytes=seen.uncompiled_bytes,
            )
        )
    return tuple(peaks)


def reserved_by(runs: Sequence[Sequence[Event]]) -> int:
    """Bytes that torch's allocator has taken once these have run one after the other, from nothing."""
    allocator = CachingAllocator()
    for events in runs:
        allocator.replay(events)
    return allocator.peak_reserved_bytes


def _phase(module: str) -> str:
    """The module's path without the numbers of layers and the first name."""
    return ".".join(part for part in module.split(".")[1:] if not part.isdigit() and part not in ("layers", "inner"))


def kind_of(module: str, config: ModelConfig) -> str:
    """What sort of phase runs in the module of that path, by the names that classes give."""
    parts = module.split(".")
    packed = "packed " if "inner" in parts else ""
    if any("attn" in part or "attention" in part for part in parts):
        has_latent = any(isinstance(mixer, Latent) for layer in config.layers for mixer in layer.mixers)
        return "latent attention" if has_latent else f"{packed}attention"
    if any("expert" in part for part in parts) or parts[-1] == "gate":
        return "experts"
    if any(part in ("mlp", "feed_forward", "block_sparse_moe") for part in parts):
        return f"{packed}feed-forward"
    return "layer"
