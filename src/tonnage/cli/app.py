"""The program: its verbs, and how it ends. Whatever goes wrong is told in one paragraph on stderr.

Exit codes: 0 done, 1 something failed, 2 the user can mend it (a setting, a file, a model), 130 interrupted,
141 whoever read our output went away, 143 terminated.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated

import click
import typer

from tonnage import __version__
from tonnage.errors import TonnageError

#: Adding a verb is one file, and its name here. A file is imported when its verb is asked for, or help for all.
VERBS = ("plan", "fit", "curve", "buckets", "run", "bench", "soak", "report", "diff", "devices", "lint", "explain-log")

TRACEBACK_VARIABLE = "TONNAGE_TRACEBACK"
INTERRUPTED, PIPE_CLOSED = 130, 141
#: What stands for a character that a terminal does not have.
_PLAINER = {"–": "-", "—": "-", "→": "->", "×": "x", "≤": "<=", "≥": ">=", "…": "..."}


def build_app(verbs: Sequence[str] = VERBS) -> typer.Typer:
    """A fresh app of these verbs; plain help, no boxes, no traceback of its own (each costs an import of rich)."""
    app = typer.Typer(
        name="tonnage",
        help="One memory budget for an LLM inference engine: planned, built, audited.",
        no_args_is_help=True,
        add_completion=False,
        suggest_commands=False,  # click does
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_top)
    for verb in verbs:
        app.command(name=verb)(_verb(verb))
    return app


def _verb(name: str) -> Callable[..., object]:
    """The function of a verb, from the file of its name; a file has underscores where a verb has dashes."""
    known = name.replace("-", "_")
    found: Callable[..., object] = getattr(import_module(f"tonnage.cli.{known}"), known)
    return found


def _show_version(asked: bool) -> None:
    if asked:
        print(f"tonnage {__version__}")
        raise typer.Exit


def _top(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    del version


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's own) and return its exit code. Never raises."""
    _print_anything()
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        return _pipe_closed()
    except KeyboardInterrupt:
        tell("interrupted")
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the last place: nothing may reach the user as a traceback
        _show_traceback()
        text, code = explain(error)
        tell(text)
        return code


def _dispatch(argv: list[str]) -> int:
    # Typer makes a program of one command into that command; a second one keeps the verb a verb.
    asked = argv[0] if argv else ""
    command = typer.main.get_command(build_app((asked, _other(asked)) if asked in VERBS else VERBS))
    try:
        with command.make_context("tonnage", argv) as context:
            ended = command.invoke(context)
            return ended if isinstance(ended, int) else 0
    except click.exceptions.NoArgsIsHelpError as empty:
        print(empty.format_message(), file=sys.stderr)
        return empty.exit_code
    except click.exceptions.Exit as done:
        return done.exit_code
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 1


def _other(verb: str) -> str:
    """The smallest verb beside it."""
    return "report" if verb != "report" else "devices"


def explain(error: Exception) -> tuple[str, int]:
    """The paragraph and the exit code for an exception."""
    if isinstance(error, TonnageError):
        return str(error), error.exit_code
    if isinstance(error, click.UsageError):
        verb = error.ctx.command_path if error.ctx else "tonnage"
        told = _habit(error) or error.format_message()
        told = told if told.endswith((".", "?")) else told + "."
        see = f"see {verb} --help"
        return f"{told} {see.capitalize() if ' To change: ' in told else f'To change: {see}'}.", error.exit_code
    if isinstance(error, click.ClickException):
        return error.format_message(), error.exit_code
    if isinstance(error, OSError) and error.strerror:
        from tonnage.files import to_read

        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}. To change: {to_read(error)}.", 1
    return (
        f"This is a defect of Tonnage, not of what you asked: {type(error).__name__}: {error}. "
        f"Set {TRACEBACK_VARIABLE}=1 to see where, and please report it.",
        1,
    )


def _habit(error: click.UsageError) -> str | None:
    """What to write for a flag of another engine; None for any other mistake."""
    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        return None
    own = {name for parameter in error.ctx.command.params for name in parameter.opts}
    if "--max-seq-len" not in own:
        return None  # it plans nothing
    from tonnage.cli.other_flags import told_of

    return told_of(error.option_name, own)


def tell(text: str) -> None:
    """One paragraph on stderr, wrapped where it is a terminal."""
    paragraph = f"tonnage: {text}"
    if sys.stderr.isatty():
        import shutil
        import textwrap

        width = shutil.get_terminal_size().columns
        paragraph = textwrap.fill(paragraph, width, break_long_words=False, break_on_hyphens=False)
    print(paragraph, file=sys.stderr)


def _show_traceback() -> None:
    if os.environ.get(TRACEBACK_VARIABLE):
        import traceback

        traceback.print_exc()


def _pipe_closed() -> int:
    """Say nothing, and keep the interpreter from flushing into the closed pipe when it exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return PIPE_CLOSED


def _print_anything() -> None:
    """A terminal that cannot show a character gets a plain one, a closed stream nothing; neither an exception."""
    codecs.register_error("plain", _plain)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="plain")


def _plain(error: UnicodeError) -> tuple[str, int]:
    """A dash for a dash and an arrow for an arrow: "60.2 ? 61.8 GiB" would be no interval. Else a question mark."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_PLAINER.get(each, "?") for each in error.object[error.start : error.end]), error.end
