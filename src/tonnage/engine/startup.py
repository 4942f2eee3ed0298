"""Start-up: load, probe, measure, plan, build, close, audit, seal. Read top to bottom, it is the order of events.

The pool is sized last, from what is really left: its addresses are reserved for the largest conceivable size before
the probes, a floor of it is mapped for them, and the rest is mapped once the plan is known.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tonnage.attention import make_backend
from tonnage.buffers import Stream, VirtualArena
from tonnage.buffers.torch_view import as_tensor, typed_view
from tonnage.config import DEFAULT_BLOCK_TOKENS, LimitKnobs, Limits, Origin, Setting
from tonnage.costs.config import ModelConfig
from tonnage.costs.dtypes import parse_dtype
from tonnage.costs.kv import kv_layout
from tonnage.costs.models import EMBEDDED
from tonnage.costs.weights import weights_layout
from tonnage.declarations import declare
from tonnage.device.host import HostDriver
from tonnage.device.machine import host_memory
from tonnage.device.process import fence, process_memory, reset_peak, settle_heap, trim_heap, unfence
from tonnage.engine.core import Engine
from tonnage.engine.executor import Executor
from tonnage.engine.family import family_of
from tonnage.engine.models import model_folder
from tonnage.engine.options import EngineOptions
from tonnage.engine.probe import ROUNDING_BYTES, Prober, trial_blocks
from tonnage.engine.runtime import Runtime, read_device, release
from tonnage.engine.stages import StageMonitor
from tonnage.engine.text import Text
from tonnage.engine.weights import build_skeleton, load_shards, place_parameters
from tonnage.errors import DriverUnsupported, InvalidSetting
from tonnage.hardware import Card, host_card
from tonnage.layout import KVLayout
from tonnage.ledger import Account, Ledger
from tonnage.planner import check_knobs, plan_measured, plan_without_device, resolve_limits
from tonnage.resources.block_pool import BlockPool
from tonnage.resources.dispatcher import Dispatcher
from tonnage.resources.kv import KVManager
from tonnage.resources.slots import SlotManager
from tonnage.terms import Chip, How, LineKind, Measured, MemoryKind, MemoryPlan, Quantity, Rank, Source
from tonnage.units import MiB, round_up
from tonnage.workspace import ScratchArena

#: Heap blocks from here on go back to the system when freed; below, page faults would cost more than they save.
HEAP_THRESHOLD_BYTES = 2 * MiB
#: On the host a probe of 8,192 tokens would take tens of seconds.
HOST_BATCH_SIZE, HOST_NUM_TOKENS = 32, 512
#: Dtypes in which the CPU kernels of torch run a whole decoder.
COMPUTE_DTYPES = ("float32", "bfloat16")


def start(
    options: EngineOptions,
    *,
    on_stage: Callable[[str], None] | None = None,
    open_device: Callable[[int], HostDriver] = HostDriver,
) -> Engine:
    """Build an engine inside its memory plan. ``on_stage`` hears the name of each stage as it begins.

    ``open_device`` makes the driver from a capacity in bytes; wrapping it injects faults.

    Raises ``UserError`` (``DoesNotFit``, ``ModelNotFound`` ...) for what the user can mend, ``StartupError`` with
    stage, history and remedy for anything else; whatever was allocated is given back either way.
    """
    startup = _Startup(options, on_stage, open_device)
    try:
        return startup.run()
    except BaseException as error:
        startup.abandon(error)
        raise


class _Startup:
    """What start-up holds between its stages."""

    def __init__(
        self,
        options: EngineOptions,
        on_stage: Callable[[str], None] | None,
        open_device: Callable[[int], HostDriver],
    ) -> None:
        self.options = options
        self.on_stage = on_stage or (lambda _: None)
        self.make_driver = open_device
        self.closing: list[Callable[[], None]] = []
        self.rank = Rank()

    def run(self) -> Engine:
        self.read_model()
        self.open_device()
        with self.stage("skeleton", remedy="check the model folder; its config, tokenizer and weights belong together"):
            self.build_skeleton()
        with self.stage("weights", remedy="give more --memory, or a smaller --dtype"):
            self.load_weights()
        with self.stage("probe", remedy="lower --max-num-tokens or --max-batch-size, or give more --memory"):
            measured = self.measure()
        with self.stage("plan", remedy="report this as a defect"):
            self.plan = self.make_plan(measured)
        with self.stage("build", remedy="give more --memory, or raise --keep-free-bytes"):
            runtime = self.build()
        with self.stage("close", remedy="raise --keep-free-bytes, or lower --max-num-tokens"):
            self.close_boundary()
        with self.stage("audit", remedy="report this as a defect"):
            self.audit(runtime)
        return Engine(runtime, self.text, self.monitor.records)

    def abandon(self, error: BaseException) -> None:
        """Give everything back after a failure. The frames in its traceback hold tensors: they are emptied first."""
        seen: BaseException | None = error
        while seen is not None:
            traceback.clear_frames(seen.__traceback__)
            seen = seen.__cause__ or seen.__context__
        for name in ("model", "pool", "backend", "executor", "dispatcher", "kv"):
            self.__dict__.pop(name, None)
        if driver := self.__dict__.get("driver"):
            release(driver, self.closing)

    def stage(self, name: str, *, remedy: str) -> Any:
        return self.monitor.stage(name, remedy=remedy)

    # -- the stages, in order ------------------------------------------------------------------------------------

    def read_model(self) -> None:
        """The model's files and shape; whatever cannot run is refused before anything is imported or allocated."""
        self.on_stage("model")
        self.folder = model_folder(self.options.model)
        self.config = ModelConfig.read(self.folder, name=shown_name(self.options.model))
        self.family = family_of(self.config)
        self.dtype = parse_dtype(self.options.dtype or self.config.dtype, knob="--dtype", allowed=COMPUTE_DTYPES)
        self.weights = weights_layout(self.config, dtype=self.dtype, rank=self.rank)
        knobs = self.options.knobs
        self.block_tokens = knobs.block_tokens.or_else(DEFAULT_BLOCK_TOKENS)
        self.layout = kv_layout(
            self.config,
            kv_dtype=knobs.kv_dtype.or_else(self.dtype),
            block_tokens=self.block_tokens,
            rank=self.rank,
        )
        self.require_same_dtype(self.layout)
        resolve_limits(self.config, self.limit_knobs())
        check_knobs(knobs)

    def open_device(self) -> None:
        """The device, the ledger and the baseline: what the process holds after its imports is the host's overhead."""
        self.on_stage("imports")
        import_libraries(self.config.model_type)
        capacity = self.options.memory_bytes or available_memory()
        self.driver = self.make_driver(capacity)
        self.stream = Stream(self.driver)
        self.chip = Chip(name="host", sm=0, num_sms=0, total_bytes=capacity)
        self.ledger = Ledger(self.rank.device, capacity)
        self.monitor = StageMonitor(self.ledger, self.driver.own_bytes, self.on_stage)
        # Forked or earlier work may have left free heap: give it back first, or it would hide what we take.
        settle_heap(HEAP_THRESHOLD_BYTES)
        trim_heap()
        self.driver.set_baseline()

    def build_skeleton(self) -> None:
        self.text = Text(self.folder)
        self.model = build_skeleton(self.folder, self.dtype)
        trim_heap()
        self.context = self.remainder("context", LineKind.CONTEXT)

    def load_weights(self) -> None:
        self.refuse_hopeless()
        arena = self.arena("weights", LineKind.WEIGHTS, self.weights.total_bytes)
        arena.commit(self.weights.total_bytes)
        views = place_parameters(self.model, self.weights, as_tensor(arena))
        load_shards(self.folder, views)

    def measure(self) -> Measured:
        """Reserve the pool's addresses, map a floor of it, run the probe stages."""
        self.make_pool()
        limits = self.probe_limits()
        self.kv = KVManager(BlockPool(1), block_tokens=self.block_tokens, max_seq_len=limits.max_seq_len,
                            max_batch_size=limits.max_batch_size)  # fmt: skip
        num_blocks = trial_blocks(self.kv, limits)
        self.pool_arena.commit(num_blocks * self.layout.slab_bytes)
        self.executor, self.dispatcher, self.kv = self.runner(limits, num_blocks=num_blocks)
        prober = self.prober(limits)
        prober.warm_up()
        stages = prober.measure()
        trim_heap()
        libraries = self.remainder("libraries", LineKind.LIBRARIES)
        return Measured(
            rank=self.rank,
            device_bytes=self.driver.capacity_bytes,
            weights=self.weights.quantity(),
            context=self.context,
            libraries=libraries,
            stages=stages,
            graphs=None,
            foreign_bytes=Quantity.exact(0, Source.MEASURED, "the host device is ours alone"),
            trial_pool_bytes=self.pool_arena.committed_bytes,
            readings=(read_device(self.driver, self.ledger, "probe"),),
        )

    def make_plan(self, measured: Measured) -> MemoryPlan:
        """The arithmetic; refuses with checked remedies if what was measured leaves no room for one sequence."""
        return plan_measured(
            self.config,
            card=self.card(),
            measured=measured,
            knobs=self.options.knobs,
            limit_knobs=self.limit_knobs(),
            dtype=self.dtype,
            rank=self.rank,
            backend=self.options.attention,
        )

    def build(self) -> Runtime:
        """Map the pool to its planned size and make what runs on it; the trial structures are dropped."""
        plan = self.plan
        for arena in (self.pool_arena, self.scratch_arena):
            arena.decommit(0)  # the probes may have needed more of a small device than the plan gives
        self.pool_arena.commit(plan.kv.bytes)
        self.ledger.expect({kind: plan.bytes_of(kind) for kind in LineKind})
        self.executor, self.dispatcher, self.kv = self.runner(plan.limits, num_blocks=plan.kv.num_slabs)
        tables = self.ledger.open(owner="kv tables", line=LineKind.TABLES, memory=MemoryKind.CPU)
        tables.add(self.kv.num_bytes, self.kv.num_bytes)
        return Runtime(
            plan=plan,
            config=self.config,
            driver=self.driver,
            ledger=self.ledger,
            kv=self.kv,
            dispatcher=self.dispatcher,
            executor=self.executor,
            transient=self.sampled("forward", LineKind.TRANSIENT),
            heap=self.sampled("heap", LineKind.SLACK),
            closing=self.closing,
        )

    def close_boundary(self) -> None:
        """From here on the heap cannot grow past the device; a full step of each kind proves that it need not."""
        own = self.driver.own_bytes()
        if self.options.fence and own is not None:
            room = max(0, self.driver.capacity_bytes - own)
            try:
                before = fence(process_memory().data_bytes + room)
            except DriverUnsupported:
                pass  # no such limit on this system: the cap is then watched, not enforced
            else:
                self.closing.append(lambda: unfence(before))
        self.prober(self.plan.limits).warm_up()
        trim_heap()

    def audit(self, runtime: Runtime) -> None:
        """Compare plan and device once more, then seal: an owner that declared nothing is reported from now on."""
        runtime.settle("audit")
        reset_peak()
        self.ledger.seal()

    # -- questions and pieces ----------------------------------------------------------------------------------

    def card(self) -> Card:
        return host_card(self.driver.capacity_bytes, page_bytes=self.driver.capabilities().page_bytes)

    def limit_knobs(self) -> LimitKnobs:
        """What was asked, with the host device's own defaults for what was left open."""
        asked = self.options.limit_knobs
        batch, tokens = asked.max_batch_size, asked.max_num_tokens
        if not batch.is_set:
            rows = min(HOST_BATCH_SIZE, tokens.or_else(HOST_BATCH_SIZE))
            batch = Setting(rows, None, Origin.DEFAULT, "host device")
        if not tokens.is_set:
            tokens = Setting(max(HOST_NUM_TOKENS, batch.or_else(1)), None, Origin.DEFAULT, "host device")
        return replace(asked, max_batch_size=batch, max_num_tokens=tokens)

    def probe_limits(self) -> Limits:
        """The limits in force, but sequences no longer than a full step: the probes need no more scratch than that."""
        limits, _ = resolve_limits(self.config, self.limit_knobs())
        return replace(limits, max_seq_len=min(limits.max_seq_len, limits.max_num_tokens + 1))

    def refuse_hopeless(self) -> None:
        """Before a byte is read: weights that cannot fit whatever the probes would show. The planner tells the sum."""
        free, _ = self.driver.mem_info()
        if round_up(self.weights.total_bytes, self.driver.capabilities().page_bytes) > free:
            plan_without_device(
                self.config,
                card=self.card(),
                knobs=self.options.knobs,
                limit_knobs=self.limit_knobs(),
                dtype=self.dtype,
                rank=self.rank,
                backend=self.options.attention,
            )

    def require_same_dtype(self, layout: KVLayout) -> None:
        kv_dtype = layout.groups[0].parts[0].dtype
        if kv_dtype != self.dtype:
            raise InvalidSetting(
                "kv_dtype",
                kv_dtype,
                f"attention backend {self.options.attention!r} needs keys in the dtype it computes in, {self.dtype}",
                remedy=f"leave --kv-dtype out, or run the whole model with --dtype {kv_dtype}",
            )

    def sampled(self, owner: str, line: LineKind) -> Account:
        return self.ledger.open(owner=owner, line=line, memory=MemoryKind.CPU, how=How.SAMPLED)

    def remainder(self, owner: str, line: LineKind) -> Quantity:
        """What the process holds and no account explains becomes ``owner``'s, measured here."""
        account = self.sampled(owner, line)
        own = self.driver.own_bytes()
        found = 0 if own is None else max(0, own - self.ledger.accounted_bytes)
        account.sampled(found)
        return Quantity.exact(
            round_up(found, ROUNDING_BYTES), Source.MEASURED, "held by the process and in no other account"
        )

    def arena(self, owner: str, line: LineKind, reserve_bytes: int) -> VirtualArena:
        arena = VirtualArena(self.stream, ledger=self.ledger, owner=owner, line=line, reserve_bytes=reserve_bytes)
        self.closing.append(arena.close)
        return arena

    def make_pool(self) -> None:
        """Addresses for the largest pool the device could hold, and the tensor over them; no memory yet."""
        layout = self.layout
        num_slabs = max(1, self.driver.capacity_bytes // layout.slab_bytes)
        self.pool_arena = self.arena("kv cache", LineKind.KV, num_slabs * layout.slab_bytes)
        part = layout.groups[0].parts[0]
        self.pool = typed_view(as_tensor(self.pool_arena), 0, (num_slabs, *part.shape), part.dtype)
        self.scratch_arena = self.arena("attention scratch", LineKind.SCRATCH, self.driver.capacity_bytes)
        self.backend = make_backend(self.options.attention, self.pool)

    def prober(self, limits: Limits) -> Prober:
        known = [self.pool, *self.model.parameters(), *self.model.buffers()]
        return Prober(self.executor, self.dispatcher, self.kv, limits=limits, known=known)

    def runner(self, limits: Limits, *, num_blocks: int) -> tuple[Executor, Dispatcher, KVManager]:
        """Scratch, managers and executor for ``limits`` over a pool of ``num_blocks``."""
        group = self.layout.groups[0]
        part = group.parts[0]
        declared = declare(
            self.options.attention,
            kv_heads=part.shape[-2],
            head_dim=part.shape[-1],
            kv_dtype=part.dtype,
            block_tokens=group.block_tokens,
        )
        scratch = ScratchArena(self.scratch_arena, declared, limits=limits, chip=self.chip)
        slots = SlotManager(limits.max_batch_size)
        kv = KVManager(
            BlockPool(num_blocks),
            block_tokens=group.block_tokens,
            max_seq_len=limits.max_seq_len,
            max_batch_size=limits.max_batch_size,
            slots=slots,
        )
        return Executor(self.model, self.backend, scratch), Dispatcher([slots, kv]), kv


def shown_name(model: str) -> str:
    """The name the planner gives the same model; empty for a folder, which then gives its own."""
    if Path(model).expanduser().exists():
        return ""
    return EMBEDDED[model.lower()][1] if model.lower() in EMBEDDED else model


def import_libraries(model_type: str) -> None:
    """Import what the engine will import anyway, so that none of it counts as the engine's memory."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    _ = AutoConfig, AutoModelForCausalLM, AutoTokenizer  # lazy attributes: touching them imports
    importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")


def available_memory() -> int:
    """Host memory that can be taken now, in bytes. Raises ``InvalidSetting`` where the system does not tell."""
    found = host_memory().available_bytes
    if found is None:
        raise InvalidSetting("memory", None, "not given, and this system does not tell", remedy="give --memory 4GiB")
    return found
