"""A file of launches, whatever it is written in: shell, compose, Kubernetes; with the options files beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from tonnage.errors import InputError
from tonnage.peers.commands import compose, kinds, kubernetes
from tonnage.peers.commands.command import Command, Place
from tonnage.peers.commands.documents import documents, mapping
from tonnage.peers.commands.invocation import launches_in, with_options
from tonnage.peers.commands.shell import Simple, simple_commands

_NOTHING: Mapping[str, str] = MappingProxyType({})
_YAML = re.compile(r"^(services|apiVersion|kind)\s*:", re.MULTILINE)
_DOCUMENT = re.compile(
    r"cat\s+(?:>{1,2}\s*(?P<to1>\S+)\s*<<-?\s*['\"]?(?P<end1>\w+)['\"]?|"
    r"<<-?\s*['\"]?(?P<end2>\w+)['\"]?\s*>{1,2}\s*(?P<to2>\S+))[ \t]*\n"
)
_REMEDY = "write vllm serve MODEL ..., python -m sglang.launch_server ..., trtllm-serve MODEL ..., or a manifest of one"


def commands_in(
    text: str, *, name: str = "-", variables: Mapping[str, str] = _NOTHING, folder: Path | None = None
) -> list[Command]:
    """Every engine that ``text`` starts. ``folder``: where options files that it names are looked for; None: nowhere.

    Raises ``InputError`` where it starts none, or cannot be read; nothing is ever run.
    """
    if name.lower().endswith(".ps1"):
        text = re.sub(r"`\r?\n", "\\\\\n", text)  # as PowerShell continues a line
    found, beside = _from_yaml(text, name, variables) if _is_yaml(text, name) else _from_shell(text, variables)
    if not found:
        raise InputError(f"{name} starts no engine that is known here", value=name, remedy=_REMEDY)
    return [_with_file(command, beside, folder) for command in found]


def _is_yaml(text: str, name: str) -> bool:
    if name.lower().endswith((".sh", ".bash", ".txt")):
        return False
    return name.lower().endswith((".yaml", ".yml", ".json")) or bool(_YAML.search(text))


def _from_shell(text: str, variables: Mapping[str, str]) -> tuple[list[Command], dict[str, str]]:
    found: list[Command] = []
    is_behind = False
    for simple in simple_commands(text, variables):
        if is_behind and simple.words[0].text.startswith("-"):
            found[-1] = replace(found[-1], lost=(*found[-1].lost, *_flags(simple)))
            continue
        launches = launches_in(simple, Place(), f"line {simple.line}")
        found, is_behind = [*found, *launches], bool(launches)
    return found, _written(text)


def _flags(simple: Simple) -> list[str]:
    return [word.text for word in simple.words if word.text.startswith("-")]


def _from_yaml(text: str, name: str, variables: Mapping[str, str]) -> tuple[list[Command], dict[str, str]]:
    found: list[Command] = []
    beside: dict[str, str] = {}
    for document in documents(text, name=name):
        if compose.is_compose(document):
            found += compose.launches(mapping(document), variables)
        elif kubernetes.is_manifest(document):
            found += kubernetes.launches(mapping(document))
            beside.update(kubernetes.config_files(mapping(document)))
    return found, beside


def _written(text: str) -> dict[str, str]:
    """Files that a script writes with ``cat > FILE <<END``, by their names."""
    found = {}
    at = 0
    while match := _DOCUMENT.search(text, at):  # what stands inside of one begins none
        end = re.compile(rf"^[ \t]*{re.escape(match['end1'] or match['end2'])}[ \t]*$", re.MULTILINE)
        last = end.search(text, match.end())
        at = len(text) if last is None else last.start()
        found[_base(match["to1"] or match["to2"])] = text[match.end() : at]
    return found


def _base(path: str) -> str:
    return path.strip("\"'").rsplit("/", 1)[-1]


def _with_file(command: Command, beside: Mapping[str, str], folder: Path | None) -> Command:
    """The command with what its options file says, where the file is at hand."""
    path = command.text(kinds.FILE_FLAGS[command.engine])
    if path is None:
        return command
    text = beside.get(_base(path))
    if text is None and folder is not None:
        text = _read(folder, path)
    if text is None:
        return command
    read = documents(text, name=path)
    return with_options(command, path, mapping(read[0]) if read else {})


def _read(folder: Path, path: str) -> str | None:
    for place in (folder / path, folder / _base(path)):
        try:
            if place.is_file() and place.stat().st_size < 1_000_000:
                return place.read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue
    return None
