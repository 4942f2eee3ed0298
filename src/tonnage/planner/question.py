"""One question to the budget, and its answer: limits resolved or fitted, claims gathered, plan or refusal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import tonnage
from tonnage.budget.inputs import PlanInputs
from tonnage.budget.search import largest
from tonnage.config import DEFAULT_BLOCK_TOKENS, Knobs, LimitKnobs, Limits
from tonnage.costs.checkpoint import Checkpoint
from tonnage.costs.config import ModelConfig
from tonnage.costs.kv import kv_layout
from tonnage.errors import DoesNotFit
from tonnage.hardware import Card
from tonnage.layout import KVLayout
from tonnage.planner.claims import claims_for, without
from tonnage.planner.drafts import draft_warnings, with_draft_layers
from tonnage.planner.graphs import uncovered
from tonnage.planner.host_tier import refuse_less_than_a_slab, whole_slabs
from tonnage.planner.knobs import check_knobs
from tonnage.planner.limits import num_drafts, resolve_limits, why_no_prefixes
from tonnage.planner.policy import answered, limits_by, refuse_engine_beams, refuse_own_money, windows_by
from tonnage.planner.predict import StageProbe, leave_out, predict
from tonnage.terms import IDLE_TIER, Claim, Measured, MemoryPlan, Quantity, Rank
from tonnage.units import format_bytes, round_down

if TYPE_CHECKING:
    from tonnage.budget.reference.knobs import ReferenceKnobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Everything a plan depends on. ``measured`` None: planned with no device, from closed forms.

    ``weights`` does not depend on the limits, so it is computed once and carried along. ``reference`` are the knobs
    of the reference policy, None: our own policy answers. ``draft`` is a second, smaller model that proposes tokens.
    ``probe`` knows the stages of a step where nothing was measured; None: closed forms do.
    """

    config: ModelConfig
    card: Card
    knobs: Knobs
    limit_knobs: LimitKnobs
    rank: Rank
    dtype: str
    backend: str
    page_bytes: int
    weights: Quantity
    measured: Measured | None = None
    extra_claims: tuple[Claim, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    ranks_tokens: int | None = None
    ranks_sequences: int | None = None
    ranks_attended: int | None = None
    reference: ReferenceKnobs | None = None
    draft: ModelConfig | None = None
    checkpoint: Checkpoint | None = None
    probe: StageProbe | None = None

    @property
    def step_tokens(self) -> int:
        """Tokens that a decode step computes for every running sequence: its next one, and its drafts."""
        return 1 + num_drafts(self.limit_knobs, has_draft=self.draft is not None)

    @property
    def block_tokens(self) -> int:
        if self.reference is not None:
            return self.reference.tokens_per_block
        return self.knobs.block_tokens.or_else(DEFAULT_BLOCK_TOKENS)

    @property
    def asked_host_bytes(self) -> int:
        """Host memory for evicted blocks, of all ranks together; the reference's knob is a size for each."""
        if self.reference is not None:
            return (self.reference.host_cache_bytes or 0) * self.rank.size
        return self.knobs.host_kv_bytes.or_else(0)

    @property
    def host_kv_bytes(self) -> int:
        """The share of one rank."""
        return self.asked_host_bytes // self.rank.size

    @property
    def kv_dtype(self) -> str:
        if self.reference is not None:
            return self.dtype if self.reference.kv_dtype == "auto" else self.reference.kv_dtype
        return self.knobs.kv_dtype.or_else(self.dtype)

    @property
    def state_dtype(self) -> str | None:
        if self.reference is not None:
            return None if self.reference.state_dtype == "auto" else self.reference.state_dtype
        return self.knobs.state_dtype.value


def answer(question: Question) -> MemoryPlan:
    """The plan, with the largest max_seq_len that fits where it was left open and the model's own does not.

    Raises ``DoesNotFit`` without remedies, or ``InvalidSetting``.
    """
    check_knobs(question.knobs)
    if question.reference is not None:
        refuse_own_money(question.knobs)
    if question.limit_knobs.max_seq_len.is_set:
        return _answer_at(question, None)
    try:
        return _answer_at(question, None)
    except DoesNotFit:
        fitted = fitted_seq_len(question)
        if fitted is None:
            return _answer_at(question, min(question.block_tokens, question.config.max_position_embeddings))
        return _answer_at(question, fitted)


def fitted_seq_len(question: Question) -> int | None:
    """The largest max_seq_len with which the question has a plan, in whole blocks if it is longer than one."""

    def fits(tokens: int) -> bool:
        try:
            _answer_at(question, tokens)
        except DoesNotFit:
            return False
        return True

    found = largest(fits, low=1, high=question.config.max_position_embeddings)
    if found is None or found < question.block_tokens or found == question.config.max_position_embeddings:
        return found
    return round_down(found, question.block_tokens)


def refuse_small_tier(questions: Sequence[Question]) -> None:
    """Raise ``DoesNotFit`` for a host tier of less than one slab on each rank; one question for each pipeline stage."""
    asked, first = questions[0].asked_host_bytes, questions[0]
    if not asked:
        return
    shapes = [_shape(question, None) for question in questions]
    if not shapes[0].limits.prefix_caching:
        return
    refuse_less_than_a_slab(
        asked,
        num_ranks=first.rank.size,
        slab_bytes=max(shape.layout.slab_bytes for shape in shapes),
        knob="host_kv_bytes" if first.reference is None else "host_cache_bytes",
    )


def _answer_at(question: Question, fitted: int | None) -> MemoryPlan:
    """One run of the arithmetic; ``fitted`` stands in for a max_seq_len that was left open."""
    made = answered(
        inputs_at(question, fitted),
        config=question.config,
        kv_dtype=question.kv_dtype,
        reference=question.reference,
    )
    if not question.asked_host_bytes:
        return made
    taken = whole_slabs(question.host_kv_bytes, made.kv.layout.slab_bytes) if made.limits.prefix_caching else 0
    return replace(made, host=replace(made.host, kv_bytes=question.asked_host_bytes, taken_bytes=taken))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """Limits in force, the settings that they come from, and the cache's layout."""

    limits: Limits
    settings: LimitKnobs
    layout: KVLayout


def _shape(question: Question, fitted: int | None) -> _Shape:
    config, knobs = question.config, question.knobs
    limits, settings = resolve_limits(
        config,
        question.limit_knobs,
        device_kind=question.card.kind,
        fitted_seq_len=fitted,
        disabled_claims=knobs.disabled_claims,
        graphs=knobs.graphs,
        has_draft=question.draft is not None,
    )
    limits = limits_by(question.reference, limits, asked=question.limit_knobs, rank=question.rank)
    if question.measured is not None:
        refuse_engine_beams(question.reference)
    return _Shape(limits=limits, settings=settings, layout=layout_at(question, limits))


def layout_at(question: Question, limits: Limits) -> KVLayout:
    """The cache's layout. Raises ``InvalidSetting`` as ``kv_layout`` does."""
    config = windows_by(question.reference, question.config, max_seq_len=limits.max_seq_len)
    return kv_layout(
        with_draft_layers(config, question.draft),
        kv_dtype=question.kv_dtype,
        state_dtype=question.state_dtype,
        block_tokens=question.block_tokens,
        rank=question.rank,
        with_mtp=limits.max_draft_tokens > 0,
    )


def inputs_at(question: Question, fitted: int | None = None) -> PlanInputs:
    """All that the arithmetic sees of the question; ``fitted`` stands in for a max_seq_len that was left open.

    Raises ``InvalidSetting`` as limits, layout and claims do.
    """
    knobs, card, shape = question.knobs, question.card, _shape(question, fitted)
    limits, layout = shape.limits, shape.layout
    claims = (*listed_claims(question, limits, layout), *question.extra_claims)
    return PlanInputs(
        device_name=card.name,
        model_name=question.config.name,
        chip=card.chip,
        measured=question.measured or _predicted(question, limits),
        claims=without(claims, knobs.disabled_claims, is_what_if=question.measured is None),
        layout=layout,
        page_bytes=question.page_bytes,
        knobs=knobs,
        limits=limits,
        limit_knobs=shape.settings,
        fingerprint=fingerprint(question, limits),
        warnings=(*_warnings(question, limits, fitted), *_what_ifs(claims, knobs.disabled_claims)),
        ranks_tokens=question.ranks_tokens,
        ranks_sequences=question.ranks_sequences,
        ranks_attended=question.ranks_attended,
    )


def listed_claims(question: Question, limits: Limits, layout: KVLayout) -> tuple[Claim, ...]:
    """What ``claims_for`` knows of this question at ``limits``; claims of others come beside these."""
    return claims_for(
        question.config,
        limits,
        backend=question.backend,
        dtype=question.dtype,
        kv_dtype=question.kv_dtype,
        block_tokens=question.block_tokens,
        rank=question.rank,
        device_kind=question.card.kind,
        chip=question.card.chip,
        layout=layout,
        beam_width=1 if question.reference is None else question.reference.max_beam_width,
        host_kv_bytes=question.host_kv_bytes,
    )


def _what_ifs(claims: Sequence[Claim], disabled: frozenset[str]) -> list[str]:
    needed = [claim.name for claim in claims if claim.name in disabled and not claim.can_disable]
    return [
        f"{name} is switched off, which the engine cannot do: this plan only shows what it costs" for name in needed
    ]


def _predicted(question: Question, limits: Limits) -> Measured:
    measured = predict(
        question.config,
        card=question.card,
        limits=limits,
        rank=question.rank,
        dtype=question.dtype,
        weights=question.weights,
        draft=question.draft,
        probe=question.probe,
    )
    return leave_out(measured, question.knobs.disabled_claims)


def _warnings(question: Question, limits: Limits, fitted: int | None) -> tuple[str, ...]:
    config, card, total = question.config, question.card, question.knobs.total_bytes.value
    found = [f"{config.name}: {note}" for note in config.notes]
    found += draft_warnings(config, question.draft)
    if why := _no_prefixes(question):
        found.append(why)
    if question.asked_host_bytes and not limits.prefix_caching:
        found.append(f"host_kv_bytes has no effect here: {IDLE_TIER}")
    if told := uncovered(question.knobs.graphs, limits.graph_batch_sizes, max_batch_size=limits.max_batch_size):
        found.append(told)
    if fitted is not None:
        found.append(
            f"max_seq_len is {limits.max_seq_len:,}, the largest that fits; the model has "
            f"{config.max_position_embeddings:,} positions"
        )
    if total is not None and total > card.total_bytes:
        found.append(
            f"total_bytes allows {format_bytes(total)}, more than the device has ({format_bytes(card.total_bytes)}); "
            "the device's size holds"
        )
    if question.measured is None and card.total.low != card.total.high:
        found.append(
            f"{card.name} reports between {format_bytes(card.total.low)} and {format_bytes(card.total.high)}; "
            f"planned with {format_bytes(card.total.bytes)}" + (f" ({card.note})" if card.note else "")
        )
    found += card.warnings
    return tuple(found)


def _no_prefixes(question: Question) -> str:
    """The reference decides by itself what it uses again."""
    why = why_no_prefixes(question.config, question.limit_knobs)
    if question.reference is not None or not why or not question.limit_knobs.prefix_caching.or_else(True):
        return ""
    return f"prefix_caching is off: {why}"


def fingerprint(question: Question, limits: Limits) -> str:
    """SHA-256 over canonical JSON of what was asked, of which model, on which kind of device.

    Closed forms give equal plans for equal fingerprints. Measured figures and extra claims are not in it: probes may
    differ from start to start, and with libraries and drivers, whose versions enter only where the caller gave them.
    """
    config, rank = question.config, question.rank
    known: Mapping[str, object] = {
        "model": dict(config.raw) or {"name": config.name},
        "weights": [question.dtype, question.weights.bytes],
        "limits": {f.name: getattr(limits, f.name) for f in fields(limits)},
        "knobs": {name: str(setting.value) for name, setting in question.knobs.items() if setting.is_set},
        "disabled_claims": sorted(question.knobs.disabled_claims),
        "rank": {f.name: getattr(rank, f.name) for f in fields(rank)},
        "family": config.model_type,
        "attention": question.backend,
        "draft": None if question.draft is None else dict(question.draft.raw),
        "policy": "own" if question.reference is None else str(question.reference),
        "device": [question.card.name, question.card.total_bytes, question.card.num_sms, question.page_bytes],
        "versions": {"tonnage": tonnage.__version__, **dict(question.versions)},
    }
    if question.probe is not None:
        known = {**known, "probe": question.probe.identity}
    text = json.dumps(known, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()
