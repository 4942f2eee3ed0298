"""Terms made a partition of a device: what is asked for last is cut where there is no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tonnage.peers.start import Term


def fitted(terms: Sequence[Term], total_bytes: int) -> tuple[Term, ...]:
    """The terms with the last one as what is left, summing to ``total_bytes`` exactly.

    Where the others are more than there is, the later ones are cut, with their full size as their high: an engine
    would start to allocate them all the same, and fail. The last keeps as its range what the others leave.
    """
    kept: list[Term] = []
    left = total_bytes
    for term in terms[:-1]:
        size = min(term.bytes.bytes, left)
        left -= size
        quantity = term.bytes
        if size < quantity.bytes:
            quantity = replace(quantity, bytes=size, low=min(quantity.low, size))
        kept.append(replace(term, bytes=quantity))
    low = max(0, total_bytes - sum(term.bytes.high for term in terms[:-1]))
    high = max(0, total_bytes - sum(term.bytes.low for term in terms[:-1]))
    rest = terms[-1]
    quantity = replace(rest.bytes, bytes=left, low=min(low, left), high=max(high, left))
    return (*kept, replace(rest, bytes=quantity))
