"""A plan of the reference policy, told as a start: its lines are the terms, its pool the pool."""

from __future__ import annotations

from fractions import Fraction

from tonnage.errors import DoesNotFit
from tonnage.layout import bytes_per_token
from tonnage.peers.asked_settings import Settings
from tonnage.peers.launch import Launch
from tonnage.peers.partition import fitted
from tonnage.peers.span import Span
from tonnage.peers.start import Check, Count, Start, Term
from tonnage.peers.trtllm import rules
from tonnage.terms import Line, LineKind, MemoryPlan, Quantity, Source
from tonnage.units import format_bytes

#: Lines that the derivation does not subtract before it sizes the pool.
_OUTSIDE = (LineKind.SLACK, LineKind.UNATTRIBUTED, LineKind.ROUNDING, LineKind.KEEP_FREE)
#: How a line of the plan says that the slack was too small for it.
_SHORT = "the slack has no more"


def start_of(launch: Launch, plan: MemoryPlan, settings: Settings) -> Start:
    """The start that the reference's plan predicts; ``plan.lines`` are a partition already."""
    rate = Fraction(bytes_per_token(plan.kv.layout)) or None
    pool = _pool(plan)
    tokens = _tokens(plan, pool, rate)
    length = plan.limits.max_seq_len
    return Start(
        launch=launch,
        terms=tuple(_term(line) for line in plan.lines if line.bytes or line.kind is LineKind.SLACK),
        pool=pool.quantity(Source.PREDICTED, "the reference's derivation"),
        bytes_per_token=rate,
        tokens=tokens,
        logged_tokens=tokens,
        concurrency=Count(
            best=tokens.best * 1000 // length, low=tokens.low * 1000 // length, high=tokens.high * 1000 // length
        ),
        max_model_len=length,
        defaults=tuple(settings.defaults),
        checks=(_holds_one(launch, plan), _slack(plan)),
        notes=(*plan.warnings, *settings.unread()),
    )


def refused(launch: Launch, error: DoesNotFit, settings: Settings, *, outside: Span, remedy: str) -> Start:
    """The start that has no pool: what loads, and the check that fails. Its engine would go on and fail later."""
    terms = [
        Term(name="context", bytes=outside.quantity(Source.PREDICTED, ""), rule=rules.CONTEXT),
        Term(name="weights", bytes=launch.weights, rule=rules.WEIGHTS),
        Term(name="slack", bytes=Quantity.exact(0, Source.DERIVED, ""), rule=rules.SLACK, is_budgeted=False),
    ]
    told = error.what[:1].upper() + error.what[1:]
    check = Check(
        name="pool holds one sequence", passes=False, need=error.need or format_bytes(error.need_bytes),
        have=error.have or format_bytes(error.have_bytes), says=f"{told}.", rule=rules.ONE_SEQUENCE, remedy=remedy,
    )  # fmt: skip
    nothing = Count.exact(0)
    return Start(
        launch=launch, terms=fitted(terms, launch.card.total_bytes),
        pool=Quantity.exact(0, Source.PREDICTED, "refused"), bytes_per_token=None, tokens=nothing,
        logged_tokens=nothing, concurrency=nothing, max_model_len=launch.config.max_position_embeddings,
        defaults=tuple(settings.defaults), checks=(check,),
    )  # fmt: skip


def _term(line: Line) -> Term:
    quantity = Quantity(bytes=line.bytes, low=line.low, high=line.high, source=line.source, ref=line.ref)
    return Term(name=line.name, bytes=quantity, rule=rules.of_line(line), is_budgeted=line.kind not in _OUTSIDE)


def _pool(plan: MemoryPlan) -> Span:
    """The pool with padding, and the range of its line."""
    line = plan.line(LineKind.KV)
    if line is None:
        return Span.exact(plan.kv.bytes)
    rest = plan.kv.bytes - line.bytes
    return Span.around(plan.kv.bytes, line.low + rest, line.high + rest)


def _tokens(plan: MemoryPlan, pool: Span, rate: Fraction | None) -> Count:
    if not rate or not plan.kv.bytes:
        return Count.exact(plan.kv.tokens)
    low, high = (plan.kv.tokens * end // plan.kv.bytes for end in (pool.low, pool.high))
    return Span.around(plan.kv.tokens, low, high).count()


def _holds_one(launch: Launch, plan: MemoryPlan) -> Check:
    """The reference lowers ``max_seq_len`` where it was asked for; a plan fits one that was left open."""
    length, own = plan.limits.max_seq_len, launch.config.max_position_embeddings
    says = "The pool must hold one sequence of max_seq_len."
    if launch.get("max_seq_len") is None and length < own:
        says += f" It would not hold the model's {own:,} tokens: max_seq_len becomes {length:,}, without a word."
    return Check(
        name="pool holds one sequence", passes=True, need=f"{length:,} tokens", have=f"{plan.kv.tokens:,} tokens",
        says=says, rule=rules.ONE_SEQUENCE,
    )  # fmt: skip


def _slack(plan: MemoryPlan) -> Check:
    """Not the engine's own: whether what nobody charges fits into what the fraction leaves."""
    short = [line for line in plan.lines if _SHORT in line.reason]
    need = plan.bytes_of(LineKind.SLACK) + sum(max(line.high - line.bytes, 0) for line in short)
    told = ", ".join(line.name for line in short) or "all that is claimed beside the pool"
    return Check(
        name="slack holds the rest", passes=not short,
        need=f"{format_bytes(need)}" if short else "what is claimed beside the pool",
        have=format_bytes(plan.bytes_of(LineKind.SLACK)), rule=rules.SLACK,
        says=f"Nothing checks this: {told} " + ("needs more than the slack has." if short else "fits into the slack."),
        remedy="a smaller --free_gpu_memory_fraction" if short else "",
    )  # fmt: skip
