"""Start-up logs explained: the launch is made again from what the log prints, predicted, and set beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tonnage.errors import UserError
from tonnage.hardware import CARDS, Card, generic_card
from tonnage.peers.commands import Command, settings_of
from tonnage.peers.commands.command import Flag
from tonnage.peers.logs import Log
from tonnage.peers.logs.explanation import Explanation, explain
from tonnage.peers.version import Version
from tonnage.peers.which import find_known
from tonnage.planner.linting import LintAsked, case_of, version_of
from tonnage.units import GiB

_TOTAL = "total_gpu_memory"
#: Messages of failures print the total in hundredths of a GiB.
_ROUNDING = GiB // 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainAsked:
    """What the log does not say: as ``LintAsked``, and flags of the launch, which count before those of the log."""

    engine: tuple[str, Version] | None = None
    card: Card | None = None
    model: str | None = None
    flags: tuple[Flag, ...] = ()


def explain_log(log: Log, *, name: str, text: str, asked: ExplainAsked) -> Explanation:
    """``text``: the log's own, of which a correction keeps a hash."""
    command = Command(
        engine=log.engine, version=log.version, model=log.model or asked.model, flags=(*log.flags, *asked.flags)
    )
    settings, _ = settings_of(command)
    try:
        case = case_of(
            command,
            settings,
            version=_version(command, asked),
            card=asked.card or _card(log),
            asked=LintAsked(models={} if asked.model is None else {"": asked.model}),
        )
    except UserError as fault:
        return explain(log, settings, None, name=name, text=text, unpredicted=str(fault))
    return explain(log, settings, replace(case, settings=_beside(settings, log)), name=name, text=text)


def _beside(settings: Mapping[str, object], log: Log) -> dict[str, object]:
    """Settings that a log tells by its figures alone: the length that was resolved."""
    length = log.figure("max_model_len")
    name = {"vllm": "max_model_len", "sglang": "context_length", "trtllm": "max_seq_len"}[log.engine]
    resolved = {name: length.value} if length is not None and length.value else {}
    is_open = settings.get(name, -1) == -1
    return {**settings, **resolved} if is_open else dict(settings)


def _version(command: Command, asked: ExplainAsked) -> Version:
    """The one asked for counts before the log's: a build between releases names neither."""
    if asked.engine is not None and asked.engine[0] == command.engine:
        return asked.engine[1]
    version, is_guess = version_of(command, None)
    if is_guess or version.first is None:
        raise UserError(
            "the log does not say which release it is",
            need="the banner with the version, or --engine",
            remedy=f"add --engine {command.engine}==VERSION, such as {find_known(command.engine, typed='').newest}",
        )
    return version


def _card(log: Log) -> Card:
    """The card whose total the log tells; where several are of that size, a card of the size and nothing else."""
    figure = log.figure(_TOTAL)
    failed = next((each.numbers[_TOTAL] for each in log.failures if _TOTAL in each.numbers), None)
    total = failed if figure is None else figure.value
    if total is None:
        raise UserError("the log does not say how large the device is", remedy="add --device NAME")
    rounding = _ROUNDING if figure is None else figure.rounding
    fitting = [
        card
        for card in CARDS
        if card.kind == "cuda" and card.total.low - rounding <= total <= card.total.high + rounding
    ]
    return fitting[0].with_total(total) if len(fitting) == 1 else generic_card(total)
