"""The derivation as rows, and the limits on the pool: what a reader follows to see why there are so many tokens."""

from __future__ import annotations

import math

from tonnage.budget.reference.estimation import Method
from tonnage.budget.reference.knobs import ReferenceKnobs
from tonnage.budget.reference.solve import Asked, Solved, ranks_units
from tonnage.budget.words import counted
from tonnage.terms import Cap, Step
from tonnage.units import format_bytes

#: The limit that is the manager's own price of a token, where that is not ours.
OWN_COUNT = "the manager's count"

_WHY = {
    "budget": "beyond it the measured peak and the reserves would find too little; the fraction also leaves slack for "
    "what nobody measured or declared",
    "max_tokens": "the pool holds no more tokens than were asked for, whatever is free; more sequences wait",
    "max_gpu_total_bytes": "the pool takes no more bytes than were asked for, whatever is free; more sequences wait",
    "second fraction": "the fraction, once more, of what is free when the final pool is built: a net under a peak that "
    "was measured too low",
    "equal shares of windows": "each window's pool has the same share of bytes, which keeps the manager simple; what "
    "short windows do not fill is lost",
    "cross_kv_cache_fraction": "the encoder's cache has bytes of its own, so that texts cannot fill them; what it does "
    "not use is lost",
    OWN_COUNT: "the manager pays for windows and states of all its sequences before the first token, so that none "
    "waits for them; ours pays for those that a text of that length can have",
    "ranks": "ranks run one schedule, and a request that the smallest cannot hold would stop all of them; the others "
    "leave the difference unused",
}


class _Path:
    """Steps so far, and the number that the next one starts from."""

    def __init__(self, start: int) -> None:
        self.steps: list[Step] = []
        self.now = start

    def add(self, name: str, op: str, operand: int, after: int, reason: str) -> None:
        self.steps.append(Step(name=name, op=op, reason=reason, before=self.now, operand=operand, after=after))
        self.now = after

    def take(self, name: str, operand: int, reason: str) -> None:
        if operand:
            self.add(name, "-", operand, self.now - operand, reason)

    def at_most(self, name: str, operand: int, reason: str) -> None:
        self.add(name, "min", operand, min(self.now, operand), reason)


def steps_of(asked: Asked, solved: Solved) -> tuple[Step, ...]:
    """``before op operand = after`` in every row; bytes until the row named blocks, tokens from there."""
    derived, knobs = solved.derived, asked.knobs
    path = _Path(derived.total_bytes)
    path.take("peak", derived.peak_bytes, _why_peak(solved))
    for line in solved.sides.peak:
        path.take(
            line.name, line.bytes, f"added to the peak, so that it costs the pool the fraction of itself: {line.reason}"
        )
    if derived.temporary_pool_bytes:
        why = "the pool that existed only for the probe is in the peak, and is given back"
        path.add("temporary pool", "+", derived.temporary_pool_bytes, derived.left_bytes, why)
    path.take("free_gpu_memory_fraction", path.now - derived.after_fraction_bytes, _why_fraction(solved))
    for line in solved.sides.pool:
        path.take(
            line.name,
            line.bytes,
            f"deducted after the fraction, so that it costs the pool all of itself: {line.reason}",
        )
    path.take("context workspace", solved.workspace_bytes, _why_workspace(solved))
    _cap_steps(path, knobs, solved)
    return (*path.steps, *_unit_steps(path.now, asked, solved))


def _cap_steps(path: _Path, knobs: ReferenceKnobs, solved: Solved) -> None:
    derived = solved.derived
    if derived.after_max_tokens_bytes < path.now:
        path.at_most("max_tokens", derived.after_max_tokens_bytes, f"what {knobs.max_tokens:,} tokens cost")
    if solved.obeys_byte_cap and derived.pool_bytes < path.now:
        path.at_most("max_gpu_total_bytes", derived.pool_bytes, "bytes of the cache, as asked")
    if knobs.manager == "V2" and solved.found.pool_bytes < path.now:
        why = f"quota of {knobs.max_tokens or 0:,} tokens at {knobs.max_util_for_resume} for resumed requests"
        path.at_most("max_tokens", solved.found.pool_bytes, why)


def _unit_steps(pool_bytes: int, asked: Asked, solved: Solved) -> list[Step]:
    """Bytes to whole blocks, counted in tokens; then whatever allows fewer."""
    price = solved.price
    affordable = price.kv_blocks_within(pool_bytes) * price.block_tokens
    each = f"whole blocks of {counted(price.block_tokens, 'token')}, {format_bytes(price.slab_bytes)} each"
    steps = [
        Step(name="blocks", op="tokens for", reason=each, before=pool_bytes, operand=price.slab_bytes, after=affordable)
    ]
    tokens = solved.tokens
    if tokens < affordable:
        name = _held_by(asked, solved)
        reason = f"{name if name != 'budget' else 'what the manager counts for a token'} allows no more"
        steps.append(Step(name=name, op="min tokens", reason=reason, before=affordable, operand=tokens, after=tokens))
    return steps


def caps_of(asked: Asked, solved: Solved) -> tuple[Cap, ...]:
    """Every limit on the pool in KV bytes of whole blocks, the budget first and the smallest marked."""
    knobs, derived, price = asked.knobs, solved.derived, solved.price

    def whole(num_bytes: int) -> int:
        return price.kv_bytes(price.kv_blocks_within(num_bytes))

    share = f"free_gpu_memory_fraction = {derived.fraction}" if derived.fraction < 1 else "what is left"
    found = [("budget", whole(derived.after_workspace_bytes), share)]
    if knobs.max_tokens and solved.how.method != Method.HELIX_QUOTA:
        cap = derived.after_max_tokens_bytes if knobs.manager == "V1" else solved.found.pool_bytes
        found.append(("max_tokens", whole(cap), f"max_tokens = {knobs.max_tokens:,}"))
    if knobs.max_gpu_total_bytes:
        told = f"max_gpu_total_bytes = {format_bytes(knobs.max_gpu_total_bytes)}"
        capped = derived.pool_bytes if solved.obeys_byte_cap else derived.after_max_tokens_bytes
        found.append(("max_gpu_total_bytes", whole(capped), told))
    if solved.found.tokens < math.inf:
        own = price.kv_bytes(int(solved.found.tokens) // price.local_tokens)
        limit = solved.found.limit or OWN_COUNT
        if own < min(size for _, size, _ in found):
            found.append((limit, own, limit))
    elif solved.found.limit:
        found.append((solved.found.limit, whole(solved.found.pool_bytes), solved.found.limit))
    if asked.inputs.ranks_tokens is not None:
        found.append(("ranks", price.kv_bytes(int(ranks_units(asked.inputs, price))), "the smallest rank"))
    binding = min(range(len(found)), key=lambda i: found[i][1])
    return tuple(
        Cap(name=name, kv_bytes=kv_bytes, setting=setting, binding=i == binding, reason=_WHY[name])
        for i, (name, kv_bytes, setting) in enumerate(found)
    )


def _held_by(asked: Asked, solved: Solved) -> str:
    return next(cap.name for cap in caps_of(asked, solved) if cap.binding)


def _why_peak(solved: Solved) -> str:
    if solved.how.method == Method.PROBE:
        return (
            "torch's peak in the probe, weights and the largest stage, and all that the device holds beside it, other "
            "processes and the temporary pool included"
        )
    return f"what is in use now, with nothing for activations: {solved.how.because}"


def _why_fraction(solved: Solved) -> str:
    return f"{solved.derived.fraction} of the rest goes to the pool; the operand is the slack that it leaves"


def _why_workspace(solved: Solved) -> str:
    cap = solved.derived.workspace.cap_tokens
    tokens = counted(cap, "token") if cap is not None else "the tokens"
    return f"scratch for {tokens} that one step may attend to, {counted(solved.sides.workspace_rate, 'byte')} each"
