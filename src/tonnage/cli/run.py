"""``tonnage run``: generate text inside a memory plan, and show the ledger, planned against actual."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tonnage.cli import options as opt
from tonnage.cli.groups import grouped
from tonnage.cli.interrupt import SIGNAL_EXIT
from tonnage.cli.planning import PolicyOptions
from tonnage.cli.rooms import engine_room
from tonnage.cli.sampling import SamplingOptions
from tonnage.errors import InputError, TonnageError, UserError
from tonnage.files import to_read, why

if TYPE_CHECKING:
    from tonnage.cli.asks import Asks
    from tonnage.cli.serving import ResultLines, Serving, Tally
    from tonnage.engine.request import Delta
    from tonnage.report import RunResult

#: Failures told one by one on stderr; ``--output`` holds them all.
NUM_FAILURES_TOLD = 20
#: Characters of a completion that are shown when the requests came from a file.
NUM_CHARACTERS = 400

Prompts = Annotated[
    list[str] | None, typer.Option("--prompt", metavar="TEXT", help="A prompt; may be repeated.", show_default=False)
]
Input = Annotated[
    str | None,
    typer.Option("--input", metavar="FILE", help='JSON lines: {"prompt": "..."}; - is stdin.', show_default=False),
]
Output = Annotated[
    str | None,
    typer.Option("--output", metavar="FILE", help="Results as JSON lines, as they finish; - is stdout.",
                 show_default=False),
]  # fmt: skip
RunFilePath = Annotated[
    str | None,
    typer.Option("--run-file", metavar="FILE", help="Keep counts, ledger and plan as JSON.", show_default=False),
]
Chat = Annotated[
    bool | None,
    typer.Option("--chat/--no-chat", help="Put prompts into the model's chat template (default: if it has one).",
                 show_default=False),
]  # fmt: skip


@grouped
def run(
    *,
    model: opt.Model,
    prompt: Prompts = None,
    input_file: Input = None,
    output: Output = None,
    run_file: RunFilePath = None,
    chat: Chat = None,
    sampling: SamplingOptions,
    memory: opt.Memory = None,
    pool: opt.PoolOptions,
    serving: opt.ServingOptions,
    policy: PolicyOptions,
    as_json: opt.AsJson = False,
    force: opt.Force = False,
) -> int:
    """Generate text inside a memory plan; what has no memory waits.

    MODEL is a folder, smollm2, or a hub id. Example: tonnage run smollm2 --prompt "Hello" --memory 1500MiB

    Flags that choose tokens are keys of an input line too (--top-p is "top_p"), where a line's key goes first.
    """
    settings = opt.engine_settings(model, memory, pool, serving) | policy.keywords()
    given = sampling.values()
    _check_files(output, run_file, input_file, as_json=as_json, force=force)
    asks = read_asks(prompt or [], input_file, given)
    tally, result = _serve(settings, asks, chat=chat, output=output, as_json=as_json, force=force)
    _show(result, tally, asks, as_json=as_json, output=output)
    if run_file is not None:
        from tonnage.report import run_text, write_file

        write_file(run_file, run_text(result), force=force, flag="--run-file")
    return SIGNAL_EXIT + tally.stopped_by if tally.stopped_by else int(bool(tally.failures))


def read_asks(prompts: list[str], input_file: str | None, sampling: Mapping[str, Any]) -> Asks:
    """The requests, with what the flags say of ``sampling``.

    Raises ``UserError`` for neither or both, ``InputError`` for a file that cannot be read or holds nothing."""
    from tonnage.cli.asks import from_lines, from_prompts

    if bool(prompts) == (input_file is not None):
        raise UserError(
            "tonnage run was given both --prompt and --input" if prompts else "tonnage run has nothing to do",
            need='one of --prompt TEXT (may be repeated) and --input FILE (JSON lines such as {"prompt": "Hello"})',
            remedy="keep one of them" if prompts else 'add --prompt "Hello"',
        )
    if input_file is None:
        return from_prompts(prompts, sampling=sampling)
    if input_file == "-":
        return from_lines(sys.stdin.buffer, file="stdin", sampling=sampling)
    try:
        with Path(input_file).open("rb") as lines:
            return from_lines(lines, file=input_file, sampling=sampling)
    except (OSError, ValueError) as fault:  # a zero byte in its name is a ValueError
        told = f"--input {input_file} cannot be read: {why(fault)}"
        raise InputError(told, knob="--input", value=input_file, remedy=to_read(fault)) from None


def _check_files(
    output: str | None, run_file: str | None, input_file: str | None, *, as_json: bool, force: bool
) -> None:
    """Whatever is wrong with the output files is told before a model is loaded."""
    from tonnage.report import check_writable

    if output == "-" and as_json:
        raise UserError(
            "--output - and --json both write to stdout", remedy="give --output a file, or --run-file instead of --json"
        )
    if output is not None and output == run_file:
        raise UserError(f"--output and --run-file both write {output}", remedy="give them two names")
    for flag, file in (("--output", output), ("--run-file", run_file)):
        if file not in (None, "-") and input_file not in (None, "-") and _is_same(str(file), str(input_file)):
            raise UserError(f"{flag} and --input are the same file, {file}", remedy=f"give {flag} a file of its own")
    if output not in (None, "-"):
        check_writable(str(output), force=force, flag="--output")
    if run_file is not None:
        check_writable(run_file, force=force, flag="--run-file")


def _is_same(one: str, other: str) -> bool:
    return Path(one).exists() and Path(other).exists() and Path(one).samefile(other)


def _serve(
    settings: dict[str, Any], asks: Asks, *, chat: bool | None, output: str | None, as_json: bool, force: bool
) -> tuple[Tally, RunResult]:
    """Start the engine, serve everything, and take its result before it is closed."""
    from tonnage.cli.display import make_display
    from tonnage.cli.serving import ResultLines, Serving

    streams = _is_one_text(asks) and sys.stdout.isatty() and not as_json and output != "-"
    with closing(make_display(sys.stderr)) as display, closing(ResultLines(output, force=force)) as results:
        display.stage("import")
        start, options = engine_room("run")
        with closing(start(options(**settings), on_stage=display.stage)) as engine:
            if streams:
                display.close()
            serving = Serving(engine, asks, results=results, display=display)
            in_chat = engine.text.has_chat_template if chat is None else chat
            _run(serving, results, chat=in_chat, on_delta=_print_delta if streams else None)
            if streams:
                serving.tally.shown.clear()
                print()
            serving.tally.records = results.records
            return serving.tally, serving.tally.counted_into(engine.result())


def _is_one_text(asks: Asks) -> bool:
    return len(asks.asks) == 1 and asks.asks[0].params.n == 1


def _run(serving: Serving, results: ResultLines, **how: Any) -> None:
    try:
        serving.run(**how)
    except (TonnageError, KeyboardInterrupt):
        if results.path not in (None, "-") and serving.tally.finished:
            print(f"{serving.tally.finished} finished requests are kept in {results.path}", file=sys.stderr)
        raise


def _print_delta(delta: Delta) -> None:
    print(delta.text, end="", flush=True)


def _show(result: RunResult, tally: Tally, asks: Asks, *, as_json: bool, output: str | None) -> None:
    """The end of a run: JSON alone, or some of the text and the ledger; failures always on stderr."""
    if as_json:
        print(_json_text(result, tally), end="")
    else:
        from tonnage.report.draw import console_for
        from tonnage.report.run_table import show_run

        # stdout belongs to the results where they go there
        stream = sys.stderr if output == "-" else sys.stdout
        if output != "-":
            _show_texts(tally, asks, kept=output)
        show_run(result, console_for(stream), with_plan=False)
    sys.stdout.flush()
    for line in _failures(tally, asks, output):
        print(line, file=sys.stderr)


def _json_text(result: RunResult, tally: Tally) -> str:
    """The run file; with the results in it where ``--output`` does not keep them."""
    import json

    from tonnage.report import run_document

    document = run_document(result) | ({"results": tally.records} if tally.records else {})
    return json.dumps(document, sort_keys=True, indent=2, ensure_ascii=False) + "\n"


def _show_texts(tally: Tally, asks: Asks, *, kept: str | None) -> None:
    for ask in asks.asks:
        for number, told in enumerate(tally.shown.get(ask.id, ()), 1):
            text = told.strip()
            whole = asks.typed or len(text) <= NUM_CHARACTERS
            shortened = text if whole else text[:NUM_CHARACTERS].rstrip() + " ..."
            sample = f", sample {number}" if ask.params.n > 1 else ""
            print(f"[{ask.id}{sample}]\n{shortened}\n")
    rest = tally.finished - len(tally.shown)
    if rest > 0 and tally.shown:
        print(f"[{rest} more, {f'in {kept}' if kept else '--output FILE keeps them all'}]\n")


def _failures(tally: Tally, asks: Asks, output: str | None) -> list[str]:
    told = [f"failed: {failure.told()}" for failure in tally.failures[:NUM_FAILURES_TOLD]]
    more = len(tally.failures) - len(told)
    if more:
        told.append(f"failed: {more} more" + (f", all in {output}" if output else ""))
    if asks.ignored:
        told.append("ignored: " + ", ".join(f"{key!r} in {count} lines" for key, count in asks.ignored.items()))
    if tally.stopped_by:
        kept = f", kept in {output}" if output not in (None, "-") and tally.finished else ""
        told.append(f"interrupted: {tally.finished} of {asks.total} requests had finished{kept}")
    return told
