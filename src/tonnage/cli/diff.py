"""``tonnage diff``: what moved between two plans or runs, or between two engines' starts, by how much, and why."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated

import typer

from tonnage.cli import options as opt
from tonnage.cli.engines import Corrections, Engine
from tonnage.cli.groups import grouped
from tonnage.cli.planning import RankOptions
from tonnage.errors import UserError

Second = Annotated[str | None, typer.Argument(metavar="[B]", hidden=True)]
Context = Annotated[opt.Text, opt.option("--max-seq-len", "N", "With --engine: tokens of one sequence.")]
Dtype = Annotated[opt.Text, opt.option("--dtype", "NAME", "With --engine: dtype of the weights.")]


@grouped
def diff(
    *,
    before: Annotated[str, opt.argument("A")],
    after: Second = None,
    engine: Engine = None,
    device: opt.Device = None,
    memory: opt.Memory = None,
    ranks: RankOptions,
    max_seq_len: Context = None,
    dtype: Dtype = None,
    like: opt.LikeOptions,
    corrections: Corrections = None,
    as_json: opt.AsJson = False,
) -> None:
    """Show what moved between two plans or runs, how far and why.

    A and B were written by plan --output, run --run-file, or either with --json.

    With two --engine, A is a MODEL, and what moves is its pool: tonnage diff ./llama-3.1-8b --device H100 --engine
    vllm==0.19 --engine vllm==0.21
    """
    if engine:
        _diff_engines(
            before, after, engine, device=device, memory=memory, ranks=ranks, like=like, kept=corrections,
            as_json=as_json, pool=opt.PoolOptions(max_seq_len=max_seq_len, dtype=dtype),
        )  # fmt: skip
        return
    _refuse_engine_flags(
        {
            "--device (--gpu)": device, "--memory": memory, "--max-seq-len": max_seq_len, "--dtype": dtype,
            "--like": like.like, "--corrections": corrections, **ranks.given(),
        }
    )  # fmt: skip
    if after is None:
        raise UserError(
            "diff compares two files, and one was given", need="A and B, or a MODEL with two --engine NAME==VERSION",
            remedy="write tonnage diff before.json after.json",
        )  # fmt: skip
    from tonnage.report import diff_files, diff_text, read_file

    made = diff_files(read_file(before), read_file(after), names=(before, after))
    if as_json:
        print(diff_text(made), end="")
        return

    from tonnage.report.diff_table import show_diff
    from tonnage.report.draw import console_for

    show_diff(made, console_for(sys.stdout))


def _refuse_engine_flags(asked: Mapping[str, object]) -> None:
    """Raise ``UserError`` naming the flags that were given though they only say how an engine starts."""
    given = [flag for flag, value in asked.items() if value is not None]
    if given:
        raise UserError(
            f"{', '.join(given)} would change nothing: two files hold what they were planned with, and only the starts "
            "of engines take flags",
            need="two files alone, or a MODEL with two --engine NAME==VERSION",
            remedy=f"leave {'it' if len(given) == 1 else 'them'} out, or add --engine vllm==0.19 --engine vllm==0.21",
        )


def _diff_engines(
    model: str,
    second: str | None,
    engines: list[str],
    *,
    device: str | None,
    memory: str | None,
    ranks: RankOptions,
    pool: opt.PoolOptions,
    like: opt.LikeOptions,
    kept: str | None,
    as_json: bool,
) -> None:
    from tonnage.cli.engines import Place, read_engines, starts_of
    from tonnage.cli.plan import card_of, check_stages
    from tonnage.peers.corrections import load_corrections
    from tonnage.planner import checkpoint_of, find_config
    from tonnage.planner.ranks import distinct_ranks
    from tonnage.report.peer_diff import diff_starts, show_start_diff, start_diff_text

    if second is not None or len(engines) != 2:
        given = f"{len(engines)} --engine" if second is None else f"a second file, {second},"
        raise UserError(
            f"diff compares the starts of one model by two engines, and {given} was given",
            need="a MODEL and two --engine NAME==VERSION",
            remedy="write tonnage diff MODEL --device H100 --engine vllm==0.19 --engine vllm==0.21",
        )
    check_stages(ranks)
    asked, stages = read_engines(engines), distinct_ranks(ranks.rank())
    stage = ranks.shown_stage(len(stages))
    place = Place(
        config=find_config(model), checkpoint=checkpoint_of(model), card=card_of(device, memory, verb="diff"),
        ranks=tuple(stages) if stage is None else (stages[stage],), dtype=pool.weights_dtype(),
        corrections=load_corrections(kept),
    )  # fmt: skip
    first, last = starts_of(asked, like.like or (), pool.knobs(), pool.limits(), place, is_compared=False)
    made = diff_starts(first, last, names=(asked[0].told, asked[1].told))
    if as_json:
        print(start_diff_text(made), end="")
        return

    from tonnage.report.draw import console_for

    show_start_diff(made, console_for(sys.stdout))
