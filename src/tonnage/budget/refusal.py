"""The two ways a plan is refused, each with what is needed, what there is, and which line or cap is to blame."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NoReturn

from tonnage.budget.charges import Charges
from tonnage.budget.money import Budget
from tonnage.budget.pool import POOL_CAPS, PoolPrice
from tonnage.budget.words import counted
from tonnage.config import Limits
from tonnage.errors import DoesNotFit
from tonnage.terms import Cap, LineKind
from tonnage.units import ceil_div, decimal_text, format_bytes


def refuse_beside_pool(
    model: str, budget: Budget, charged: Charges, price: PoolPrice, sequence_blocks: int, *, limits: Limits
) -> NoReturn:
    """What does not depend on the tokens already takes more than there is."""
    weights = charged.line(LineKind.WEIGHTS).bytes
    if weights > budget.cap:
        what = f"{model} does not fit: its weights alone take {format_bytes(weights)}, {_there_is(budget)}"
    else:
        what = (
            f"{model} does not fit: before the first KV block {format_bytes(budget.fixed)} are taken, "
            f"{_there_is(budget)}"
        )
    _raise(what, budget, charged, price, sequence_blocks, limits=limits)


def refuse_pool(
    model: str,
    budget: Budget,
    charged: Charges,
    price: PoolPrice,
    sequence_blocks: int,
    *,
    caps: Sequence[Cap],
    limits: Limits,
) -> NoReturn:
    """The pool would hold less than one sequence of max_seq_len."""
    cap = next(cap for cap in caps if cap.binding)
    tokens = price.kv_blocks_within(cap.kv_bytes) * price.block_tokens
    what = (
        f"{model}: the KV pool would hold {counted(tokens, 'token')}, less than one sequence of max_seq_len = "
        f"{limits.max_seq_len:,}; it is limited by {cap.setting}"
    )
    if cap.name == "kv_fraction" and price.total_bytes(sequence_blocks) <= budget.rest:
        _raise_for_fraction(what, budget, price, sequence_blocks)
    if cap.name not in POOL_CAPS:
        _raise(what, budget, charged, price, sequence_blocks, limits=limits)
    need = price.kv_bytes(sequence_blocks)
    raise DoesNotFit(
        what,
        need_bytes=need,
        have_bytes=cap.kv_bytes,
        need=f"{format_bytes(need)} of KV ({need:,} bytes) for {counted(sequence_blocks, 'block')}",
        have=f"{format_bytes(cap.kv_bytes)} of KV ({cap.kv_bytes:,} bytes)",
    )


def _raise_for_fraction(what: str, budget: Budget, price: PoolPrice, sequence_blocks: int) -> NoReturn:
    """There is enough; only the share is too small. More memory would be an absurd thing to ask for."""
    need = price.total_bytes(sequence_blocks)
    least = decimal_text(Fraction(ceil_div(10**6 * need, budget.rest), 10**6))
    raise DoesNotFit(
        what,
        need_bytes=need,
        have_bytes=budget.pool,
        need=f"a kv_fraction of at least {least}: {format_bytes(need)} ({need:,} bytes) for "
        f"{counted(sequence_blocks, 'block')}",
        have=f"{format_bytes(budget.pool)} ({budget.pool:,} bytes) of the {format_bytes(budget.rest)} it is a share of",
    )


def _there_is(budget: Budget) -> str:
    if budget.total_bytes is not None and budget.total_bytes <= budget.room:
        return f"and total_bytes allows {format_bytes(budget.total_bytes)}"
    taken = [("other processes", budget.foreign), ("keep_free_bytes", budget.keep_free)]
    beside = " and ".join(f"{format_bytes(size)} for {name}" for name, size in taken if size)
    return f"and the device has {format_bytes(budget.device)}" + (f", less {beside}" if beside else "")


def _raise(
    what: str, budget: Budget, charged: Charges, price: PoolPrice, sequence_blocks: int, *, limits: Limits
) -> NoReturn:
    # Not divided by kv_fraction: a small one would turn a few blocks into more memory than there is anywhere.
    pool = price.total_bytes(sequence_blocks)
    limited = budget.total_bytes is not None and budget.total_bytes <= budget.room
    outside = 0 if limited else budget.foreign + budget.keep_free
    need, have = budget.fixed + pool + outside, budget.cap if limited else budget.device
    parts = [(line.name, line.bytes) for line in charged.fixed]
    parts += [("keep_free", 0 if limited else budget.keep_free), ("other processes", 0 if limited else budget.foreign)]
    parts += [(group.name, group.blocks(0) * price.block_bytes) for group in price.groups if group.is_fixed]
    parts.append((f"one sequence of {counted(limits.max_seq_len, 'token')}", pool))
    shown = sorted((part for part in parts if part[1]), key=lambda part: -part[1])[:5]
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in shown)
    even = "even with a kv_fraction of 1, " if budget.fraction < 1 else ""
    raise DoesNotFit(
        what,
        need_bytes=need,
        have_bytes=have,
        need=f"{even}{format_bytes(need)} ({need:,} bytes; the largest: {listed})",
        have=f"{format_bytes(have)} ({have:,} bytes), {format_bytes(need - have)} short",
    )
