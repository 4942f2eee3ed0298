"""``tonnage lint``: what a launch of another engine will do, and what to change, with no GPU at hand."""

from __future__ import annotations

import codecs
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tonnage.cli import options as opt
from tonnage.errors import InputError, InvalidSetting, UserError
from tonnage.files import to_read, why

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tonnage.peers.commands import Command
    from tonnage.peers.lint import Linted
    from tonnage.peers.version import Version
    from tonnage.planner.linting import LintAsked

FORMATS = ("text", "json", "github")
#: What a launch on the command line begins with.
_PROGRAMS = (
    "vllm", "sglang", "trtllm-serve", "python", "python3", "docker", "podman", "nerdctl", "uv", "uvx", "env", "bash",
    "sh", "zsh", "sudo", "nohup", "exec", "srun", "mpirun", "torchrun", "timeout", "numactl", "tmux", "screen", "ssh",
    "eval",
)  # fmt: skip
_ASSIGNS = re.compile(r"[A-Za-z_]\w*=")
#: Bytes of a file that are read.
MOST_BYTES = 4_000_000

Text = str | None
Several = list[str] | None


def lint(
    files: Annotated[list[str], typer.Argument(metavar="FILE... | -- COMMAND", hidden=True)],
    engine: Annotated[Text, opt.option("--engine", "NAME==VERSION", "Release where nothing says: vllm==0.19.")] = None,
    device: opt.Device = None,
    memory: opt.Memory = None,
    model: Annotated[
        Several,
        typer.Option(
            "--model", metavar="[NAME=]MODEL", help="A folder, config.json or built-in shape for it; may be repeated."
        ),
    ] = None,
    num_gpus: Annotated[Text, opt.option("--num-gpus", "N", "GPUs of each launch, where nothing says.")] = None,
    users: Annotated[Text, opt.option("--users", "N", "Sequences of full length that are to fit at once.")] = None,
    in_use: Annotated[Text, opt.option("--in-use", "SIZE", "What other processes hold on each GPU.")] = None,
    set_: Annotated[
        Several, typer.Option("--set", metavar="NAME=VALUE", help="Value of a variable in the files; may be repeated.")
    ] = None,
    corrections: Annotated[
        Text, opt.option("--corrections", "FILE", "Corrections from logs (default: those kept by explain-log --save).")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 where there are warnings.")] = False,
    form: Annotated[Text, opt.option("--format", "NAME", "text (default), json, or github.")] = None,
    as_json: opt.AsJson = False,
) -> int:
    """Say what a launch of another engine will do, and what to fix.

    Engines are vLLM, SGLang and TensorRT-LLM (trtllm-serve).

    FILE is a shell script, a compose file, a Kubernetes manifest, or - for stdin; behind -- a command may stand.
    Exit code: 0 without errors, 1 with --strict and warnings, 2 with errors.
    Example: tonnage lint --device H100 --engine vllm==0.19 -- vllm serve ./llama-3.1-8b
    """
    from tonnage.planner.linting import lint as lint_commands

    form = form or "text"
    if form not in FORMATS:
        raise InvalidSetting("--format", form, "no such format", remedy="write text, json or github")
    asked = _asked(engine, device, memory, model, num_gpus, users, in_use, corrections)
    variables = dict(_pairs(set_, "--set"))
    found: list[Linted] = []
    for name, commands in _commands(files, variables):
        found += lint_commands(commands, file=name, asked=asked)
    _show(found, "json" if as_json else form)
    return exit_code(found, strict=strict)


def exit_code(found: Sequence[Linted], *, strict: bool) -> int:
    """2 for an error, which the user can mend; 1 for a warning where those count."""
    worst = {each.worst for each in found}
    return 2 if "error" in worst else int(strict and "warning" in worst)


def _show(found: Sequence[Linted], form: str) -> None:
    from tonnage.report.lint_json import github_text, lint_text

    if form != "text":
        print(lint_text(found) if form == "json" else github_text(found), end="")
        return
    from tonnage.report.draw import console_for
    from tonnage.report.lint_table import show_lint

    show_lint(found, console_for(sys.stdout))


def _asked(
    engine: Text, device: Text, memory: Text, model: Several, num_gpus: Text, users: Text, in_use: Text, kept: Text
) -> LintAsked:
    from tonnage.cli.plan import card_of
    from tonnage.peers.corrections import load_corrections
    from tonnage.planner.linting import LintAsked

    return LintAsked(
        engine=None if engine is None else read_engine(engine),
        card=None if device is memory is None else card_of(device, memory, verb="lint", takes_part=False),
        models=dict(_pairs(model, "--model", alone=True)),
        num_gpus=None if num_gpus is None else opt.read_count(num_gpus, "--num-gpus", 1),
        users=None if users is None else opt.read_count(users, "--users", 1),
        in_use_bytes=opt.read_bytes(in_use, "--in-use") or 0,
        corrections=load_corrections(kept),
    )


def read_engine(text: str) -> tuple[str, Version]:
    """``vllm==0.19`` as its name and release. Raises ``UserError``, also for a name alone: that adds nothing."""
    from tonnage.peers import which

    found = which.read_engine(text)
    if found.is_newest:
        raise UserError(
            f"--engine {text} names no release",
            need="NAME==VERSION",
            remedy=f"write for example --engine {found.name}=={found.version}",
        )
    return found.name, found.version


def _pairs(texts: Several, flag: str, *, alone: bool = False) -> list[tuple[str, str]]:
    found = []
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals and not alone:
            raise InvalidSetting(flag, text, "no value is given", remedy=f"write {flag} NAME=VALUE")
        found.append((name, value) if equals else ("", text))
    return found


def _commands(files: Sequence[str], variables: dict[str, str]) -> list[tuple[str, list[Command]]]:
    from tonnage.peers.commands import commands_in

    if _is_command(files):
        import shlex

        return [("command", commands_in(shlex.join(files), name="command", variables=variables, folder=Path()))]
    found = []
    for name in files:
        text, folder = read_text(name)
        known = {**_dotenv(folder), **variables}
        try:
            found.append((name, commands_in(text, name=name, variables=known, folder=folder)))
        except InputError as fault:
            told = fault.what if name in fault.what else f"{name}: {fault.what}"
            raise InputError(told, value=name, remedy=fault.remedy) from None
    return found


def _is_command(words: Sequence[str]) -> bool:
    """Whether the words are a command and no files: a program with its words, or assignments in front of one."""
    if words[0].rsplit("/", 1)[-1] not in _PROGRAMS and not _ASSIGNS.match(words[0]):
        return False
    return len(words) > 1 or not Path(words[0]).is_file()


def read_text(name: str) -> tuple[str, Path]:
    """The text of a file, or of stdin for ``-``, and the folder that it lies in. Raises ``InputError``."""
    if name == "-":
        raw, folder = sys.stdin.buffer.read(MOST_BYTES + 1), Path()
    else:
        path = Path(name)
        try:
            with path.open("rb") as file:
                raw, folder = file.read(MOST_BYTES + 1), path.parent
        except FileNotFoundError:
            raise InputError(f"there is no file {name}", value=name, remedy="check the path") from None
        except IsADirectoryError:
            raise InputError(
                f"{name} is a folder", value=name, remedy=f"name its files: {name.rstrip('/')}/*"
            ) from None
        except (OSError, ValueError) as fault:
            raise InputError(f"{name} cannot be read: {why(fault)}", value=name, remedy=to_read(fault)) from None
    if len(raw) > MOST_BYTES:
        told = f"{name} is larger than {MOST_BYTES:,} bytes"
        raise InputError(told, value=name, remedy="cut out the part that matters")
    is_wide = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # as PowerShell redirects
    return raw.decode("utf-16" if is_wide else "utf-8-sig", errors="replace"), folder


def _dotenv(folder: Path) -> dict[str, str]:
    """Variables of the ``.env`` beside the file, which compose reads as well."""
    try:
        text = (folder / ".env").read_text(encoding="utf-8")[:MOST_BYTES]
    except (OSError, ValueError):
        return {}
    pairs = (line.strip().removeprefix("export ").partition("=") for line in text.splitlines())
    return {name.strip(): value.strip().strip("\"'") for name, equals, value in pairs if equals and name[:1] != "#"}
