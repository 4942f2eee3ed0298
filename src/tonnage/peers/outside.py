"""What is gone before an engine first looks at free memory: context, handles, collectives. By logged starts."""

from __future__ import annotations

from tonnage.peers.launch import Launch
from tonnage.peers.span import Span
from tonnage.terms import Rank
from tonnage.units import GiB, MiB

#: Context and handles of one process on a card without catalogued figures: 0.71 and 0.73 GiB on two H100s.
OUTSIDE_BYTES = Span(737 * MiB, 614 * MiB, 973 * MiB)

#: The driver's context of a process without torch: no log tells it alone.
DRIVER_BYTES = Span(450 * MiB, 250 * MiB, OUTSIDE_BYTES.high)


def _span(best: float, low: float, high: float) -> Span:
    return Span(int(best * GiB), int(low * GiB), int(high * GiB))


#: Collectives: of two to seven ranks, of eight and more, and of pipeline stages alone.
FEW_RANKS, MANY_RANKS, STAGES = _span(0.6, 0, 2.0), _span(1.9, 1.5, 2.2), _span(0.16, 0.05, 0.4)


def outside(launch: Launch) -> Span:
    """Bytes of context, handles and collectives. The card's own catalogued figures count before the logged ones."""
    return context(launch) + collectives(launch.rank)


def driver(launch: Launch) -> Span:
    """Of a process without torch, collectives on top; the card's own catalogued context counts where there is one."""
    known = launch.card.context
    alone = DRIVER_BYTES if known is None else Span.of(known)
    return Span(alone.best, min(alone.low, DRIVER_BYTES.low), DRIVER_BYTES.high) + collectives(launch.rank)


def context(launch: Launch) -> Span:
    """Without collectives. The highest logged stays the high: catalogues were measured without torch's own kernels."""
    card = launch.card
    if card.context is None or card.libraries is None:
        return OUTSIDE_BYTES
    alone = Span.of(card.context) + Span.of(card.libraries)
    return Span(alone.best, alone.low, max(alone.high, OUTSIDE_BYTES.high))


def collectives(rank: Rank) -> Span:
    ranks = max(rank.tp, rank.ep)
    if ranks > 1:
        return MANY_RANKS if ranks >= 8 else FEW_RANKS
    return STAGES if rank.pp > 1 else Span.exact(0)
