"""Files that Tonnage writes: read whichever kind it is, and never write over one unasked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tonnage.errors import InputError
from tonnage.files import to_read, to_write, why, write_whole
from tonnage.terms import PLAN_SCHEMA, RUN_SCHEMA
from tonnage.units import shown

if TYPE_CHECKING:
    from tonnage.report.plan_json import PlanFile
    from tonnage.report.run_json import RunFile


#: Other files of ours, by the kind in their schema: what is in them, and what to do instead.
OTHERS = {
    "tonnage.fit": (
        '; its plans are under "plans", one for each stage',
        'cut one out (with jq, .plans[0]), or type what is under "command", with --output FILE',
    ),
    "tonnage.curve": ("; it holds the points of a picture", "run tonnage curve without --json to see them"),
    "tonnage.diff": ("; it holds differences", "run tonnage diff without --json to see them"),
}


_NAME_ONE = "name a file that plan --output or run --run-file wrote"


def read_file(path: str | Path) -> PlanFile | RunFile:
    """A plan file or a run file. Raises ``InputError`` with the path and what is wrong with it."""
    from tonnage.report import codec
    from tonnage.report.plan_json import plan_from
    from tonnage.report.run_json import run_from

    document = codec.loads(_text(Path(path)), file=str(path))
    kind = str(document.get("schema")).split("/")[0]
    if kind == RUN_SCHEMA.split("/")[0]:
        return run_from(document, file=str(path))
    if kind == PLAN_SCHEMA.split("/")[0]:
        return plan_from(document, file=str(path))
    schema = document.get("schema")
    if kind in OTHERS:
        told, remedy = OTHERS[kind]
        raise InputError(
            f"{path} is a {schema} answer, and only plans and runs can be shown or compared{told}",
            value=str(path),
            remedy=remedy,
        )
    raise InputError(
        f"{path} has schema {schema!r}, which is neither a plan nor a run",
        value=str(path),
        remedy=codec.REMEDY,
    )


def check_writable(path: str | Path, *, force: bool, flag: str) -> Path:
    """Refuse an existing file (unless ``force``) and a folder that is not there, before any work is done."""
    if str(path) == "-":
        raise InputError(f"{flag} needs a file", knob=flag, value="-", remedy="to print it instead, use --json")
    try:
        return _checked(Path(path), force=force, flag=flag)
    except (OSError, ValueError) as fault:  # a name that is too long, or has a zero byte
        remedy = to_write(fault) if isinstance(fault, OSError) else "choose another name"
        raise InputError(
            f"{flag} {shown(str(path))} cannot be written: {why(fault)}", knob=flag, value=str(path), remedy=remedy
        ) from None


def _checked(target: Path, *, force: bool, flag: str) -> Path:
    path = target
    if target.is_dir():
        raise InputError(f"{flag} {target} is a folder", knob=flag, value=str(path), remedy="name a file")
    if target.exists() and not force:
        raise InputError(
            f"{flag} {target} exists", knob=flag, value=str(path), remedy="choose another name, or add --force"
        )
    if not target.parent.is_dir():
        raise InputError(
            f"{flag} {target}: there is no folder {target.parent}",
            knob=flag,
            value=str(path),
            remedy=f"make it first: mkdir -p {target.parent}",
        )
    return target


def write_file(path: str | Path, text: str, *, force: bool, flag: str) -> None:
    """Write ``text`` whole. Raises ``InputError`` where the file exists or cannot be written."""
    target = check_writable(path, force=force, flag=flag)
    try:
        write_whole(target, text, replaces=force)
    except OSError as fault:
        told = f"{flag} {target} cannot be written: {why(fault)}"
        raise InputError(told, knob=flag, value=str(path), remedy=to_write(fault)) from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"there is no file {path}", value=str(path), remedy="check the path") from None
    except OSError as fault:
        remedy = f"{to_read(fault)}: one that plan --output or run --run-file wrote"
        raise InputError(f"{path} cannot be read: {why(fault)}", value=str(path), remedy=remedy) from None
    except UnicodeDecodeError as fault:
        told = f"{path} is not UTF-8 text (byte {fault.start})"
        raise InputError(told, value=str(path), remedy=_NAME_ONE) from None
