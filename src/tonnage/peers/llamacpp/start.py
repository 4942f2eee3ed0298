"""llama.cpp's start on one device: what ``--fit`` leaves of context and layers, and the buffers that follow."""

from __future__ import annotations

from dataclasses import replace

from tonnage.peers.asked_settings import Settings
from tonnage.peers.launch import Launch
from tonnage.peers.llamacpp import rules
from tonnage.peers.llamacpp.fit import Fitted, Wanted, fit, wanted
from tonnage.peers.llamacpp.sizes import Model, model_of
from tonnage.peers.outside import driver
from tonnage.peers.partition import fitted
from tonnage.peers.span import Span
from tonnage.peers.start import Check, Rule, Start, Term
from tonnage.terms import Quantity, Rank, Source
from tonnage.units import format_bytes

_ONLY_READ = (
    "Margin, order of sacrifice, layers on the host and the weights' share of the device are from source and threads "
    "alone; the cache and the states were checked against one log, the compute buffer against one thread."
)


def predict(launch: Launch) -> Start:
    """The start on one device. Raises ``InvalidSetting`` for a setting that llama.cpp would not read."""
    settings = Settings(launch)
    model = model_of(launch, settings)
    asked = wanted(launch, settings, model)
    total, gone = launch.card.total, driver(replace(launch, rank=Rank()))

    def at(card: int, outside: int, weights: int, compute: int) -> Fitted:
        return fit(model, asked, free=max(card - outside, 0), weights=weights, compute=compute)

    best = at(total.bytes, gone.best, model.weights.best, model.compute.best)
    ends = (
        at(total.low, gone.high, model.weights.high, model.compute.high),
        at(total.high, gone.low, model.weights.low, model.compute.low),
    )
    context = Span.around(best.context, *(each.context for each in ends))
    pool = Span.around(best.kv + best.states, *(each.kv + each.states for each in ends))
    length = best.context if model.is_unified else best.context // model.num_sequences
    return Start(
        launch=launch,
        terms=fitted(_terms(model, best, ends, gone), total.bytes),
        pool=pool.quantity(Source.PREDICTED, "cells of the context"),
        bytes_per_token=(model.cell * best.device_layers / max(model.num_layers, 1)) or None,
        tokens=context.count(),
        logged_tokens=context.count(),
        concurrency=Span.exact(1000 if model.is_unified else 1000 * model.num_sequences).count(),
        max_model_len=length,
        defaults=tuple(settings.defaults),
        checks=_checks(launch, model, asked, best, ends, gone),
        notes=(_ONLY_READ, *_notes(launch, model, best), *settings.unread()),
    )


def _terms(model: Model, best: Fitted, ends: tuple[Fitted, ...], gone: Span) -> list[Term]:
    def term(name: str, rule: Rule, span: Span) -> Term:
        return Term(name=name, bytes=span.quantity(Source.PREDICTED, rule.source), rule=rule)

    def around(name: str) -> Span:
        return Span.around(getattr(best, name), *(getattr(each, name) for each in ends))

    made = [
        replace(term("context", rules.OUTSIDE, gone), is_budgeted=False),
        term("weights", rules.WEIGHTS, around("weights")),
        term("kv cache", rules.CACHE, around("kv")),
    ]
    if model.state:
        made.append(term("recurrent states", rules.STATES, around("states")))
    made.append(term("compute buffer", rules.COMPUTE, around("compute")))
    left = Term(name="left free", bytes=Quantity.exact(0, Source.DERIVED, ""), rule=rules.LEFT, is_budgeted=False)
    return [*made, left]


def _checks(
    launch: Launch, model: Model, asked: Wanted, best: Fitted, ends: tuple[Fitted, ...], gone: Span
) -> tuple[Check, ...]:
    card = launch.card.total
    frees = (card.bytes - gone.best, card.low - gone.high, card.high - gone.low)
    least = asked.margin_bytes if asked.is_on else 0
    fits = [free - each.used >= least for free, each in zip(frees, (best, *ends), strict=True)]
    told = f"--ctx-size {best.context}" if asked.context is None else f"context {best.context:,} as asked"
    says = f"Keeps {told}, {best.device_layers} of {model.num_layers} layers on the device."
    rule = rules.MARGIN if asked.is_on and asked.layers is None else rules.GIVES_UP
    margin = Check(
        name="margin on the device", passes=fits[0] if len(set(fits)) == 1 else None,
        need=f"{format_bytes(least)} free", have=f"{format_bytes(max(frees[0] - best.used, 0))} free", says=says,
        rule=rule, remedy="" if all(fits) else _remedy(launch, asked),
    )  # fmt: skip
    return (margin,)


def _remedy(launch: Launch, asked: Wanted) -> str:
    """What was tried, by predicting again."""
    for change, told in (
        ({"fit": True, "n_gpu_layers": None}, "leave --n-gpu-layers out, with --fit on"),
        ({"fit": True, "n_gpu_layers": None, "ctx_size": None}, "leave --ctx-size and --n-gpu-layers out"),
    ):
        if all(launch.get(name) == value for name, value in change.items() if name != "fit") and asked.is_on:
            continue
        tried = predict(replace(launch, settings={**launch.settings, **change}))
        if tried.checks[0].passes is not False:
            return told
    return "a smaller file, or a larger card"


def _notes(launch: Launch, model: Model, best: Fitted) -> tuple[str, ...]:
    notes = []
    moved, experts = model.num_layers - best.device_layers, best.device_layers - best.expert_layers
    for count, what in ((moved, "whole layers"), (experts, "layers' experts")):
        if count:
            notes.append(
                f"{count} of {model.num_layers} {what} go to the host and are computed there, many times slower; a "
                "smaller file or --cache-type-k q8_0 --cache-type-v q8_0 keeps more on the device."
            )
    if model.is_unified and model.num_sequences > 1:
        notes.append(f"{model.num_sequences} slots share one cache of {best.context:,} cells.")
    if not model.is_unified:
        notes.append(f"Each of {model.num_sequences} slots has {best.context // model.num_sequences:,} cells.")
    if launch.config.towers:
        notes.append("The projector of pictures is a file of its own and not counted, as in --fit before mid-2026.")
    if launch.draft is not None:
        notes.append("Of the draft only weights are counted: its cache and buffers come on top.")
    if launch.rank.pp > 1:
        notes.append("One device of several, fitted alone: --fit balances them, with half a layer to spare on each.")
    return tuple(notes)
