"""Start-up: load, probe, measure, plan, build, close, audit, seal. Read top to bottom, it is the order of events.

The pool is sized last, from what is really left: its addresses are reserved for the largest conceivable size before
the probes, a floor of it is mapped for them, and the planned size is mapped once the plan is known. What was measured
can be kept in a file, with which a later start is spared the probes. Where the device has no virtual memory the pool
is sized before the graphs are captured, with what they are declared to take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from tonnage.buffers import BufferManager, Restore
from tonnage.buffers.torch_view import as_tensor
from tonnage.config import Limits
from tonnage.costs.activations import SAMPLER_TILE_ELEMENTS
from tonnage.device.host import HostDriver
from tonnage.engine.collector import freeze
from tonnage.engine.compiled import compile_layers
from tonnage.engine.core import Engine
from tonnage.engine.executor import Executor
from tonnage.engine.faults import release_frames
from tonnage.engine.host_site import STEPS
from tonnage.engine.interrupts import deferred_interrupts
from tonnage.engine.managers import BlockStore, Managers
from tonnage.engine.opening import import_libraries, open_site, starting_alone
from tonnage.engine.options import EngineOptions
from tonnage.engine.plan_file import WOBBLE_BYTES, PlanFile, agreed, key_of
from tonnage.engine.pool_memory import PoolMemory
from tonnage.engine.probe import Prober, trial_blocks
from tonnage.engine.random_weights import fill_random
from tonnage.engine.runtime import DeviceRuntime
from tonnage.engine.sampling import Sampler
from tonnage.engine.site import WEIGHTS, Site
from tonnage.engine.stages import StageMonitor
from tonnage.engine.target import Target
from tonnage.engine.watch import Watch
from tonnage.engine.weights import build_skeleton, load_shards, place_parameters
from tonnage.errors import DoesNotFit, InputError
from tonnage.layout import penalty_table_bytes
from tonnage.report import StartFigures
from tonnage.resources.mover import DeviceMover
from tonnage.resources.transfers import TransferBudget, measure_rate
from tonnage.terms import LineKind, Measured, MemoryKind, Quantity, worst_bytes
from tonnage.units import MiB, format_bytes, round_up

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
    file = None if options.plan_file is None else PlanFile.read(options.plan_file)
    on_stage("imports")
    import_libraries(target.config.model_type)
    with starting_alone(target, on_stage) as told:
        site = open_site(target, make_driver)
        site.told += told
        startup = _Startup(target, site, on_stage, file)
        try:
            with site.active():
                return startup.run()
        except BaseException as error:
            with deferred_interrupts():
                startup.abandon(error)
            raise


class _Startup:
    """What start-up holds between its stages."""

    def __init__(
        self, target: Target, site: Site, on_stage: Callable[[str], None], file: PlanFile | None = None
    ) -> None:
        self.target, self.site, self.file = target, site, file
        self.is_short = False  # of what the plan file has
        self.monitor = StageMonitor(site.ledger, site.read, on_stage)
        self.watch = site.watch = Watch(site, interval_s=target.options.watch_s)

    def run(self) -> Engine:
        with self.stage("skeleton", remedy="check the model folder; its config, tokenizer and weights belong together"):
            self.build_skeleton()
        with self.stage("weights", remedy="give more --memory, or a smaller --dtype"):
            self.load_weights()
        with self.stage("probe", remedy="lower --max-num-tokens or --max-batch-size, or give more --memory"):
            self.measured = self.measure()
        with self.stage("plan", remedy="report this as a defect"):
            self.make_plan()
            self.first = self.plan, self.measured
        with self.stage("build", remedy="give more --memory, or raise --keep-free-bytes"):
            runtime = self.build()
        with self.stage("close", remedy="raise --keep-free-bytes, or lower --max-num-tokens"):
            self.close_boundary()
        with self.stage("audit", remedy="report this as a defect"):
            self.audit(runtime)
        engine = Engine(runtime, self.text, self.monitor.records)
        self.watch.restart()
        freeze(self.site)
        return engine

    def abandon(self, error: BaseException) -> None:
        """Give everything back after a failure. The frames in its traceback hold tensors: they are emptied first."""
        release_frames(error)
        for name in ("model", "memory", "executor"):
            self.__dict__.pop(name, None)
        self.site.close()

    def stage(self, name: str, *, remedy: str) -> AbstractContextManager[None]:
        return self.monitor.stage(name, remedy=remedy)

    # -- the stages, in order ------------------------------------------------------------------------------------

    def build_skeleton(self) -> None:
        self.watch.start()
        self.memory = PoolMemory(self.target, self.site)
        self.key = {} if self.file is None else key_of(self.target, self.site)
        self.text = self.target.text()
        self.model = build_skeleton(self.target.folder, self.target.dtype, device=self.site.torch_device)
        self.context = self.site.remainder("context", LineKind.CONTEXT)

    def load_weights(self) -> None:
        self.target.refuse_hopeless(self.site.card)
        layout = self.target.weights
        arena = self.site.arena(
            "weights", LineKind.WEIGHTS, reserve_bytes=layout.total_bytes, tag=WEIGHTS, restore=Restore.CPU
        )
        self.site.require_available(layout.total_bytes, "the weights")
        with deferred_interrupts():
            arena.commit(layout.total_bytes)
        views = place_parameters(self.model, layout, as_tensor(arena), self.target.family)
        if self.target.options.random_weights:
            fill_random(views)
        else:
            load_shards(self.target.folder, views, experts=self.target.family.experts)

    def measure(self) -> Measured:
        """Map a floor of the pool, run the probe stages."""
        limits, layout = self.target.probe_limits(), self.target.kv
        num_blocks = trial_blocks(limits, layout)
        scratch_bytes = worst_bytes(self.target.scratch(), limits, self.site.chip)
        growth = (
            num_blocks * layout.slab_bytes + scratch_bytes + self.target.step_bytes(limits) + self.table_bytes(limits)
        )
        self.require_room(growth, limits)
        with deferred_interrupts():
            self.memory.fill(num_blocks, limits)
            self.make_executor(limits)
        then = None if self.file is None else self.file.usable(self.key)
        with self.prober(limits, num_blocks=num_blocks) as prober:
            prober.warm_up()
            graphs = self.declared_graphs() if self.memory.is_static else self.capture()
            stages = prober.measure() if then is None else then.stages
        self.require_room(max(stage.reserved.bytes for stage in stages), limits)
        now = Measured(
            rank=self.target.rank,
            device_bytes=self.site.capacity_bytes,
            weights=self.target.weights.quantity(),
            context=self.context,
            libraries=self.site.remainder("libraries", LineKind.LIBRARIES),
            stages=stages,
            graphs=graphs,
            foreign_bytes=self.site.foreign(),
            trial_pool_bytes=self.memory.kv_bytes,
            readings=(self.site.read("probe"),),
        )
        if then is None:
            return now
        measured, told = agreed(then, now, keep_free_bytes=self.target.keep_free_bytes)
        self.is_short = bool(told)
        self.site.told += [told] if told else []
        return measured

    def make_plan(self) -> None:
        """The arithmetic, from what was measured."""
        plan = self.target.plan(self.site.card, self.measured, claims=self.claims)
        self.plan = self.target.with_head(plan)

    def follow_others(self) -> None:
        """Others may have taken memory since it was measured what they hold: then the pool is that much smaller."""
        planned, gone = self.measured.foreign_bytes, self.site.beyond_accounts_bytes()
        if gone - planned.bytes <= min(WOBBLE_BYTES, self.target.keep_free_bytes):
            return
        now = Quantity.exact(round_up(gone, MiB), planned.source, "what was gone when the pool was made, and not ours")
        self.measured = replace(self.measured, foreign_bytes=now)
        self.make_plan()
        more = format_bytes(now.bytes - planned.bytes)
        self.site.told.append(f"the pool is {more} smaller than what was measured allows: others took that meanwhile")

    def capture(self) -> Quantity | None:
        """Graphs of decodes, where there are to be any, and what they keep."""
        sizes = self.target.limits.graph_batch_sizes
        if not sizes:
            return None
        self.executor.prepare_graphs(sizes, self.target.limits)
        assert self.executor.graphs is not None
        return self.site.captured(self.executor.graphs.capture)

    def declared_graphs(self) -> Quantity | None:
        """What graphs are taken to keep where they are captured behind the pool."""
        why = self.site.driver.capabilities().reasons.get("vmm", "the device has none")
        self.site.told.append(f"the pool was sized before anything was captured, without virtual memory: {why}")
        return self.target.declared_graphs()

    def build(self) -> DeviceRuntime:
        """Map the pool to its planned size and make what runs on it; what the probes used is dropped."""
        self.follow_others()
        plan, ledger = self.plan, self.site.ledger
        has_graphs = self.executor.graphs is not None
        with deferred_interrupts():
            if not has_graphs:
                self.executor.close()
                self.memory.empty()  # the probes may have needed more of a small device than the plan gives
            ledger.expect({kind: plan.bytes_of(kind) for kind in LineKind})
            self.site.reset_peak()
            self.site.require_available(plan.kv.bytes - self.memory.kv_bytes, "the KV cache")
            self.memory.fill(plan.kv.num_slabs, plan.limits)
            if not has_graphs:
                self.make_executor(plan.limits)
        if self.memory.is_static:
            self.capture()
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
            steps = self.plan.bytes_of(LineKind.TRANSIENT)
            if self.site.is_capped_by_use:
                prober.warm_up()
            if options.torch_segments:
                self.site.route_steps(step_bytes=steps, try_out=prober.warm_up)
            if options.fence:
                self.site.told += self.site.close_boundary(total_bytes=cap, step_bytes=steps)
            with self.site.active():  # anew: memory may come from elsewhere by now
                prober.warm_up()
        self.site.trim()
        self.site.remember_steps()

    def audit(self, runtime: DeviceRuntime) -> None:
        """Compare plan and device once more, then seal: an owner that declared nothing is reported from now on."""
        runtime.settle("audit")
        self.site.ledger.own_is_known()
        runtime.plan_file = self.keep_figures()
        host = () if self.site.host_pool is None else (self.site.host_pool.told(), *self.site.host_pool.warnings)
        told = (*host, *self.site.told, *self.deviations())
        runtime.plan = replace(self.plan, warnings=(*self.plan.warnings, *told))
        self.site.reset_peak()
        self.site.ledger.seal(declared=[STEPS, PENALTIES])

    def keep_figures(self) -> str:
        """Write the plan file, where one was named and this start knows more than is in it; what became of it, in a
        sentence."""
        if self.file is None:
            return ""
        plan, measured = self.first
        told, is_known = self.file.told(self.key), self.file.usable(self.key) is not None
        if self.is_short or (is_known and self.file.plan == plan):
            return told
        try:
            self.file.write(plan, StartFigures(key=self.key, measured=measured))
        except InputError as error:  # no reason to give up an engine that is there
            return f"{told}, but it was not kept: {error}"
        return told

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

    def table_bytes(self, limits: Limits) -> int:
        """Penalty tables, which the probes use and give back."""
        if not limits.penalties:
            return 0
        return penalty_table_bytes(max_batch_size=limits.max_batch_size, vocab_size=self.target.config.vocab_size)

    def make_executor(self, limits: Limits) -> None:
        """Scratch and executor for ``limits``."""
        tile = SAMPLER_TILE_ELEMENTS[self.target.device_kind]
        sampler = Sampler(self.target.config.vocab_size, tile_elements=tile)
        if self.target.device_kind == "cuda" and self.target.options.compile:
            compile_layers(self.model)
        self.executor = Executor(
            self.model,
            self.memory.backend,
            self.memory.scratch(limits),
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
            steps_ahead=int(self.target.options.is_ahead),
            buffers=BufferManager(self.site.stream, ledger=self.site.ledger, owner=PENALTIES),
        )

    def block_store(self) -> BlockStore:
        """The planned pool and the host's, and what moves blocks within them and between them at the rate measured."""
        layout, kv, host = self.target.kv, self.plan.kv, self.site.host_pool
        mover = DeviceMover(self.memory.arena, host, slab_bytes=layout.slab_bytes, stream=self.site.stream)
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
        known = [self.memory.tensor, *self.model.parameters(), *self.model.buffers()]
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
