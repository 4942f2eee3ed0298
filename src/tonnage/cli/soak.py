"""``tonnage soak``: a long random run that an independent oracle judges."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tonnage.cli import options as opt
from tonnage.cli.card import CardOptions, card_ordinal
from tonnage.cli.groups import grouped
from tonnage.cli.interrupt import Stop, noted_interrupts
from tonnage.cli.rooms import engine_room, stub_room
from tonnage.errors import InvalidSetting, UserError

if TYPE_CHECKING:
    from tonnage.bench.adversary import Adversary
    from tonnage.bench.moves import Load
    from tonnage.bench.neighbour import Neighbour
    from tonnage.bench.verdict import SoakReport
    from tonnage.cli.display import Display

DEFAULT_REQUESTS = 2000
#: The stub's pool where nothing was asked: small beside its batch, so that requests wait and are suspended.
STUB_KV_TOKENS, STUB_MAX_SEQ_LEN, STUB_END_PROBABILITY = 8192, 1024, 0.01
#: Its cache: a host tier of so many pools, one part in so many of a pool more at the head, and steps that a load takes.
STUB_HOST_POOLS, STUB_HEAD_PARTS, STUB_LOAD_STEPS = 4, 4, 4
#: The mix has short prompts and long ones.
LEAST_SEQ_LEN = 32
#: Above it hardly a step would end well.
MOST_FAULTS = 0.2
#: A storm of so many minutes ends soon after them: what has more tokens than this to go is taken back.
LAST_TOKENS = 256
_STUB_KNOWS = ("--kv-tokens", "--block-tokens", "--admission")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What is sent, until when, and what happens beside it."""

    requests: Annotated[opt.Text, opt.option("--requests", "N", "Stop asking after N (default 2000).")] = None
    minutes: Annotated[opt.Text, opt.option("--minutes", "M", "Stop asking after M minutes.")] = None
    seed: Annotated[opt.Text, opt.option("--seed", "N", "Of everything random (default 0).")] = None
    faults: Annotated[
        opt.Text, opt.option("--faults", "P", "With --stub: so often a launch, a copy or an allocation fails.")
    ] = None
    adversarial: Annotated[
        bool | None,
        typer.Option(
            "--adversarial/--no-adversarial",
            help="Phases that are each hard on an engine, at full load (default on a card).",
            show_default=False,
        ),
    ] = None
    no_neighbour: Annotated[
        bool, typer.Option("--no-neighbour", help="No other process that takes memory of the card meanwhile.")
    ] = False


@grouped
def soak(
    *,
    model: Annotated[opt.Text, opt.argument("[MODEL]")] = None,
    stub: Annotated[bool, typer.Option("--stub", help="No model: tokens from a hash, all else real.")] = False,
    load: LoadOptions,
    memory: opt.Memory = None,
    pool: opt.PoolOptions,
    serving: opt.ServingOptions,
    card: CardOptions,
    as_json: opt.AsJson = False,
    output: Annotated[opt.Text, opt.option("--output", "FILE", "Keep the verdict as JSON.")] = None,
    force: opt.Force = False,
) -> int:
    """Serve a random mix for long, and judge by the log alone.

    Lengths, sampling, priorities, cancellations, failing callbacks, bursts and quiet times are random; --seed repeats
    them. --adversarial sends phases that are each hard on an engine. Exit code 1: a rule was broken.

    MODEL is a folder, smollm2, or a hub id. Example: tonnage soak --stub --requests 20000
    """
    if (model is None) != stub:
        raise UserError(
            "tonnage soak does not know what to run" if model is None else "tonnage soak was given a model and --stub",
            need="a model, or --stub",
            remedy="add --stub" if model is None else "leave --stub out",
        )
    settings = card.onto(opt.engine_settings(model or "stub", memory, pool, serving))
    if stub:
        _refuse_money(settings)
    probability = _probability(load.faults, is_stub=stub)
    length = settings["limit_knobs"].max_seq_len
    if length.is_set and length.or_else(0) < LEAST_SEQ_LEN:
        raise InvalidSetting(
            "--max-seq-len", length.text, "too short for a mix", remedy=f"write {LEAST_SEQ_LEN} or more"
        )
    number = opt.read_count(load.seed, "--seed", 0, allow_zero=True)
    is_over, total = _end(load.requests, load.minutes)
    from tonnage.report import check_writable

    if output is not None:
        check_writable(output, force=force, flag="--output")
    storms = card_ordinal(settings) is not None if load.adversarial is None else load.adversarial
    asked = _Asked(
        settings=settings,
        seed=number,
        faults=probability,
        is_stub=stub,
        storms=storms,
        has_neighbour=not load.no_neighbour,
    )
    report, stop = _soaked(asked, is_over, total)
    _show(report, asked, as_json=as_json, output=output, force=force)
    if stop and report.is_good:
        print("interrupted: the verdict is about what was asked until then", file=sys.stderr)
        return stop.exit_code
    return int(not report.is_good)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """``settings`` are the keywords of ``EngineOptions``. ``storms``: adversarial, with another process on a card."""

    settings: dict[str, Any]
    seed: int
    faults: float
    is_stub: bool
    storms: bool
    has_neighbour: bool


def _show(report: SoakReport, asked: _Asked, *, as_json: bool, output: str | None, force: bool) -> None:
    from tonnage.bench.report import text_of
    from tonnage.bench.soak_report import show_soak, soak_document
    from tonnage.report import write_file
    from tonnage.report.draw import console_for

    store = _store_of(_stub_sizes(asked.settings)) if asked.is_stub else {}
    document = soak_document(report, seed=asked.seed, command=["tonnage", *sys.argv[1:]])
    text = text_of(document | ({"stub": store} if store else {}))
    if output is not None:
        write_file(output, text, force=force, flag="--output")
    if as_json:
        print(text, end="")
        return
    if store:
        print(_store_text(store))
    show_soak(report, console_for(sys.stdout))


def _end(requests: opt.Text, minutes: opt.Text) -> tuple[Callable[[int, float], bool], int | None]:
    """When to stop asking, and how many requests that will be if it is known. Raises ``UserError``."""
    if requests is not None and minutes is not None:
        raise UserError("--requests and --minutes both say when to stop", remedy="keep one of them")
    if minutes is None:
        most = opt.read_count(requests, "--requests", DEFAULT_REQUESTS)
        return lambda num_asked, _: num_asked >= most, most
    try:
        seconds = 60 * float(minutes)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise InvalidSetting("--minutes", minutes, "not a number above 0", remedy="write a number such as 15 or 0.5")
    return lambda _, passed: passed >= seconds, None


def _probability(text: opt.Text, *, is_stub: bool) -> float:
    """Of a failure; 0: none. Raises ``InvalidSetting``, and ``UserError`` where nothing would come of it."""
    if text is None:
        return 0.0
    if not is_stub:
        raise UserError("--faults would change nothing: only the stub fails on purpose", remedy="add --stub")
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= MOST_FAULTS:
        raise InvalidSetting("--faults", text, "no probability of that kind", remedy=f"write 0 to {MOST_FAULTS}")
    return found


def _refuse_money(settings: dict[str, Any]) -> None:
    """The stub has no memory to plan; flags about it would be passed over in silence."""
    asked = {setting.where: setting.is_set for _, setting in settings["knobs"].items()}
    asked |= {"--memory": settings.get("memory_bytes"), "--dtype": settings.get("dtype")}
    asked |= {"--plan-file": settings.get("plan_file")}
    asked |= {"--device": settings.get("device"), "--attention": settings.get("attention")}
    asked |= {"--random-weights": settings.get("random_weights"), "--no-compile": "compile" in settings}
    given = [flag for flag, is_set in asked.items() if is_set and flag not in _STUB_KNOWS]
    if given:
        raise UserError(
            f"{', '.join(given)} would change nothing: --stub plans no memory",
            remedy="leave it out; --kv-tokens says how large the pool is",
        )


def _soaked(asked: _Asked, is_over: Callable[[int, float], bool], total: int | None) -> tuple[SoakReport, Stop]:
    from tonnage.bench.soak import Soak
    from tonnage.cli.display import make_display

    with ExitStack() as held:
        display = held.enter_context(closing(make_display(sys.stderr)))
        display.stage("import")
        neighbour = _neighbour(asked, display)
        if neighbour is not None:
            held.enter_context(neighbour)
        engine, mishaps = _stub(asked) if asked.is_stub else (_engine(asked.settings, display), None)
        held.enter_context(closing(engine))
        load, adversary = _load(asked, engine, neighbour)
        display.begin(total)
        with noted_interrupts() as stop:
            report = Soak(
                engine,
                load,
                is_over=is_over,
                has_sampler=not asked.is_stub,
                mishaps=mishaps,
                adversary=adversary,
                max_last_tokens=LAST_TOKENS if asked.storms and total is None else None,
                on_step=lambda done: display.step(engine.progress(), done=done),
                is_stopped=lambda: bool(stop),
            ).run()
        return report, stop


def _load(asked: _Asked, engine: Any, neighbour: Neighbour | None) -> tuple[Load, Adversary | None]:
    if not asked.storms:
        from tonnage.bench.soak import make_mix

        return make_mix(engine, asked.seed), None
    from tonnage.bench.adversary import Adversary

    adversary = Adversary(engine, asked.seed, has_sampler=not asked.is_stub, neighbour=neighbour)
    return adversary.storm, adversary


def _neighbour(asked: _Asked, display: Display) -> Neighbour | None:
    """The other process, before the engine: its context is then one of those that the plan finds on the card."""
    ordinal = card_ordinal(asked.settings)
    if ordinal is None or not asked.storms or not asked.has_neighbour:
        return None
    from tonnage.bench.neighbour import Neighbour

    display.stage("neighbour")
    return Neighbour(ordinal)


def _engine(settings: dict[str, Any], display: Display) -> Any:
    start, options = engine_room("soak")
    return start(options(**settings), on_stage=display.stage)


def _stub(asked: _Asked) -> tuple[Any, Any]:
    """A stub that checks what every cached block holds, with a host tier and a lent head; and what fails in it."""
    stub_engine, mishaps = stub_room("soak"), None
    if asked.faults:
        from tonnage.engine.mishaps import Mishaps

        mishaps = Mishaps(probability=asked.faults, seed=asked.seed)
    engine = stub_engine(
        **_stub_sizes(asked.settings),
        **({} if mishaps is None else {"mishaps": mishaps}),
        end_probability=STUB_END_PROBABILITY,
        seed=asked.seed,
    )
    return engine, mishaps


def _stub_sizes(settings: dict[str, Any]) -> dict[str, Any]:
    """What ``stub_engine`` is asked for: its limits, and how large its pool, its head and its host tier are."""
    knobs, limits = settings["knobs"], settings["limit_knobs"]
    kv_tokens = knobs.kv_tokens.or_else(STUB_KV_TOKENS)
    sizes = {
        "kv_tokens": kv_tokens,
        "max_seq_len": limits.max_seq_len.or_else(STUB_MAX_SEQ_LEN),
        "block_tokens": knobs.block_tokens.value,
        "admission": knobs.admission.value,
        "max_batch_size": limits.max_batch_size.value,
        "max_num_tokens": limits.max_num_tokens.value,
        "chunk_tokens": settings.get("chunk_tokens"),
        "overlap": settings.get("overlap"),
    }
    if limits.prefix_caching.or_else(True):
        sizes |= {
            "prefix_caching": True,
            "checks_contents": True,
            "host_kv_tokens": STUB_HOST_POOLS * kv_tokens,
            "head_tokens": kv_tokens // STUB_HEAD_PARTS,
            "load_steps": STUB_LOAD_STEPS,
        }
    return {name: value for name, value in sizes.items() if value is not None}


def _store_of(sizes: dict[str, Any]) -> dict[str, int]:
    """Where the stub's blocks lie, in tokens: as many as were asked for, before they are rounded up to blocks."""
    return {
        "pool_tokens": sizes["kv_tokens"],
        "head_tokens": sizes.get("head_tokens", 0),
        "host_tier_tokens": sizes.get("host_kv_tokens", 0),
        "load_steps": sizes.get("load_steps", 0),
    }


def _store_text(store: dict[str, int]) -> str:
    told = f"stub      a pool of {store['pool_tokens']:,} tokens"
    if not store["host_tier_tokens"]:
        return f"{told} without a prefix cache"
    return (
        f"{told}, {store['head_tokens']:,} more in a lent head, {store['host_tier_tokens']:,} in a host tier; a load "
        f"takes up to {store['load_steps']} steps"
    )
