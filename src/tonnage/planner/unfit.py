"""Why a workload cannot be had on a device, and what would make it work: each suggestion was fitted again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tonnage.budget.fit import Dimension, Values, last_resorts, sacrificed
from tonnage.budget.search import largest
from tonnage.errors import DoesNotFit
from tonnage.planner.aim import Aim, found_by
from tonnage.planner.dimensions import dimensions
from tonnage.planner.host_tier import WHAT_FOR, HostTier, host_tier
from tonnage.planner.left_out import nothing_helps
from tonnage.planner.question import Question
from tonnage.planner.remedies import MONEY, MOST_BYTES, last_of, place_of, size_text, smaller_num_tokens
from tonnage.planner.site import Plans, Site, holds, kv_bytes_for, tightest
from tonnage.planner.workload import Workload
from tonnage.units import MiB, format_bytes, round_up


def can_hold(site: Site, num_users: int, seq_tokens: int) -> bool:
    """Whether so many users of so many tokens are all resident with everything given up that was left open."""
    asked = site.first.limit_knobs
    limits = (
        (asked.max_batch_size, num_users),
        (asked.max_num_tokens, num_users * site.first.step_tokens),
        (asked.max_seq_len, seq_tokens),
    )
    if any(setting.is_set and setting.or_else(0) < least for setting, least in limits):
        return False
    return last_resort(site, num_users, seq_tokens) is not None


def last_resort(site: Site, num_users: int, seq_tokens: int) -> Values | None:
    """Values with everything given up with which they are all resident; None where there are none."""
    order = dimensions(site.first, least_rows=num_users, least_seq_len=seq_tokens)
    return next(
        (
            values
            for values in last_resorts(order)
            if site.reaches(values, lambda plans: holds(plans, num_sequences=num_users, seq_tokens=seq_tokens))
        ),
        None,
    )


def most_resident(site: Site, workload: Workload) -> int | None:
    """The most users, fewer than the workload has, who are all resident; None where not one is."""
    return largest(lambda users: can_hold(site, users, workload.seq_tokens), low=1, high=workload.num_users - 1)


def workload_refusal(site: Site, workload: Workload, order: Sequence[Dimension]) -> DoesNotFit:
    """The refusal: need, have, and what would help. Raises ``InvalidSetting`` where a setting is the reason."""
    resident = most_resident(site, workload)
    need, have, need_told, have_told = _need(site, workload, order, resident)
    question = site.first
    given_up = ", ".join(f"{name} {value}" for name, value in sacrificed(order).items())
    even = f", even with {given_up}" if given_up else ""
    return DoesNotFit(
        f"{question.config.name} on {question.card.name}: {workload.told()} do not fit{even}",
        need_bytes=need,
        have_bytes=have,
        need=need_told,
        have=have_told,
        remedies=_remedies(site, workload, order, resident),
        where=place_of(question),
    )


def _need(
    site: Site, workload: Workload, order: Sequence[Dimension], resident: int | None
) -> tuple[int, int, str | None, str | None]:
    """Bytes needed, bytes there are, and both in words."""
    try:
        plans = site.at(sacrificed(order)).plans()
    except DoesNotFit as refused:
        all_of_them = f", for the sequence of one user beside what {workload.num_users:,} at once need"
        alone = f"{refused.need}{all_of_them}" if workload.num_users > 1 else refused.need
        return refused.need_bytes, refused.have_bytes, alone, refused.have
    plan = tightest(plans)
    need, have = kv_bytes_for(plan, workload.num_users, workload.seq_tokens), plan.kv.bytes
    # Not tokens: windows and states cost a sequence more than its tokens cost a longer one.
    held = _held(plans, workload)
    alike = "1 such user" if held == 1 else f"{held:,} such users"
    beside = "" if held == (resident or 0) else f" beside what {workload.num_users:,} at once need"
    return (
        need,
        have,
        f"{format_bytes(need)} of KV ({need:,} bytes)",
        f"{format_bytes(have)} of KV ({have:,} bytes), room for {alike}{beside}",
    )


def _held(plans: Plans, workload: Workload) -> int:
    """Users whose whole sequences these pools hold."""
    num_users, tokens = workload.num_users, workload.seq_tokens
    return largest(lambda n: holds(plans, num_sequences=n, seq_tokens=tokens), low=1, high=num_users) or 0


def _remedies(site: Site, workload: Workload, order: Sequence[Dimension], resident: int | None) -> list[str]:
    found = [_shorter(site, workload), None if resident is None else f"lower users to {resident}"]
    tier = None if resident is None else offered_tier(site, workload, resident)
    if tier is not None:
        size = size_text(round_up(tier.kv_bytes, MiB))
        found.append(f"set host_kv_bytes to {size} ({tier.told()}; {WHAT_FOR})")
    others = {name: value for name, value in sacrificed(order).items() if name != "kv_dtype"}
    aim = Aim(site.at(others).first, _works(site, workload, order))
    finders = (smaller_num_tokens, *MONEY) if site.first.limit_knobs.max_num_tokens.is_set else MONEY
    return [remedy for remedy in found if remedy] + found_by(finders, aim) or last_of(aim) or [nothing_helps(aim)]


def _works(site: Site, workload: Workload, order: Sequence[Dimension]) -> Callable[[Question], bool]:
    """Whether a changed question, with any dtype of the cache that was left open, holds the workload."""
    dtypes = [{name: value for name, value in values.items() if name == "kv_dtype"} for values in last_resorts(order)]

    def met(plans: Plans) -> bool:
        return holds(plans, num_sequences=workload.num_users, seq_tokens=workload.seq_tokens)

    return lambda question: any(site.like(question).reaches(dtype, met) for dtype in dtypes)


def _shorter(site: Site, workload: Workload) -> str | None:
    """Fewer tokens for every user: of the output while there are any, else of both together."""
    found = largest(lambda tokens: can_hold(site, workload.num_users, tokens), low=1, high=workload.seq_tokens - 1)
    if found is None:
        return None
    if found >= workload.prompt_tokens:
        return f"lower output_tokens to {found - workload.prompt_tokens}"
    return f"lower prompt_tokens and output_tokens to {found} together"


def offered_tier(site: Site, workload: Workload, num_resident: int) -> HostTier | None:
    """What would wait in host memory, with everything given up; None where the host memory given is too small."""
    values = last_resort(site, num_resident, workload.seq_tokens)
    if values is None:
        return None
    tier = host_tier(
        site.at(values).plans(),
        site.first.card,
        num_sequences=workload.num_users,
        num_resident=num_resident,
        seq_tokens=workload.seq_tokens,
    )
    given = site.first.knobs.host_kv_bytes.value
    return None if tier is None or tier.kv_bytes > MOST_BYTES or (given is not None and given < tier.kv_bytes) else tier
