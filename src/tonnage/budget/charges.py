"""Who pays what before the pool is sized: measured quantities and claims, sorted by how they depend on the tokens.

Three kinds come out: lines that do not depend on the number of KV tokens, costs paid once for every block, and
demands that grow with the attended tokens until their worst case.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tonnage.config import Limits
from tonnage.terms import (
    Chip,
    Claim,
    Fixed,
    Lifetime,
    Line,
    LineKind,
    Maker,
    Measured,
    NotCharged,
    PerBlock,
    Quantity,
    Scratch,
    Source,
    StagePeak,
    worst_shape,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedClaim:
    """Scratch that grows with attended tokens: ``bytes_per_token`` each, up to ``most_tokens`` of them."""

    claim: Claim
    bytes_per_token: int
    most_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Charges:
    """``lines``: one for each kind that does not depend on the tokens. ``per_block`` and ``rated`` grow with the pool.

    ``paid_tokens``: attended tokens whose scratch is in ``lines`` because its worst case is set aside; None where no
    scratch grows with them.

    ``fragmentation`` does not depend on the tokens either. It is of the transient's kind, so that kind has two lines:
    the tensors of a step and what the allocator adds to them, which only together can be compared with a device.
    """

    lines: tuple[Line, ...]
    fragmentation: Line
    per_block: tuple[tuple[Claim, int], ...]
    rated: tuple[RatedClaim, ...]
    paid_tokens: int | None = None

    def line(self, kind: LineKind) -> Line:
        """The line of that kind; of the transient's two, the one named transient."""
        return next(line for line in self.lines if line.kind == kind)

    @property
    def fixed(self) -> tuple[Line, ...]:
        """Every line that does not depend on the number of tokens."""
        return (*self.lines, self.fragmentation)

    @property
    def fixed_bytes(self) -> int:
        return sum(line.bytes for line in self.fixed)


def charges(
    measured: Measured,
    claims: Sequence[Claim],
    *,
    limits: Limits,
    chip: Chip,
    attended_tokens: int | None = None,
    reserve_worst: bool = False,
) -> Charges:
    """Sort everything that must be paid for. Claims that do not apply cost nothing.

    ``attended_tokens`` is the most that one step may attend to; it bounds the scratch that grows with them, but one
    sequence of full length must always pass. None: every running sequence at full length at once.
    ``reserve_worst``: that scratch is paid for up to there whatever the pool, so nothing is ``rated``.
    """
    live = [claim for claim in claims if claim.applies]
    worst = limits.max_batch_size * limits.max_seq_len
    most = worst if attended_tokens is None else min(max(attended_tokens, limits.max_seq_len), worst)
    growing = _rated(live, limits=limits, chip=chip, most_tokens=most)
    paid_tokens = most if growing and reserve_worst else None
    resident = _strongest_of_shares(_resident(live, limits=limits, chip=chip, attended_tokens=paid_tokens or 0))
    transient = _transient(measured.stages, [claim for claim in live if _in_a_step(claim)])
    quantities = {
        LineKind.WEIGHTS: measured.weights,
        LineKind.SCRATCH: None,
        LineKind.GRAPHS: measured.graphs,
        LineKind.CONTEXT: measured.context,
        LineKind.LIBRARIES: measured.libraries,
        LineKind.TABLES: None,
    }
    lines = [_sum_line(kind, quantity, resident) for kind, quantity in quantities.items()]
    return Charges(
        lines=(*lines, transient),
        fragmentation=_fragmentation(measured.stages),
        per_block=tuple((c, c.cost.bytes_per_block) for c in live if isinstance(c.cost, PerBlock)),
        rated=() if reserve_worst else growing,
        paid_tokens=paid_tokens,
    )


def not_charged(
    claims: Sequence[Claim], *, disabled: frozenset[str], limits: Limits, chip: Chip
) -> tuple[NotCharged, ...]:
    """Claims that do not apply, with what they would cost at the limits."""
    return tuple(
        NotCharged(
            name=claim.name,
            owner=claim.owner,
            bytes=_size(claim, limits=limits, chip=chip, attended_tokens=limits.max_batch_size * limits.max_seq_len),
            because=claim.because,
            reason=claim.reason,
            switched_off=claim.name in disabled,
        )
        for claim in claims
        if not claim.applies
    )


def _scratch_bytes(scratch: Scratch, *, limits: Limits, chip: Chip, attended_tokens: int) -> int:
    """What is paid whatever the pool: all of it where the backend bounds its chunks, else the part of so many attended
    tokens beside the part that does not grow with them."""
    if scratch.chunk_bounded:
        return scratch.bytes_at(worst_shape(limits), chip)
    rates = scratch.rates(limits, chip)
    grown = rates.per_attended_token * attended_tokens
    return rates.fixed + rates.per_row * limits.max_batch_size + rates.per_token * limits.max_num_tokens + grown


def _rated(claims: Iterable[Claim], *, limits: Limits, chip: Chip, most_tokens: int) -> tuple[RatedClaim, ...]:
    """Attended-token demands; those that share one arena are one demand, at the highest rate."""
    strongest: dict[str, RatedClaim] = {}
    for claim in claims:
        if not isinstance(claim.cost, Scratch) or claim.cost.chunk_bounded:
            continue
        rate = claim.cost.rates(limits, chip).per_attended_token
        key = claim.share or claim.name
        if rate > 0 and (key not in strongest or rate > strongest[key].bytes_per_token):
            strongest[key] = RatedClaim(claim=claim, bytes_per_token=rate, most_tokens=most_tokens)
    return tuple(strongest.values())


def _resident(claims: Iterable[Claim], *, limits: Limits, chip: Chip, attended_tokens: int) -> list[tuple[Claim, Line]]:
    """Every claim of a fixed size that is not confined to a step, as the child line it becomes."""
    found = []
    for claim in claims:
        if _in_a_step(claim) or isinstance(claim.cost, PerBlock):
            continue
        size = _size(claim, limits=limits, chip=chip, attended_tokens=attended_tokens)
        found.append((claim, claim_line(claim, num_bytes=max(0, size - claim.probed_bytes))))
    return found


def _in_a_step(claim: Claim) -> bool:
    """Scratch stays resident in its arena whatever its lifetime says; only plain bytes come and go with a step."""
    return claim.lifetime == Lifetime.STEP and isinstance(claim.cost, Fixed)


def _size(claim: Claim, *, limits: Limits, chip: Chip, attended_tokens: int) -> int:
    if isinstance(claim.cost, Scratch):
        return _scratch_bytes(claim.cost, limits=limits, chip=chip, attended_tokens=attended_tokens)
    return _plain_bytes(claim)


def _plain_bytes(claim: Claim) -> int:
    return claim.cost.bytes if isinstance(claim.cost, Fixed) else 0


def _strongest_of_shares(claimed: Sequence[tuple[Claim, Line]]) -> list[Line]:
    """Claims with the same share key use one buffer: only the largest stays."""
    kept: dict[tuple[LineKind, str], Line] = {}
    for claim, line in claimed:
        key = (line.kind, f"share:{claim.share}" if claim.share else f"own:{claim.owner}:{claim.name}")
        if key not in kept or line.bytes > kept[key].bytes:
            kept[key] = line
    return list(kept.values())


def claim_line(claim: Claim, *, num_bytes: int, kind: LineKind | None = None) -> Line:
    """A claim as a line of ``num_bytes``, its error bar widened to contain them."""
    return Line(
        name=claim.name,
        owner=claim.owner,
        kind=kind or claim.line,
        bytes=num_bytes,
        low=min(num_bytes, num_bytes if claim.low is None else claim.low),
        high=max(num_bytes, num_bytes if claim.high is None else claim.high),
        lifetime=claim.lifetime,
        maker=claim.maker,
        source=claim.source,
        ref=claim.ref,
        reason=claim.reason,
    )


_ABOUT: dict[LineKind, tuple[str, Maker, str]] = {
    LineKind.WEIGHTS: ("weights", Maker.ARENA, "the model's parameters lie in one arena"),
    LineKind.SCRATCH: ("scratch", Maker.ARENA, "attention declared this much scratch, and all layers share it"),
    LineKind.GRAPHS: ("graphs", Maker.DRIVER, "decode steps are captured ahead, and each keeps its memory"),
    LineKind.CONTEXT: (
        "context",
        Maker.DRIVER,
        "the driver keeps a context for the process; on a host, what the process holds beside the engine",
    ),
    LineKind.LIBRARIES: ("libraries", Maker.LIBRARY, "libraries keep handles and workspaces from their first use on"),
    LineKind.TABLES: (
        "tables",
        Maker.TORCH,
        "page tables, step inputs and penalty counts lie ready for every running sequence",
    ),
}


def _sum_line(kind: LineKind, quantity: Quantity | None, resident: Sequence[Line]) -> Line:
    """A measured quantity and the claims of its kind, added up."""
    name, maker, reason = _ABOUT[kind]
    children = [line for line in resident if line.kind == kind]
    if quantity is not None:
        own = quantity_line(name, quantity, kind=kind, maker=maker, reason=reason)
        if not children:
            return own
        children.insert(0, own)
    main = max(children, key=lambda line: line.bytes, default=None)
    return Line(
        name=name,
        owner=name,
        kind=kind,
        bytes=sum(line.bytes for line in children),
        low=sum(line.low for line in children),
        high=sum(line.high for line in children),
        lifetime=Lifetime.RESIDENT,
        maker=maker,
        source=main.source if main else Source.DERIVED,
        ref=main.ref if main else "nothing claimed",
        reason=reason,
        children=tuple(children),
    )


def quantity_line(
    name: str,
    quantity: Quantity,
    *,
    kind: LineKind,
    maker: Maker,
    reason: str,
    lifetime: Lifetime = Lifetime.RESIDENT,
    children: tuple[Line, ...] = (),
) -> Line:
    """A quantity as a line; the line belongs to whoever its name says."""
    return Line(
        name=name,
        owner=name,
        kind=kind,
        bytes=quantity.bytes,
        low=quantity.low,
        high=quantity.high,
        lifetime=lifetime,
        maker=maker,
        source=quantity.source,
        ref=quantity.ref,
        reason=reason,
        children=children,
    )


def _transient(stages: Sequence[StagePeak], claims: Sequence[Claim]) -> Line:
    """The largest stage. Claims of a stage add to its peak; claims of no stage may meet any, so they add to each."""
    names = list(dict.fromkeys([stage.stage for stage in stages] + [claim.stage for claim in claims if claim.stage]))
    children = tuple(_stage(name, stages, claims) for name in names or ["step"])
    largest = max(children, key=lambda line: line.bytes)
    worst = Quantity(
        bytes=largest.bytes,
        low=max(child.low for child in children),
        high=max(child.high for child in children),
        source=largest.source,
        ref=largest.ref,
    )
    reason = f"the largest stage ({largest.name}); stages do not coexist"
    return quantity_line(
        "transient",
        worst,
        kind=LineKind.TRANSIENT,
        maker=Maker.TORCH,
        reason=reason,
        lifetime=Lifetime.STEP,
        children=children,
    )


def _stage(name: str, stages: Sequence[StagePeak], claims: Sequence[Claim]) -> Line:
    peaks = [stage.allocated for stage in stages if stage.stage == name]
    extras = _strongest_of_shares([(c, _step_line(c)) for c in claims if c.stage in (name, None)])
    parts = [(peak.bytes, peak.low, peak.high) for peak in peaks] + [(e.bytes, e.low, e.high) for e in extras]
    total, low, high = (sum(part[i] for part in parts) for i in range(3))
    known = peaks[0] if peaks else None
    return quantity_line(
        name,
        Quantity(
            bytes=total,
            low=low,
            high=high,
            source=known.source if known else (extras[0].source if extras else Source.DERIVED),
            ref=known.ref if known else (extras[0].ref if extras else "no stage measured or claimed"),
        ),
        kind=LineKind.TRANSIENT,
        maker=Maker.TORCH,
        reason="this much is alive at the peak of this stage",
        lifetime=Lifetime.STEP,
        children=tuple(extras),
    )


def _step_line(claim: Claim) -> Line:
    num_bytes = max(0, _plain_bytes(claim) - claim.probed_bytes)
    return claim_line(claim, num_bytes=num_bytes, kind=LineKind.TRANSIENT)


def _fragmentation(stages: Sequence[StagePeak]) -> Line:
    """What the allocator takes beyond the bytes alive at the highest peak: segments, rounding, holes."""

    def beyond(pick: str) -> int:
        reserved = max((getattr(stage.reserved, pick) for stage in stages), default=0)
        return max(0, reserved - max((getattr(stage.allocated, pick) for stage in stages), default=0))

    sizes = sorted((beyond("low"), beyond("high")))
    best = beyond("bytes")
    source = max(stages, key=lambda stage: stage.reserved.bytes).reserved if stages else None
    gap = Quantity(
        bytes=best,
        low=min(best, sizes[0]),
        high=max(best, sizes[1]),
        source=source.source if source else Source.DERIVED,
        ref=source.ref if source else "no stage measured",
    )
    return quantity_line(
        "fragmentation",
        gap,
        kind=LineKind.TRANSIENT,
        maker=Maker.TORCH,
        reason="the allocator takes more than the bytes alive at the peak, for its pieces do not always fit",
        lifetime=Lifetime.STEP,
    )
