"""The partition: every byte of the device in exactly one line, what a cap or a rounding leaves included."""

from __future__ import annotations

from tonnage.budget.charges import Charges, claim_line, quantity_line
from tonnage.budget.pool import GroupPrice, PoolPrice
from tonnage.budget.solve import Solved
from tonnage.budget.words import counted, why_fixed, why_keep_free
from tonnage.config import Limits, Setting
from tonnage.terms import Line, LineKind, Maker, Quantity, Source
from tonnage.units import format_bytes


def partition(solved: Solved, *, bar: tuple[int, int]) -> tuple[Line, ...]:
    """Top-level lines, each >= 0, summing to the device; ``bar`` is the pool's low and high in bytes."""
    charged, price, num_blocks = solved.charged, solved.price, solved.num_blocks
    losses = {**solved.page_losses, "kv": price.kv_page_loss(num_blocks)}
    if price.demands:
        losses["growing scratch"] = price.scratch_page_loss(num_blocks)
    lines = (
        charged.line(LineKind.WEIGHTS),
        _kv_line(price, num_blocks=num_blocks, bar=bar, limits=solved.inputs.limits),
        _with_growing_scratch(charged, price, num_blocks),
        charged.line(LineKind.TRANSIENT),
        charged.line(LineKind.GRAPHS),
        charged.line(LineKind.CONTEXT),
        charged.line(LineKind.LIBRARIES),
        _with_block_tables(charged, price.num_slabs(num_blocks)),
        quantity_line(
            "foreign",
            solved.inputs.measured.foreign_bytes,
            kind=LineKind.FOREIGN,
            maker=Maker.FOREIGN,
            reason="other processes hold it, and this engine cannot take it from them",
        ),
        _keep_free_line(solved.budget.keep_free, solved.inputs.knobs.keep_free_bytes),
        _page_rounding(losses, price.page_bytes),
        *_padding(price, num_blocks),
        charged.fragmentation,
        *_left_over(solved),
        _exact("unattributed", LineKind.UNATTRIBUTED, 0, Source.DERIVED, "a plan explains every byte; a run may not"),
    )
    total = sum(line.bytes for line in lines)
    assert total == solved.budget.device, f"lines sum to {total}, the device has {solved.budget.device}"
    assert all(line.bytes >= 0 for line in lines), "a line is negative"
    return lines


def _left_over(solved: Solved) -> list[Line]:
    """What the pool does not take of the budget, by who leaves it. Only the block rounding may be 0."""
    budget, price, num_blocks = solved.budget, solved.price, solved.num_blocks
    affordable = price.blocks_within(budget.pool)
    rounding = budget.pool - price.total_bytes(affordable)
    leaves = {"total_bytes": budget.room - budget.cap, "kv_fraction": budget.rest - budget.pool}
    if not price.grows:
        rounding, leaves[solved.binding.name] = 0, rounding
    elif num_blocks < affordable:
        leaves[solved.binding.name] = price.total_bytes(affordable) - price.total_bytes(num_blocks)
    block = f"less than one block of {format_bytes(price.block_bytes)} in whole pages"
    lines = [_exact("part of a block", LineKind.ROUNDING, rounding, Source.DERIVED, block)]
    caps = {cap.name: cap for cap in solved.caps}
    for name, left in leaves.items():
        if left:
            reason = f"{caps[name].setting if name in caps else name} leaves it unused"
            lines.append(_exact(f"left by {name}", LineKind.SLACK, left, Source.DERIVED, reason))
    return lines


def _kv_line(price: PoolPrice, *, num_blocks: int, bar: tuple[int, int], limits: Limits) -> Line:
    """What is in use in the slabs. Where several groups of layers share the pool each has a line of its own below."""
    padding = price.padding_bytes(num_blocks)
    quantity = Quantity(
        bytes=price.kv_bytes(num_blocks) - padding,
        low=max(0, bar[0] - padding),
        high=bar[1] - padding,
        source=Source.DERIVED,
        ref="what the other lines leave, in whole blocks; low and high follow theirs",
    )
    if len(price.groups) == 1:  # as the layout has it, and nothing kept beside it
        reason = _why_only_group(price, num_blocks, limits=limits)
        return quantity_line("kv", quantity, kind=LineKind.KV, maker=Maker.ARENA, reason=reason)
    children = tuple(
        _exact(
            group.name,
            LineKind.KV,
            price.group_bytes(group, num_blocks),
            Source.DERIVED,
            _why_group(group, price, num_blocks, limits=limits),
        )
        for group in price.groups
    )
    reason = f"{counted(price.num_slabs(num_blocks), 'slab')} of {format_bytes(price.slab_bytes)}, shared by all groups"
    return quantity_line("kv", quantity, kind=LineKind.KV, maker=Maker.ARENA, reason=reason, children=children)


def _why_only_group(price: PoolPrice, num_blocks: int, *, limits: Limits) -> str:
    (group,) = price.groups
    each = f"{format_bytes(price.slab_bytes)} each"
    if group.is_fixed:
        return f"{counted(price.num_slabs(num_blocks), 'state')}, {each}: {why_fixed(group, limits)}"
    if group.window is not None:
        return f"{_why_group(group, price, num_blocks, limits=limits)}; {each}"
    return f"{counted(num_blocks, 'block')} of {counted(price.block_tokens, 'token')}, {each}"


def _why_group(group: GroupPrice, price: PoolPrice, num_blocks: int, *, limits: Limits) -> str:
    if group.is_fixed:
        return why_fixed(group, limits)
    if group.snapshot_tokens:
        return (
            f"a state every {group.snapshot_tokens:,} tokens, so that a prefix can be used again without computing it "
            "anew; a larger snapshot_tokens keeps fewer"
        )
    blocks = group.blocks(num_blocks * price.local_tokens)
    held = f"{counted(blocks, 'block')} of {counted(group.block_tokens, 'token')}"
    if group.window is None:
        return held
    return (
        f"{held}: what windows of {group.window:,} tokens show of sequences of full length, and a step adds; shorter "
        "sequences show more for as many tokens, and fewer of theirs fit"
    )


def _padding(price: PoolPrice, num_blocks: int) -> list[Line]:
    padding = price.padding_bytes(num_blocks)
    if not padding:
        return []
    reason = "blocks of different groups share equal slabs, and not every one fills its slab"
    return [_exact("padding", LineKind.ROUNDING, padding, Source.DERIVED, reason)]


def _with_growing_scratch(charged: Charges, price: PoolPrice, num_blocks: int) -> Line:
    line = charged.line(LineKind.SCRATCH)
    granted = price.granted_bytes(num_blocks)
    children = [claim_line(r.claim, num_bytes=size) for r, size in zip(charged.rated, granted, strict=True)]
    return _grown(line, children)


def _with_block_tables(charged: Charges, num_slabs: int) -> Line:
    line = charged.line(LineKind.TABLES)
    children = [claim_line(claim, num_bytes=each * num_slabs) for claim, each in charged.per_block]
    return _grown(line, children)


def _grown(line: Line, children: list[Line]) -> Line:
    """The line with more children added to its sum."""
    if not children:
        return line
    own = line.children or ((line,) if line.bytes else ())
    quantity = Quantity(
        bytes=line.bytes + sum(child.bytes for child in children),
        low=line.low + sum(child.low for child in children),
        high=line.high + sum(child.high for child in children),
        source=line.source if line.bytes else children[0].source,
        ref=line.ref if line.bytes else children[0].ref,
    )
    return quantity_line(
        line.name, quantity, kind=line.kind, maker=line.maker, reason=line.reason, children=(*own, *children)
    )


def _keep_free_line(num_bytes: int, setting: Setting[int]) -> Line:
    source = Source.ASKED if setting.is_set else Source.ASSUMED
    return _exact("keep_free", LineKind.KEEP_FREE, num_bytes, source, why_keep_free(setting))


def _page_rounding(losses: dict[str, int], page_bytes: int) -> Line:
    children = tuple(
        _exact(name, LineKind.ROUNDING, loss, Source.DERIVED, "the arena is committed up to a whole page")
        for name, loss in losses.items()
    )
    total = Quantity.exact(sum(losses.values()), Source.DERIVED, f"pages of {format_bytes(page_bytes)}")
    reason = f"arenas are committed in pages of {format_bytes(page_bytes)}"
    return quantity_line(
        "page rounding", total, kind=LineKind.ROUNDING, maker=Maker.ARENA, reason=reason, children=children
    )


def _exact(name: str, kind: LineKind, num_bytes: int, source: Source, reason: str) -> Line:
    return quantity_line(name, Quantity.exact(num_bytes, source, ""), kind=kind, maker=Maker.ARENA, reason=reason)
