"""What measuring needs to know of an engine and its ordinary callers do not: read here, and nowhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tonnage.bench.oracle import Limits

if TYPE_CHECKING:
    from tonnage.engine import Engine

#: Counts of the managers that say how much there is, ever was, or has been made for all; made once, it is kept.
_NOT_HELD = ("capacity", "high_water", "num_bytes")


def held(engine: Engine) -> dict[str, int]:
    """Every manager's counts of what is taken and what is left; equal at any two moments when nothing runs."""
    return {name: count for name, count in engine.stats().items() if name.split(".")[-1] not in _NOT_HELD}


def oracle_limits(engine: Engine) -> Limits:
    """The engine's bounds in the oracle's words."""
    from tonnage.engine.queue import MAX_OVERTAKEN

    limits, managers, chunking = engine.plan.limits, engine._runtime.managers, engine._runtime.chunking
    return Limits(
        num_blocks=managers.kv.capacity(),
        block_tokens=managers.kv.block_tokens,
        max_seq_len=limits.max_seq_len,
        max_batch_size=limits.max_batch_size,
        max_num_tokens=limits.max_num_tokens,
        max_chunk_tokens=chunking.max_tokens,
        max_beside_decode_tokens=chunking.beside_decodes,
        cuts_prompts=chunking.is_on,
        max_overtaken=MAX_OVERTAKEN,
        may_suspend=managers.admission.may_suspend,
    )
