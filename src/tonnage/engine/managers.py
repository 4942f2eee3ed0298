"""The resource managers of one engine, made from limits and put behind one dispatcher."""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.buffers import BufferManager
from tonnage.config import ADMISSION_POLICIES, Limits
from tonnage.resources.admission import ADMISSIONS, Admission
from tonnage.resources.block_pool import BlockPool
from tonnage.resources.dispatcher import Dispatcher
from tonnage.resources.kv import KVManager
from tonnage.resources.penalties import PenaltyTables
from tonnage.resources.slots import SlotManager


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
        *,
        num_blocks: int,
        block_tokens: int,
        vocab_size: int,
        admission: str | None,
        buffers: BufferManager,
    ) -> Managers:
        """``admission`` is a name of ``ADMISSIONS``; ``buffers`` makes the penalty tables when the first request needs
        them."""
        policy = ADMISSIONS[admission or ADMISSION_POLICIES[0]]()
        slots = SlotManager(limits.max_batch_size)
        kv = KVManager(
            BlockPool(num_blocks),
            block_tokens=block_tokens,
            max_seq_len=limits.max_seq_len,
            max_batch_size=limits.max_batch_size,
            extra_tokens=limits.extra_tokens,
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
