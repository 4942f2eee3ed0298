"""An engine with everything but a model: scheduler, managers, sampling parameters and ledger are the real ones.

The tokens come from a hash of each request's seed and position, so a request gives the same tokens however it is
scheduled. For tests of the loop by the ten thousand, and for the price of its bookkeeping.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tonnage.buffers import BufferManager, Device, Stream
from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.costs.config import ModelConfig
from tonnage.device.host import HostDriver
from tonnage.engine.batch import Batch
from tonnage.engine.core import Engine
from tonnage.engine.inputs import StepInputs
from tonnage.engine.managers import Managers
from tonnage.engine.options import Chunking
from tonnage.engine.outcome import Outcome, TokenLogprobs
from tonnage.engine.sampling.random import Words, uniform
from tonnage.engine.sampling.rows import Edits
from tonnage.engine.scheduler import Scheduled
from tonnage.engine.text import Message, Text
from tonnage.hardware import host_card
from tonnage.ledger import Ledger
from tonnage.planner import plan_without_device
from tonnage.report import RunResult
from tonnage.step import Ints
from tonnage.terms import MemoryPlan
from tonnage.units import GiB, MiB

_VOCAB_SIZE = 256
_STOP_ID = 0
#: Keeps the draws that end sequences apart from those that make tokens.
_ENDS = 0x454E4453
#: Of the device that holds the penalty tables; nothing else is allocated.
_DEVICE_BYTES = 256 * MiB


def stub_engine(
    *,
    kv_tokens: int,
    max_seq_len: int = 4096,
    max_batch_size: int = 256,
    max_num_tokens: int = 2048,
    block_tokens: int = 16,
    admission: str = "optimistic",
    chunk_tokens: int | Literal["none"] | None = None,
    end_probability: float = 0.0,
    seed: int = 0,
) -> Engine:
    """An engine whose sequences end by themselves with ``end_probability`` at each token (token id 0).

    ``seed`` changes every request's tokens. Raises what the planner raises for limits that make no sense.
    """
    config = _config(max_seq_len)
    plan = plan_without_device(
        config,
        card=host_card(64 * GiB, page_bytes=4096),
        knobs=Knobs(kv_tokens=Setting(kv_tokens), block_tokens=Setting(block_tokens), admission=Setting(admission)),
        limit_knobs=LimitKnobs(
            max_seq_len=Setting(max_seq_len),
            max_batch_size=Setting(max_batch_size),
            max_num_tokens=Setting(max_num_tokens),
        ),
    )
    chunking = Chunking.of(chunk_tokens, block_tokens=block_tokens)
    return Engine(_StubRuntime.of(plan, chunking, end_probability=end_probability, seed=seed), _LetterText(), ())


@dataclass(slots=True, eq=False, kw_only=True)
class _StubRuntime:
    plan: MemoryPlan
    vocab_size: int
    managers: Managers
    chunking: Chunking
    ledger: Ledger
    end_probability: float
    seed: int

    @classmethod
    def of(cls, plan: MemoryPlan, chunking: Chunking, *, end_probability: float, seed: int) -> _StubRuntime:
        ledger = Ledger(0, _DEVICE_BYTES)
        buffers = BufferManager(Stream(Device(HostDriver(_DEVICE_BYTES))), ledger=ledger, owner="penalties")
        return cls(
            plan=plan,
            vocab_size=_VOCAB_SIZE,
            managers=Managers.make(
                plan.limits,
                num_blocks=plan.kv.num_slabs,
                block_tokens=plan.kv.layout.groups[0].block_tokens,
                vocab_size=_VOCAB_SIZE,
                admission=plan.knobs.admission.value,
                buffers=buffers,
            ),
            chunking=chunking,
            ledger=ledger,
            end_probability=end_probability,
            seed=seed,
        )

    def launch(self, scheduled: Scheduled, batch: Batch) -> Outcome:
        inputs = StepInputs.of(scheduled, batch, self.managers)
        plan = scheduled.plan
        slots, positions = scheduled.slots[plan.samples], plan.ends[plan.samples]
        tokens = self._tokens(batch.sampling.seeds(slots), positions, inputs.sampling.edits)
        ids = plan.request_ids if plan.samples.all() else np.array(plan.request_ids, np.object_)[plan.samples].tolist()
        return Outcome(
            request_ids=ids,
            tokens=tokens,
            logprobs=[-1.0] * len(tokens),
            finite=[True] * len(tokens),
            prompt={
                piece.request_id: [TokenLogprobs(token, -1.0) for token in piece.targets.tolist()]
                for piece in inputs.prompts
            },
        )

    def _tokens(self, seeds: Words, positions: Ints, edits: Edits | None) -> list[int]:
        seeds = seeds ^ np.uint64(self.seed)
        drawn = 1 + (uniform(seeds, positions) * (_VOCAB_SIZE - 1)).astype(np.int64)
        if self.end_probability:
            drawn[uniform(seeds ^ np.uint64(_ENDS), positions) < self.end_probability] = _STOP_ID
        found: list[int] = drawn.tolist()
        if edits is not None:
            # Stops that come too early: what a real sampler gives no probability.
            masked = edits.values == -np.inf
            banned = set(zip(edits.rows[masked].tolist(), edits.tokens[masked].tolist(), strict=True))
            for row in {row for row, _ in banned}:
                while (row, found[row]) in banned:
                    found[row] = (found[row] + 1) % _VOCAB_SIZE
        return found

    def settle(self, phase: str) -> None:
        """There is no device to look at."""

    def drain(self) -> None:
        """Nothing runs behind the caller's back."""

    def result(self, **counts: Any) -> RunResult:
        return RunResult(snapshot=self.ledger.snapshot(), plan=self.plan, audit=self.ledger.audit(), **counts)

    def close(self) -> None:
        self.managers.dispatcher.close()


class _LetterText(Text):
    """Token 98 is "b": texts that stop strings can be found in."""

    def __init__(self) -> None:
        self.stop_ids = frozenset({_STOP_ID})

    @property
    def has_chat_template(self) -> bool:
        return True

    def encode(self, prompt: str) -> list[int]:
        return list(prompt.encode())

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return self.encode("\n".join(message["content"] for message in messages))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        kept = (token for token in ids if token != _STOP_ID or not skip_special_tokens)
        return "".join(chr(97 + token % 26) for token in kept)


def _config(max_seq_len: int) -> ModelConfig:
    shape = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "intermediate_size": 64,
        "vocab_size": _VOCAB_SIZE,
        "max_position_embeddings": max_seq_len,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    return ModelConfig.from_dict(shape, name="stub")
