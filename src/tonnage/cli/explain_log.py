"""``tonnage explain-log``: a start-up log of another engine, line by line beside its rules."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from tonnage.cli import options as opt
from tonnage.cli.lint import read_engine, read_text
from tonnage.errors import UserError

if TYPE_CHECKING:
    from tonnage.peers.commands.command import Flag
    from tonnage.peers.logs.explanation import Explanation

Text = str | None


def explain_log(
    file: Annotated[str, opt.argument("FILE")],
    model: Annotated[Text, opt.option("--model", "MODEL", "The model, where it is not the log's own name.")] = None,
    engine: Annotated[Text, opt.option("--engine", "NAME==VERSION", "Release, where the log has none.")] = None,
    device: opt.Device = None,
    memory: opt.Memory = None,
    flags: Annotated[
        Text, opt.option("--flags", "TEXT", "Flags of the launch that the log does not print, in one word.")
    ] = None,
    save: Annotated[
        bool, typer.Option("--save", help="Keep the differences for the next prediction on this machine.")
    ] = False,
    corrections: Annotated[
        Text, opt.option("--corrections", "FILE", "Where to keep them (default: a file of this machine).")
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Recompute a start-up log, and name the term that differs.

    A failed start is explained, with what to change.

    FILE is a log of vLLM, SGLang or TensorRT-LLM from its first line on, or - for stdin.
    Example: tonnage explain-log vllm.log --model ./llama-3.1-8b --device H100 --save
    """
    if corrections is not None and not save:
        raise UserError(
            f"--corrections {corrections} says where --save keeps what differs, and nothing is to be kept",
            remedy="add --save, or leave --corrections out",
        )
    from tonnage.cli.plan import card_of
    from tonnage.peers.logs import read_log
    from tonnage.planner.explaining import ExplainAsked, explain_log

    asked_engine = None if engine is None else read_engine(engine)
    card = None if device is memory is None else card_of(device, memory, verb="explain-log", takes_part=False)
    text, _ = read_text(file)
    log = read_log(text, engine=None if asked_engine is None else asked_engine[0], name=file)
    asked = ExplainAsked(engine=asked_engine, card=card, model=model, flags=_flags(log.engine, flags))
    found = explain_log(log, name=file, text=text, asked=asked)
    kept = _save(found, corrections) if save else ""
    if as_json:
        from tonnage.report.log_json import explanation_text

        print(explanation_text(found), end="")
        return
    from tonnage.report.draw import console_for
    from tonnage.report.log_table import show_explanation

    show_explanation(found, console_for(sys.stdout), kept=kept)


def _flags(engine: str, text: Text) -> tuple[Flag, ...]:
    if text is None:
        return ()
    from tonnage.peers.commands.invocation import command_of
    from tonnage.peers.commands.shell import simple_commands

    words = [word for simple in simple_commands(text) for word in simple.words]
    return command_of(engine, words).flags


def _save(found: Explanation, path: Text) -> str:
    from tonnage.peers.corrections import save_correction

    if found.correction is None or not found.correction.minor:
        why = found.unpredicted or "no figure of the log has a term of the prediction, or its release is not known"
        raise UserError(f"there is nothing to keep: {why}", remedy="give --model, --device and --engine")
    return str(save_correction(found.correction, path))
