"""The reference asks every backend three questions; here they are answered by ``Scratch.bytes_at`` alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tonnage.config import Limits
from tonnage.terms import Chip, Scratch, worst_shape
from tonnage.units import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """bytes_per_attended_token  how the need grows with what a step attends to, its own tokens included
    is_chunk_bounded          whether it stops growing once a step can hold no more tokens of its own
    fixed_bytes               what it is at the limits with nothing attended: arenas of a fixed capacity
    """

    bytes_per_attended_token: int
    is_chunk_bounded: bool
    fixed_bytes: int


#: Tokens before the worst case over which growth is looked for, so that rounding to an alignment hides none.
_LAST_TOKENS = 4096


def questions(scratch: Scratch, limits: Limits, chip: Chip) -> Questions:
    """The three answers at the limits, by differences.

    The rate is read off within one step's own tokens, where no bound is reached yet. Unbounded is what still grows
    at the worst case, where it attends to more than that.
    """
    worst = worst_shape(limits)

    def at(attended_tokens: int) -> int:
        return scratch.bytes_at(replace(worst, attended_tokens=attended_tokens), chip)

    fixed, most = at(0), worst.attended_tokens
    own_tokens = min(limits.max_num_tokens, most)
    before = max(own_tokens, most - _LAST_TOKENS)
    return Questions(
        bytes_per_attended_token=ceil_div(at(own_tokens) - fixed, own_tokens),
        is_chunk_bounded=most == own_tokens or at(most) == at(before),
        fixed_bytes=fixed,
    )
