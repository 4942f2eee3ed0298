"""SGLang's own checks at start-up, and the one that it does not make: whether the rest is enough for what comes after.

Every remedy was tried by predicting again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from tonnage.peers.asked_settings import decimal_up
from tonnage.peers.sglang import after, rules
from tonnage.peers.span import Span
from tonnage.peers.start import Check, Rule
from tonnage.units import ceil_div, format_bytes

if TYPE_CHECKING:
    from tonnage.peers.sglang.pools import Pools
    from tonnage.peers.sglang.start import Found

#: Steps of mem_fraction_static that are tried downwards.
_STEP = Fraction(1, 100)


def of(found: Found) -> tuple[Check, ...]:
    """In the order of the engine."""
    made = [_agree(found)] if found.launch.rank.size > 1 else []
    if found.launch.weights.low >= found.before:
        return (*made, _loads(found))
    made.append(_positive(found))
    if found.kept.state:
        made.append(_slots(found))
    if found.kept.window is not None and found.kept.rule is rules.WINDOWS:
        made.append(_window(found))
    return tuple(made) if made[0].passes is False or found.best.tokens <= 0 else (*made, _rest(found))


def _check(name: str, *, passes: bool | None, rule: Rule, need: str, have: str, says: str, remedy: str = "") -> Check:
    told = "" if passes is True else remedy
    return Check(name=name, passes=passes, need=need, have=have, says=says, rule=rule, remedy=told)


def _verdict(points: Iterable[bool]) -> bool | None:
    """Sure where all points agree; else it depends."""
    found = set(points)
    return found.pop() if len(found) == 1 else None


def _agree(found: Found) -> Check:
    free = format_bytes(found.before)
    return _check(
        "ranks agree", passes=True, rule=rules.RANKS_AGREE, need="90 % of the largest on every rank",
        have=f"{free} on each",
        says="All ranks have the same card here, with nothing else on it.",
    )  # fmt: skip


def _loads(found: Found) -> Check:
    """Weights that are larger than what is free end the start while they load."""
    return _check(
        "weights load", passes=False, rule=rules.WEIGHTS, need=format_bytes(found.launch.weights.bytes),
        have=f"{format_bytes(found.before)} free", says="The weights of this rank are more than the card has free.",
        remedy="more tensor-parallel ranks, weights of fewer bits, or a larger card",
    )  # fmt: skip


def _positive(found: Found) -> Check:
    """The check that prints the smallest fraction that would do."""
    ends = (found.best, found.least, found.most)
    passes = _verdict(each.rest > 0 and each.tokens > 0 for each in ends)
    least = 1 - Fraction(found.before - found.launch.weights.bytes, found.before) if found.before else Fraction(1)
    shown = decimal_up(least.numerator, least.denominator)
    says = (
        f"What is free after loading, less (1 - {float(found.static.best):.3f}) of what was free before, must be above "
        f"0; the message names {shown} as the smallest mem_fraction_static."
    )
    remedy = "" if passes else _higher(found)
    return _check(
        "pool above zero", passes=passes, rule=rules.STATIC, need=f"mem_fraction_static above {shown}",
        have=f"{float(found.static.best):.3f}", says=says, remedy=remedy,
    )  # fmt: skip


def _higher(found: Found) -> str:
    """A fraction with which the pool holds a sequence, or else the largest with any pool."""
    best = ""
    for percent in range(int(found.static.best * 100) + 1, 100):
        least = found.at(Fraction(percent, 100), "least")
        if least.rest > 0 and least.tokens >= min(found.shapes.context_tokens, 4096):
            return f"--mem-fraction-static 0.{percent:02d}"
        best = f"--mem-fraction-static 0.{percent:02d}" if found.at(Fraction(percent, 100)).tokens > 0 else best
    return best or "more tensor-parallel ranks, or a larger card"


def _slots(found: Found) -> Check:
    """Every running request needs its state slots."""
    each = found.shapes.slots_each
    ends = (found.best, found.least, found.most)
    asked = found.shapes.max_requests
    have = found.best.slots // each
    passes = _verdict(pools.slots // each >= 1 for pools in ends)
    says = f"A request takes {each} slots of the state pool; no slot for one request stops the start."
    if passes and asked is not None and have < asked:
        says += f" max_running_requests is lowered from {asked:,} to {have:,}."
    return _check(
        "state slots", passes=passes, rule=rules.STATES, need=f"{each} slots", have=f"{found.best.slots:,} slots",
        says=says, remedy="" if passes else _higher(found),
    )  # fmt: skip


def _window(found: Found) -> Check:
    window, page = found.kept.window or 0, found.shapes.page_tokens
    ends = (found.best, found.least, found.most)
    need = window + page + 1
    return _check(
        "window pool", passes=_verdict(pools.window_tokens >= need for pools in ends), rule=rules.WINDOWS,
        need=f"{need:,} tokens", have=f"{found.best.window_tokens:,} tokens",
        says="The window pool must hold one request: its window and a page.",
        remedy="--swa-full-tokens-ratio 1.0, or a larger --mem-fraction-static",
    )  # fmt: skip


def needs_after(found: Found) -> Span:
    """What lives off the rest."""
    table = Span.exact(after.request_table(found.best, found.shapes))
    return table + found.graphs + found.prefill + Span.of(found.activations)


def rest_of(found: Found, made: Pools) -> int:
    """Free once those pools are allocated."""
    return found.before - found.launch.weights.bytes - made.all_bytes


def _rest(found: Found) -> Check:
    """Not SGLang's: what dies after the pool."""
    have, need = rest_of(found, found.best), needs_after(found)
    passes = True if have >= need.high else False if have < need.low else None
    graphs = found.graphs.best + found.prefill.best
    says = (
        f"Nothing checks this: {format_bytes(graphs)} of graphs, {format_bytes(found.activations.bytes)} of "
        f"activations and {format_bytes(found.table.best)} of request table come after the pools. Where the rest is "
        "too small, capture or the first long prompt runs out of memory."
    )
    return _check(
        "rest holds graphs and activations", passes=passes, rule=rules.ACTIVATIONS,
        need=f"{format_bytes(need.best)} ({format_bytes(need.low)} to {format_bytes(need.high)})",
        have=format_bytes(max(have, 0)), says=says, remedy="" if passes else _lower(found, need),
    )  # fmt: skip


def _lower(found: Found, need: Span) -> str:
    """The largest fraction, in hundredths, whose rest holds the most that may be needed; else what it likely needs."""
    first = ceil_div(int(found.static.best * 1000), 10) - 1
    for wanted in (need.high, need.best):
        for percent in range(first, 5, -1):
            tried = found.at(Fraction(percent, 100))
            if tried.tokens <= 0:
                break
            if rest_of(found, tried) >= wanted:
                return f"--mem-fraction-static 0.{percent:02d}"
    return _smaller(found)


#: What is tried where no fraction is enough.
_SMALL = {"max_running_requests": 64, "chunked_prefill_size": 2048, "cuda_graph_max_bs": 8}


def _smaller(found: Found) -> str:
    """Fewer requests, shorter chunks and smaller graphs, where they are enough with the fraction as it is."""
    from tonnage.peers.sglang.start import gather

    launch = found.launch
    kept = {"mem_fraction_static": found.static.best, **launch.settings}
    settings = {name: value for name, value in kept.items() if name != "cuda_graph_bs"} | _SMALL
    tried = gather(replace(launch, settings=settings))
    if tried.best.tokens > 0 and rest_of(tried, tried.best) >= needs_after(tried).high:
        return "--max-running-requests 64 --chunked-prefill-size 2048 --cuda-graph-max-bs 8"
    return "more tensor-parallel ranks, weights of fewer bits, or a larger card"
