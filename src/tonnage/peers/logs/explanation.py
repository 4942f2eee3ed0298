"""A start-up log explained: against itself, against a prediction, and what to do where it failed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

from tonnage.errors import UserError
from tonnage.peers.corrections import Correction, corrected, key_of
from tonnage.peers.lint.case import Case
from tonnage.peers.lint.remedies import remedies
from tonnage.peers.logs.compare import compare, differences
from tonnage.peers.logs.consistency import consistency
from tonnage.peers.logs.failures import KINDS
from tonnage.peers.logs.log import Failure, Log
from tonnage.peers.logs.reasons import reasons, what_ifs
from tonnage.peers.logs.rows import Row, worst
from tonnage.peers.start import Start
from tonnage.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A failure with what it means and what to change."""

    failure: Failure
    means: str
    change: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """``own``: sums of the log made again. ``rows``: the log beside the prediction. ``worst``: the term that differs
    most; ``why``: what is known to make it differ; ``if_so``: settings with which it would not. ``start`` None: it
    was not predicted, and ``unpredicted`` says why."""

    log: Log
    version: str
    card: str | None
    own: tuple[Row, ...]
    ended: tuple[Ended, ...]
    spread: tuple[str, ...]
    start: Start | None = None
    rows: tuple[Row, ...] = ()
    worst: Row | None = None
    why: tuple[str, ...] = ()
    if_so: tuple[str, ...] = ()
    unpredicted: str = ""
    correction: Correction | None = None


def explain(
    log: Log, settings: Mapping[str, object], case: Case | None, *, name: str, text: str, unpredicted: str = ""
) -> Explanation:
    """``case``: the same launch, to be predicted; None: its model or card is not at hand. ``text``: the log's own."""
    plain = Explanation(
        log=log,
        version=str(case.version) if case else log.version or "",
        card=case.card.name if case else None,
        own=consistency(log, settings),
        ended=tuple(_ended(each, None) for each in log.failures),
        spread=tuple(_spread(log)),
        unpredicted=unpredicted,
    )
    if case is None:
        return plain
    try:
        start = case.predict()
    except UserError as fault:
        return replace(plain, unpredicted=str(fault))
    rows = compare(log, start)
    apart = worst(rows)
    correction = _correction(start, rows, name=name, text=text)
    again = replace(case, correct=lambda found: corrected(found, (correction,))) if correction else case
    return replace(
        plain,
        start=start,
        rows=rows,
        worst=apart,
        why=() if apart is None else reasons(log, apart),
        if_so=() if apart is None else what_ifs(case, log, apart),
        ended=tuple(_ended(each, again) for each in log.failures),
        correction=correction,
    )


def _correction(start: Start, rows: tuple[Row, ...], *, name: str, text: str) -> Correction | None:
    terms = differences(rows, start)
    engine, minor, card, tp, pp, model = key_of(start.launch)
    if not terms:
        return None
    digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:12]
    told = f"{name.rsplit('/', 1)[-1]} ({digest})"
    said = {name: start.term(name).bytes.bytes for name in terms}
    return Correction(
        engine=engine, minor=minor, card=card, tp=tp, pp=pp, model=model, log=told, terms=terms, rules=said
    )


def _ended(failure: Failure, case: Case | None) -> Ended:
    """With what helps by the prediction, corrected by the log's own figures. Where that prediction starts all the
    same, milder settings are still what to try: the failure is a fact."""
    means = KINDS[failure.kind]
    estimate = failure.numbers.get("estimated_max_model_len")
    told: tuple[str, ...] = (f"--max-model-len {estimate} (the engine's own estimate)",) if estimate else ()
    if blocks := failure.numbers.get("state_blocks"):
        told = (f"--max-num-seqs {blocks} (the engine's own bound)",)
    if failure.kind == "one request" and (tokens := failure.numbers.get("kv_cache_tokens")):
        told = (f"--max-model-len {tokens} (what the log's own pool holds)",)
    if failure.kind == "free memory":
        return Ended(failure=failure, means=_with_numbers(means, failure), change=_free_share(failure, case))
    if case is None:
        return Ended(failure=failure, means=_with_numbers(means, failure), change=told)
    try:
        start = case.predict()
    except UserError:
        return Ended(failure=failure, means=_with_numbers(means, failure), change=told)
    if failure.kind in ("arguments", "profiling", "unbalanced"):
        return Ended(failure=failure, means=_with_numbers(means, failure), change=told)
    told_means = _with_numbers(means, failure)
    if failure.kind not in _POOL:
        more = remedies(case, start, raised=False)
    else:
        more = remedies(case, start, partial(_holds_more, start, shorter=not told), lowered=False)
        if start.starts:
            told_means += f"; by the rules alone it starts, with {format_bytes(start.pool.bytes)} for the cache: see "
            told_means += "what else is on the device"
    return Ended(failure=failure, means=told_means, change=(*told, *more))


#: Failures of a pool that is too small: what makes it smaller is no help.
_POOL = ("no pool", "one request")


def _holds_more(start: Start, tried: Start, *, shorter: bool) -> bool:
    """Whether a start has a larger pool. ``shorter``: it may get that by a shorter request."""
    return tried.pool.bytes > start.pool.bytes and (shorter or tried.max_model_len == start.max_model_len)


def _free_share(failure: Failure, case: Case | None) -> tuple[str, ...]:
    """The largest share of the device, in hundredths, that was free, unless the prediction says that it is no help."""
    free, total = failure.numbers.get("free_at_start", 0), failure.numbers.get("total_gpu_memory", 0)
    share = Fraction(100 * free // total, 100) if total else Fraction(0)
    change = {"gpu_memory_utilization": share}
    is_help = share > 0 and (case is None or case.tried(change) is not None)
    told = (f"--gpu-memory-utilization {float(share):.2f} (what was free)",) if is_help else ()
    return (*told, "end the processes that hold the rest of the device")


def _with_numbers(means: str, failure: Failure) -> str:
    names = {
        "kv_needed": "needed", "kv_cache": "there", "requested": "asked for", "free_at_start": "free at start",
        "asked": "asked for", "free": "free",
    }  # fmt: skip
    sizes = [f"{format_bytes(failure.numbers[name])} {told}" for name, told in names.items() if name in failure.numbers]
    counts = [
        f"{name} {failure.numbers[name]:,}"
        for name in ("max_model_len", "max_num_seqs", "state_blocks", "kv_cache_tokens")
        if name in failure.numbers
    ]
    return "; ".join([means, *filter(None, [", ".join(sizes), ", ".join(counts)])])


def _spread(log: Log) -> Iterator[str]:
    """Figures in which ranks differ: the smallest pool decides for all."""
    for name in ("weights", "non_torch", "activation_peak", "kv_cache", "avail_before_load", "avail_after_pool"):
        ends = log.spread(name)
        if ends is not None:
            low, high = ends
            yield (
                f"{name.replace('_', ' ')} differs between ranks: {format_bytes(low.value)} on {low.rank or 'one'}, "
                f"{format_bytes(high.value)} on {high.rank or 'another'}"
            )
