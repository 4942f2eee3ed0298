"""What measuring needs to know of an engine and its ordinary callers do not: read here, and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tonnage.bench.rules import Limits

if TYPE_CHECKING:
    from tonnage.engine import Engine
    from tonnage.resources.base import Deferral
    from tonnage.resources.cache import BlockCache

#: A load takes a fraction of a second; so many steps are some seconds, even of a small model.
MAX_LOAD_STEPS = 1000
#: Counts of the managers that say how much there is, ever was, or has been made for all; made once, it is kept.
_NOT_HELD = ("capacity", "high_water", "num_bytes", "host_capacity")
#: Those of the KV cache that say where blocks are that nobody holds.
_AT_HAND = ("free", "cached", "lent", "host_cached", "host_free")
#: Counters of torch's caching allocator: it found no memory at all, or only after it had given its own back.
ALLOCATOR_COUNTS = ("num_ooms", "num_alloc_retries")
#: And what it has done so far.
DONE = (
    "queried_tokens", "hit_tokens", "evicted", "offloaded", "loaded", "moved", "partial_copies", "taken_back",
)  # fmt: skip


def held(engine: Engine) -> dict[str, int]:
    """Every manager's counts of what is taken and what is left; equal at any two moments when nothing runs."""
    left_out = {*_NOT_HELD, *_AT_HAND, *DONE}
    return {name: count for name, count in engine.stats().items() if name.split(".")[-1] not in left_out}


def done(engine: Engine) -> dict[str, int]:
    """What the KV cache has done, in blocks, and the tokens that were looked for and found."""
    stats = engine.stats()
    return {name: stats[f"kv.{name}"] for name in DONE}


def oracle_limits(engine: Engine) -> Limits:
    """The engine's bounds in the oracle's words."""
    from tonnage.engine.queue import MAX_OVERTAKEN
    from tonnage.engine.retry import CAREFUL_STEPS

    limits, managers, chunking = engine.plan.limits, engine._runtime.managers, engine._runtime.chunking
    kv = managers.kv
    return Limits(
        num_blocks=kv.capacity(),
        block_tokens=kv.block_tokens,
        max_seq_len=limits.max_seq_len,
        max_batch_size=limits.max_batch_size,
        max_num_tokens=limits.max_num_tokens,
        max_chunk_tokens=chunking.max_tokens,
        max_beside_decode_tokens=chunking.beside_decodes,
        cuts_prompts=chunking.is_on,
        max_overtaken=MAX_OVERTAKEN,
        may_suspend=managers.admission.may_suspend,
        shares=kv.no_reuse is None,
        windows=tuple(group.window for group in kv.cache.groups),
        max_load_steps=getattr(engine._runtime, "max_load_steps", MAX_LOAD_STEPS),
        is_link_slow=kv.cache.num_host_slots > 0 and kv.cache.room.budget.blocks_per_step < kv.cache.num_slots,
        steps_ahead=engine.steps_ahead,
        careful_steps=CAREFUL_STEPS,
    )


# -- the device ----------------------------------------------------------------------------------------------------


def device_free(engine: Engine) -> Callable[[], int] | None:
    """Free bytes of the engine's card whenever it is called, from any thread; None where it runs on no card."""
    if not is_on_card(engine):
        return None
    driver = _site(engine).driver
    return lambda: int(driver.mem_info()[0])


def allocator_counts(engine: Engine) -> dict[str, int]:
    """``ALLOCATOR_COUNTS`` since the process began; empty on the host."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not is_on_card(engine):
        return {}
    found = torch.cuda.memory_stats(_site(engine).torch_device)
    return {name: int(found.get(name, 0)) for name in ALLOCATOR_COUNTS}


def can_sleep(engine: Engine) -> bool:
    """Its device has virtual memory; a stub has none to give back, and sleeps all the same."""
    site = _site(engine)
    return site is None or bool(site.driver.capabilities().vmm)


def _site(engine: Engine) -> Any:
    """The device it is built on; a stub has none."""
    return getattr(engine._runtime, "site", None)


def is_on_card(engine: Engine) -> bool:
    site = _site(engine)
    return site is not None and site.driver.kind == "cuda"


def computes_in(engine: Engine) -> str:
    """The dtype of its cache, which is that of all it computes."""
    return engine.plan.kv.layout.groups[0].parts[0].dtype


# -- the pool ------------------------------------------------------------------------------------------------------


def head_slots(engine: Engine) -> int:
    """Slots that a scratch may take back."""
    return _cache(engine).head_slots


def take_back(engine: Engine, num_slots: int) -> Deferral | None:
    """As ``BlockCache.take_back``, for scratch that is written to at once; where contents are kept, it is."""
    cache, shadow = _cache(engine), _shadow(engine)
    if shadow is not None:
        shadow.give_scratch()
    try:
        return cache.take_back(num_slots)
    finally:
        if shadow is not None:
            cache.flush()  # what was evicted from there may still be on its way to the host
            shadow.take_scratch(num_scratch_slots(engine))


def lend(engine: Engine) -> None:
    """As ``BlockCache.lend``."""
    shadow = _shadow(engine)
    if shadow is not None:
        shadow.give_scratch()
    _cache(engine).lend()


def num_scratch_slots(engine: Engine) -> int:
    """Slots of the head that are not lent now."""
    return head_slots(engine) - engine.stats()["kv.lent"]


def num_in_scratch(engine: Engine) -> int:
    """Blocks that lie in slots that were taken back."""
    return int((_cache(engine).blocks.owners[: num_scratch_slots(engine)] >= 0).sum())


def wrong_contents(engine: Engine) -> tuple[int, list[str]]:
    """How often somebody found other entries than its own, and the first few cases; none where nobody keeps them."""
    shadow = _shadow(engine)
    return (0, []) if shadow is None else (shadow.num_wrong, shadow.told)


def settle(engine: Engine) -> None:
    """Loads that nobody waits for any more come to their end."""
    _cache(engine).incoming.wait_all()


def lost_blocks(engine: Engine) -> list[str]:
    """With nothing running and nothing pinned: what is neither free nor cached, in words."""
    cache, stats = _cache(engine), engine.stats()
    slots = stats["kv.free"] + stats["kv.cached"] + num_scratch_slots(engine)
    host = stats["kv.host_free"] + stats["kv.host_cached"]
    told = []
    if num_held := int((cache.blocks.refs > 0).sum()):
        told.append(f"{num_held} blocks are held by nobody")
    if slots != cache.num_slots:
        told.append(f"{slots} of {cache.num_slots} slots are free, cached or scratch")
    if host != cache.num_host_slots:
        told.append(f"{host} of {cache.num_host_slots} host slots are free or cached")
    return told


def lost_when_emptied(engine: Engine) -> list[str]:
    """The same once the cache is empty: then all is free."""
    cache = _cache(engine)
    cache.clear()
    told = lost_blocks(engine)
    if cache.num_cached or len(cache.blocks.free_ids) != cache.blocks.num_blocks or cache.tree.num_nodes:
        free, nodes = len(cache.blocks.free_ids), cache.tree.num_nodes
        told.append(f"{free} of {cache.blocks.num_blocks} blocks are free and {nodes} nodes are left")
    return told


def _cache(engine: Engine) -> BlockCache:
    return engine._runtime.managers.kv.cache


def _shadow(engine: Engine) -> Any:
    """What the stub keeps of contents; no other engine does."""
    return getattr(engine._runtime, "shadow", None)
