"""The resource managers of one engine, made from limits and put behind one dispatcher."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tonnage.buffers import BufferManager
from tonnage.config import ADMISSION_POLICIES, Limits
from tonnage.layout import KVLayout
from tonnage.resources.admission import ADMISSIONS, Admission
from tonnage.resources.cache import BlockCache
from tonnage.resources.dispatcher import Dispatcher
from tonnage.resources.kv import KVManager
from tonnage.resources.mover import Mover
from tonnage.resources.penalties import PenaltyTables
from tonnage.resources.slots import SlotManager
from tonnage.resources.transfers import TransferBudget


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStore:
    """The slabs that a KV manager hands out: ``num_slots`` of them, the first ``head_slots`` kept for scratch and lent
    meanwhile, and who moves them. Without a ``mover`` there are no bytes, or none that are worth keeping. ``clock``
    tells seconds, for retention."""

    layout: KVLayout
    num_slots: int
    head_slots: int = 0
    num_host_slots: int = 0
    mover: Mover | None = None
    budget: TransferBudget | None = None
    clock: Callable[[], float] = time.monotonic

    @property
    def block_tokens(self) -> int:
        return self.layout.groups[0].block_tokens

    def cache(self, *, reuse: bool) -> BlockCache:
        return BlockCache(
            self.layout.groups,
            num_slots=self.num_slots,
            head_slots=self.head_slots,
            num_host_slots=self.num_host_slots,
            mover=self.mover,
            budget=self.budget,
            reuse=reuse,
            clock=self.clock,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Managers:
    """Each by its own name, all behind ``dispatcher``, and the policy by which the KV cache admits."""

    slots: SlotManager
    kv: KVManager
    penalties: PenaltyTables
    dispatcher: Dispatcher
    admission: Admission

    @classmethod
    def make(
        cls,
        limits: Limits,
        store: BlockStore,
        *,
        vocab_size: int,
        admission: str | None,
        buffers: BufferManager,
        steps_ahead: int = 0,
    ) -> Managers:
        """``admission`` is a name of ``ADMISSIONS``; ``buffers`` makes the penalty tables when the first request needs
        them. ``steps_ahead`` are launched when an earlier one has not landed."""
        policy = ADMISSIONS[admission or ADMISSION_POLICIES[0]]()
        slots = SlotManager(limits.max_batch_size)
        kv = KVManager(
            store.cache(reuse=limits.prefix_caching),
            block_tokens=store.block_tokens,
            max_seq_len=limits.max_seq_len,
            max_batch_size=limits.max_batch_size,
            extra_tokens=limits.extra_tokens,
            max_pending_tokens=(1 + steps_ahead) * limits.max_num_tokens,
            admission=policy,
            slots=slots,
        )
        penalties = PenaltyTables(
            slots,
            vocab_size=vocab_size,
            num_slots=limits.max_batch_size,
            buffers=buffers,
            enabled=limits.penalties,
        )
        return cls(
            slots=slots,
            kv=kv,
            penalties=penalties,
            dispatcher=Dispatcher([slots, kv, penalties]),
            admission=policy,
        )
