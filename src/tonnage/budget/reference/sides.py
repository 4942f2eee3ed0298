"""The claims of a plan by the side that the reference charges them on.

On the peak, on the pool, by the rule for attended tokens, or nowhere: what its probe does not see and nobody declared
to it lives off the slack that the fraction leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tonnage.budget.charges import claim_line
from tonnage.config import Limits
from tonnage.terms import Chip, Claim, Fixed, Line, PerBlock, ReferenceSide, Scratch, StepShape, worst_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """Claims that apply, each once. ``workspace`` is the one that grows with attended tokens, at ``workspace_rate``
    bytes for each; of several in one memory the strongest. ``unpriced``: such claims that the reference ignores."""

    peak: tuple[Line, ...]
    pool: tuple[Line, ...]
    outside: tuple[Line, ...]
    per_block: tuple[Claim, ...]
    workspace: Claim | None
    workspace_rate: int
    unpriced: tuple[Claim, ...]

    @property
    def peak_bytes(self) -> int:
        return sum(line.bytes for line in self.peak)

    @property
    def pool_bytes(self) -> int:
        return sum(line.bytes for line in self.pool)


def sides(claims: Sequence[Claim], *, limits: Limits, chip: Chip, is_unseen: bool = False) -> Sides:
    """Sort the claims. Chunks bound some of the scratch on the pool's side; a probe has seen that, so it is peak.

    ``is_unseen``: no probe ran that would have, so it is rated by attended tokens like what nothing bounds.
    """
    live = [claim for claim in claims if claim.applies]
    growing = [claim for claim in live if _grows(claim, is_unseen=is_unseen)]
    rated = [claim for claim in growing if claim.reference_side == ReferenceSide.POOL]
    strongest = max(rated, key=lambda claim: _rate(claim, limits, chip), default=None)
    sized = _strongest_of_shares(
        [
            (claim, _line(claim, limits, chip, grows=claim in growing))
            for claim in live
            if not isinstance(claim.cost, PerBlock)
        ]
    )
    found: dict[ReferenceSide | None, list[Line]] = {ReferenceSide.PEAK: [], ReferenceSide.POOL: [], None: []}
    for claim, line in sized:
        if claim in growing and not line.bytes:
            continue  # all of it grows with the attended tokens
        seen = isinstance(claim.cost, Scratch) and claim.reference_side == ReferenceSide.POOL
        found[ReferenceSide.PEAK if seen else claim.reference_side].append(line)
    return Sides(
        peak=tuple(found[ReferenceSide.PEAK]),
        pool=tuple(found[ReferenceSide.POOL]),
        outside=tuple(found[None]),
        per_block=tuple(claim for claim in live if isinstance(claim.cost, PerBlock)),
        workspace=strongest,
        workspace_rate=_rate(strongest, limits, chip) if strongest else 0,
        unpriced=tuple(claim for claim in growing if claim.reference_side != ReferenceSide.POOL),
    )


def uncharged(one: Sides) -> Sides:
    """The same claims where the reference has no capacity step: it charges none of them."""
    return Sides(
        peak=(),
        pool=(),
        outside=(*one.peak, *one.pool, *one.outside),
        per_block=one.per_block,
        workspace=None,
        workspace_rate=0,
        unpriced=(*one.unpriced, *((one.workspace,) if one.workspace else ())),
    )


def _grows(claim: Claim, *, is_unseen: bool) -> bool:
    """Whether the reference rates it by attended tokens."""
    if not isinstance(claim.cost, Scratch):
        return False
    return not claim.cost.chunk_bounded or (is_unseen and claim.reference_side == ReferenceSide.POOL)


def _line(claim: Claim, limits: Limits, chip: Chip, *, grows: bool) -> Line:
    cost = claim.cost
    if isinstance(cost, Fixed):
        size = cost.bytes
    elif isinstance(cost, Scratch):
        size = _fixed_scratch(cost, limits, chip) if grows else cost.bytes_at(worst_shape(limits), chip)
    else:
        size = 0
    return claim_line(claim, num_bytes=max(0, size - claim.probed_bytes))


def _fixed_scratch(cost: Scratch, limits: Limits, chip: Chip) -> int:
    """What scratch takes however long the cached past is."""
    if cost.chunk_bounded:
        return cost.bytes_at(StepShape(), chip)
    rates = cost.rates(limits, chip)
    return rates.fixed + rates.per_row * limits.max_batch_size + rates.per_token * limits.max_num_tokens


def _rate(claim: Claim, limits: Limits, chip: Chip) -> int:
    cost = claim.cost
    if not isinstance(cost, Scratch):
        return 0
    if cost.chunk_bounded:  # flat beyond its chunks, so the first token tells
        one = StepShape(num_tokens=1, prefill_tokens=1, prefill_rows=1, attended_tokens=1, max_row_tokens=1)
        return cost.bytes_at(one, chip) - cost.bytes_at(StepShape(), chip)
    return cost.rates(limits, chip).per_attended_token


def _strongest_of_shares(sized: Iterable[tuple[Claim, Line]]) -> list[tuple[Claim, Line]]:
    """Claims with the same share key use one memory: only the largest stays."""
    kept: dict[tuple[str, str], tuple[Claim, Line]] = {}
    for claim, line in sized:
        key = (line.kind, f"share:{claim.share}" if claim.share else f"own:{claim.owner}:{claim.name}")
        if key not in kept or line.bytes > kept[key][1].bytes:
            kept[key] = (claim, line)
    return list(kept.values())
