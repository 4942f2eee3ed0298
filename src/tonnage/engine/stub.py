"""An engine with everything but a model: scheduler, managers, sampling parameters and ledger are the real ones.

The tokens come from a hash of each request's seed and position, so a request gives the same tokens however it is
scheduled. For tests of the loop by the ten thousand, and for the price of its bookkeeping. What the KV blocks would
hold can be kept as one number a token (``shadow``), so that a wrong slot shows, and steps and copies can be made to
fail (``mishaps``).
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from tonnage.buffers import BufferManager, Device, Stream
from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.costs.config import ModelConfig
from tonnage.device.host import HostDriver
from tonnage.device.machine import host_memory
from tonnage.engine.batch import Batch
from tonnage.engine.core import Engine
from tonnage.engine.inputs import StepInputs
from tonnage.engine.letters import LetterText
from tonnage.engine.managers import BlockStore, Managers
from tonnage.engine.mishaps import Mishaps
from tonnage.engine.options import Chunking
from tonnage.engine.outcome import Landed, Outcome, Pending, TokenLogprobs
from tonnage.engine.picked import Scheduled
from tonnage.engine.sampling.random import Words, uniform
from tonnage.engine.sampling.rows import Edits
from tonnage.engine.shadow import Shadow, ShadowMover
from tonnage.engine.stub_memory import StubSizes, check_fits, check_sizes
from tonnage.graphs.token_feed import pending
from tonnage.hardware import host_card
from tonnage.layout import penalty_table_bytes
from tonnage.ledger import Ledger
from tonnage.planner import plan_without_device
from tonnage.report import RunResult
from tonnage.resources.transfers import TransferBudget
from tonnage.step import Ints
from tonnage.terms import MemoryPlan
from tonnage.units import GiB, MiB

_VOCAB_SIZE = 256
_STOP_ID = 0
#: Keeps the draws that end sequences apart from those that make tokens.
_ENDS = 0x454E4453
#: Least of the device that a stub is planned for, which is never there: by it the soak judges what no line explains.
_PLANNED_BYTES = 64 * GiB
#: Least of the device that holds the penalty tables; nothing else is allocated.
_DEVICE_BYTES = 256 * MiB
#: The clock of the stub's cache goes on by this at each step, so that a run repeats itself.
_STEP_S = 0.01


def stub_engine(
    *,
    kv_tokens: int,
    max_seq_len: int = 4096,
    max_batch_size: int = 256,
    max_num_tokens: int = 2048,
    block_tokens: int = 16,
    admission: str = "optimistic",
    chunk_tokens: int | Literal["none"] | None = None,
    prefix_caching: bool = False,
    head_tokens: int = 0,
    host_kv_tokens: int = 0,
    load_steps: int = 0,
    link_blocks: int | None = None,
    checks_contents: bool = False,
    mishaps: Mishaps | None = None,
    end_probability: float = 0.0,
    overlap: bool = False,
    seed: int = 0,
) -> Engine:
    """An engine whose sequences end by themselves with ``end_probability`` at each token (token id 0).

    ``head_tokens`` of KV blocks beside ``kv_tokens`` are lent to cached blocks, ``host_kv_tokens`` lie on the host.
    A load takes up to ``load_steps`` steps, and a step moves at most ``link_blocks`` blocks to the host (None: any
    number); both need ``checks_contents``, which keeps a ``Shadow``. ``overlap``: what a step drew is told when the
    next one is launched. ``seed`` changes every request's tokens, and how long loads take. Raises what the planner
    raises for limits that make no sense, and ``DoesNotFit`` for a stub whose bookkeeping the host cannot hold.
    """
    sizes = StubSizes(
        kv_tokens=kv_tokens,
        head_tokens=head_tokens,
        host_kv_tokens=host_kv_tokens,
        block_tokens=block_tokens,
        max_seq_len=max_seq_len,
        max_batch_size=max_batch_size,
        vocab_size=_VOCAB_SIZE,
        is_cached=prefix_caching,
        is_shadowed=checks_contents,
    )
    plan = _planned(sizes, admission=admission, max_num_tokens=max_num_tokens)
    head, host = (-(-tokens // block_tokens) for tokens in (head_tokens, host_kv_tokens))
    runtime = _StubRuntime.of(
        replace(plan, limits=replace(plan.limits, prefix_caching=prefix_caching)),
        Chunking.of(chunk_tokens, block_tokens=block_tokens),
        _Blocks(head=head, host=host, load_steps=load_steps, link=link_blocks, checks_contents=checks_contents),
        mishaps=mishaps,
        end_probability=end_probability,
        seed=seed,
        steps_ahead=int(overlap),
    )
    return Engine(runtime, LetterText([_STOP_ID]), ())


def _planned(sizes: StubSizes, *, admission: str, max_num_tokens: int) -> MemoryPlan:
    check_sizes(sizes)
    if sizes.max_batch_size <= max_num_tokens and sizes.max_seq_len <= sizes.kv_tokens:  # else the planner refuses it
        check_fits(sizes, available_bytes=host_memory().available_bytes)
    return plan_without_device(
        _config(sizes.max_seq_len),
        card=host_card(max(_PLANNED_BYTES, sizes.planned_bytes), page_bytes=4096),
        knobs=Knobs(
            kv_tokens=Setting(sizes.kv_tokens),
            block_tokens=Setting(sizes.block_tokens),
            admission=Setting(admission),
        ),
        limit_knobs=LimitKnobs(
            max_seq_len=Setting(sizes.max_seq_len),
            max_batch_size=Setting(sizes.max_batch_size),
            max_num_tokens=Setting(max_num_tokens),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blocks:
    """Blocks beside the pool's own, and how copies of them go."""

    head: int
    host: int
    load_steps: int
    link: int | None
    checks_contents: bool


class _Clock:
    """Seconds that go by in steps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def step(self) -> None:
        self.now_s += _STEP_S


@dataclass(slots=True, eq=False, kw_only=True)
class _StubRuntime:
    """``shadow`` and ``mover`` only where contents are checked; ``newest``: what each slot drew last."""

    plan: MemoryPlan
    vocab_size: int
    managers: Managers
    chunking: Chunking
    ledger: Ledger
    end_probability: float
    seed: int
    driver: HostDriver
    shadow: Shadow | None = None
    mover: ShadowMover | None = None
    mishaps: Mishaps | None = None
    clock: _Clock = field(default_factory=_Clock)
    max_load_steps: int = 0
    steps_ahead: int = 0
    newest: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    @classmethod
    def of(
        cls,
        plan: MemoryPlan,
        chunking: Chunking,
        blocks: _Blocks,
        *,
        mishaps: Mishaps | None,
        end_probability: float,
        seed: int,
        steps_ahead: int,
    ) -> _StubRuntime:
        penalties = penalty_table_bytes(max_batch_size=plan.limits.max_batch_size, vocab_size=_VOCAB_SIZE)
        device_bytes = max(_DEVICE_BYTES, 2 * penalties)
        ledger, clock = Ledger(0, device_bytes), _Clock()
        driver = HostDriver(device_bytes)
        buffers = BufferManager(
            Stream(Device(driver if mishaps is None else mishaps.driver(driver))), ledger=ledger, owner="penalties"
        )
        num_slots, slab_bytes = plan.kv.num_slabs + blocks.head, plan.kv.layout.slab_bytes
        shadow, mover = _shadow(plan, blocks, mishaps, num_slots=num_slots, seed=seed)
        budget = blocks.link and TransferBudget(
            slab_bytes=slab_bytes, bytes_per_second=blocks.link * slab_bytes, slice_s=1.0
        )
        store = BlockStore(
            layout=plan.kv.layout,
            num_slots=num_slots,
            head_slots=blocks.head,
            num_host_slots=blocks.host,
            mover=mover,
            budget=budget or None,
            clock=clock,
        )
        return cls(
            plan=plan,
            vocab_size=_VOCAB_SIZE,
            managers=Managers.make(
                plan.limits,
                store,
                vocab_size=_VOCAB_SIZE,
                admission=plan.knobs.admission.value,
                buffers=buffers,
                steps_ahead=steps_ahead,
            ),
            chunking=chunking,
            ledger=ledger,
            driver=driver,
            end_probability=end_probability,
            seed=seed,
            shadow=shadow,
            mover=mover,
            mishaps=mishaps,
            clock=clock,
            max_load_steps=blocks.load_steps + 1,
            steps_ahead=steps_ahead,
            newest=np.zeros(plan.limits.max_batch_size, np.int64),
        )

    def active(self) -> AbstractContextManager[object]:
        return nullcontext()

    def aside(self) -> AbstractContextManager[object]:
        return nullcontext()

    def launch(self, scheduled: Scheduled, batch: Batch) -> Pending:
        inputs = StepInputs.of(scheduled, batch, self.managers)
        if self.steps_ahead:
            inputs = replace(
                inputs, ids=np.where(inputs.ids < 0, self.newest[np.maximum(pending(inputs.ids), 0)], inputs.ids)
            )
        plan = scheduled.plan
        self.clock.step()
        if self.mover is not None:
            self.mover.step()
        if self.shadow is not None:
            self.shadow.compute(inputs, batch)
        if self.mishaps is not None:
            self.mishaps.before_launch()
        slots, positions = scheduled.slots[plan.samples], plan.ends[plan.samples]
        tokens = self._tokens(batch.sampling.seeds(slots), positions, inputs.sampling.edits)
        ids = plan.request_ids if plan.samples.all() else np.array(plan.request_ids, np.object_)[plan.samples].tolist()
        self.newest[slots] = tokens
        outcome = Outcome(
            request_ids=ids,
            tokens=tokens,
            logprobs=[-1.0] * len(tokens),
            finite=self._finite(inputs),
            prompt={
                piece.request_id: [TokenLogprobs(token, -1.0) for token in piece.targets.tolist()]
                for piece in inputs.prompts
            },
        )
        return Landed(outcome)

    def _finite(self, inputs: StepInputs) -> list[bool]:
        """Now and then the last row that samples gives no numbers, and what it wrote are none either."""
        sampling = np.flatnonzero(inputs.plan.samples)
        found = [True] * sampling.size
        if sampling.size and self.mishaps is not None and self.mishaps.spoils_row():
            found[-1] = False
            if self.shadow is not None:
                self.shadow.spoil(inputs, int(sampling[-1]))
        return found

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

    def require_sleepable(self) -> None:
        """It has nothing to give back."""

    def release(self, tags: Collection[str]) -> Mapping[str, int]:
        """What blocks would hold is gone."""
        if self.shadow is not None and "kv" in tags:
            self.shadow.forget()
        return dict.fromkeys(tags, 0)

    def materialize(self, tags: Collection[str]) -> None:
        """There is nothing to bring back."""

    def drop_graphs(self) -> int:
        return 0

    def recapture(self) -> None:
        """There are none."""

    def holdings(self) -> tuple[tuple[tuple[str, int], ...], int | None]:
        return (), None

    @property
    def watch(self) -> None:
        """There is no device to watch."""

    def settle(self, phase: str) -> None:
        """There is no device to look at."""

    def drain(self) -> None:
        """Nothing runs behind the caller's back."""

    def result(self, **counts: Any) -> RunResult:
        return RunResult(snapshot=self.ledger.snapshot(), plan=self.plan, audit=self.ledger.audit(), **counts)

    def close(self) -> None:
        self.managers.dispatcher.close()
        self.driver.close()


def _shadow(
    plan: MemoryPlan, blocks: _Blocks, mishaps: Mishaps | None, *, num_slots: int, seed: int
) -> tuple[Shadow, ShadowMover] | tuple[None, None]:
    if not blocks.checks_contents:
        return None, None
    shadow = Shadow(
        num_slots=num_slots,
        num_host_slots=blocks.host,
        block_tokens=plan.kv.layout.groups[0].block_tokens,
        max_batch_size=plan.limits.max_batch_size,
        max_seq_len=plan.limits.max_seq_len,
    )
    rng = random.Random(seed ^ 0x10AD)
    mover = ShadowMover(
        plan.kv.layout.slab_bytes,
        shadow,
        load_steps=lambda: rng.randint(0, blocks.load_steps),
        before_copy=mishaps.before_copy if mishaps is not None else lambda _: None,
    )
    return shadow, mover


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
