"""One slab for every kind of layer: how many layers go side by side, and how many tokens into a block.

All blocks lie in equal slabs, and what a block does not fill is lost. Two things can be chosen for each kind of
layer: its layers may be spread over several groups, and its blocks may hold a multiple of the tokens asked for. Both
cost something: a larger block is filled half on average when a sequence ends, and each group needs a page table.

The rule: of all slabs that are the block of some group, or the next multiple of another group's block above it, take
the one that loses fewest bytes on a sequence of ``TYPICAL_TOKENS`` tokens; for each kind, the same. Lost are the
padding of every slab in use, half a block at the end of a sequence (and at the start of a window), and for each page
table a 1,024th of the sequence. Ties go to fewer groups, then to the smaller slab. One kind alone loses nothing: one
group, blocks as asked for.

Where all that is kept are tokens of the text, blocks of all groups hold as many of them (``Stack.most_units``): one
position of the prefix tree is then one block of each group. Only the spread over groups is chosen there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tonnage.units import ceil_div

TYPICAL_TOKENS = 4096
#: What one more page table is worth: this share of a typical sequence.
GROUP_SHARE = 1024


@dataclass(frozen=True, slots=True)
class Stack:
    """Equal layers. ``unit_bytes`` is the smallest block of one layer: ``unit_tokens`` tokens, or with 0 tokens the
    state of one sequence. ``window``: tokens that live at most, None for all. ``most_units`` of it in a block, None:
    any number."""

    num_layers: int
    unit_bytes: int
    unit_tokens: int
    window: int | None = None
    most_units: int | None = None

    @property
    def num_ends(self) -> int:
        """Ends at which a block is filled in part: none of a state, one of a text, two of a window."""
        return 0 if not self.unit_tokens else 1 if self.window is None else 2

    @property
    def live_tokens(self) -> int:
        return TYPICAL_TOKENS if self.window is None else min(self.window, TYPICAL_TOKENS)

    def units_in(self, slab_bytes: int, num_layers: int) -> int:
        """In a block of so many layers; 0: it does not fit."""
        units = slab_bytes // (num_layers * self.unit_bytes)
        return units if self.most_units is None else min(units, self.most_units)


@dataclass(frozen=True, slots=True)
class Share:
    """One group of a stack: its layers, and its block in units of ``unit_tokens``."""

    num_layers: int
    num_units: int


@dataclass(frozen=True, slots=True)
class Slabs:
    """The choice: the slab, and the groups of every stack in order."""

    slab_bytes: int
    shares: tuple[tuple[Share, ...], ...]


@lru_cache(maxsize=256)
def choose_slabs(stacks: tuple[Stack, ...]) -> Slabs:
    """The rule of the module's docstring."""
    if len(stacks) == 1:
        return Slabs(stacks[0].num_layers * stacks[0].unit_bytes, ((Share(stacks[0].num_layers, 1),),))
    table = table_price(stacks)
    blocks = _blocks(stacks)
    best = _best(stacks, sorted(blocks), table, None)
    assert best is not None, "the largest block holds every stack"
    # The best so far bounds the slabs that can win, and so the many that are multiples of others.
    most = best.loss // max(1, sum(stack.num_ends for stack in stacks))
    best = _best(stacks, sorted(_multiples(blocks, max(stack.unit_bytes for stack in stacks), most)), table, best)
    assert best is not None
    shares = (_shares(stack, groups, best.slab_bytes) for stack, groups in zip(stacks, best.num_groups, strict=True))
    return Slabs(best.slab_bytes, tuple(shares))


@dataclass(frozen=True, slots=True)
class _Choice:
    loss: int
    slab_bytes: int
    num_groups: tuple[int, ...]

    @property
    def rank(self) -> tuple[int, int, int]:
        return self.loss, sum(self.num_groups), self.slab_bytes


def _best(stacks: Sequence[Stack], slabs: Sequence[int], table: int, best: _Choice | None) -> _Choice | None:
    """The best of these slabs, in ascending order, and of ``best``."""
    # States first: they are the quickest to price, and most slabs lose by their padding alone.
    order = sorted(range(len(stacks)), key=lambda i: stacks[i].num_ends)
    ends = [stacks[i].num_ends for i in order]
    left = [sum(ends[i:]) for i in range(len(stacks) + 1)]
    for slab in slabs:
        if best is not None and left[0] * slab > best.loss:
            break  # half a block of every stack is lost whatever its groups
        total, groups = 0, [0] * len(stacks)
        for place, i in enumerate(order):
            lost, groups[i] = _best_split(stacks[i], slab, table)
            if lost is None:
                break
            total += lost
            if best is not None and total + left[place + 1] * slab > best.loss:
                break
        else:
            choice = _Choice(total, slab, tuple(groups))
            if best is None or choice.rank < best.rank:
                best = choice
    return best


def table_price(stacks: Sequence[Stack]) -> int:
    """Twice the bytes that a page table is worth."""
    typical = sum(
        stack.num_layers
        * (stack.unit_bytes * stack.live_tokens // stack.unit_tokens if stack.unit_tokens else stack.unit_bytes)
        for stack in stacks
    )
    return 2 * typical // GROUP_SHARE


Cut = tuple[tuple[int, int], ...]


@lru_cache(maxsize=1024)
def cut(num_layers: int, num_groups: int) -> Cut:
    """(layers, groups of so many): as even as can be, the larger ones first."""
    small, larger = divmod(num_layers, num_groups)
    parts = ((small + 1, larger), (small, num_groups - larger))
    return tuple(part for part in parts if part[1])


@lru_cache(maxsize=1024)
def splits(num_layers: int) -> tuple[tuple[int, Cut], ...]:
    """Numbers of groups worth trying, with their cuts: for each size of the largest group, the fewest groups."""
    numbers = sorted({ceil_div(num_layers, size) for size in range(1, num_layers + 1)})
    return tuple((groups, cut(num_layers, groups)) for groups in numbers)


def loss(stack: Stack, parts: Cut, slab_bytes: int, table: int) -> int | None:
    """Twice the bytes lost on a typical sequence by one stack cut so; None where a block does not fit."""
    unit, tokens = stack.unit_bytes, stack.unit_tokens
    if not tokens:
        fits = parts[0][0] * unit <= slab_bytes
        return 2 * sum(groups * (slab_bytes - layers * unit) for layers, groups in parts) if fits else None
    live, ends, total = stack.live_tokens, stack.num_ends, 0
    for layers, groups in parts:
        units = stack.units_in(slab_bytes, layers)
        if units == 0:
            return None
        full = units * layers * unit
        total += groups * (2 * -(-live // (units * tokens)) * (slab_bytes - full) + full * ends + table)
    return total


def _best_split(stack: Stack, slab_bytes: int, table: int) -> tuple[int | None, int]:
    """(loss, number of groups), the fewest groups among equals."""
    most_layers = slab_bytes // stack.unit_bytes
    if not most_layers:
        return None, 0
    fewest = ceil_div(stack.num_layers, most_layers)
    if not stack.unit_tokens:  # of states, the fewest groups that fit lose least
        return loss(stack, cut(stack.num_layers, fewest), slab_bytes, table), fewest
    best: int | None = None
    chosen = 0
    for groups, parts in splits(stack.num_layers):
        if groups < fewest:
            continue
        if best is not None and groups * table >= best:
            break  # page tables alone cost more from here on
        found = loss(stack, parts, slab_bytes, table)
        if found is not None and (best is None or found < best):
            best, chosen = found, groups
    return best, chosen


def _blocks(stacks: Sequence[Stack]) -> set[int]:
    """The smallest block of every group that could be."""
    return {parts[0][0] * stack.unit_bytes for stack in stacks for _, parts in splits(stack.num_layers)}


def _multiples(blocks: set[int], least: int, most: int) -> set[int]:
    """For every two blocks the next multiple of one above the other, as far as a slab may be that large."""
    floors = {max(block, least) for block in blocks if block <= most}
    return {slab for floor in floors for block in blocks if (slab := -(-floor // block) * block) <= most}


def _shares(stack: Stack, num_groups: int, slab_bytes: int) -> tuple[Share, ...]:
    sizes = [layers for layers, groups in cut(stack.num_layers, num_groups) for _ in range(groups)]
    return tuple(Share(size, stack.units_in(slab_bytes, size) if stack.unit_tokens else 1) for size in sizes)
