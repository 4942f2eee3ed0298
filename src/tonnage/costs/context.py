"""What is on the device beside the engine's own buffers: context, libraries, collectives, graph executables.

Only one card was measured; everything else is ASSUMED and carries a wide bar, until a start measures it.
"""

from __future__ import annotations

from tonnage.costs.activations import forward_peak
from tonnage.costs.config import ModelConfig
from tonnage.terms import Quantity, Rank, Source
from tonnage.units import MiB

#: Bytes of one graph's executable and descriptors, beside the pool that all share. The 35 graphs of an 8B model's
#: decodes took 84 to 88 MiB on an H200, of which a pool as below would be 67 (the audits in
#: benchmarks/results/2026-11-30-h200-serve-card-7a9c8bc.json and its like); 8 graphs in one pool took next to nothing
#: beyond the first; another engine logged 0.59 GiB for 86, cut in pieces. (low, best, high)
GRAPH_BYTES = (0, 1 * MiB, 7 * MiB)


def _assumed(low: int, best: int, high: int, ref: str) -> Quantity:
    return Quantity(bytes=best, low=low, high=high, source=Source.ASSUMED, ref=ref)


def context_bytes(device_kind: str, *, known: Quantity | None = None) -> Quantity:
    """The driver's context; on the host device, what the process holds beside the engine: tokenizer, model skeleton.

    ``known`` is the catalogue's figure for the card, where it has one.
    """
    if known is not None:
        return known
    if device_kind == "host":
        return _assumed(24 * MiB, 64 * MiB, 128 * MiB, "tokenizer and model skeleton of a small model")
    return _assumed(300 * MiB, 524 * MiB, 700 * MiB, "as on an H200; not measured on this card")


def library_bytes(device_kind: str, *, known: Quantity | None = None) -> Quantity:
    """Handles and workspaces that the first matrix products create; ``known`` as in ``context_bytes``."""
    if known is not None:
        return known
    if device_kind == "host":
        return _assumed(8 * MiB, 24 * MiB, 48 * MiB, "first-touch scratch of the host's BLAS: about 9 MiB seen")
    return _assumed(100 * MiB, 164 * MiB, 400 * MiB, "first matmul as on an H200; not measured on this card")


def collective_bytes(rank: Rank) -> Quantity:
    """Communicators and their buffers; nothing for a single rank. Expert-parallel ranks are the tensor-parallel ones
    or more, so the larger counts."""
    if max(rank.tp, rank.ep) * rank.pp * rank.cp == 1:
        return Quantity.exact(0, Source.DERIVED, "one rank")
    return _assumed(128 * MiB, 512 * MiB, 2048 * MiB, "communicators of one rank; depends on library and topology")


def graph_bytes(
    config: ModelConfig, *, device_kind: str, max_batch_size: int, num_graphs: int, dtype: str, rank: Rank
) -> Quantity | None:
    """Captured decode graphs: one private pool for the largest batch, and each graph's executable. None on a host.

    ``max_batch_size`` is the largest that is captured, and ``num_graphs`` 0 where nothing is.
    """
    if device_kind == "host":
        return None
    if num_graphs == 0:
        return Quantity.exact(0, Source.DERIVED, "nothing is captured")
    rows = max_batch_size
    pool = forward_peak(config, num_tokens=rows, logits_rows=rows, dtype=dtype, rank=rank).bytes
    low, best, high = (pool + num_graphs * each for each in GRAPH_BYTES)
    return _assumed(
        low, best, high, f"{num_graphs} decode graphs in one pool, {GRAPH_BYTES[1] // MiB} MiB each beside it"
    )
