"""Start-up: load, probe, measure, plan, build, close, audit, seal. Read top to bottom, it is the order of events.

The pool is sized last, from what is really left: its addresses are reserved for the largest conceivable size before
the probes, a floor of it is mapped for them, and the planned size is mapped once the plan is known.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from tonnage.attention import make_backend
from tonnage.buffers import BufferManager
from tonnage.buffers.torch_view import as_tensor, typed_view
from tonnage.config import Limits
from tonnage.costs.activations import SAMPLER_TILE_ELEMENTS
from tonnage.device.host import HostDriver
from tonnage.engine.compiled import compile_layers
from tonnage.engine.core import Engine
from tonnage.engine.executor import Executor
from tonnage.engine.faults import release_frames
from tonnage.engine.host_site import STEPS, HostSite
from tonnage.engine.interrupts import deferred_interrupts
from tonnage.engine.managers import BlockStore, Managers
from tonnage.engine.options import EngineOptions
from tonnage.engine.probe import Prober, trial_blocks
from tonnage.engine.random_weights import fill_random
from tonnage.engine.runtime import DeviceRuntime
from tonnage.engine.sampling import Sampler
from tonnage.engine.site import Site
from tonnage.engine.stages import StageMonitor
from tonnage.engine.target import Target
from tonnage.engine.weights import build_skeleton, load_shards, place_parameters
from tonnage.errors import DoesNotFit
from tonnage.layout import penalty_table_bytes
from tonnage.resources.mover import DeviceMover
from tonnage.resources.transfers import TransferBudget, measure_rate
from tonnage.terms import LineKind, Measured, MemoryKind, Quantity, worst_bytes
from tonnage.units import MiB, format_bytes, round_up
from tonnage.workspace import ScratchArena

#: Owner of the tables that count tokens for penalties; they are planned, and allocated by the first request with any.
PENALTIES = "penalties"
#: What no line explains may be this much, or 3 % of the device if that is more, before the plan carries a warning.
UNATTRIBUTED_BYTES = 32 * MiB


def start(
    options: EngineOptions,
    *,
    on_stage: Callable[[str], None] | None = None,
    make_driver: Callable[[int], HostDriver] = HostDriver,
) -> Engine:
    """Build an engine inside its memory plan. ``on_stage`` hears the name of each stage as it begins.

    ``make_driver`` opens the device from its capacity in bytes; wrapping it injects faults.

    Raises ``UserError`` (``DoesNotFit``, ``ModelNotFound`` ...) for what the user can mend, ``StartupError`` with
    stage, history and remedy for anything else; whatever was allocated is given back either way.
    """
    on_stage = on_stage or (lambda _: None)
    on_stage("model")
    target = Target.read(options)
    on_stage("imports")
    _import_libraries(target.config.model_type)
    site = _open(target, make_driver)
    startup = _Startup(target, site, on_stage)
    try:
        with site.active():
            return startup.run()
    except BaseException as error:
        with deferred_interrupts():
            startup.abandon(error)
        raise


def _open(target: Target, make_driver: Callable[[int], HostDriver]) -> Site:
    """The device that was asked for, with host memory for evicted blocks beside it."""
    options, host_bytes, slab_bytes = target.options, target.options.host_kv_bytes, target.kv.slab_bytes
    if target.device_kind == "host":
        return HostSite(
            options.memory_bytes,
            index=target.rank.device,
            make_driver=make_driver,
            host_kv_bytes=host_bytes,
            slab_bytes=slab_bytes,
        )
    from tonnage.engine.cuda_site import CudaSite

    site = CudaSite(target.rank.device)
    try:
        if host_bytes:
            site.open_host_pool(asked_bytes=host_bytes, slab_bytes=slab_bytes, also_needed_bytes=0)
    except BaseException:
        site.close()
        raise
    return site


class _Startup:
    """What start-up holds between its stages."""

    def __init__(self, target: Target, site: Site, on_stage: Callable[[str], None]) -> None:
        self.target, self.site = target, site
        self.told: tuple[str, ...] = ()  # of the boundary, for the report
        self.monitor = StageMonitor(site.ledger, site.own_bytes, on_stage)

    def run(self) -> Engine:
        with self.stage("skeleton", remedy="check the model folder; its config, tokenizer and weights belong together"):
            self.build_skeleton()
        with self.stage("weights", remedy="give more --memory, or a smaller --dtype"):
            self.load_weights()
        with self.stage("probe", remedy="lower --max-num-tokens or --max-batch-size, or give more --memory"):
            measured = self.measure()
        with self.stage("plan", remedy="report this as a defect"):
            self.plan = self.target.plan(self.site.card, measured, claims=self.claims)
            self.plan = self.target.with_head(self.plan)
        with self.stage("build", remedy="give more --memory, or raise --keep-free-bytes"):
            runtime = self.build()
        with self.stage("close", remedy="raise --keep-free-bytes, or lower --max-num-tokens"):
            self.close_boundary()
        with self.stage("audit", remedy="report this as a defect"):
            self.audit(runtime)
        return Engine(runtime, self.text, self.monitor.records)

    def abandon(self, error: BaseException) -> None:
        """Give everything back after a failure. The frames in its traceback hold tensors: they are emptied first."""
        release_frames(error)
        for name in ("model", "pool", "backend", "executor"):
            self.__dict__.pop(name, None)
        self.site.close()

    def stage(self, name: str, *, remedy: str) -> AbstractContextManager[None]:
        return self.monitor.stage(name, remedy=remedy)

    # -- the stages, in order ------------------------------------------------------------------------------------

    def build_skeleton(self) -> None:
        self.text = self.target.text()
        self.model = build_skeleton(self.target.folder, self.target.dtype, device=self.site.torch_device)
        self.context = self.site.remainder("context", LineKind.CONTEXT)

    def load_weights(self) -> None:
        self.target.refuse_hopeless(self.site.card)
        layout = self.target.weights
        arena = self.site.arena("weights", LineKind.WEIGHTS, reserve_bytes=layout.total_bytes)
        self.site.require_available(layout.total_bytes, "the weights")
        with deferred_interrupts():
            arena.commit(layout.total_bytes)
        views = place_parameters(self.model, layout, as_tensor(arena), self.target.family)
        if self.target.options.random_weights:
            fill_random(views)
        else:
            load_shards(self.target.folder, views, experts=self.target.family.experts)

    def measure(self) -> Measured:
        """Reserve the pool's addresses, map a floor of it, run the probe stages."""
        self.reserve_pool()
        limits, layout = self.target.probe_limits(), self.target.kv
        num_blocks = trial_blocks(limits, layout)
        scratch_bytes = worst_bytes(self.target.scratch(), limits, self.site.chip)
        growth = (
            num_blocks * layout.slab_bytes + scratch_bytes + self.target.step_bytes(limits) + self.table_bytes(limits)
        )
        self.require_room(growth, limits)
        with deferred_interrupts():
            self.pool_arena.commit(num_blocks * layout.slab_bytes)
            self.make_executor(limits)
        with self.prober(limits, num_blocks=num_blocks) as prober:
            prober.warm_up()
            graphs = self.capture()
            stages = prober.measure()
        self.require_room(max(stage.reserved.bytes for stage in stages), limits)
        return Measured(
            rank=self.target.rank,
            device_bytes=self.site.capacity_bytes,
            weights=self.target.weights.quantity(),
            context=self.context,
            libraries=self.site.remainder("libraries", LineKind.LIBRARIES),
            stages=stages,
            graphs=graphs,
            foreign_bytes=self.site.foreign(),
            trial_pool_bytes=self.pool_arena.committed_bytes,
            readings=(self.site.read("probe"),),
        )

    def capture(self) -> Quantity | None:
        """Graphs of decodes, where there are to be any, and what they keep."""
        sizes = self.target.limits.graph_batch_sizes
        if not sizes:
            return None
        self.executor.prepare_graphs(sizes, self.target.limits)
        assert self.executor.graphs is not None
        return self.site.captured(self.executor.graphs.capture)

    def build(self) -> DeviceRuntime:
        """Map the pool to its planned size and make what runs on it; what the probes used is dropped."""
        plan, ledger = self.plan, self.site.ledger
        with deferred_interrupts():
            if self.executor.graphs is None:
                for arena in (self.pool_arena, self.scratch_arena):
                    arena.decommit(0)  # the probes may have needed more of a small device than the plan gives
                self.make_executor(plan.limits)
            ledger.expect({kind: plan.bytes_of(kind) for kind in LineKind})
            self.site.reset_peak()
            self.site.require_available(plan.kv.bytes - self.pool_arena.committed_bytes, "the KV cache")
            self.pool_arena.commit(plan.kv.bytes)
        managers = self.managers(plan.limits, self.block_store())
        tables = ledger.open(owner="kv tables", line=LineKind.TABLES, memory=MemoryKind.CPU)
        tables.add(managers.kv.num_bytes, managers.kv.num_bytes)
        return DeviceRuntime(
            plan=plan,
            vocab_size=self.target.config.vocab_size,
            site=self.site,
            managers=managers,
            chunking=self.target.chunking,
            executor=self.executor,
            steps_ahead=int(self.target.options.is_ahead),
        )

    def close_boundary(self) -> None:
        """From here on steps cannot take more than was planned for them; a full step of each kind proves that they
        need not."""
        options, cap = self.target.options, self.target.options.knobs.total_bytes.value
        with self.prober(self.plan.limits, num_blocks=self.plan.kv.num_slabs) as prober:
            if self.site.is_capped_by_use:
                prober.warm_up()
            if options.fence:
                steps = self.plan.bytes_of(LineKind.TRANSIENT)
                self.told += self.site.close_boundary(total_bytes=cap, step_bytes=steps)
            prober.warm_up()
        self.site.trim()

    def audit(self, runtime: DeviceRuntime) -> None:
        """Compare plan and device once more, then seal: an owner that declared nothing is reported from now on."""
        runtime.settle("audit")
        host = () if self.site.host_pool is None else (self.site.host_pool.told(), *self.site.host_pool.warnings)
        runtime.plan = replace(self.plan, warnings=(*self.plan.warnings, *host, *self.told, *self.deviations()))
        self.site.reset_peak()
        self.site.ledger.seal(declared=[STEPS, PENALTIES])

    def deviations(self) -> list[str]:
        """A sentence for every line that holds more than the plan gave it, and for what no line explains."""
        allowed = max(UNATTRIBUTED_BYTES, self.plan.device_bytes * 3 // 100)
        told = []
        for row in self.site.ledger.audit():
            over = (row.error_bytes or 0) - (allowed if row.line is LineKind.UNATTRIBUTED else 0)
            if over > 0:
                told.append(
                    f"{row.line} holds {format_bytes(row.actual_bytes or 0)}, planned {format_bytes(row.planned_bytes)}"
                )
        return told

    # -- what the stages are made of -----------------------------------------------------------------------------

    def reserve_pool(self) -> None:
        """Addresses for the largest pool the device could hold, and the tensor over them; no memory yet."""
        layout, capacity = self.target.kv, self.site.capacity_bytes
        num_slabs = max(1, capacity // layout.slab_bytes)
        self.pool_arena = self.site.arena("kv cache", LineKind.KV, reserve_bytes=num_slabs * layout.slab_bytes)
        self.scratch_arena = self.site.arena("attention scratch", LineKind.SCRATCH, reserve_bytes=capacity)
        part = layout.groups[0].parts[0]
        self.pool = typed_view(as_tensor(self.pool_arena), 0, (num_slabs, *part.shape), part.dtype)
        self.backend = make_backend(self.target.options.attention_backend, self.pool)

    def table_bytes(self, limits: Limits) -> int:
        """Penalty tables, which the probes use and give back."""
        if not limits.penalties:
            return 0
        return penalty_table_bytes(max_batch_size=limits.max_batch_size, vocab_size=self.target.config.vocab_size)

    def make_executor(self, limits: Limits) -> None:
        """Scratch and executor for ``limits``."""
        scratch = ScratchArena(self.scratch_arena, self.target.scratch(), limits=limits, chip=self.site.chip)
        tile = SAMPLER_TILE_ELEMENTS[self.target.device_kind]
        sampler = Sampler(self.target.config.vocab_size, tile_elements=tile)
        if self.target.device_kind == "cuda" and self.target.options.compile:
            compile_layers(self.model)
        self.executor = Executor(
            self.model,
            self.backend,
            scratch,
            sampler,
            device=self.site.torch_device,
            max_logits_rows=limits.max_logits_rows,
            num_slots=limits.max_batch_size,
        )

    def managers(self, limits: Limits, store: BlockStore) -> Managers:
        return Managers.make(
            limits,
            store,
            vocab_size=self.target.config.vocab_size,
            admission=self.target.options.knobs.admission.value,
            buffers=BufferManager(self.site.stream, ledger=self.site.ledger, owner=PENALTIES),
        )

    def block_store(self) -> BlockStore:
        """The planned pool and the host's, and what moves blocks within them and between them at the rate measured."""
        layout, kv, host = self.target.kv, self.plan.kv, self.site.host_pool
        mover = DeviceMover(self.pool_arena, host, slab_bytes=layout.slab_bytes, stream=self.site.stream)
        self.site.closing(mover.close)
        budget = None
        if host is not None:
            budget = TransferBudget(
                slab_bytes=layout.slab_bytes,
                bytes_per_second=measure_rate(mover).least,
                slice_s=self.target.options.transfer_slice_s,
            )
        return BlockStore(
            layout=layout,
            num_slots=kv.num_slabs,
            head_slots=self.target.head_slots,
            num_host_slots=0 if host is None else host.num_slots,
            mover=mover,
            budget=budget,
        )

    def require_room(self, growth_bytes: int, limits: Limits) -> None:
        """Refuse where a full step does not fit into the cap beside what is there: the cap holds for probes too."""
        self.site.trim()
        need = (self.site.own_bytes() or 0) + growth_bytes
        have = self.target.room_bytes(self.site.card)
        if need <= have:
            return
        self.target.refuse(self.site.card)
        limits_told = f"{limits.max_num_tokens} tokens and {limits.max_batch_size} sequences"
        raise DoesNotFit(
            f"A full step of {limits_told} does not fit into the cap beside the weights",
            need_bytes=need,
            have_bytes=have,
            need=f"{format_bytes(need)}, of which {format_bytes(growth_bytes)} for the step",
            have=f"{format_bytes(have)}, {format_bytes(need - have)} short",
            remedies=["lower max_num_tokens", f"give {round_up(need - have, MiB) // MiB}MiB more memory"],
        )

    @contextmanager
    def prober(self, limits: Limits, *, num_blocks: int) -> Iterator[Prober]:
        """A prober with managers of its own: what its requests take, penalty tables included, is given back."""
        known = [self.pool, *self.model.parameters(), *self.model.buffers()]
        store = BlockStore(layout=self.target.kv, num_slots=num_blocks)
        managers = self.managers(replace(limits, prefix_caching=False), store)
        try:
            self.claims = [
                claim
                for claim in managers.dispatcher.claims(self.target.limits)
                # Beside a card the books of the cache lie in host memory; what the card has of them the planner knows.
                if self.site.memory is MemoryKind.CPU or claim.owner != managers.kv.name
            ]
            vocab_size = self.target.config.vocab_size
            yield Prober(self.executor, managers, self.site, limits=limits, vocab_size=vocab_size, known=known)
        except BaseException as error:
            release_frames(error)  # those of an interrupted step hold tensors over what is closed now
            raise
        finally:
            managers.dispatcher.close()


def _import_libraries(model_type: str) -> None:
    """Import what the engine will import anyway, so that none of it counts as the engine's memory."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    _ = AutoConfig, AutoModelForCausalLM, AutoTokenizer  # lazy attributes: touching them imports
    module = model_type_to_module_name(model_type)
    importlib.import_module(f"transformers.models.{module}.modeling_{module}")
