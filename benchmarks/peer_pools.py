"""Our KV manager and the pools of other engines behind the same five calls, as their own schedulers make them.

A peer is used only where it is installed, and none of it is copied here. What a peer's package imports and its cache
does not use may be missing: ``installed`` serves empty modules for that.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import types
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Protocol
from unittest.mock import MagicMock

import numpy as np

from tonnage.layout import KVGroup, KVGroupKind
from tonnage.resources.base import Deferral
from tonnage.resources.cache import BlockCache
from tonnage.resources.kv import KVManager
from tonnage.sampling import SamplingParams
from tonnage.step import StepPlan, Txn

BLOCK_TOKENS = 16
#: Packages that SGLang imports for pictures and sound.
ABSENT = ("torchvision",)


class Pool(Protocol):
    """One contestant, new for each run. A sequence is whatever ``sequence`` makes, which is not timed."""

    def sequence(self, name: str, prompt: list[int], num_new: int) -> Any: ...

    def admit(self, sequence: Any) -> int | None:
        """Find what is cached of it and hold that: tokens found, or None: not now."""

    def step(self, sequences: Sequence[Any], tokens: Sequence[int]) -> None:
        """Room for all that each knows and has not computed; that is computed then, and each gets one more token."""

    def end(self, sequence: Any) -> None:
        """Its blocks go back; they can be found until they are evicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    num_blocks: int
    num_rows: int
    max_tokens: int


# -- ours ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Ask:
    """What the manager may know of a request."""

    id: str
    token_ids: list[int]
    num_prompt_tokens: int
    max_total_tokens: int
    start: int = 0
    num_computed_tokens: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)
    adapter_id: None = None


class OurPool:
    """``KVManager`` with its transactions, its page table and the admission of whole lives."""

    def __init__(self, size: Size) -> None:
        layers = KVGroup(
            name="full", kind=KVGroupKind.FULL, layers=(0,), window=None, block_tokens=BLOCK_TOKENS, block_bytes=64,
            parts=(),
        )  # fmt: skip
        self.kv = KVManager(
            BlockCache([layers], num_slots=size.num_blocks),
            block_tokens=BLOCK_TOKENS,
            max_seq_len=size.max_tokens,
            max_batch_size=size.num_rows,
        )
        self._steps = 0

    def sequence(self, name: str, prompt: list[int], num_new: int) -> Ask:
        return Ask(name, list(prompt), len(prompt), len(prompt) + num_new)

    def admit(self, sequence: Ask) -> int | None:
        txn = Txn()
        answer = self.kv.admit(sequence, txn)
        if isinstance(answer, Deferral):
            return None
        txn.commit()
        self.kv.committed()
        sequence.start = answer.cached_tokens
        return answer.cached_tokens

    def step(self, sequences: Sequence[Ask], tokens: Sequence[int]) -> None:
        starts = np.array([one.start for one in sequences])
        ends = np.array([len(one.token_ids) for one in sequences])
        plan = StepPlan.build(
            self._steps,
            [one.id for one in sequences],
            starts=starts,
            counts=ends - starts,
            samples=np.ones(len(sequences), np.bool_),
        )
        self._steps += 1
        txn = Txn()
        self.kv.prepare(plan, txn)
        txn.commit()
        self.kv.committed()
        for one, token in zip(sequences, tokens, strict=True):
            one.start = len(one.token_ids)
            one.token_ids.append(token)
        self.kv.update(plan, None)

    def end(self, sequence: Ask) -> None:
        self.kv.free(sequence.id)


# -- peers -----------------------------------------------------------------------------------------------------------


class VllmPool:
    """vLLM's ``KVCacheManager`` over its ``BlockPool``, with SHA-256 over blocks, which is its default."""

    def __init__(self, size: Size) -> None:
        import torch
        from vllm.sampling_params import SamplingParams as VllmParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request

        init_none_hash(sha256)
        layers = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.float16)
        self.kv = KVCacheManager(
            # One block is its null block.
            KVCacheConfig(
                num_blocks=size.num_blocks + 1,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], layers)],
            ),
            max_model_len=size.max_tokens,
            scheduler_block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
        )
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._request, self._params = Request, VllmParams

    def sequence(self, name: str, prompt: list[int], num_new: int) -> Any:
        # Without its hasher, so that hashing is timed and the making of requests is not.
        return self._request(name, list(prompt), self._params(max_tokens=num_new), None)

    def admit(self, sequence: Any) -> int | None:
        sequence.block_hashes.extend(self._hasher(sequence))
        blocks, num_cached, _ = self.kv.get_computed_blocks(sequence)
        num_new = sequence.num_tokens - num_cached
        if self.kv.allocate_slots(sequence, num_new, num_cached, blocks) is None:
            return None
        sequence.num_computed_tokens = sequence.num_tokens
        return int(num_cached)

    def step(self, sequences: Sequence[Any], tokens: Sequence[int]) -> None:
        for one, token in zip(sequences, tokens, strict=True):
            num_new = one.num_tokens - one.num_computed_tokens
            if num_new:  # 0: it was admitted in this step, which allocates
                if self.kv.allocate_slots(one, num_new) is None:
                    raise RuntimeError("the pool is too small for the trace")
                one.num_computed_tokens += num_new
            one.append_output_token_ids(token)
            one.block_hashes.extend(self._hasher(one))

    def end(self, sequence: Any) -> None:
        self.kv.free(sequence)


class SglangRequest:
    """What SGLang's tree and pools read of a request; ``kv`` is its own record."""

    extra_key = cache_salt = priority = None

    def __init__(self, rid: str, prompt: list[int], kv: Any) -> None:
        self.rid, self.kv = rid, kv
        self.origin_input_ids = array("q", prompt)
        self.full_untruncated_fill_ids = array("q", prompt)
        self.last_node = self.lock = self.prefix = None
        self.start = 0


class SglangPool:
    """SGLang's ``RadixCache`` over its paged allocator and its request pool, on the CPU."""

    def __init__(self, size: Size) -> None:
        import torch
        from sglang.srt.managers.schedule_batch import ReqKvInfo
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

        self._torch, self._record, self._key, self._asked = torch, ReqKvInfo, RadixKey, MatchPrefixParams
        self.pool = ReqToTokenPool(size.num_rows, size.max_tokens, "cpu", enable_memory_saver=False)
        self.allocator = PagedTokenToKVPoolAllocator(
            size.num_blocks * BLOCK_TOKENS, BLOCK_TOKENS, torch.float16, "cpu", kvcache=None, need_sort=False
        )
        self.allocator.use_triton_kernels = False  # their plain torch path: there is no GPU
        self.tree = RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.pool,
                token_to_kv_pool_allocator=self.allocator,
                page_size=BLOCK_TOKENS,
            )
        )

    def sequence(self, name: str, prompt: list[int], num_new: int) -> SglangRequest:  # noqa: ARG002
        return SglangRequest(name, prompt, self._record())

    def admit(self, sequence: SglangRequest) -> int | None:
        key = self._key(sequence.origin_input_ids, limit=len(sequence.origin_input_ids) - 1)
        found = self.tree.match_prefix(self._asked(key=key))
        sequence.last_node = found.last_device_node
        sequence.lock = self.tree.lock(found.last_device_node)
        sequence.prefix = self.tree.path_device_indices(found.last_device_node)
        sequence.start = sequence.kv.cache_protected_len = found.device_prefix_len
        return int(found.device_prefix_len)

    def step(self, sequences: Sequence[SglangRequest], tokens: Sequence[int]) -> None:
        new = [one for one in sequences if not one.kv.holds_kv]
        if old := [one for one in sequences if one.kv.holds_kv]:
            self._decode(old)
        if new:
            self._extend(new)
        for one, token in zip(sequences, tokens, strict=True):
            one.start = one.kv.kv_allocated_len = one.kv.kv_committed_len = len(one.full_untruncated_fill_ids)
            one.full_untruncated_fill_ids.append(token)
        for one in new:
            self.tree.checkpoint(one, up_to=one.start)

    def _extend(self, new: Sequence[SglangRequest]) -> None:
        torch = self._torch
        starts = torch.tensor([one.start for one in new])
        ends = torch.tensor([len(one.full_untruncated_fill_ids) for one in new])
        num_tokens = int((ends - starts).sum())
        last = torch.cat([one.prefix[-1:] if one.start else torch.full((1,), -1) for one in new])
        self.allocator.evict_to_free_tokens(self.tree, num_tokens + len(new) * BLOCK_TOKENS)
        places = self.allocator.alloc_extend(starts, starts, ends, ends, last, num_tokens)
        if places is None or self.pool.alloc(new) is None:
            raise RuntimeError("the pool is too small for the trace")
        first = 0
        for one, start, end in zip(new, starts.tolist(), ends.tolist(), strict=True):
            self.pool.write((one.kv.req_pool_idx, slice(0, start)), one.prefix)
            self.pool.write((one.kv.req_pool_idx, slice(start, end)), places[first : first + end - start])
            first += end - start

    def _decode(self, old: Sequence[SglangRequest]) -> None:
        torch = self._torch
        rows = torch.tensor([one.kv.req_pool_idx for one in old])
        ends = torch.tensor([len(one.full_untruncated_fill_ids) for one in old])
        self.allocator.evict_to_free_tokens(self.tree, len(old) * BLOCK_TOKENS)
        places = self.allocator.alloc_decode(ends, ends, self.pool.req_to_token[rows, ends - 2].long())
        if places is None:
            raise RuntimeError("the pool is too small for the trace")
        self.pool.write((rows, ends - 1), places.to(torch.int32))

    def end(self, sequence: SglangRequest) -> None:
        end = sequence.start
        self.tree.checkpoint(sequence, up_to=end)
        self.tree.free_kv_row(sequence.kv, [(sequence.kv.cache_protected_len, end)])
        self.tree.unlock(sequence.lock)
        self.pool.free(sequence)


# -- which there are -------------------------------------------------------------------------------------------------

PEERS: dict[str, type[Any]] = {"vllm": VllmPool, "sglang": SglangPool}


def installed() -> dict[str, str]:
    """Peers that are here, with their versions; from then on they can be imported."""
    if missing := [name for name in ABSENT if importlib.util.find_spec(name) is None]:
        sys.meta_path.append(_Empty(missing))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("sglang").setLevel(logging.ERROR)
    return {name: version(name) for name in PEERS if importlib.util.find_spec(name) is not None}


class _Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules with every name in them, for packages that are missing."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:  # noqa: ARG002
        if name.partition(".")[0] in self._names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        made = types.ModuleType(spec.name)
        made.__version__ = "0"

        def get(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return MagicMock(name=name)

        made.__getattr__ = get
        return made

    def exec_module(self, module: types.ModuleType) -> None: ...
