"""Captured graphs: outside the budget before 0.21, deducted by an estimate from then on."""

from __future__ import annotations

from tonnage.costs.ranks import rank_shape
from tonnage.peers.start import Rule
from tonnage.peers.vllm import eras
from tonnage.peers.vllm.facts import Facts
from tonnage.peers.vllm.setup import Setup, count
from tonnage.terms import Quantity, Source
from tonnage.units import ceil_div

#: The longest list of sizes by default: every 8 up to 256 and every 16 up to 512, beside 1, 2 and 4.
FULL_LIST = 51


def num_sizes(setup: Setup) -> int:
    """Batch sizes that are captured: the list that was asked for, or how many; else the default up to twice
    ``max_num_seqs``. Raises ``InvalidSetting``."""
    launch = setup.launch
    asked = launch.get("cudagraph_capture_sizes")
    if isinstance(asked, (list, tuple)):
        return len(asked)
    if asked is not None:
        return count(launch, "cudagraph_capture_sizes", allow_zero=True) or 0
    given = [count(launch, name, allow_zero=True) for name in ("max_cudagraph_capture_size", "max_capture_size")]
    largest = next((size for size in given if size is not None), None)
    if not setup.is_v1:
        return 3 + min(setup.max_num_seqs, 256 if largest is None else largest) // 8
    limit = min(2 * setup.max_num_seqs, 512 if largest is None else largest)
    small = sum(size <= limit for size in (1, 2, 4))
    return small + min(limit, 256) // 8 + max(0, limit - 256) // 16


def graphs(setup: Setup, facts: Facts) -> Quantity:
    """Bytes of all captured graphs of this rank: some for the first, the rest by layers and by the sizes captured."""
    if setup.is_eager:
        return Quantity.exact(0, Source.ASKED, "enforce_eager")
    if not setup.is_v1:
        return facts["graphs V0"].of(1, ref="graphs of the first core")
    layers, sizes = len(rank_shape(setup.launch.config, setup.launch.rank).layers), num_sizes(setup)
    if not sizes:
        return Quantity.exact(0, Source.ASKED, "no sizes to capture")
    share = min(1, sizes / FULL_LIST)
    kind = "graph estimate" if setup.deducts_graphs else "graphs"
    each = facts[f"{kind} per layer"].of(ceil_div(int(layers * 100 * (1 + share) / 2), 100), ref=kind)
    base = facts[f"{kind} base"].of(1, ref=kind)
    return Quantity(
        bytes=base.bytes + each.bytes,
        low=max(0, base.low + each.low),
        high=base.high + each.high,
        source=Source.PREDICTED,
        ref=each.ref,
    )


def rule(setup: Setup, facts: Facts) -> Rule:
    records = facts["graphs per layer" if setup.is_v1 else "graphs V0"].records
    if setup.deducts_graphs:
        return Rule(
            name="graphs", since=eras.GRAPHS_DEDUCTED, records=records, source="vllm#38284",
            says="an estimate is deducted before the pool: so much for the first graph, and so much for each layer",
        )  # fmt: skip
    return Rule(
        name="graphs", before=eras.GRAPHS_DEDUCTED, records=records,
        says="captured after the pool, from what the budget leaves: so much for the first, and so much for each layer",
    )  # fmt: skip
