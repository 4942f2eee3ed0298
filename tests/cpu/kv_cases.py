"""What the tests of the KV manager share: layers, requests with text, steps, and slabs that remember what was written.

``Slabs`` keeps, for each token place of each slot, the whole text up to that token and its scope, as an attention
layer's entries depend on it. ``compute`` runs a step on them the way a kernel would, by the page tables alone: it reads
what the new tokens look at and fails if a place holds anything else, then writes. So a block that is shared wrongly,
moved without its contents or given to two shows as another text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from cache_bench import Carrier
from tonnage.caching import CacheParams
from tonnage.layout import KVGroup, KVGroupKind
from tonnage.resources.cache import BlockCache
from tonnage.resources.kv import KVManager
from tonnage.sampling import SamplingParams
from tonnage.step import StepItem, StepPlan, Txn


def group(name="full", *, kind=KVGroupKind.FULL, window=None, block_tokens=4):
    return KVGroup(
        name=name, kind=kind, layers=(0,), window=window, block_tokens=block_tokens, block_bytes=64, parts=()
    )


def window(tokens, *, block_tokens=4):
    return group(f"window-{tokens}", kind=KVGroupKind.WINDOW, window=tokens, block_tokens=block_tokens)


@dataclass(slots=True, kw_only=True, eq=False)
class Ask:
    """A request with a text; its tokens may grow as an engine's do."""

    id: str
    token_ids: list[int]
    num_prompt_tokens: int
    max_total_tokens: int
    num_computed_tokens: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)
    adapter_id: int | None = None


def ask(name, tokens, new=8, *, adapter_id=None, prompt_logprobs=None, **cache):
    """``cache``: fields of ``CacheParams``."""
    tokens = list(tokens)
    return Ask(
        id=name,
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
        max_total_tokens=len(tokens) + new,
        adapter_id=adapter_id,
        params=SamplingParams(cache=CacheParams(**cache), prompt_logprobs=prompt_logprobs),
    )


class Slabs(Carrier):
    """Contents of device and host slots, one list of entries a slot."""

    def __init__(self, num_slots, num_host_slots=0, *, block_tokens=4, hold_loads=False):
        super().__init__(num_slots, num_host_slots, hold_loads=hold_loads)
        self.device = [[None] * block_tokens for _ in range(num_slots)]
        self.host = [[None] * block_tokens for _ in range(num_host_slots)]


def manager(num_slots=8, *, block_tokens=4, max_seq_len=20, groups=None, head=0, host=0, reuse=True, clock=None, **kw):
    """A manager over slabs; ``kw`` goes to it. The slabs are ``kv.cache.mover``."""
    fields = {"max_batch_size": 3} | kw
    more = {} if clock is None else {"clock": clock}
    cache = BlockCache(
        groups if groups is not None else [group(block_tokens=block_tokens)],
        num_slots=num_slots + head,
        head_slots=head,
        num_host_slots=host,
        mover=Slabs(num_slots + head, host, block_tokens=block_tokens),
        reuse=reuse,
        **more,
    )
    return KVManager(cache, block_tokens=block_tokens, max_seq_len=max_seq_len, **fields)


def step(*items, drafts=None):
    """(name, start, count) a row; ``drafts``: how many of each are guesses."""
    plan = StepPlan.of(
        0, tuple(StepItem(request_id=name, start=start, count=count, samples=True) for name, start, count in items)
    )
    if drafts is None:
        return plan
    return StepPlan.build(
        0,
        plan.request_ids,
        starts=plan.starts,
        counts=plan.counts,
        samples=plan.samples,
        drafts=np.array(drafts, np.int64),
    )


def outcome(plan, accepted):
    return SimpleNamespace(request_ids=plan.request_ids, tokens=(0,) * len(plan), accepted=np.array(accepted, np.int64))


def launch(kv, plan, txn=None):
    """Prepared and final."""
    txn = txn or Txn()
    kv.prepare(plan, txn)
    txn.commit()
    kv.committed()


def run(kv, plan, result=None):
    """Launched and landed at once."""
    launch(kv, plan)
    kv.update(plan, result)


def entry(request, position, tokens=None):
    """What a token's place holds: it depends on everything before it, and on the adapter."""
    tokens = request.token_ids if tokens is None else tokens
    return (request.adapter_id, request.params.cache.salt, *tokens[: position + 1])


def places(kv, request, index, first, last):
    """Slot and offset of positions [first, last) in the tables of one group."""
    row = kv.tables[index][kv.row_index(request.id)]
    return [(int(row[p // kv.block_tokens]), p % kv.block_tokens) for p in range(first, last)]


def check_entries(kv, request, end):
    """Everything that the token after ``end`` computed ones looks at is there."""
    slabs = kv.cache.mover
    for index, layers in enumerate(kv.cache.groups):
        first = 0 if layers.window is None else max(0, end - layers.window + 1)
        for position, (slot, offset) in zip(range(first, end), places(kv, request, index, first, end), strict=True):
            assert slabs.device[slot][offset] == entry(request, position), (request.id, index, position)


def compute(kv, plan, requests, tokens=None):
    """The kernels of a prepared step. ``tokens``: the text of a request with its guesses, where it has some."""
    slabs = kv.cache.mover
    for item in plan.items:
        request = requests[item.request_id]
        check_entries(kv, request, item.start)
        text = (tokens or {}).get(request.id)
        for index in range(len(kv.cache.groups)):
            for position, (slot, offset) in zip(
                range(item.start, item.end), places(kv, request, index, item.start, item.end), strict=True
            ):
                slabs.device[slot][offset] = entry(request, position, text)


def serve(kv, request, *, count=None, others=None):
    """Admit it and compute what it knows, in one step; the grant."""
    txn = Txn()
    grant = kv.admit(request, txn)
    assert hasattr(grant, "cached_tokens"), grant
    txn.commit()
    kv.committed()
    kv.wait_loaded()
    assert request.id not in kv.loading()
    start = grant.cached_tokens
    plan = step((request.id, start, len(request.token_ids) - start if count is None else count))
    step_txn = Txn()
    kv.prepare(plan, step_txn)
    compute(kv, plan, {request.id: request})
    step_txn.commit()
    kv.committed()
    kv.update(plan, None)
    return grant


def state(kv):
    """All that a rollback restores where nothing was evicted: who holds what, what is cached and in which order."""
    cache = kv.cache
    sequences = {
        name: (kv.watermarks(name), [kv.block_ids(name, group=g).tolist() for g in kv.tables], kv.row_index(name))
        for name in kv._row_of
    }
    queues = [queue.listed() for queue in (cache.room.body, cache.room.head, cache.room.host)]
    tables = {g: table.tolist() for g, table in kv.tables.items()}
    stats = {k: v for k, v in kv.stats().items() if k not in ("high_water", "partial_copies")}
    return cache.blocks.refs.tolist(), cache.blocks.free_body.listed().tolist(), queues, tables, sequences, stats
