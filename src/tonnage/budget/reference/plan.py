"""The reference policy over the inputs of any plan: the same partition, steps and caps, by the reference's rules.

    total - peak - reserves on the peak + temporary pool, x fraction, - indexer, - latent workspace, caps, blocks

The measured quantities stand for its probe: torch's peak is weights and the largest stage, what the device holds beside
it are context, libraries, graphs, other processes and the probe's own pool. Our knobs about money (``kv_fraction``,
``total_bytes`` ...) are not looked at; its own are ``ReferenceKnobs``. Blocks are those of the layout.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NoReturn

from tonnage.budget.charges import not_charged
from tonnage.budget.inputs import PlanInputs
from tonnage.budget.reference.estimation import Method
from tonnage.budget.reference.followed import refuse_unfollowed, without_effect
from tonnage.budget.reference.knobs import ReferenceKnobs
from tonnage.budget.reference.manager import chosen_manager
from tonnage.budget.reference.mla import cap_warning
from tonnage.budget.reference.pages import agreed_cap
from tonnage.budget.reference.partition import Pool, partition
from tonnage.budget.reference.solve import Asked, Solved, solve
from tonnage.budget.reference.steps import caps_of, steps_of
from tonnage.budget.reference.tokens import resumable_tokens
from tonnage.budget.words import counted
from tonnage.errors import DoesNotFit
from tonnage.layout import KVGroupKind, blocks_per_sequence
from tonnage.terms import HostPlan, KVPool, Measured, MemoryPlan, NotCharged, Quantity, StagePeak
from tonnage.units import format_bytes


def reference_plan(
    inputs: PlanInputs, knobs: ReferenceKnobs, *, backend: str = "TRTLLM", is_chunk_bounded: bool = True
) -> MemoryPlan:
    """The plan for one rank as the reference would make it.

    backend           its attention backend; VANILLA is never probed
    is_chunk_bounded  its answer to whether chunked prefill bounds the scratch of latent attention
    Raises ``DoesNotFit`` for a negative budget and where not one sequence of max_seq_len fits, where the reference
    would go on or lower max_seq_len; ``InvalidSetting`` for knobs that it refuses, or that no plan follows.
    """
    refuse_unfollowed(knobs)
    chosen = chosen_manager(knobs.manager, beam_width=knobs.max_beam_width)
    knobs = replace(knobs, manager=chosen.manager)
    asked = Asked(inputs=inputs, knobs=knobs, backend=backend, is_chunk_bounded=is_chunk_bounded)
    solved = solve(asked, inputs.measured)
    price, limits, caps = solved.price, inputs.limits, caps_of(asked, solved)
    sequence = _sequence_blocks(asked, solved)
    if solved.units < sequence:
        _refuse(asked, solved, sequence)
    lines, missing_bytes = partition(
        inputs.measured,
        solved.base,
        solved.sides,
        Pool(
            price=price,
            units=solved.units,
            bar=_bar(asked),
            workspace_bytes=solved.workspace_bytes,
            left_bytes=solved.derived.after_workspace_bytes - solved.pool_bytes,
            note=_resumed(asked, solved),
            left_by=next((cap.name for cap in caps if cap.binding and cap.name != "budget"), ""),
        ),
        is_profiled=solved.how.method == Method.PROBE,
    )
    attended_cap = agreed_cap([solved.derived.workspace.cap_tokens, inputs.ranks_attended])
    warnings = _warnings(asked, solved, missing_bytes=missing_bytes, attended_cap=attended_cap)
    return MemoryPlan(
        rank=inputs.measured.rank,
        device_name=inputs.device_name,
        device_bytes=inputs.measured.device_bytes,
        model_name=inputs.model_name,
        lines=lines,
        steps=steps_of(asked, solved),
        caps=caps,
        kv=_pool(inputs, solved),
        host=HostPlan(kv_bytes=knobs.host_cache_bytes or 0, disk_bytes=knobs.disk_cache_bytes or 0),
        attended_cap=attended_cap,
        max_concurrency=min(n for n in (solved.units // sequence, inputs.ranks_sequences) if n is not None),
        knobs=inputs.knobs,
        limits=limits,
        limit_knobs=inputs.limit_knobs,
        fingerprint=inputs.fingerprint,
        warnings=(*inputs.warnings, *([chosen.warning] if chosen.warning else []), *warnings),
        not_charged=_not_charged(inputs, solved),
        policy="reference",
        stages=inputs.measured.stages,
    )


def _sequence_blocks(asked: Asked, solved: Solved) -> int:
    """Of the longest sequence. Beams share nothing that can be relied on: each may need all of them."""
    limits = asked.inputs.limits
    alone = blocks_per_sequence(limits.max_seq_len, solved.price.block_tokens, extra_tokens=limits.extra_tokens)
    return asked.knobs.max_beam_width * alone


def _pool(inputs: PlanInputs, solved: Solved) -> KVPool:
    return KVPool(
        layout=inputs.layout,
        num_slabs=solved.price.num_slabs(solved.units),
        bytes=solved.pool_bytes,
        tokens=solved.tokens,
        guaranteed_tokens=solved.tokens,
        reachable_tokens=solved.tokens,
    )


def _refuse(asked: Asked, solved: Solved, sequence_blocks: int) -> NoReturn:
    """The reference would lower max_seq_len in silence, down to nothing."""
    price, limits, manager = solved.price, asked.inputs.limits, asked.knobs.manager
    first = asked.cache.first_bytes(manager)
    priced = asked.cache.needed_bytes(manager, limits.max_seq_len + limits.extra_tokens)
    need, have = max(priced, price.kv_bytes(sequence_blocks)), solved.found.pool_bytes
    if need <= have:  # another rank, or whole blocks, left less than the bytes pay for
        have = solved.pool_bytes
    tokens, width = solved.units * price.block_tokens, asked.knobs.max_beam_width
    beams = f" in {width} beams" if width > 1 else ""
    ahead = (
        f", {format_bytes(first)} of it before the first token for windows and states of every seat" if first else ""
    )
    raise DoesNotFit(
        f"{asked.inputs.model_name}: under the reference policy the KV pool would hold {counted(tokens, 'token')}, "
        f"less than one sequence of max_seq_len = {limits.max_seq_len:,}{beams}",
        need_bytes=need,
        have_bytes=have,
        need=f"{format_bytes(need)} of KV ({need:,} bytes){ahead}",
        have=f"{format_bytes(have)} of KV ({have:,} bytes)",
    )


def _bar(asked: Asked) -> tuple[int, int]:
    """KV bytes with everything measured at its high, and at its low; 0 where that leaves no budget at all."""

    def at(pick: str) -> int:
        try:
            return solve(asked, _shifted(asked.inputs.measured, pick)).pool_bytes
        except DoesNotFit:
            return 0

    return at("high"), at("low")


def _shifted(measured: Measured, pick: str) -> Measured:
    """The same measurements with every quantity at its low or high."""

    def shift(quantity: Quantity) -> Quantity:
        return replace(quantity, bytes=getattr(quantity, pick))

    def stage(peak: StagePeak) -> StagePeak:
        return replace(peak, allocated=shift(peak.allocated), reserved=shift(peak.reserved))

    return replace(
        measured,
        weights=shift(measured.weights),
        context=shift(measured.context),
        libraries=shift(measured.libraries),
        graphs=shift(measured.graphs) if measured.graphs else None,
        foreign_bytes=shift(measured.foreign_bytes),
        stages=tuple(stage(peak) for peak in measured.stages),
    )


def _warnings(asked: Asked, solved: Solved, *, missing_bytes: int, attended_cap: int | None) -> list[str]:
    knobs, found = asked.knobs, []
    if solved.how.method != Method.PROBE:
        found.append(f"the reference does not probe here: {solved.how.because}")
    if missing_bytes:
        found.append(
            f"the slack is {format_bytes(missing_bytes)} short of what is claimed beside the pool; the reference would "
            "start, and fail when that memory is first asked for"
        )
    if capped := cap_warning(attended_cap, max_seq_len=asked.inputs.limits.max_seq_len):
        found.append(capped)
    if knobs.max_gpu_total_bytes and not solved.obeys_byte_cap:
        found.append("max_gpu_total_bytes does not limit uniform pools of the block manager; max_tokens does")
    found += without_effect(
        knobs,
        has_states=asked.cache.has(KVGroupKind.STATE),
        has_shares=knobs.manager == "V1" and asked.cache.is_variable_window,
        has_cap=attended_cap is not None,
    )
    return found


def _resumed(asked: Asked, solved: Solved) -> str:
    """V2 keeps part of its quota for what running requests still need."""
    if asked.knobs.manager == "V1":
        return ""
    share = asked.knobs.max_util_for_resume
    tokens = resumable_tokens(asked.cache.quota_cost(), solved.found.pool_bytes, resume_fraction=share)
    told = "any number of tokens" if tokens == math.inf else f"{tokens:,} tokens"
    return f"resumed requests may fill {told}, {share} of the quota"


def _not_charged(inputs: PlanInputs, solved: Solved) -> tuple[NotCharged, ...]:
    """Claims that do not apply, and scratch for attended tokens that the reference knows nothing of."""
    why = "the reference sets nothing aside for it beforehand"
    unknown = [replace(claim, applies=False, because=why) for claim in solved.sides.unpriced]
    return not_charged(
        (*inputs.claims, *unknown), disabled=inputs.knobs.disabled_claims, limits=inputs.limits, chip=inputs.chip
    )
