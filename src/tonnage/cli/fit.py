"""``tonnage fit``: what was left open, chosen for a goal, and the inverse: the least memory, the fewest devices."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tonnage.cli import options as opt
from tonnage.cli.groups import grouped
from tonnage.cli.plan import card_of, check_stages, dtype_warning_of
from tonnage.cli.planning import FeatureOptions, RankOptions
from tonnage.errors import UserError
from tonnage.units import format_bytes, parse_count

if TYPE_CHECKING:
    from tonnage.config import Knobs, LimitKnobs
    from tonnage.costs.config import ModelConfig
    from tonnage.hardware import Card
    from tonnage.planner.fit import Fit
    from tonnage.planner.host_tier import HostTier
    from tonnage.planner.workload import Goal, Workload
    from tonnage.report.fit_table import FitView
    from tonnage.terms import Rank

LeastMemoryFlag = Annotated[
    bool, typer.Option("--least-memory", help="The smallest device for the workload, instead of a fit on one.")
]
LeastRanksFlag = Annotated[
    bool, typer.Option("--least-ranks", help="The fewest devices of that kind for the workload, and how to split.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalOptions:
    """What the fit is for: a goal, or a workload."""

    goal: Annotated[opt.Text, opt.option("--goal", "NAME", "longest-context or most-concurrency.")] = None
    users: Annotated[opt.Text, opt.option("--users", "N", "A workload: users at once, all resident.")] = None
    prompt_tokens: Annotated[opt.Text, opt.option("--prompt-tokens", "N", "Prompt of each user.")] = None
    output_tokens: Annotated[opt.Text, opt.option("--output-tokens", "N", "Output of each user.")] = None

    def read(self, *, inverse: str | None = None) -> Goal | Workload:
        """``inverse``: a flag that needs a workload. Raises ``UserError`` for none, for both, for half a workload, and
        for what cannot be read."""
        from tonnage.planner.workload import Workload, parse_goal

        flags = {"--users": self.users, "--prompt-tokens": self.prompt_tokens, "--output-tokens": self.output_tokens}
        given = [flag for flag, text in flags.items() if text is not None]
        if (self.goal is None) == (not given):
            if inverse is not None and not given:
                raise _needs_workload(inverse)
            raise UserError(
                "tonnage fit does not know what for" if not given else f"--goal and {given[0]} are two goals",
                need="--goal NAME, or --users, --prompt-tokens and --output-tokens",
                remedy="add --goal longest-context" if not given else f"leave out --goal, or {' and '.join(given)}",
            )
        if self.goal is not None:
            return parse_goal(self.goal, knob="--goal")
        if missing := [flag for flag, text in flags.items() if text is None]:
            are = "is" if len(missing) == 1 else "are"
            raise UserError(
                f"a workload is {', '.join(flags)}, and {' and '.join(missing)} {are} missing",
                remedy=f"add {' '.join(f'{flag} N' for flag in missing)}",
            )
        return Workload(
            num_users=parse_count(self.users or "", knob="--users"),
            prompt_tokens=parse_count(self.prompt_tokens or "", knob="--prompt-tokens"),
            output_tokens=parse_count(self.output_tokens or "", knob="--output-tokens", allow_zero=True),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """Everything that the flags said."""

    model: str
    device: str | None
    memory: str | None
    goal: Goal | Workload
    knobs: Knobs
    limits: LimitKnobs
    dtype: str | None
    backend: str
    rank: Rank
    stage: int | None
    draft: str | None

    def keywords(self) -> dict[str, Any]:
        """What every fit is given beside model, device, goal and ranks."""
        from tonnage.planner import checkpoint_of, find_config

        return {
            "knobs": self.knobs,
            "limit_knobs": self.limits,
            "dtype": self.dtype,
            "backend": self.backend,
            "checkpoint": checkpoint_of(self.model),
            "draft": None if self.draft is None else find_config(self.draft),
        }

    def command(self, made: Fit, *, sized: str | None = None) -> str:
        """What to type for the same plan; ``sized`` stands in for the device where the answer is one."""
        where = sized if sized is not None else f"--device {quote(self.device)}" if self.device is not None else ""
        if sized is None and self.memory is not None:
            where = f"{where} --memory {quote(self.memory)}".strip()
        dtype = f"--dtype {self.dtype}" if self.dtype is not None else ""
        draft = f"--draft {quote(self.draft)}" if self.draft is not None else ""
        return " ".join(part for part in ("tonnage plan", quote(self.model), where, dtype, draft, *made.flags) if part)


@grouped
def fit(
    *,
    model: opt.PlannedModel,
    device: opt.Device = None,
    memory: opt.Memory = None,
    goal: GoalOptions,
    least_memory: LeastMemoryFlag = False,
    least_ranks: LeastRanksFlag = False,
    pool: opt.PoolOptions,
    features: FeatureOptions,
    ranks: RankOptions,
    as_json: opt.AsJson = False,
) -> None:
    """Choose what was left open, giving up as little as needed.

    MODEL is as in tonnage plan. Example: tonnage fit llama-3.1-8b --device H100 --goal longest-context

    A workload is --users 64 --prompt-tokens 4000 --output-tokens 1000; --least-memory and --least-ranks turn it around.
    """
    check_stages(ranks)
    rank = ranks.rank()
    asked = _Asked(
        model=model,
        device=device,
        memory=memory,
        goal=goal.read(inverse="--least-memory" if least_memory else "--least-ranks" if least_ranks else None),
        knobs=features.knobs(pool),
        limits=features.limits(pool),
        dtype=pool.weights_dtype(),
        backend=features.backend,
        rank=rank,
        stage=ranks.shown_stage(rank.pp),
        draft=features.draft,
    )
    view = _view(asked, least_memory=least_memory, least_ranks=least_ranks)
    if as_json:
        from tonnage.report.fit_table import fit_text

        print(fit_text(view), end="")
        return

    from tonnage.report.draw import console_for
    from tonnage.report.fit_table import show_fit

    show_fit(view, console_for(sys.stdout))


def _view(asked: _Asked, *, least_memory: bool, least_ranks: bool) -> FitView:
    from tonnage.planner import find_config
    from tonnage.planner.workload import Workload

    if least_memory and least_ranks:
        raise UserError("--least-memory and --least-ranks ask for two answers", remedy="keep one")
    inverse = "--least-memory" if least_memory else "--least-ranks" if least_ranks else None
    if inverse is not None and not isinstance(asked.goal, Workload):
        raise _needs_workload(inverse)
    if least_ranks and asked.rank.size > 1:
        raise UserError("--least-ranks looks for the ranks itself", remedy="leave out --tp, --pp, --cp and --ep")
    card = _card(asked, sized=not least_memory)
    config = find_config(asked.model)
    find = _least_memory if least_memory else _least_ranks if least_ranks else _fitted
    view, warning = find(config, card, asked), dtype_warning_of(card, asked.dtype, config)
    return replace(view, notes=(*view.notes, warning)) if warning else view


def _fitted(config: ModelConfig, card: Card, asked: _Asked) -> FitView:
    from tonnage.planner.fit import fit

    made = fit(config, card=card, goal=asked.goal, rank=asked.rank, **asked.keywords())
    return _shown(made, asked, command=asked.command(made))


def _needs_workload(inverse: str) -> UserError:
    return UserError(
        f"{inverse} needs a workload: a goal without an end would take every device",
        need="--users, --prompt-tokens and --output-tokens",
        remedy="say how many users with how many tokens: add --users N --prompt-tokens N --output-tokens N",
    )


def _card(asked: _Asked, *, sized: bool) -> Card:
    """The device; where its size is the question, any of its kind."""
    from tonnage.hardware import is_host

    is_open = asked.memory is None and (asked.device is None or is_host(asked.device))
    return card_of(asked.device, "1GiB" if is_open and not sized else asked.memory, verb="fit")


def _least_memory(config: ModelConfig, card: Card, asked: _Asked) -> FitView:
    from tonnage.planner.least import least_memory

    assert not isinstance(asked.goal, str)
    found = least_memory(config, card=card, workload=asked.goal, rank=asked.rank, **asked.keywords())
    told = f"{format_bytes(found.device_bytes)} of device memory ({found.device_bytes:,} bytes); a MiB less is refused"
    if found.comfortable_bytes is not None:
        told += f". With nothing given up: {format_bytes(found.comfortable_bytes)}"
    size = f"--memory {found.device_bytes // 2**20}MiB"
    notes: tuple[str, ...] = ()
    if card.kind == "host":
        size = f"--device host {size}"
    elif card.sm:
        notes = (f"planned with what {card.name} has besides its size; --memory alone plans with the usual figures",)
    return _shown(
        found.fit,
        asked,
        command=asked.command(found.fit, sized=size),
        notes=notes,
        inverse={"device_bytes": found.device_bytes, "comfortable_bytes": found.comfortable_bytes, "told": told},
    )


def _least_ranks(config: ModelConfig, card: Card, asked: _Asked) -> FitView:
    from tonnage.planner.least import least_ranks

    assert not isinstance(asked.goal, str)
    found = least_ranks(config, card=card, workload=asked.goal, **asked.keywords())
    number = "1 device is" if found.num_ranks == 1 else f"{found.num_ranks} devices are"
    told = f"{number} enough: tp {found.tp}, pp {found.pp}"
    if found.tried:
        told += "; refused before: " + ", ".join(f"tp {tp} pp {pp}" for tp, pp in found.tried)
    return _shown(
        found.fit,
        asked,
        command=asked.command(found.fit),
        inverse={
            "num_ranks": found.num_ranks,
            "tp": found.tp,
            "pp": found.pp,
            "tried": [{"tp": tp, "pp": pp} for tp, pp in found.tried],
            "told": told,
        },
    )


def _shown(
    made: Fit,
    asked: _Asked,
    *,
    command: str,
    notes: tuple[str, ...] = (),
    inverse: dict[str, object] | None = None,
) -> FitView:
    from tonnage.planner.host_tier import held_text
    from tonnage.report.fit_table import FitView
    from tonnage.report.idle import idle_settings

    held = held_text(made.plans) if made.tier is None else ""
    return FitView(
        goal=asked.goal if isinstance(asked.goal, str) else asked.goal.told(),
        reached=made.reached,
        order=made.order,
        fitted=made.fitted,
        plan=made.plan if asked.stage is None else made.plans[asked.stage],
        plans=made.plans,
        command=command,
        notes=(*made.notes, *notes, *idle_settings(made.plan), *([held] if held else [])),
        inverse=inverse or {},
        host={} if made.tier is None else _tier(made.tier),
    )


def _tier(tier: HostTier) -> dict[str, object]:
    from tonnage.planner.host_tier import WHAT_FOR

    return {
        "num_resident": tier.num_resident,
        "num_waiting": tier.num_waiting,
        "seq_tokens": tier.seq_tokens,
        "sequence_bytes": tier.sequence_bytes,
        "kv_bytes": tier.kv_bytes,
        "link": tier.link.name,
        "link_bytes_per_second": tier.link.bytes_per_second,
        "link_source": tier.link.source,
        "link_ref": tier.link.ref,
        "swap_microseconds": round(tier.swap_seconds * 10**6),
        "told": f"{tier.told()}; {WHAT_FOR}",
    }
