"""Findings about whether it starts, how many sequences it holds, and what is left."""

from __future__ import annotations

from collections.abc import Iterator

from tonnage.peers.lint.case import Case, held, number_of
from tonnage.peers.lint.finding import Finding, Severity
from tonnage.peers.lint.remedies import flags_text, lower_shares, remedies
from tonnage.peers.start import Rule, Start, Term
from tonnage.units import format_bytes


def starting(case: Case, start: Start) -> Iterator[Finding]:
    """A finding for each check that fails, and one for each that may."""
    failing = [check for check in start.checks if check.passes is False]
    for check in failing:
        yield Finding(
            code="TN001",
            severity=Severity.ERROR,
            what=f"it will not start: {check.says or check.name}",
            why=f"need {check.need}, have {check.have} ({source(check.rule)})",
            change=remedies(case, start),
        )
    for check in start.checks:
        if check.passes is None:
            yield Finding(
                code="TN002",
                severity=Severity.WARNING,
                what=f"it may not start: {check.says or check.name}",
                why=f"need {check.need}, have {check.have} ({source(check.rule)})",
                change=() if failing else remedies(case, start),
            )


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
    replicas = case.parallel().replicas
    limit = number_of(case, start, "max_num_seqs" if case.engine == "vllm" else "max_running_requests")
    together = best * replicas
    if users is not None and together < users * 1000:
        wanted = -(-users * 1000 // replicas)
        yield Finding(
            code="TN012",
            severity=Severity.ERROR,
            what=f"{together // 1000:,} sequences of {length:,} tokens fit at once, and {users:,} are wanted",
            why=f"the cache of {_each(replicas)} holds {_tokens(start)}",
            change=remedies(case, start, lambda tried: _thousandths(tried) >= wanted),
        )
    elif users is not None and limit is not None and limit * replicas < users:
        yield Finding(
            code="TN012",
            severity=Severity.ERROR,
            what=f"at most {limit * replicas:,} sequences run at once, and {users:,} are wanted",
            why=f"each of {replicas} takes {limit:,}" if replicas > 1 else "by the limit on sequences",
            change=_more_sequences(case, -(-users // replicas)),
        )


def _thousandths(start: Start) -> int:
    return 0 if start.concurrency is None else start.concurrency.best


def _more_sequences(case: Case, number: int) -> tuple[str, ...]:
    name = "max_num_seqs" if case.engine == "vllm" else "max_running_requests"
    return (flags_text(case, {name: number}),) if case.tried({name: number}) else ()


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
    told = rule.source or (f"{len(rule.records)} logged starts" if rule.records else "no source")
    return f"rule {rule.name}: {told}"
