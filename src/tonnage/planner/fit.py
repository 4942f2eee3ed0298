"""What the user left open, chosen for a goal: the least sacrifice that reaches it, in a visible order.

A goal without an end (the longest context, the most sequences at once) is first taken as far as it goes with
everything given up; then as little as possible is given up for that. Whatever the user set stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from shlex import quote
from typing import Unpack

from tonnage.budget.fit import Dimension, Fitted, Value, Values, best_goal, least_sacrifice, sacrificed
from tonnage.config import Setting
from tonnage.costs.config import ModelConfig
from tonnage.errors import DoesNotFit, UserError
from tonnage.planner.asked import Asked
from tonnage.planner.dimensions import dimensions, largest_graph
from tonnage.planner.host_tier import HostTier, host_tier
from tonnage.planner.question import Question
from tonnage.planner.site import Plans, Site, fewest_tokens, holds, tightest
from tonnage.planner.unfit import most_resident, workload_refusal
from tonnage.planner.workload import Goal, Workload, check_workload
from tonnage.terms import MemoryPlan
from tonnage.units import format_bytes, round_down

#: The most sequences at once that a fit looks for: beyond it a step is all sampling.
MOST_SEQUENCES = 4096
#: Said where the most concurrency was asked for and no length.
LENGTH_IS_OPEN = "sequences were counted at the longest that there is; max_seq_len says how long yours are"
#: Said where the longest sequence that fits is the only one.
ALONE = (
    "one sequence as long as the device has room for leaves room for no other, so this goal says little while "
    "max_seq_len is open: set it to the length of yours, and as many of them as fit are counted"
)


Met = Callable[[Plans], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """An answer. ``order`` holds what was open, first given up first; ``plans`` one for each pipeline stage.

    reached  the goal in numbers
    flags    what to type to have the same again, for ``tonnage plan`` and, but for those in ``notes``, ``tonnage run``
    tier     set where part of a workload waits in host memory
    """

    goal: Goal | Workload
    reached: str
    order: tuple[Dimension, ...]
    fitted: Fitted
    plans: tuple[MemoryPlan, ...]
    flags: tuple[str, ...]
    notes: tuple[str, ...]
    tier: HostTier | None = None

    @property
    def plan(self) -> MemoryPlan:
        """That of the stage whose pool is the smallest by itself; the others follow it."""
        return next((plan for plan in self.plans if not _follows(plan)), self.plans[0])


def _follows(plan: MemoryPlan) -> bool:
    return any(cap.name == "ranks" and cap.binding for cap in plan.caps)


def fit(config: ModelConfig, *, goal: Goal | Workload, **asked: Unpack[Asked]) -> Fit:
    """The fit of ``config`` on devices like ``card``, one for each of ``rank``'s ranks (its index is not looked at).

    Raises ``UnsupportedModel``, ``InvalidSetting``, or ``DoesNotFit`` with remedies that were each fitted.
    """
    return fit_site(Site.of(config, **asked), goal)


def fit_site(site: Site, goal: Goal | Workload) -> Fit:
    """``fit`` where the questions are there already."""
    if isinstance(goal, Workload):
        return _fit_workload(site, goal)
    return _fit_longest(site) if goal == Goal.LONGEST_CONTEXT else _fit_concurrency(site)


def _fit_longest(site: Site) -> Fit:
    order = dimensions(site.first)
    settled = _longest(site, order)
    made = _fitted(site, order, settled, lambda _: True)
    if made is None:
        raise _no_plan(site, order, settled)
    length = tightest(site.at({**made.as_mapping(), **settled}).plans()).limits.max_seq_len
    return _answer(site, Goal.LONGEST_CONTEXT, f"sequences of {length:,} tokens", order, made, settled)


def _fit_concurrency(site: Site) -> Fit:
    """Sequences of full length: the model's, where it is open and fits, else the longest that fits once."""
    everything = dimensions(site.first)
    settled = _longest(site, everything)
    most = best_goal(
        everything,
        lambda goal, values: site.reaches({**values, **settled, **_rows(values, goal, site)}, _at_once(goal)),
        low=1,
        high=_most_rows(site),
    )
    if most is None:
        raise _no_plan(site, everything, settled)
    order = dimensions(site.first, least_rows=most)
    made = _fitted(site, order, settled, _at_once(most))
    if made is None:
        raise AssertionError("the most that fits with everything given up fits")
    length = tightest(site.at({**made.as_mapping(), **settled}).plans()).limits.max_seq_len
    told = f"{most:,} sequence{'' if most == 1 else 's'} of {length:,} tokens at once"
    if settled and most == 1:
        told += ", the longest that fits, so no second one does: set max_seq_len to the length of yours"
    answered = _answer(site, Goal.MOST_CONCURRENCY, told, order, made, settled)
    note = ALONE if most == 1 else LENGTH_IS_OPEN
    return replace(answered, notes=(note, *answered.notes)) if settled else answered


def _fit_workload(site: Site, workload: Workload) -> Fit:
    check_workload(workload, site.first.config, site.first.limit_knobs, has_draft=site.first.draft is not None)
    users, length = workload.num_users, workload.seq_tokens
    order = dimensions(site.first, least_rows=users, least_seq_len=length)
    made = _fitted(site, order, {}, lambda plans: holds(plans, num_sequences=users, seq_tokens=length))
    if made is not None:
        return _answer(site, workload, f"all {users:,} resident, {length:,} tokens each", order, made, {})
    hosted = _with_host(site, workload)
    if hosted is None:
        raise workload_refusal(site, workload, order)
    return hosted


def _with_host(site: Site, workload: Workload) -> Fit | None:
    """As many resident as there can be, the others in the host memory that was given; None where that is too small."""
    given = site.first.knobs.host_kv_bytes.or_else(0)
    resident = most_resident(site, workload) if given else None
    if resident is None:
        return None

    def tier_of(plans: Plans) -> HostTier | None:
        return host_tier(
            plans,
            site.first.card,
            num_sequences=workload.num_users,
            num_resident=resident,
            seq_tokens=workload.seq_tokens,
        )

    def met(plans: Plans) -> bool:
        tier = tier_of(plans)
        fits = holds(plans, num_sequences=resident, seq_tokens=workload.seq_tokens)
        return fits and tier is not None and tier.kv_bytes <= given

    order = dimensions(site.first, least_rows=resident, least_seq_len=workload.seq_tokens)
    made = _fitted(site, order, {}, met)
    if made is None:
        return None
    told = f"{resident:,} resident, {workload.num_users - resident:,} waiting in host memory"
    answered = _answer(site, workload, told, order, made, {})
    return replace(answered, tier=tier_of(answered.plans))


def _longest(site: Site, order: Sequence[Dimension]) -> dict[str, Value]:
    """The longest max_seq_len with everything given up, in whole blocks; nothing where it was set.

    Raises ``DoesNotFit`` where there is none.
    """
    question = site.first
    if question.limit_knobs.max_seq_len.is_set:
        return {}
    most, block = question.config.max_position_embeddings, question.block_tokens
    found = best_goal(
        order,
        lambda length, values: site.reaches({**values, "max_seq_len": length}, lambda _: True),
        low=1,
        high=most,
    )
    if found is None:
        raise _no_plan(site, order, {})
    return {"max_seq_len": found if found == most or found < block else round_down(found, block)}


def _rows(values: Values, goal: int, site: Site) -> dict[str, Value]:
    return {"max_batch_size": max(goal, largest_graph(site.first))} if "max_batch_size" in values else {}


def _most_rows(site: Site) -> int:
    """A batch size that was set, or as many rows as the step that was set has tokens for."""
    asked, step = site.first.limit_knobs, site.first.step_tokens
    return asked.max_batch_size.or_else(
        min(MOST_SEQUENCES, asked.max_num_tokens.or_else(MOST_SEQUENCES * step) // step)
    )


def _at_once(num_sequences: int) -> Met:
    return lambda plans: all(plan.max_concurrency >= num_sequences for plan in plans)


def _fitted(site: Site, order: Sequence[Dimension], settled: Values, met: Met) -> Fitted | None:
    return least_sacrifice(
        order,
        lambda values: site.reaches({**values, **settled}, met),
        why=lambda values, name, wanted: _gain(site, {**values, **settled}, {name: wanted}),
    )


def _gain(site: Site, values: Values, restored: Values) -> str:
    """What a sacrifice buys: tokens of the pool, or that there is a plan at all."""
    now = fewest_tokens(site.at(values).plans())
    try:
        before = fewest_tokens(site.at({**values, **restored}).plans())
    except DoesNotFit as refused:
        return f"kept, it would take {format_bytes(refused.shortfall_bytes)} more than there is"
    except UserError:
        return "the values that were set allow no more"
    return f"the pool holds {now:,} tokens instead of {before:,}"


def _no_plan(site: Site, order: Sequence[Dimension], settled: Values) -> DoesNotFit:
    """The refusal with everything given up. Raises ``InvalidSetting`` where that is the reason."""
    refusal = site.at({**sacrificed(order), **settled}).refusal()
    if refusal is None:
        raise AssertionError("a goal was out of reach and a plan for it was not")
    return refusal


def _answer(
    site: Site, goal: Goal | Workload, reached: str, order: tuple[Dimension, ...], made: Fitted, settled: Values
) -> Fit:
    chosen = site.at({**made.as_mapping(), **settled})
    flags = _flags(chosen.first)
    return Fit(
        goal=goal,
        reached=reached,
        order=order,
        fitted=made,
        plans=chosen.agreed(),
        flags=flags,
        notes=_notes(chosen.first, flags),
    )


def _flags(question: Question) -> tuple[str, ...]:
    """Every limit that was chosen or set, every knob that is set, ranks and backend, as they are typed."""
    limits = [(each.name, getattr(question.limit_knobs, each.name)) for each in fields(question.limit_knobs)]
    given = [(name, setting) for name, setting in (*limits, *question.knobs.items()) if setting.is_set]
    found = [_typed(name, setting) for name, setting in given if name != "prompt_logprobs"]
    found += ["--prompt-logprobs"] if question.limit_knobs.prompt_logprobs.value else []
    found += [f"--without {quote(claim)}" for claim in sorted(question.knobs.disabled_claims)]
    found += [] if question.backend == "sdpa" else [f"--attention {question.backend}"]
    rank = question.rank
    found += [f"--{name} {size}" for name in ("tp", "pp", "cp", "ep") if (size := getattr(rank, name)) > 1]
    found += ["--attention-dp"] if rank.attention_dp else []
    found += [f"--stage-layers {','.join(str(each) for each in rank.partition)}"] if rank.partition else []
    return tuple(found)


def _notes(question: Question, flags: Sequence[str]) -> tuple[str, ...]:
    """What of the flags the engine does not obey, and what was counted otherwise than one might think."""
    planned = dict.fromkeys(flag.split()[0] for flag in flags if flag.split()[0] not in RUN_FLAGS)
    found = []
    if planned:
        found.append(f"tonnage run has no {', '.join(planned)} in this release; only plans do")
    if question.kv_dtype != question.dtype:
        found.append(
            f"the engine of this release keeps its cache in the dtype of the weights; {question.kv_dtype} is for plans"
        )
    if question.rank.attention_dp:
        found.append("every rank was asked to hold all sequences, though under attention_dp each serves its own")
    return tuple(found)


def _typed(name: str, setting: Setting[object]) -> str:
    return f"{_flag(name)} {quote(setting.text or str(setting.value))}"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


#: What ``tonnage run`` knows of the flags of a plan.
RUN_FLAGS = frozenset(
    _flag(name)
    for name in (
        *("max_seq_len", "max_batch_size", "max_num_tokens", "total_bytes", "keep_free_bytes"),
        *("kv_fraction", "kv_bytes", "kv_tokens", "kv_dtype", "block_tokens", "host_kv_bytes", "graphs"),
    )
)
