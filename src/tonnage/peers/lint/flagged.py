"""Findings about the command itself: values, names, variables, files. They need no prediction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tonnage.errors import InvalidSetting
from tonnage.peers.commands import kinds, known
from tonnage.peers.commands.command import Command, Flag
from tonnage.peers.commands.invocation import close_to
from tonnage.peers.commands.meaning import counted_draft, draft_model
from tonnage.peers.lint.case import Case
from tonnage.peers.lint.finding import Finding, Severity
from tonnage.peers.lint.parallel import overstates
from tonnage.peers.version import Version
from tonnage.peers.which import find_known, is_beyond

_TITLES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "trtllm-serve"}


def values(wrong: Sequence[InvalidSetting]) -> Iterator[Finding]:
    """A finding for each value that cannot be read."""
    for fault in wrong:
        yield Finding(
            code="TN003",
            severity=Severity.ERROR,
            what=f"{fault.knob} {fault.value}: {str(fault.what).partition(': ')[2] or fault.what}",
            change=(fault.remedy,) if fault.remedy else (),
        )


def names(command: Command, version: Version, *, is_assumed: bool = False) -> Iterator[Finding]:
    """A finding for each flag that this release does not read. ``is_assumed``: nothing says that it is this one."""
    for flag in {flag.name: flag for flag in command.flags}.values():
        if not flag.written.startswith("-"):
            continue  # a key of an options file: those are too many to be judged
        found = known.standing(command.engine, flag.name, version)
        if found.is_read is not False:
            continue
        instead = known.INSTEAD.get((command.engine, flag.name.partition(".")[0]))
        if found.seen:
            gone = _gone(command, flag, version, found.seen, instead)
            yield replace(gone, severity=Severity.WARNING) if is_assumed else gone
        elif (command.engine, flag.name) not in known.INSTEAD:
            yield _unknown(command, flag)


def _gone(command: Command, flag: Flag, version: Version, seen: tuple[str, ...], instead: str | None) -> Finding:
    title = _TITLES[command.engine]
    return Finding(
        code="TN005",
        severity=Severity.ERROR,
        what=f"{title} {version} does not read {flag.written}, and refuses to start with a flag that it does not know",
        why=f"releases that were looked at and read it: {', '.join(seen)}",
        change=() if instead is None else (f"leave {flag.written} out",) if instead == "nothing" else (instead,),
    )


def _unknown(command: Command, flag: Flag) -> Finding:
    near = close_to(command.engine, flag.name)
    return Finding(
        code="TN004",
        severity=Severity.WARNING,
        what=f"no release of {_TITLES[command.engine]} that was looked at reads {flag.written}",
        why="a plugin or a front end may; else it refuses to start",
        change=() if near is None else (f"--{near.replace('_', '-')}",),
    )


def variables(command: Command) -> Iterator[Finding]:
    """Values that only a run could tell."""
    for flag in command.flags:
        if flag.unknown and kinds.kind_of(command.engine, flag.name.partition(".")[0]) is not None:
            yield Finding(
                code="TN006",
                severity=Severity.WARNING,
                what=f"{flag.written} is {flag.text}, and nothing here gives {_listed(flag.unknown)} a value",
                why="the prediction is made without the flag",
                change=tuple(f"--set {name}=VALUE" for name in flag.unknown if name.isidentifier()),
            )
    for word in command.open_words:
        named = tuple(name for name in word.unknown if name.isidentifier())
        if named:
            yield Finding(
                code="TN006",
                severity=Severity.WARNING,
                what=f"{word.text} stands among the flags, and nothing here gives {_listed(named)} a value",
                why="the prediction is made without the flags in it",
                change=tuple(f"--set {name}=VALUE" for name in named),
            )


def behind(command: Command) -> Iterator[Finding]:
    """Flags on lines that the command does not reach, for a comment or a blank behind a backslash ends it."""
    if command.lost:
        yield Finding(
            code="TN013",
            severity=Severity.ERROR,
            what=f"the command ends before {_listed(command.lost)}, which its engine never sees",
            why="a comment line between continued lines, or a blank behind a backslash, ends a command",
            change=("move the comment out of the command, and end each of its lines with the backslash",),
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)


def weights(case: Case) -> Iterator[Finding]:
    """What the weights of the prediction leave out, or do not follow."""
    draft = draft_model(case.engine, case.settings)
    if draft is not None and case.draft is None:
        yield Finding(
            code="TN043",
            severity=Severity.WARNING,
            what=f"the draft model {draft} is loaded beside it, and its weights and cache are not counted",
            change=()
            if counted_draft(case.engine, case.settings) is None
            else (f"--model {draft}=MODEL of tonnage lint",),
        )
    quantised = case.settings.get("quantization")
    if quantised is not None and case.config.quantisation is None:
        yield Finding(
            code="TN044",
            severity=Severity.WARNING,
            what=f"--quantization {quantised}: the checkpoint is not quantised, and is counted as it is stored",
            why="what is quantised as it is loaded takes less, and the cache will be larger than predicted",
        )
    parallel = case.parallel()
    if case.engine == "vllm" and overstates(parallel, case.config):
        groups = f"{parallel.dp} data-parallel groups of {parallel.tp} ranks"
        yield Finding(
            code="TN045",
            severity=Severity.NOTE,
            what=f"{groups} share the experts, which are counted for each group",
            why="the weights are less than predicted, and the cache is larger",
        )


def release(command: Command, version: Version, *, is_assumed: bool) -> Iterator[Finding]:
    """A release that nothing names, or one that is newer than the rules."""
    if is_assumed:
        image = command.place.image
        yield Finding(
            code="TN007",
            severity=Severity.WARNING,
            what=f"nothing says which release it is; the rules of {version} are taken",
            why=f"the image is {image}" if image else "",
            change=(f"a tag with a release in it, or --engine {command.engine}=={version}",),
        )
    known = find_known(command.engine, typed=command.engine)
    if is_beyond(known, version):
        yield Finding(
            code="TN007",
            severity=Severity.WARNING,
            what=f"{version} is newer than {known.newest}, the newest release whose rules are known",
            why=f"the rules of {known.newest} are taken",
        )


def options_file(command: Command) -> Iterator[Finding]:
    """An options file that is not at hand."""
    path = command.text(kinds.FILE_FLAGS[command.engine])
    if path is not None and path not in command.files:
        yield Finding(
            code="TN009",
            severity=Severity.WARNING,
            what=f"the options file {path} is not at hand, and what it says is not known",
            why="it is looked for beside this file, in a ConfigMap of the manifest, and in cat > FILE <<END",
        )
