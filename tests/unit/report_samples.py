"""Plans and runs made by hand, for the tests of reports and of the command line."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from tonnage.config import Knobs, LimitKnobs, Limits, Setting
from tonnage.layout import KVGroup, KVGroupKind, KVLayout, KVOrder, Part
from tonnage.ledger import AuditRow
from tonnage.report import RunResult, StageRecord
from tonnage.terms import (
    Cap,
    HostPlan,
    How,
    KVPool,
    LedgerEntry,
    LedgerEvent,
    Lifetime,
    Line,
    LineKind,
    Maker,
    MemoryKind,
    MemoryPlan,
    Rank,
    Snapshot,
    Source,
    Step,
)  # fmt: skip
from tonnage.units import GiB, MiB

BLOCK_BYTES = 16 * 131072
DEVICE_BYTES = 80 * GiB


def line(kind: LineKind, num_bytes: int, **fields: object) -> Line:
    given: dict[str, object] = {
        "name": kind.value, "owner": "test", "low": num_bytes, "high": num_bytes, "lifetime": Lifetime.RESIDENT,
        "maker": Maker.ARENA, "source": Source.DERIVED, "ref": "", "reason": "",
    }  # fmt: skip
    return Line(kind=kind, bytes=num_bytes, **(given | fields))  # type: ignore[arg-type]


def layout(*, block_bytes: int = BLOCK_BYTES, block_tokens: int = 16) -> KVLayout:
    part = Part(name="k", dtype="bfloat16", shape=(32, block_tokens, 8, 128), offset_bytes=0)
    group = KVGroup(
        name="full", kind=KVGroupKind.FULL, layers=tuple(range(32)), window=None, block_tokens=block_tokens,
        block_bytes=block_bytes, parts=(part, replace(part, name="v", offset_bytes=part.num_bytes)),
    )  # fmt: skip
    return KVLayout(slab_bytes=block_bytes, order=KVOrder.BLOCK_MAJOR, groups=(group,))


def make_plan(*, kv_blocks: int = 30_000, weights: int = 14 * GiB + 980 * MiB, **fields: object) -> MemoryPlan:
    """Llama-3.1-8B on 80 GiB, or nearly: enough for every part of a report to have something to show."""
    kv = kv_blocks * BLOCK_BYTES
    prefill = line(LineKind.TRANSIENT, 912 * MiB, name="prefill", lifetime=Lifetime.STEP)
    decode = line(LineKind.TRANSIENT, 77 * MiB, name="decode", lifetime=Lifetime.STEP)
    taken = [
        line(LineKind.WEIGHTS, weights, reason="291 tensors in bfloat16, counted from the shapes in config.json"),
        line(LineKind.CONTEXT, 520 * MiB, low=400 * MiB, high=640 * MiB, source=Source.ASSUMED, maker=Maker.DRIVER,
             reason="what a CUDA context takes before the first allocation; not measured on this device"),
        line(LineKind.TRANSIENT, 912 * MiB, low=700 * MiB, high=2 * GiB, source=Source.PREDICTED, maker=Maker.TORCH,
             name="activations", children=(prefill, decode), lifetime=Lifetime.STEP,
             reason="the widest stage is the full prefill of 8,192 tokens"),
        line(LineKind.SCRATCH, 64 * MiB, source=Source.DECLARED, reason="sdpa: one tile of gathered keys and values"),
        line(LineKind.TABLES, 4096, reason="page tables and slots"),
        line(LineKind.KEEP_FREE, 256 * MiB, source=Source.ASKED, reason="left alone (default)"),
    ]  # fmt: skip
    rounding = DEVICE_BYTES - kv - sum(each.bytes for each in taken)
    lines = (*taken, line(LineKind.KV, kv, reason="what the other lines leave"), line(LineKind.ROUNDING, rounding))
    given: dict[str, object] = {
        "rank": Rank(), "device_name": "80GiB", "device_bytes": DEVICE_BYTES, "model_name": "llama-3.1-8b",
        "lines": lines, "steps": STEPS, "caps": CAPS, "host": HostPlan(), "attended_cap": None, "max_concurrency": 58,
        "kv": KVPool(layout=layout(), num_slabs=kv_blocks, bytes=kv, tokens=kv_blocks * 16,
                     guaranteed_tokens=kv_blocks * 16, reachable_tokens=kv_blocks * 16 + 512),
        "knobs": Knobs(kv_fraction=Setting.flag(Fraction(9, 10), "90%", "--kv-fraction"),
                       disabled_claims=frozenset({"b", "a"})),
        "limit_knobs": LimitKnobs(max_seq_len=Setting.flag(8192, "8Ki", "--max-seq-len")),
        "limits": Limits(max_seq_len=8192, max_batch_size=256, max_num_tokens=8192, max_logits_rows=256),
        "fingerprint": "sha256:00", "warnings": ("the size of the CUDA context is assumed, not measured",),
    }  # fmt: skip
    return MemoryPlan(**(given | fields))  # type: ignore[arg-type]


def with_fragmentation(plan: MemoryPlan, num_bytes: int = 200 * MiB) -> MemoryPlan:
    """The plan with a second line of kind transient, taken from the last line."""
    *others, last = plan.lines
    second = line(
        LineKind.TRANSIENT, num_bytes, name="fragmentation", source=Source.PREDICTED, lifetime=Lifetime.STEP,
        reason="what the allocator takes beyond the bytes alive at the peak",
    )  # fmt: skip
    return replace(plan, lines=(*others, second, replace(last, bytes=last.bytes - num_bytes)))


STEPS = (
    Step(name="device", op="=", before=0, operand=DEVICE_BYTES, after=DEVICE_BYTES, reason="--memory 80GiB"),
    Step(name="weights", op="-", before=DEVICE_BYTES, operand=15 * GiB, after=65 * GiB, reason="resident"),
    Step(name="kv_fraction", op="*", before=65 * GiB, operand=0, after=58 * GiB, reason="9/10 of what remains"),
)
CAPS = (
    Cap(name="device", kv_bytes=63_000_000_000, setting="--memory", binding=True),
    Cap(name="kv_tokens", kv_bytes=70_000_000_000, setting="--kv-tokens", binding=False),
)


def entry(kind: LineKind, num_bytes: int, *, high: int | None = None, how: How = How.COUNTED) -> LedgerEntry:
    return LedgerEntry(
        owner=f"{kind.value} arena", line=kind, tag="", memory=MemoryKind.GPU, device=0, how=how,
        requested_bytes=num_bytes, physical_bytes=num_bytes, high_water_bytes=high or num_bytes, released_bytes=0,
        num_live=1, first_phase="build", high_water_phase="serve", planned_bytes=num_bytes,
    )  # fmt: skip


def make_snapshot(plan: MemoryPlan) -> Snapshot:
    entries = (
        entry(LineKind.WEIGHTS, plan.bytes_of(LineKind.WEIGHTS)),
        entry(LineKind.TRANSIENT, 410 * MiB, high=930 * MiB, how=How.SAMPLED),
        entry(LineKind.KV, plan.bytes_of(LineKind.KV)),
    )
    own = sum(each.physical_bytes for each in entries) + 12 * MiB
    first = LedgerEvent(at_ns=5, owner="surprise", delta=4096, phase="serve", step=3, sealed=True)
    return Snapshot(
        phase="serve", entries=entries, own=own, own_source="anonymous + shared memory", foreign=0, free=5 * GiB,
        unattributed=12 * MiB, first_uses=(first,),
    )  # fmt: skip


def make_audit(plan: MemoryPlan, snapshot: Snapshot) -> tuple[AuditRow, ...]:
    """As a ledger would say it: lines in the order of their kinds, the remainder last."""
    rows = []
    for kind in sorted({each.kind for each in plan.lines}, key=list(LineKind).index):
        entries = [each for each in snapshot.entries if each.line == kind]
        now, high = sum(each.physical_bytes for each in entries), sum(each.high_water_bytes for each in entries)
        planned = plan.bytes_of(kind)
        rows.append(AuditRow(line=kind, planned_bytes=planned, actual_bytes=now, high_water_bytes=high))
    remainder = AuditRow(
        line=LineKind.UNATTRIBUTED, planned_bytes=0, actual_bytes=snapshot.unattributed, high_water_bytes=20 * MiB
    )
    return (*rows, remainder)


def make_run(plan: MemoryPlan | None = None, **fields: object) -> RunResult:
    plan = plan or make_plan()
    snapshot = make_snapshot(plan)
    given: dict[str, object] = {
        "finished": 62, "failed": 1, "cancelled": 1, "waited": 40, "suspensions": 7,
        "retried_steps": ("penalties: 4,096 bytes", "penalties: 4,096 bytes"),
        "prompt_tokens": 12_345, "cached_prompt_tokens": 8_192, "generated_tokens": 4_096,
        "offloaded_blocks": 300, "loaded_blocks": 1,
        "elapsed_ms": 98_765, "snapshot": snapshot, "plan": plan, "peak_own_bytes": 70 * GiB,
        "stages": (StageRecord(name="load", own_before_bytes=0, own_after_bytes=15 * GiB, elapsed_ms=2_345),
                   StageRecord(name="probe", own_before_bytes=15 * GiB, own_after_bytes=None, elapsed_ms=800)),
        "audit": make_audit(plan, snapshot),
    }  # fmt: skip
    return RunResult(**(given | fields))  # type: ignore[arg-type]
