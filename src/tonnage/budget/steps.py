"""The derivation from the device to tokens, one operation a row: what a reader follows to see why there are so many."""

from __future__ import annotations

from tonnage.budget.solve import Solved
from tonnage.budget.words import counted, why_fixed, why_fraction, why_keep_free, why_pages
from tonnage.terms import Step
from tonnage.units import format_bytes


class _Derivation:
    """Steps so far, and the number that the next one starts from."""

    def __init__(self, start: int) -> None:
        self.steps: list[Step] = []
        self.now = start

    def take(self, name: str, operand: int, reason: str) -> None:
        self._add(name, "-", operand, self.now - operand, reason)

    def at_most(self, name: str, operand: int, reason: str) -> None:
        self._add(name, "min", operand, min(self.now, operand), reason)

    def _add(self, name: str, op: str, operand: int, after: int, reason: str) -> None:
        self.steps.append(Step(name=name, op=op, reason=reason, before=self.now, operand=operand, after=after))
        self.now = after


def derivation(solved: Solved) -> tuple[Step, ...]:
    """``before op operand = after`` in every row; bytes until the row named blocks, tokens from there."""
    budget, price, inputs = solved.budget, solved.price, solved.inputs
    path = _Derivation(budget.device)
    path.take("foreign", budget.foreign, "other processes hold it, and this engine cannot take it from them")
    path.take("keep_free", budget.keep_free, why_keep_free(inputs.knobs.keep_free_bytes))
    if budget.total_bytes is not None:
        path.at_most("total_bytes", budget.total_bytes, "everything the engine may take, as asked")
    for line in solved.charged.fixed:
        if line.bytes:
            path.take(line.name, line.bytes, line.reason)
    path.take("page rounding", sum(solved.page_losses.values()), why_pages(price.page_bytes))
    for group in price.groups:
        if group.is_fixed:
            path.take(group.name, group.blocks(0) * price.block_bytes, why_fixed(group, inputs.limits))
    if budget.fraction < 1:
        path.take("kv_fraction", budget.rest - budget.pool, why_fraction(budget.fraction))
    return (*path.steps, *_unit_steps(path.now, solved))


def _unit_steps(pool: int, solved: Solved) -> list[Step]:
    """Bytes to whole blocks, counted in tokens; then the cap that allows fewer."""
    price = solved.price
    if not price.grows:
        reason = (
            f"nothing grows with the tokens, so they are as many as {solved.binding.setting} asks for, and cost nothing"
        )
        name = solved.binding.name
        return [Step(name=name, op="tokens for", reason=reason, before=pool, operand=0, after=solved.tokens)]
    affordable = price.blocks_within(pool) * price.block_tokens
    first = price.block_bytes * (price.num_slabs(1) - price.fixed_slabs)
    growing = f", beside {', '.join(demand.name for demand in price.demands)}" if price.demands else ""
    block = f"{counted(price.block_tokens, 'token')}, {format_bytes(first)} each"
    if any(group.window for group in price.groups):
        block += " until windows are full"
    each = f"whole blocks of {block}{growing}, in whole pages"
    steps = [Step(name="blocks", op="tokens for", reason=each, before=pool, operand=first, after=affordable)]
    if solved.tokens < affordable:
        cap, tokens = solved.binding, solved.tokens
        reason = f"{cap.setting} allows no more"
        steps.append(
            Step(name=cap.name, op="min tokens", reason=reason, before=affordable, operand=tokens, after=tokens)
        )
    return steps
