"""The value types that pass between rooms: what was measured, what was declared, and the plan that comes out.

All are frozen and keyword-only. Bytes and tokens are ``int``; ``device_bytes`` is the driver's total
(``cuMemGetInfo``; for the host device, its capacity).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from tonnage.config import Knobs, LimitKnobs, Limits
from tonnage.layout import KVLayout

PLAN_SCHEMA = "tonnage.plan/1"
RUN_SCHEMA = "tonnage.run/1"


class Source(StrEnum):
    """How a number came to be known; the report prints it beside the number."""

    MEASURED = "measured"  # by a probe on this device
    COUNTED = "counted"  # by our own allocator
    DECLARED = "declared"  # by the backend that will allocate it
    DERIVED = "derived"  # exact arithmetic on the model's config
    CATALOGUE = "catalogue"  # from the table of cards
    PREDICTED = "predicted"  # a closed form, with low and high
    SIMULATED = "simulated"  # counted on a forward of fake tensors, with low and high
    ASKED = "asked"  # the user said so
    ASSUMED = "assumed"  # nothing better is known


class Lifetime(StrEnum):
    RESIDENT = "resident"
    STEP = "step"  # lives inside one step: different stages take the maximum
    LAZY = "lazy"  # first allocated after start-up
    STARTUP = "startup"


class Maker(StrEnum):
    """Who calls the allocator."""

    ARENA = "arena"
    TORCH = "torch"
    DRIVER = "driver"
    LIBRARY = "library"
    FOREIGN = "foreign"


class LineKind(StrEnum):
    WEIGHTS = "weights"
    KV = "kv"
    SCRATCH = "scratch"
    TRANSIENT = "transient"
    GRAPHS = "graphs"
    CONTEXT = "context"
    LIBRARIES = "libraries"
    TABLES = "tables"
    FOREIGN = "foreign"
    KEEP_FREE = "keep_free"
    ROUNDING = "rounding"
    UNATTRIBUTED = "unattributed"
    SLACK = "slack"


class MemoryKind(StrEnum):
    """The kinds of memory a BufferManager hands out."""

    GPU = "gpu"
    GPU_SYNC = "gpu_sync"
    CPU = "cpu"
    PINNED = "pinned"
    PINNED_POOL = "pinned_pool"
    MANAGED = "managed"
    IPC_NVLS = "ipc_nvls"


class How(StrEnum):
    """How the ledger knows an account."""

    COUNTED = "counted"
    SAMPLED = "sampled"
    REMAINDER = "remainder"


class ReferenceSide(StrEnum):
    """How the reference policy charges a claim: added to the measured peak, or deducted from the pool."""

    PEAK = "peak"
    POOL = "pool"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank of a parallel engine; every measured number belongs to one. Sizes count ranks, ``index`` from 0.

    partition   layers of every pipeline stage where they are named; empty: an even split, the first stages take more
    """

    index: int = 0
    size: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    attention_dp: bool = False
    device: int = 0
    partition: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """A device as the formulas see it. ``sm`` is the compute capability times ten (90), 0 for a host."""

    name: str
    sm: int
    num_sms: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A number of bytes with its error bar and its origin; ``ref`` names the probe, formula or record."""

    bytes: int
    low: int
    high: int
    source: Source
    ref: str

    @classmethod
    def exact(cls, num_bytes: int, source: Source, ref: str) -> Quantity:
        return cls(bytes=num_bytes, low=num_bytes, high=num_bytes, source=source, ref=ref)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The shape of one forward, in tokens and rows.

    num_tokens        tokens computed (prefill and decode)
    prefill_tokens    those that belong to prefill chunks
    prefill_rows      sequences in prefill
    decode_rows       sequences that decode one token
    attended_tokens   sum over rows of the cached prefix plus the new tokens
    max_row_tokens    the longest row's attended tokens
    logits_rows       rows the vocabulary projection runs for
    captured          whether a CUDA graph replays it
    """

    num_tokens: int = 0
    prefill_tokens: int = 0
    prefill_rows: int = 0
    decode_rows: int = 0
    attended_tokens: int = 0
    max_row_tokens: int = 0
    logits_rows: int = 0
    captured: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """A declaration as an affine law: fixed + per_row*rows + per_token*tokens + per_attended_token*attended, bytes."""

    fixed: int
    per_row: int
    per_token: int
    per_attended_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """A cost that does not depend on the number of KV tokens."""

    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PerBlock:
    """A cost paid once for every KV block (reference counts, say)."""

    bytes_per_block: int


@dataclass(frozen=True, kw_only=True)
class Scratch(ABC):
    """A backend's declaration of its scratch memory. Subclasses live in ``declarations/NAME.py`` and need no torch.

    ``bytes_at`` is the only formula: the planner reserves by it and the arena serves by it, so they cannot drift.

    backend, name  who asks, and for what
    share          declarations with the same key use one arena: the maximum counts, not the sum
    served         our arena hands it out and refuses to grow past it; False: a library allocates it, audit only
    captured       lives inside CUDA graphs, so its address must not move
    chunk_bounded  the backend cuts its work so that the need stays below ``bytes_at`` at the limits
    keeps_state    state survives between steps: never lent, never shrunk
    zeroed_bytes   leading bytes that must be zero before first use
    alignment      in bytes, a power of two
    source         where the formula comes from
    """

    backend: str
    name: str
    share: str
    served: bool = True
    captured: bool = False
    chunk_bounded: bool = True
    keeps_state: bool = True
    zeroed_bytes: int = 0
    alignment: int = 256
    source: str

    @abstractmethod
    def bytes_at(self, shape: StepShape, chip: Chip) -> int:
        """Bytes needed for one step of ``shape`` on ``chip``; never decreases when any field of the shape grows."""

    def rates(self, limits: Limits, chip: Chip) -> Rates:
        """The affine law that ``bytes_at`` follows at the limits, read off by differences (so it cannot drift).

        It matters for declarations that are not chunk-bounded: they grow with the pool by it. A chunk-bounded one is
        paid in full by ``bytes_at``; it may be saturated at the limits, and then shows rates of 0 or too small.
        """
        rows, tokens = limits.max_batch_size, limits.max_num_tokens
        # A long row stays below this, so differences see the slope and no saturation.
        attended = limits.max_seq_len

        def at(num_rows: int, num_tokens: int, attended_tokens: int) -> int:
            shape = StepShape(
                num_tokens=num_tokens,
                prefill_tokens=num_tokens,
                prefill_rows=num_rows,
                attended_tokens=attended_tokens,
                max_row_tokens=min(attended_tokens, limits.max_seq_len),
            )
            return self.bytes_at(shape, chip)

        fixed = at(0, 0, 0)
        return Rates(
            fixed=fixed,
            per_row=-(-(at(rows, 0, 0) - fixed) // rows),
            per_token=-(-(at(0, tokens, 0) - fixed) // tokens),
            per_attended_token=-(-(at(0, 0, attended) - fixed) // attended),
        )


def worst_shape(limits: Limits) -> StepShape:
    """The largest value of every field at once: no admissible step exceeds it in any of them.

    ``Scratch.bytes_at`` never decreases, so bytes at this shape are enough for every step. Rows may all be prefill
    or all decode, so both counts stand at their maximum although one step cannot have both.
    """
    rows = min(limits.max_batch_size, limits.max_num_tokens)
    return StepShape(
        num_tokens=limits.max_num_tokens,
        prefill_tokens=limits.max_num_tokens,
        prefill_rows=rows,
        decode_rows=rows,
        attended_tokens=rows * limits.max_seq_len,
        max_row_tokens=limits.max_seq_len,
        logits_rows=limits.max_logits_rows,
        captured=bool(limits.graph_batch_sizes),
    )


def worst_bytes(declarations: Iterable[Scratch], limits: Limits, chip: Chip) -> int:
    """Bytes of one arena that serves every declaration in turn at the limits: their maximum, 0 for none."""
    shape = worst_shape(limits)
    return max((declaration.bytes_at(shape, chip) for declaration in declarations), default=0)


Cost: TypeAlias = Fixed | PerBlock | Scratch


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Memory that someone will take later, said before the pool is sized.

    stage          STEP claims only: the same stage adds, different stages take the maximum
    share          claims with the same key count once, at their maximum
    probed_bytes   how much of it the measured peak already holds, so that nothing is counted twice
    reference_side how the reference policy charges it: data, never derived from the lifetime
    applies        False: named in the report with ``because``, charged nothing
    low, high      error bar in bytes around the cost; None when it is exact
    """

    name: str
    owner: str
    line: LineKind
    cost: Cost
    lifetime: Lifetime
    maker: Maker
    source: Source
    reason: str
    ref: str = ""
    stage: str | None = None
    share: str | None = None
    probed_bytes: int = 0
    reference_side: ReferenceSide | None = None
    lendable: bool = False
    applies: bool = True
    because: str = ""
    can_disable: bool = False
    low: int | None = None
    high: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A named share of the device, >= 0. Top-level lines are a partition: they sum exactly to ``device_bytes``.

    ``children`` detail a line. Children of the transient line do not coexist: the line is their maximum. Two lines
    may share a kind: what the allocator adds to the transient tensors is the line "fragmentation", also TRANSIENT.
    """

    name: str
    owner: str
    kind: LineKind
    bytes: int
    low: int
    high: int
    lifetime: Lifetime
    maker: Maker
    source: Source
    ref: str
    reason: str
    children: tuple[Line, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One operation of the derivation: ``before`` op ``operand`` gives ``after``; bytes unless ``op`` says tokens."""

    name: str
    op: str
    reason: str
    before: int
    operand: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cap:
    """A limit on the pool: ``kv_bytes`` it would allow, the ``setting`` it comes from, and whether it binds.

    ``reason`` names the failure that it prevents and the cost that it accepts.
    """

    name: str
    kv_bytes: int
    setting: str
    binding: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotCharged:
    """A claim that costs this plan nothing: ``bytes`` it would have been, and ``because`` why it is not.

    ``switched_off``: the user did that, and ``reason`` says what requests lose by it; else what triggers the claim is
    not there.
    """

    name: str
    owner: str
    bytes: int
    because: str
    reason: str = ""
    switched_off: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPool:
    """The pool in blocks. ``bytes`` = ``num_slabs`` * ``layout.slab_bytes``; page rounding is a line of its own.

    tokens are counted as sequences of max_seq_len hold them; windows show more of as many tokens in shorter sequences,
    so fewer of theirs fit. guaranteed_tokens: with every loan called in. reachable_tokens: with none called in (scratch
    lent to the cache).
    """

    layout: KVLayout
    num_slabs: int
    bytes: int
    tokens: int
    guaranteed_tokens: int
    reachable_tokens: int


#: Why a host tier that was asked for is not taken.
IDLE_TIER = "no prefixes are cached, so nothing is evicted that would be looked for again"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """What the plan asks of host memory beside the device, in bytes, for all ranks together but where a rank is named.

    kv_bytes     the host tier as it was asked for
    taken_bytes  what this rank takes of it: whole slabs of its share, none where no prefixes are cached
    """

    kv_bytes: int = 0
    taken_bytes: int = 0
    pinned_bytes: int = 0
    disk_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """One rank's partition of its device, with the derivation, the caps and the pool.

    max_concurrency: sequences of ``limits.max_seq_len`` tokens that the pool holds at once (whole ones).
    limit_knobs: what was asked about shapes, so that reports can say where each of ``limits`` came from.
    not_charged: claims that were considered and cost nothing here, each with the reason.
    policy: "own", or "reference" for TensorRT-LLM's derivation.
    stages: of a step, as they were measured or predicted, of which the largest is in the lines.
    """

    schema: str = PLAN_SCHEMA
    rank: Rank
    device_name: str
    device_bytes: int
    model_name: str
    lines: tuple[Line, ...]
    steps: tuple[Step, ...]
    caps: tuple[Cap, ...]
    kv: KVPool
    host: HostPlan
    attended_cap: int | None
    max_concurrency: int
    knobs: Knobs
    limits: Limits
    fingerprint: str
    warnings: tuple[str, ...] = ()
    limit_knobs: LimitKnobs = field(default_factory=LimitKnobs)
    not_charged: tuple[NotCharged, ...] = ()
    policy: str = "own"
    stages: tuple[StagePeak, ...] = ()

    def line(self, kind: LineKind) -> Line | None:
        """The first top-level line of that kind, or None where the plan has none."""
        return next((line for line in self.lines if line.kind == kind), None)

    def bytes_of(self, kind: LineKind) -> int:
        """Bytes of all top-level lines of that kind."""
        return sum(line.bytes for line in self.lines if line.kind == kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One look at the device, its fields always read in this order.

    own_bytes is what this process holds there; ``own_source`` says how it is known: "nvml" asked the driver of this
    very process, "inferred" took what vanished from free memory since the device was opened, whoever took it. On the
    host device the torch fields are 0 (its CPU allocator keeps no statistics) and ``own_bytes`` is anonymous plus
    shared memory since the baseline; ``peak_own_bytes`` is the highest value since the last reset, where the kernel
    keeps one. ``arena_bytes`` is what the ledger's accounts hold, ``pool_reserved_bytes`` what our pool has taken.
    """

    phase: str
    at_ns: int
    total_bytes: int
    free_bytes: int
    own_bytes: int | None
    own_source: str
    peak_own_bytes: int | None = None
    torch_allocated: int = 0
    torch_reserved: int = 0
    torch_peak_allocated: int = 0
    torch_peak_reserved: int = 0
    arena_bytes: int = 0
    pool_reserved_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePeak:
    """One probe: bytes live at the peak (``allocated``) and bytes the allocator took for it (``reserved``).

    ``uncompiled_bytes``: live at the peak where every operation runs by itself, which compiled layers stay below; None
    where nobody looked.
    """

    stage: str
    shape: StepShape
    allocated: Quantity
    reserved: Quantity
    compiled: bool = False
    uncompiled_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The same type comes from a real start, from closed forms (planning with no device), and from a file."""

    rank: Rank
    device_bytes: int
    weights: Quantity
    context: Quantity
    libraries: Quantity
    stages: tuple[StagePeak, ...]
    graphs: Quantity | None
    foreign_bytes: Quantity
    trial_pool_bytes: int = 0
    readings: tuple[Reading, ...] = ()
    fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """A frozen view of one account. ``physical_bytes`` counts page rounding, ``planned_bytes`` is the plan's line."""

    owner: str
    line: LineKind
    tag: str
    memory: MemoryKind
    device: int
    how: How
    requested_bytes: int
    physical_bytes: int
    high_water_bytes: int
    released_bytes: int
    num_live: int
    first_phase: str
    high_water_phase: str
    planned_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEvent:
    """One change of one account; the ring of these gives history, timeline and the first-use audit.

    delta   physical bytes taken; below zero, given back
    stream  handle of the stream that the memory was asked for on, None where there was none
    line    of the account, None in files that say nothing of it
    """

    at_ns: int
    owner: str
    delta: int
    phase: str
    step: int
    sealed: bool
    stream: int | None = None
    line: LineKind | None = None
    tag: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The ledger at one moment. ``unattributed`` = ``own`` - physical bytes of all accounts on the device; may be < 0.

    foreign_low, foreign_high  the least and the most that others were seen to hold; None where nobody looked
    free_low                   the least that was seen free on the device; None where nobody looked
    host                       bytes of accounts in host memory where the device is not the host: in none of the others
    """

    phase: str
    entries: tuple[LedgerEntry, ...]
    own: int | None
    own_source: str
    foreign: int
    free: int
    unattributed: int | None
    first_uses: tuple[LedgerEvent, ...] = field(default=())
    foreign_low: int | None = None
    foreign_high: int | None = None
    host: int = 0
    free_low: int | None = None
