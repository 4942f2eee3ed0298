"""What is going to run: the model's files and shape, and what was asked of it, checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from tonnage.attention import BACKENDS, FLASHINFER, TRITON, check_backend, require_triton
from tonnage.attention.choice import choose
from tonnage.attention.flashinfer_modules import refuse_missing_modules, refuse_other_devices, variants_of
from tonnage.config import DEFAULT_KEEP_FREE_BYTES, Limits, Setting
from tonnage.costs.activations import forward_peak, sampler_bytes
from tonnage.costs.config import ModelConfig
from tonnage.costs.context import graph_bytes
from tonnage.costs.dtypes import parse_dtype
from tonnage.costs.kv import kv_layout
from tonnage.costs.models import EMBEDDED
from tonnage.costs.weights import WeightsLayout
from tonnage.declarations import attention_shapes, declare_for
from tonnage.device.cuda_devices import cuda_devices
from tonnage.engine.family import Family, family_of
from tonnage.engine.features import backends_by_need
from tonnage.engine.letters import LetterText
from tonnage.engine.models import model_folder
from tonnage.engine.options import AUTO, Chunking, EngineOptions
from tonnage.engine.text import Text
from tonnage.engine.weights import arena_layout
from tonnage.errors import InvalidSetting
from tonnage.hardware import Card
from tonnage.layout import KVLayout, penalty_table_bytes, table_bytes
from tonnage.planner import (
    check_knobs,
    plan_measured,
    plan_without_device,
    refuse_own_money,
    refuse_planned_only,
    resolve_limits,
)
from tonnage.planner.graphs import DEFAULT, NONE, read_graphs
from tonnage.terms import Claim, Measured, MemoryPlan, Quantity, Rank, Scratch
from tonnage.units import ceil_div, format_bytes

#: Attention backends whose decodes can be captured in CUDA graphs.
CAPTURING = ("triton", "flashinfer", "paired")
#: Whatever a tokenizer of transformers is read from.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
#: Dtypes in which the CPU kernels of torch run a whole decoder.
COMPUTE_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """``limits`` as far as they are known before the plan, which may still lower a max_seq_len that was left open.

    ``dtype`` is that of weights, cache and compute.
    """

    options: EngineOptions
    folder: Path
    config: ModelConfig
    family: Family
    dtype: str
    weights: WeightsLayout
    kv: KVLayout
    limits: Limits
    chunking: Chunking
    rank: Rank

    @classmethod
    def read(cls, options: EngineOptions) -> Target:
        """Raises the ``UserError`` of whatever cannot run: model, dtype, limits, knobs."""
        check_knobs(options.knobs)
        check_backend(options.attention_backend)
        if options.attention in TRITON:
            require_triton(options.attention, options.device_kind)
        captures = options.device_kind == "cuda" and options.attention_backend in CAPTURING
        refuse_planned_only(options.knobs, options.limit_knobs)
        if options.reference is not None:
            refuse_own_money(options.knobs)
        if options.device_kind == "cuda" and not captures:
            options = _without_graphs(options)
        folder = model_folder(options.model, needs_weights=not options.random_weights)
        rank = Rank(device=options.ordinal)
        config = ModelConfig.read(folder, name=_shown_name(options.model))
        dtype = parse_dtype(options.dtype or config.dtype, knob="dtype", allowed=COMPUTE_DTYPES)
        options = replace(options, attention=_attention(options, config, dtype))
        family = family_of(config, attention=options.attention_backend)
        kv = kv_layout(
            config,
            kv_dtype=options.kv_dtype or dtype,
            block_tokens=options.block_tokens,
            rank=rank,
        )
        _require_same_dtype(kv, dtype, backend=options.attention_backend)
        limits, _ = resolve_limits(
            config, options.limit_knobs, device_kind=options.device_kind, graphs=options.knobs.graphs
        )
        weights = arena_layout(folder, config, family, dtype=dtype, rank=rank)
        chunking = Chunking.of(
            options.chunk_tokens, block_tokens=kv.groups[0].block_tokens, device_kind=options.device_kind
        )
        return cls(
            options=options,
            folder=folder,
            config=config,
            family=family,
            dtype=dtype,
            weights=weights,
            kv=kv,
            limits=limits,
            chunking=chunking,
            rank=rank,
        )

    @property
    def device_kind(self) -> str:
        return self.options.device_kind

    def text(self) -> Text:
        """The model's tokenizer, or, with weights that mean nothing and no tokenizer, letters."""
        if self.options.random_weights and not any((self.folder / name).is_file() for name in TOKENIZER_FILES):
            return LetterText()
        return Text(self.folder)

    @property
    def block_tokens(self) -> int:
        return self.kv.groups[0].block_tokens

    def probe_limits(self) -> Limits:
        """The limits in force, but sequences no longer than a full step: the probes need no more scratch than that.
        What is captured serves all of a card's, as they are."""
        limits = self.limits
        if self.device_kind == "cuda":
            return limits
        return replace(limits, max_seq_len=min(limits.max_seq_len, limits.max_num_tokens + 1))

    @property
    def head_slots(self) -> int:
        """Blocks at the head of the pool that are kept for scratch."""
        return ceil_div(self.options.scratch_head_bytes, self.kv.slab_bytes)

    def with_head(self, plan: MemoryPlan) -> MemoryPlan:
        """The plan with the head's blocks taken out of what sequences can count on. Raises ``InvalidSetting`` where
        nothing is left of the pool."""
        head, kv = self.head_slots, plan.kv
        if not head:
            return plan
        if head >= kv.num_slabs:
            raise InvalidSetting(
                "scratch_head_bytes",
                format_bytes(self.options.scratch_head_bytes),
                f"{head} blocks of a pool that has {kv.num_slabs}",
                remedy=f"write at most {format_bytes((kv.num_slabs - 1) * self.kv.slab_bytes)}",
            )
        guaranteed = kv.guaranteed_tokens - kv.guaranteed_tokens * head // kv.num_slabs
        return replace(plan, kv=replace(kv, guaranteed_tokens=guaranteed))

    def scratch(self) -> tuple[Scratch, ...]:
        """What the attention backend declares for this model, of whose kinds of layers the most demanding counts."""
        part = self.kv.groups[0].parts[0]
        shapes = attention_shapes(self.config, kv_dtype=part.dtype, block_tokens=self.block_tokens, rank=self.rank)
        backend = self.options.attention_backend
        return tuple(scratch for shape in shapes for scratch in declare_for(backend, shape, limits=self.limits))

    def declared_graphs(self) -> Quantity | None:
        """What the planner declares for the graphs that are captured; None where none are."""
        sizes = self.limits.graph_batch_sizes
        if not sizes:
            return None
        return graph_bytes(
            self.config,
            device_kind=self.device_kind,
            max_batch_size=sizes[-1],
            num_graphs=len(sizes),
            dtype=self.dtype,
            rank=self.rank,
        )

    def refuse_hopeless(self, card: Card) -> None:
        """Before a byte is read: weights and tables that cannot fit whatever the probes would show, which make the
        tables to begin with. The planner tells the sum."""
        limits = self.limits
        tables = sum(
            table_bytes(
                max_batch_size=limits.max_batch_size, max_seq_len=limits.max_seq_len, block_tokens=group.block_tokens
            )
            for group in self.kv.groups
            if group.block_tokens
        )
        if limits.penalties:
            tables += penalty_table_bytes(max_batch_size=limits.max_batch_size, vocab_size=self.config.vocab_size)
        if self.weights.total_bytes + tables > self.room_bytes(card):
            self.refuse(card)

    @property
    def keep_free_bytes(self) -> int:
        """What is left alone of the device."""
        return self.options.knobs.keep_free_bytes.or_else(DEFAULT_KEEP_FREE_BYTES)

    def room_bytes(self, card: Card) -> int:
        """What the engine may take in all, by device, ``keep_free_bytes`` and ``total_bytes``."""
        total = card.total_bytes
        return min(total - self.keep_free_bytes, self.options.knobs.total_bytes.or_else(total))

    def step_bytes(self, limits: Limits) -> int:
        """What the largest step takes, forward or sampling, by the planner's closed forms."""
        rows = limits.max_logits_rows
        forward = forward_peak(self.config, num_tokens=limits.max_num_tokens, logits_rows=rows, dtype=self.dtype)
        sampler = sampler_bytes(self.config, logits_rows=rows, dtype=self.dtype, device_kind=self.device_kind)
        return max(forward.bytes, sampler)

    def refuse(self, card: Card) -> None:
        """Raise the planner's ``DoesNotFit`` if it has no plan either; its closed forms are on the careful side."""
        plan_without_device(
            self.config,
            card=card,
            knobs=self.options.knobs,
            limit_knobs=self.options.limit_knobs,
            dtype=self.dtype,
            rank=self.rank,
            backend=self.options.attention_backend,
            reference=self.options.reference,
        )

    def plan(self, card: Card, measured: Measured, *, claims: Sequence[Claim]) -> MemoryPlan:
        """The arithmetic; refuses with checked remedies if what was measured leaves no room for one sequence.

        ``claims`` are the resource managers'; those that the planner knows by itself count once.
        """
        return plan_measured(
            self.config,
            card=card,
            measured=measured,
            knobs=self.options.knobs,
            limit_knobs=self.options.limit_knobs,
            dtype=self.dtype,
            rank=self.rank,
            backend=self.options.attention_backend,
            extra_claims=claims,
            versions={"torch": version("torch"), "transformers": version("transformers")},
            reference=self.options.reference,
        )


def _attention(options: EngineOptions, config: ModelConfig, dtype: str) -> str:
    """The backend for this model: the one that was asked for, or the fastest of those that can run it here. Raises
    ``InvalidSetting`` where kernels that it takes have not been compiled, or have no device."""
    variants = variants_of(config, dtype=dtype)
    if options.attention == AUTO:
        able = [name for name in BACKENDS if all(name in have for have in backends_by_need(config).values())]
        return choose(options.device_kind, variants, sm=_compute_capability(options), among=able)
    if options.attention in FLASHINFER:
        refuse_other_devices(options.device)
        for variant in variants:
            refuse_missing_modules(variant)
    return options.attention


def _compute_capability(options: EngineOptions) -> int:
    """Of the card that was asked for; 0 on a host, and where there is no such card, which is told when it is opened."""
    found = cuda_devices().devices if options.device_kind == "cuda" else ()
    return found[options.ordinal].sm if options.ordinal < len(found) else 0


def _shown_name(model: str) -> str:
    """The name the planner gives the same model; empty for a folder, which then gives its own."""
    if Path(model).expanduser().exists():
        return ""
    return EMBEDDED[model.lower()][1] if model.lower() in EMBEDDED else model


def _without_graphs(options: EngineOptions) -> EngineOptions:
    """On a card, with a backend whose steps are launched kernel by kernel: nothing is set aside for graphs. Raises
    ``InvalidSetting`` where some were asked for."""
    asked = options.knobs.graphs
    if asked.value is not None and read_graphs(asked.value) not in (NONE, DEFAULT):
        raise InvalidSetting(
            "graphs",
            asked.text or asked.value,
            f"decodes of attention backend {options.attention_backend!r} are not captured",
            remedy=f"choose attention {' or '.join(CAPTURING)}, or leave graphs out",
        )
    return replace(options, knobs=replace(options.knobs, graphs=Setting(NONE, NONE)))


def _require_same_dtype(kv: KVLayout, dtype: str, *, backend: str) -> None:
    kv_dtype = kv.groups[0].parts[0].dtype
    if kv_dtype != dtype:
        raise InvalidSetting(
            "kv_dtype",
            kv_dtype,
            f"attention backend {backend!r} needs keys in the dtype it computes in, {dtype}",
            remedy="leave kv_dtype out"
            + (f", or run the whole model with dtype {kv_dtype}" if kv_dtype in COMPUTE_DTYPES else ""),
        )
