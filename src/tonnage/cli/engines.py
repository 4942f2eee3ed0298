"""Starts of other engines on the command line: what ``plan`` and ``diff`` share."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from tonnage.errors import DoesNotFit, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tonnage.cli.planning import FeatureOptions, Planning, PolicyOptions
    from tonnage.config import Knobs, LimitKnobs
    from tonnage.costs.checkpoint import Checkpoint
    from tonnage.costs.config import ModelConfig
    from tonnage.hardware import Card
    from tonnage.peers.corrections import Correction
    from tonnage.peers.launch import Value
    from tonnage.peers.start import Start
    from tonnage.peers.which import Asked
    from tonnage.terms import MemoryPlan, Rank

#: Exit code of a start that its engine would refuse for sure: as for a plan that does not fit.
REFUSED = 2

Engine = Annotated[
    list[str] | None,
    typer.Option(
        "--engine",
        metavar="NAME==VERSION",
        help="The start of vllm, sglang, trtllm or llamacpp by its own rules; its knobs by --like.",
        show_default=False,
    ),
]
Corrections = Annotated[
    str | None,
    typer.Option(
        "--corrections",
        metavar="FILE",
        help="With --engine: corrections from logs (default: those kept by explain-log --save).",
        show_default=False,
    ),
]
Compare = Annotated[
    bool, typer.Option("--compare", help="The engines of --engine and Tonnage's own plan side by side.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStarts:
    """Starts of other engines in the place of our own plan, or beside it."""

    engine: Engine = None
    compare: Compare = False
    corrections: Corrections = None

    @property
    def is_asked(self) -> bool:
        return bool(self.engine) or self.compare

    def refuse_others(
        self,
        *,
        explain: bool,
        exact: bool,
        output: str | None,
        html: str | None,
        features: FeatureOptions,
        policy: PolicyOptions,
    ) -> None:
        """Raise ``UserError`` for a flag about our own plan alone beside the start of an engine, and the reverse."""
        if not self.is_asked:
            if self.corrections is not None:
                raise UserError("--corrections is about starts of other engines", remedy="add --engine vllm==0.19")
            return
        given = {
            "--explain": explain, "--exact": exact, "--output": output, "--html": html,
            "--policy": policy.policy, "--reference": policy.reference,
            "--attention": None if self.compare else features.attention,
            "--without": None if self.compare else features.without,
        }  # fmt: skip
        for flag, value in given.items():
            if value:
                raise UserError(
                    f"{flag} is about our own plan, and --engine shows the start of another engine",
                    remedy="leave one of the two out",
                )

    def show(
        self,
        likes: Sequence[str],
        knobs: Knobs,
        limits: LimitKnobs,
        planning: Planning,
        card: Card,
        *,
        as_json: bool,
    ) -> int:
        """Predict and print them, beside our own plan where several are asked for; the exit code."""
        from tonnage.peers.corrections import load_corrections
        from tonnage.peers.which import KNOWN
        from tonnage.planner.ranks import distinct_ranks

        notes: tuple[str, ...] = ()
        asked = read_engines(self.engine or [known.name for known in KNOWN])
        if not self.engine:
            asked, notes = able(asked, planning.rank)
        is_compared = self.compare or len(asked) > 1
        stages = distinct_ranks(planning.rank)
        place = Place(
            config=planning.config, checkpoint=planning.checkpoint, card=card, dtype=planning.dtype,
            draft=planning.draft, ranks=tuple(stages) if planning.stage is None else (stages[planning.stage],),
            corrections=load_corrections(self.corrections),
        )  # fmt: skip
        starts = starts_of(asked, likes, knobs, limits, place, is_compared=is_compared)
        own = (lambda: planning.plan(knobs, limits, card)) if is_compared else None
        return show_engines(asked, starts, compared_with=own, notes=notes, as_json=as_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Model, device and ranks that every engine is asked for: one rank of each pipeline stage, or the one asked.

    ``corrections``: what start-up logs of this machine have taught.
    """

    config: ModelConfig
    checkpoint: Checkpoint | None
    card: Card
    ranks: tuple[Rank, ...]
    dtype: str | None
    draft: ModelConfig | None = None
    corrections: tuple[Correction, ...] = ()


def read_engines(texts: Sequence[str]) -> tuple[Asked, ...]:
    """Raises ``UserError`` for an engine or a release that is not known, and for one that is named twice."""
    from tonnage.peers.which import read_engine

    asked = tuple(read_engine(text) for text in texts)
    told = [each.told for each in asked]
    if len(set(told)) < len(told):
        raise UserError(f"--engine {texts[-1]} is named twice", remedy="name each engine and release once")
    return asked


def able(asked: Sequence[Asked], rank: Rank) -> tuple[tuple[Asked, ...], tuple[str, ...]]:
    """Of all engines those that can be split so, with a sentence for each that is left out."""
    kept = tuple(each for each in asked if rank.tp == 1 or each.name != "llamacpp")
    out = [
        f"{each.told} is left out: it gives whole layers to its devices (--pp)." for each in asked if each not in kept
    ]
    return kept, tuple(out)


def starts_of(
    asked: Sequence[Asked],
    likes: Sequence[str],
    knobs: Knobs,
    limits: LimitKnobs,
    place: Place,
    *,
    is_compared: bool,
) -> tuple[Start, ...]:
    """The predicted starts, in order: of the stage with the fewest tokens, which all others follow.

    Raises ``UserError`` for what an engine would not read.
    """
    from tonnage.peers.own_settings import read_settings
    from tonnage.planner.launches import given_limits, settings_for

    if place.card.kind == "host":
        raise UserError(
            "--engine knows starts on cards, and the device is host memory",
            need="--device NAME of a card, or --memory SIZE",
            remedy="write --memory 24GiB for a card of that size",
        )  # fmt: skip
    own = read_settings(likes, engines=[each.name for each in asked])
    given = given_limits(knobs, limits)
    return tuple(
        _start(each, place, settings_for(each, own[each.name], given, is_compared=is_compared)) for each in asked
    )


def _start(asked: Asked, place: Place, settings: Mapping[str, Value]) -> Start:
    from dataclasses import replace

    from tonnage.hardware import dtype_warning
    from tonnage.peers.corrections import corrected
    from tonnage.peers.predict import predict
    from tonnage.planner.launches import launch_of

    launches = [
        launch_of(
            asked, place.config, card=place.card, rank=rank, settings=settings, dtype=place.dtype,
            checkpoint=place.checkpoint, draft=place.draft,
        )
        for rank in place.ranks
    ]  # fmt: skip
    stages = [corrected(predict(launch), place.corrections) for launch in launches]
    # A stage that fails ends the start, however much it would hold.
    found = min(stages, key=lambda start: (start.starts is not False, start.tokens.best if start.tokens else 0))
    warning = dtype_warning(place.card, found.launch.dtype or place.config.dtype)
    beyond = beyond_note(asked)
    return replace(found, notes=(*found.notes, *(each for each in (warning, beyond) if each)))


def show_engines(
    asked: Sequence[Asked],
    starts: Sequence[Start],
    *,
    compared_with: Callable[[], MemoryPlan] | None,
    notes: tuple[str, ...] = (),
    as_json: bool,
) -> int:
    """Print one start, or several beside our own plan; the exit code."""
    if compared_with is not None:
        _show_comparison(asked, starts, compared_with, notes, as_json=as_json)
        return 0
    from tonnage.report.peer_start import start_text

    start = starts[0]
    if as_json:
        print(start_text(start), end="")
    else:
        from tonnage.report.draw import console_for
        from tonnage.report.peer_start_table import show_start

        show_start(start, console_for(sys.stdout), told=asked[0].told, note=newest_note(asked[0]))
    return REFUSED if start.starts is False else 0


def newest_note(asked: Asked) -> str:
    """Which release was taken, where none was named."""
    if not asked.is_newest:
        return ""
    return f"none was named: {asked.known.newest} is the newest whose rules are known; write {asked.name}==VERSION"


def beyond_note(asked: Asked) -> str:
    """That a release is newer than the rules; empty where it is not."""
    if not asked.is_beyond:
        return ""
    return (
        f"{asked.told} is newer than {asked.known.newest}, the newest release whose rules are known: those of "
        f"{asked.known.newest} are taken"
    )


def _show_comparison(
    asked: Sequence[Asked],
    starts: Sequence[Start],
    plan: Callable[[], MemoryPlan],
    notes: tuple[str, ...],
    *,
    as_json: bool,
) -> None:
    from tonnage.report.peer_compare import Comparison, compare_text, show_comparison

    refused = ""
    try:
        own: MemoryPlan | None = plan()
    except DoesNotFit as error:
        own, refused = None, str(error)
    launch = starts[0].launch
    if newest := [each.told for each in asked if each.is_newest]:
        notes = (*notes, f"Releases that were not named are the newest whose rules are known: {', '.join(newest)}.")
    notes = (*notes, *(f"{note}." for each in asked if (note := beyond_note(each))))
    made = Comparison(
        model=launch.config.name, device=launch.card.name, device_bytes=launch.card.total_bytes,
        starts=tuple((each.told, start) for each, start in zip(asked, starts, strict=True)), plan=own, refused=refused,
        notes=tuple(notes),
    )  # fmt: skip
    if as_json:
        print(compare_text(made), end="")
        return
    from tonnage.report.draw import console_for

    show_comparison(made, console_for(sys.stdout))
