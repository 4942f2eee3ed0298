"""Launches of other engines linted: each with its model, its card and its release found, predicted, and judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from tonnage.costs.checkpoint import Checkpoint
from tonnage.costs.config import ModelConfig
from tonnage.costs.models import find_config
from tonnage.errors import InvalidSetting, ModelConfigError, ModelNotFound, UserError
from tonnage.hardware import Card, find_card
from tonnage.peers.commands import Command, settings_of
from tonnage.peers.commands.meaning import counted_draft, drafts_inside
from tonnage.peers.corrections import Correction, corrected
from tonnage.peers.lint import Case, Finding, Linted, Severity, flagged, layout, sharing
from tonnage.peers.lint.case import Weights, check_settings
from tonnage.peers.lint.check import in_order, predicted
from tonnage.peers.lint.parallel import parallel_of
from tonnage.peers.loading import as_loaded
from tonnage.peers.own_settings import QUANTIZATION
from tonnage.peers.start import Start
from tonnage.peers.version import Version
from tonnage.peers.which import find_known, newest_of
from tonnage.planner.weights import checkpoint_of, weights_of
from tonnage.terms import Quantity, Rank

#: The share of an engine that is given none, before its release is asked: to compare engines on one GPU by.
_SHARES = {"vllm": Fraction(9, 10), "sglang": Fraction(85, 100)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LintAsked:
    """What the files do not say.

    engine       name and release, for launches of that engine whose release nothing names
    card         the device, where no node selector names it
    models       model as typed -> folder or config.json; "" stands for every model
    num_gpus     devices that each launch is given, where nothing says
    users        sequences of full length that are to fit at once
    in_use_bytes what other processes hold on each device
    corrections  from logs of this machine
    """

    engine: tuple[str, Version] | None = None
    card: Card | None = None
    models: Mapping[str, str] = field(default_factory=dict)
    num_gpus: int | None = None
    users: int | None = None
    in_use_bytes: int = 0
    corrections: Sequence[Correction] = ()


def lint(commands: Sequence[Command], *, file: str, asked: LintAsked) -> list[Linted]:
    """Every launch of one file, in order."""
    pairs = [_lint(command, file=file, asked=asked) for command in commands]
    found = [linted for linted, _ in pairs]
    shares = [(each.command, case, _SHARES.get(each.command.engine, Fraction(0))) for each, case in pairs]
    for place, finding in sharing.too_much(shares).items():
        found[place] = _with(found[place], [*found[place].findings, finding])
    return found


def _with(linted: Linted, findings: Sequence[Finding]) -> Linted:
    return Linted(
        file=linted.file,
        command=linted.command,
        version=linted.version,
        card=linted.card,
        start=linted.start,
        findings=tuple(in_order(list(findings))),
    )


def _lint(command: Command, *, file: str, asked: LintAsked) -> tuple[Linted, Case | None]:
    version, is_assumed = version_of(command, asked.engine)
    settings, wrong = settings_of(command)
    names = flagged.names(command, version, is_assumed=is_assumed)
    findings = [*flagged.values(wrong), *names, *flagged.variables(command)]
    findings += flagged.behind(command)
    findings += [*flagged.release(command, version, is_assumed=is_assumed), *flagged.options_file(command)]
    parallel = parallel_of(command.engine, settings)
    num_gpus = sharing.num_gpus_of(command)
    is_spread = any(name in settings for name in ("nnodes", "data_parallel_size_local"))
    is_spread = is_spread or command.text("distributed_executor_backend") == "ray"  # it finds GPUs of other hosts
    findings += layout.gpus(
        command, parallel, num_gpus=asked.num_gpus if num_gpus is None else num_gpus, is_spread=is_spread
    )
    card, start, case = None, None, None
    try:
        card = card_of(command, asked.card)
        case = case_of(command, settings, version=version, card=card, asked=asked)
    except UserError as fault:
        findings.append(_not_predicted(fault))
    else:
        if unread := [*flagged.values(check_settings(case))]:
            findings += unread
        else:
            findings += flagged.weights(case)
            start, more = predicted(case, users=asked.users)
            findings += [*more, *_applied(start)]
    linted = Linted(
        file=file,
        command=command,
        version=str(version),
        card=None if card is None else card.name,
        start=start,
        findings=tuple(in_order(findings)),
    )
    return linted, case


def _applied(start: Start | None) -> list[Finding]:
    from tonnage.peers.corrections import APPLIED

    notes = () if start is None else start.notes
    return [Finding(code="TN050", severity=Severity.NOTE, what=note) for note in notes if note.startswith(APPLIED)]


def _not_predicted(fault: UserError) -> Finding:
    return Finding(
        code="TN008",
        severity=Severity.WARNING,
        what=f"it was not predicted: {fault.what}",
        why=fault.need or "",
        change=(fault.remedy,) if fault.remedy else (),
    )


def version_of(command: Command, asked: tuple[str, Version] | None) -> tuple[Version, bool]:
    """The release, and whether it is a guess: the command's own, the one asked for, or the newest that was read."""
    if command.version is not None:
        return Version.read(command.version), False
    if asked is not None and asked[0] == command.engine:
        return asked[1], False
    known = find_known(command.engine, typed=command.engine)
    return newest_of(known), True


def card_of(command: Command, asked: Card | None) -> Card:
    """The device. Raises ``UserError`` where nothing names one that is known."""
    if asked is not None:
        return asked
    name = command.place.gpu_name
    if name is None:
        raise UserError("nothing names the GPU", need="--device NAME, or a node selector in the manifest",
                        remedy="add --device H100")  # fmt: skip
    for suffix in ("-SHARED", ""):
        if suffix and not name.endswith(suffix):
            continue
        try:
            return find_card(name.removesuffix(suffix) if suffix else name)
        except InvalidSetting:
            continue
    raise UserError(
        f"the node selector asks for {name[:80]}, which is no card that is known", remedy="add --device NAME"
    )


def case_of(
    command: Command, settings: Mapping[str, object], *, version: Version, card: Card, asked: LintAsked
) -> Case:
    """The launch, ready to be predicted. Raises ``UserError`` for a model that is not at hand."""
    path = _path_of(command, asked)
    try:
        config = find_config(path)
    except (ModelNotFound, ModelConfigError) as fault:
        raise UserError(fault.what, remedy=f"give its shape: --model {command.model}=MODEL") from None
    corrections = tuple(asked.corrections)
    loaded = as_loaded(config, settings.get(QUANTIZATION)) or config
    drafts = drafts_inside(command.engine, settings)
    checkpoint = checkpoint_of(path) if loaded is config else None  # its headers say how it is stored
    draft = _draft(counted_draft(command.engine, settings), asked)
    return Case(
        command=command,
        version=version,
        config=loaded,
        card=card,
        weights=weights_by_rank(loaded, checkpoint, drafts=drafts, draft=draft),
        settings=settings,
        draft=draft,
        in_use_bytes=asked.in_use_bytes,
        correct=(lambda start: corrected(start, corrections)) if corrections else (lambda start: start),
    )


def _path_of(command: Command, asked: LintAsked) -> str:
    """Where the model's shape is. Raises ``UserError`` where the command does not say, and neither did the user."""
    stands_in = asked.models.get("")
    if command.model is not None and not command.unknown:
        return asked.models.get(command.model, stands_in or command.model)
    if command.model is None:
        raise UserError("it names no model", remedy="name it in the command")
    if stands_in is not None:
        return stands_in
    names = [name for name in command.unknown if name.isidentifier()]
    raise UserError(
        f"the model is {' '.join(command.model.split())}, and nothing here gives {', '.join(command.unknown)} a value",
        remedy=f"add --set {names[0]}=VALUE, or --model MODEL" if names else "add --model MODEL",
    )


def _draft(named: str | None, asked: LintAsked) -> ModelConfig | None:
    """The shape of a whole model that drafts; None where there is none, or its shape is not at hand."""
    if named is None:
        return None
    try:
        return find_config(asked.models.get(named, named))
    except (ModelNotFound, ModelConfigError):
        return None


def weights_by_rank(
    config: ModelConfig, checkpoint: Checkpoint | None, *, drafts: bool = False, draft: ModelConfig | None = None
) -> Weights:
    """Bytes of one rank's weights, each counted once. ``drafts``: layers for multi-token prediction are loaded too;
    ``draft``: a whole model is, on the last stage."""
    known: dict[tuple[Rank, str | None], Quantity] = {}

    def weights(rank: Rank, dtype: str | None) -> Quantity:
        if (rank, dtype) not in known:
            element = dtype or config.dtype
            known[rank, dtype] = weights_of(
                config, dtype=element, rank=rank, checkpoint=checkpoint, drafts=drafts, draft=draft
            )
        return known[rank, dtype]

    return weights
