"""Findings about whether it starts, how many sequences it holds, and what is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tonnage.errors import UserError
from tonnage.peers.lint.case import Case, default_of, held, number_of
from tonnage.peers.lint.finding import Finding, Severity
from tonnage.peers.lint.remedies import flags_text, lower_shares, remedies
from tonnage.peers.start import Check, Rule, Start, Term
from tonnage.units import format_bytes

#: The flag that limits running sequences.
_LIMITS = {"vllm": "max_num_seqs", "sglang": "max_running_requests", "trtllm": "max_batch_size"}


def starting(case: Case, start: Start) -> Iterator[Finding]:
    """A finding for each check that fails, and one for each that may."""
    failing = [check for check in start.checks if check.passes is False]
    for check in failing:
        yield Finding(
            code="TN001",
            severity=Severity.ERROR,
            what=f"it will not start: {_says(check)}",
            why=f"need {check.need}, have {check.have} ({source(check.rule)})",
            change=remedies(case, start),
        )
    for check in start.checks:
        if check.passes is None:
            yield Finding(
                code="TN002",
                severity=Severity.WARNING,
                what=f"it may not start: {_says(check)}",
                why=f"need {check.need}, have {check.have} ({source(check.rule)})",
                change=() if failing else remedies(case, start),
            )


def _says(check: Check) -> str:
    return (check.says or check.name).rstrip(".")


def concurrency(case: Case, start: Start, *, users: int | None) -> Iterator[Finding]:
    """Whether a sequence of full length fits, and as many of them as are wanted."""
    if start.starts is False or start.concurrency is None:
        return
    length, best = start.max_model_len, start.concurrency.best
    if best < 1000:
        yield Finding(
            code="TN011",
            severity=Severity.WARNING,
            what=f"a sequence of {length:,} tokens does not fit into the cache",
            why=f"the cache holds {best / 1000:.2f} of one",
            change=remedies(
                case, start, lambda tried: tried.concurrency is not None and tried.concurrency.best >= 1000
            ),
        )
    if users is not None:
        yield from _users(case, start, users)


def _users(case: Case, start: Start, users: int) -> Iterator[Finding]:
    """Whether so many sequences of full length fit, by the cache and by the limit on sequences."""
    replicas = case.parallel().replicas
    each = -(-users // replicas)
    name = _LIMITS[case.engine]
    limit, together = number_of(case, start, name), _thousandths(start) * replicas
    raised: dict[str, object] = {name: each} if limit is not None and limit < each else {}
    fits = together >= users * 1000
    if fits and not raised:
        return
    length = start.max_model_len
    what = f"{together // 1000:,} sequences of {length:,} tokens fit at once, and {users:,} are wanted"
    if fits:
        what = f"at most {(limit or 0) * replicas:,} sequences run at once, and {users:,} are wanted"

    def enough(tried: Start) -> bool:
        now = tried.launch.get(name, default_of(tried, name))
        return _thousandths(tried) >= each * 1000 and (not isinstance(now, int) or now >= each)

    yield Finding(
        code="TN012",
        severity=Severity.ERROR,
        what=what,
        why=f"the cache of {_each(replicas)} holds {_tokens(start)}",
        change=_for_users(case, raised, enough),
    )


def _for_users(case: Case, raised: dict[str, object], enough: Callable[[Start], bool]) -> tuple[str, ...]:
    """The limit raised where it is too low, alone if that is enough, else with another change beside it."""
    higher = replace(case, settings={**case.settings, **raised})
    alone = higher.tried({})
    if raised and alone is not None and enough(alone):
        return (flags_text(case, raised),)
    try:
        start = higher.predict()
    except UserError:
        return ()
    before = flags_text(case, raised)
    return tuple(f"{before} {change}".strip() for change in remedies(higher, start, enough))


def _thousandths(start: Start) -> int:
    return 0 if start.concurrency is None else start.concurrency.best


def _each(replicas: int) -> str:
    return "one rank" if replicas == 1 else f"each of {replicas} replicas"


def _tokens(start: Start) -> str:
    return format_bytes(start.pool.bytes) if start.tokens is None else f"{start.tokens.best:,} tokens"


def left_of(start: Start) -> Term | None:
    """The term of what nobody takes."""
    outside = [term for term in start.terms if not term.is_budgeted]
    return next((term for term in reversed(outside) if "free" in term.name or "left" in term.name), None)


def headroom(case: Case, start: Start) -> Iterator[Finding]:
    """Whether what comes after the pool fits: graphs, collectives and warm-ups that its engine does not budget."""
    left = left_of(start)
    if start.starts is False or left is None or left.bytes.low >= 0:
        return
    unsure = [term for term in start.terms if term is not left and "pool" not in term.name]
    late = [term for term in unsure if not term.is_budgeted]
    widest = max(late or unsure, key=lambda term: term.bytes.high, default=None)
    dies = left.bytes.bytes < 0
    first = "" if widest is None else (
        f"; {widest.name} comes first with up to {format_bytes(widest.bytes.high)} ({source(widest.rule)})"
    )  # fmt: skip
    yield Finding(
        code="TN020",
        severity=Severity.ERROR if dies else Severity.WARNING,
        what=f"{'nothing' if dies else 'as little as nothing'} is left on the device after start-up",
        why=f"expected {format_bytes(left.bytes.bytes)}, at worst {format_bytes(left.bytes.low)}{first}",
        change=_room(case, start),
    )


def _room(case: Case, start: Start) -> tuple[str, ...]:
    """The largest share below today's with which something is left at worst."""
    for changes in lower_shares(case, start):
        tried = case.tried(changes)
        if tried is None:
            return ()
        left = left_of(tried)
        if left is not None and left.bytes.low >= 0:
            return (flags_text(case, changes),)
    return ()


def sequences(case: Case, start: Start) -> Iterator[Finding]:
    """What vLLM's default number of sequences costs: its sampler is run for all of them before the pool is sized."""
    name = "max_num_seqs"
    now = number_of(case, start, name)
    if case.engine != "vllm" or name in case.settings or now is None or now <= 256 or start.starts is False:
        return
    tried = case.tried({name: 256})
    if tried is None:
        return
    gain = tried.pool.bytes - start.pool.bytes
    if gain * 50 < start.pool.bytes:  # below two per cent nobody minds
        return
    yield Finding(
        code="TN010",
        severity=Severity.WARNING,
        what=f"--max-num-seqs is left at its default of {now:,}, which costs {format_bytes(gain)} of the cache",
        why=f"with 256 the cache holds {held(tried) - held(start):,} tokens more ({_peak_rule(start)})",
        change=(flags_text(case, {name: 256}),),
    )


def _peak_rule(start: Start) -> str:
    """The source of the term that the number of sequences decides."""
    for term in start.terms:
        if any(word in term.name.lower() for word in ("sampler", "peak", "activation")):
            return source(term.rule)
    return "by predicting again"


def log_probabilities(case: Case, start: Start) -> Iterator[Finding]:
    """Logits of a whole prompt in 16 and in 32 bits at once, which no dry run asks for."""
    left, tokens = left_of(start), number_of(case, start, "max_num_batched_tokens")
    if case.engine != "vllm" or left is None or tokens is None or start.starts is False:
        return
    if case.settings.get("max_logprobs") == 0:
        return
    need = tokens * case.config.vocab_size * 6
    if need <= max(0, left.bytes.low):
        return
    yield Finding(
        code="TN023",
        severity=Severity.NOTE,
        what="a request for log-probabilities of its prompt may end the engine",
        why=(
            f"{tokens:,} tokens x {case.config.vocab_size:,} words x 6 bytes is {format_bytes(need)}, and "
            f"{format_bytes(max(0, left.bytes.bytes))} is left (vllm-project/vllm#5907)"
        ),
        change=(),
    )


def source(rule: Rule) -> str:
    """Where a rule comes from, in a few words."""
    logs = len(rule.records)
    told = rule.source or (f"{logs} logged start{'' if logs == 1 else 's'}" if logs else "no source")
    return f"rule {rule.name}: {told}"
