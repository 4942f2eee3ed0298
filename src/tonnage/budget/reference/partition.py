"""The device under the reference policy as lines: each >= 0, summing exactly to it.

The reference knows the peak, its reserves and the pool. What else is claimed is taken from the slack it leaves, and
from what the pool does not use; where that is not enough such a line is cut to what is there, with its full need as its
``high``, and a warning says so. The reference would start all the same, and fail when that memory is first asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tonnage.budget.charges import Charges, claim_line, quantity_line
from tonnage.budget.pool import PoolPrice
from tonnage.budget.reference.sides import Sides
from tonnage.budget.words import counted
from tonnage.terms import Line, LineKind, Maker, Measured, PerBlock, Quantity, Source
from tonnage.units import format_bytes, round_up

#: Kinds of one top-level line each, with what the device holds of them by measurement.
_SUMMED = (
    LineKind.WEIGHTS,
    LineKind.SCRATCH,
    LineKind.GRAPHS,
    LineKind.CONTEXT,
    LineKind.LIBRARIES,
    LineKind.TABLES,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The final pool as the lines need it. ``left_bytes`` of the budget buy no more, by ``left_by`` (empty: they are
    less than the next block needs); ``note`` is said of the pool."""

    price: PoolPrice
    units: int
    bar: tuple[int, int]
    workspace_bytes: int
    left_bytes: int
    left_by: str
    note: str = ""

    @property
    def kv_bytes(self) -> int:
        return self.price.kv_bytes(self.units)


def partition(
    measured: Measured, base: Charges, sides: Sides, pool: Pool, *, is_profiled: bool
) -> tuple[tuple[Line, ...], int]:
    """The lines, and the bytes that what is claimed lacks (0: it fits).

    base  what was measured, as lines without any claim;  is_profiled: the transient is in the reference's peak
    """
    foreign = _line("foreign", measured.foreign_bytes, LineKind.FOREIGN, Maker.FOREIGN, "other processes")
    kept = [*(base.line(kind) for kind in _SUMMED), foreign, *_kv_lines(pool)]
    charged = [*sides.peak, *sides.pool, *_workspace(sides, pool)]
    on_slack: list[Line] = []
    (kept if is_profiled else on_slack).append(base.line(LineKind.TRANSIENT))
    left = measured.device_bytes - sum(line.bytes for line in (*kept, *charged))
    assert left >= pool.left_bytes, f"{left} are left, less than the {pool.left_bytes} that the pool does not use"
    on_slack += [*sides.outside, *_per_block(sides, pool), base.fragmentation, _page_rounding(base, pool)]
    given, missing, left = _from_slack(on_slack, left)
    lines = _by_kind([*kept, *(line for line in given if line.name == "transient")], [*charged, *given])
    over = _left_over(pool, min(pool.left_bytes, left))
    lines += [over, _slack(left - over.bytes), _exact("unattributed", LineKind.UNATTRIBUTED, 0, _EXPLAINED)]
    assert sum(line.bytes for line in lines) == measured.device_bytes
    return tuple(lines), missing


def _from_slack(wanted: Iterable[Line], left: int) -> tuple[list[Line], int, int]:
    """Each line whole while there is slack, then cut; what was missing in all, and what is left."""
    given, missing = [], 0
    for line in wanted:
        size = min(line.bytes, left)
        missing, left = missing + line.bytes - size, left - size
        given.append(line if size == line.bytes else _cut(line, size))
    return given, missing, left


def _cut(line: Line, size: int) -> Line:
    reason = f"{line.reason}; needs {format_bytes(line.bytes)}, and the slack has no more"
    return replace(line, bytes=size, low=min(line.low, size), reason=reason, children=())


def _by_kind(measured: list[Line], claimed: list[Line]) -> list[Line]:
    """Measured lines in order, the claims of the summed kinds as their children, all other claims after them."""
    found = []
    for line in measured:
        children = [claim for claim in claimed if claim.kind == line.kind] if line.kind in _SUMMED else []
        found.append(_grown(line, children) if children else line)
    named = {id(line) for line in measured}
    return found + [claim for claim in claimed if claim.kind not in _SUMMED and id(claim) not in named]


def _grown(line: Line, children: list[Line]) -> Line:
    parts = ((line,) if line.bytes else ()) + tuple(children)
    total, low, high = (sum(getattr(part, name) for part in parts) for name in ("bytes", "low", "high"))
    quantity = Quantity(bytes=total, low=low, high=high, source=parts[0].source, ref=parts[0].ref)
    return quantity_line(
        line.name,
        quantity,
        kind=line.kind,
        maker=line.maker,
        reason=line.reason,
        lifetime=line.lifetime,
        children=parts,
    )


def _workspace(sides: Sides, pool: Pool) -> list[Line]:
    if sides.workspace is None or not pool.workspace_bytes:
        return []
    return [claim_line(sides.workspace, num_bytes=pool.workspace_bytes)]


def _per_block(sides: Sides, pool: Pool) -> list[Line]:
    slabs = pool.price.num_slabs(pool.units)
    sizes = [(claim, claim.cost.bytes_per_block) for claim in sides.per_block if isinstance(claim.cost, PerBlock)]
    return [claim_line(claim, num_bytes=each * slabs) for claim, each in sizes]


def _kv_lines(pool: Pool) -> list[Line]:
    """What is in use in the slabs, by group where several share the pool, and what is not."""
    price, padding = pool.price, pool.price.padding_bytes(pool.units)
    size, (low, high) = pool.kv_bytes - padding, pool.bar
    known = Quantity(
        bytes=size, low=max(0, min(low - padding, size)), high=max(high - padding, size), source=_DERIVED, ref=_KV_REF
    )
    groups = tuple(
        _exact(group.name, LineKind.KV, price.group_bytes(group, pool.units), "its blocks in the slabs of all")
        for group in price.groups
    )
    blocks = f"{counted(price.num_slabs(pool.units), 'block')} of {format_bytes(price.slab_bytes)}"
    line = quantity_line(
        "kv",
        known,
        kind=LineKind.KV,
        maker=Maker.ARENA,
        reason="; ".join(part for part in (blocks, pool.note) if part),
        children=groups if len(groups) > 1 else (),
    )
    why = "blocks of different groups share equal slabs, and not every one fills its slab"
    return [line, *([_exact("padding", LineKind.ROUNDING, padding, why)] if padding else [])]


def _page_rounding(base: Charges, pool: Pool) -> Line:
    """Whole pages of the arenas; the reference does not round, so they come out of its slack."""
    page = pool.price.page_bytes
    sizes = (base.line(LineKind.WEIGHTS).bytes, pool.kv_bytes)
    lost = sum(round_up(size, page) - size for size in sizes)
    return _exact("page rounding", LineKind.ROUNDING, lost, f"arenas are committed in pages of {format_bytes(page)}")


def _left_over(pool: Pool, num_bytes: int) -> Line:
    if not pool.left_by:
        return _exact("part of a block", LineKind.ROUNDING, num_bytes, "less than the next block needs")
    return _exact(f"left by {pool.left_by}", LineKind.SLACK, num_bytes, f"{pool.left_by} leaves it unused")


def _slack(num_bytes: int) -> Line:
    reason = "what free_gpu_memory_fraction leaves; whatever nobody measured or declared lives off it"
    return _exact("slack", LineKind.SLACK, num_bytes, reason)


def _line(name: str, quantity: Quantity, kind: LineKind, maker: Maker, reason: str) -> Line:
    return quantity_line(name, quantity, kind=kind, maker=maker, reason=reason)


def _exact(name: str, kind: LineKind, num_bytes: int, reason: str) -> Line:
    return _line(name, Quantity.exact(num_bytes, _DERIVED, ""), kind, Maker.ARENA, reason)


_EXPLAINED = "a plan explains every byte; a run may not"
_DERIVED = Source.DERIVED
_KV_REF = "the reference's derivation; low and high follow what was measured"
