"""What lives off the rest once the pools are there: tables, graphs, activations. SGLang measures none of it."""

from __future__ import annotations

from tonnage.costs.activations import forward_peak, reserved_for
from tonnage.peers.launch import Launch
from tonnage.peers.sglang.pools import Pools, Shapes
from tonnage.peers.span import Span
from tonnage.terms import Quantity
from tonnage.units import MiB

#: MiB for each size of a decode graph: the lowest, the median and the highest of five logs.
GRAPH_MIB = Span(19, 7, 29)
#: MiB for each size of a prefill graph: what SGLang itself leaves, twice that, and what 58 of them took in one log.
PREFILL_MIB = Span(16, 5, 68)
#: Rows beyond a text's length in the request table, and bytes of an entry of the list of free tokens.
_EXTRA_TOKENS, _ENTRY_BYTES = 4, 8


def request_table(found: Pools, made: Shapes) -> int:
    """int32 for every token that a running request may have, and the list of free tokens."""
    width = made.context_tokens + _EXTRA_TOKENS + made.num_drafts
    return found.max_requests * width * 4 + found.tokens * _ENTRY_BYTES


def graphs(sizes: tuple[int, ...]) -> Span:
    return _mib(GRAPH_MIB, len(sizes))


def prefill_graphs(count: int) -> Span:
    return _mib(PREFILL_MIB, count)


def activations(launch: Launch, *, chunk_tokens: int, rows: int) -> Quantity:
    """The larger of a chunk of prompt with one row of logits, and of a decode batch of ``rows``."""
    dtype = launch.dtype or launch.config.dtype
    peaks = [
        forward_peak(launch.config, num_tokens=tokens, logits_rows=logits, dtype=dtype, rank=launch.rank)
        for tokens, logits in ((chunk_tokens, 1), (max(rows, 1), max(rows, 1)))
    ]
    peak = max(peaks, key=lambda each: each.bytes)
    return reserved_for(peak.quantity(ref=f"costs.activations: {peak.phase} phase"), device_kind="cuda")


def _mib(each: Span, count: int) -> Span:
    return each.times(count * MiB)
