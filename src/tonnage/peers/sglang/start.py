"""SGLang's start on one rank: what it takes before the pools, the pools, and what lives off the rest."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from tonnage.peers.asked_settings import Settings
from tonnage.peers.launch import Launch
from tonnage.peers.outside import outside as gone_before
from tonnage.peers.partition import fitted
from tonnage.peers.sglang import after, checks, rules
from tonnage.peers.sglang.cells import Cells, cells
from tonnage.peers.sglang.fraction import (
    Static,
    decode_graph_sizes,
    drafts,
    has_compressed,
    is_multimodal,
    static_fraction,
)
from tonnage.peers.sglang.pools import Pools, Shapes, pools, shapes
from tonnage.peers.span import Span
from tonnage.peers.start import Rule, Start, Term
from tonnage.terms import Quantity, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Everything that a start is told from; ``least`` and ``most`` are the pools at the ends of all inputs."""

    launch: Launch
    settings: Settings
    static: Static
    kept: Cells
    shapes: Shapes
    outside: Span
    best: Pools
    least: Pools
    most: Pools
    graphs: Span
    prefill: Span
    activations: Quantity

    def span(self, name: str) -> Span:
        """A figure of the pools with its range."""
        return Span.around(*(getattr(each, name) for each in (self.best, self.least, self.most)))

    def at(self, fraction: Fraction, end: str = "best") -> Pools:
        """The pools with another ``mem_fraction_static``: at the best of all other inputs, or at their ``least``."""
        total, weights, gone = self.launch.card.total, self.launch.weights, self.outside
        if end == "least":
            return _pools_at(self.kept, self.shapes, total.low - gone.high, weights.high, fraction)
        return _pools_at(self.kept, self.shapes, total.bytes - gone.best, weights.bytes, fraction)

    @property
    def before(self) -> int:
        """Free before the weights load."""
        return max(self.launch.card.total_bytes - self.outside.best, 0)

    @property
    def table(self) -> Span:
        return Span.around(*(after.request_table(each, self.shapes) for each in (self.best, self.least, self.most)))


def predict(launch: Launch) -> Start:
    """The start by the rules of that release. Raises ``InvalidSetting`` for a setting that SGLang would not read."""
    found = gather(launch)
    best = found.best
    tokens = found.span("tokens").count()
    length = found.shapes.context_tokens
    resident = [each.tokens * 1000 // length for each in (found.best, found.least, found.most)]
    return Start(
        launch=launch,
        terms=fitted(_terms(found), launch.card.total_bytes),
        pool=found.span("all_bytes").quantity(Source.PREDICTED, "mem_fraction_static"),
        bytes_per_token=found.kept.token or None,
        tokens=tokens,
        logged_tokens=tokens,
        concurrency=Span.around(*(_concurrency(each, found, value) for each, value in zip(
            (found.best, found.least, found.most), resident, strict=True))).count(),
        max_model_len=length,
        defaults=tuple(found.settings.defaults) + _requests_default(found, best),
        checks=checks.of(found),
        notes=_notes(found),
        rules=_rules(found),
    )  # fmt: skip


def _rules(found: Found) -> tuple[Rule, ...]:
    """Of the fraction where it was guessed, of a token, and of how many requests may run."""
    made = [] if found.static.is_asked else [found.static.rule]
    if not found.static.is_asked and is_multimodal(found.launch):
        made.append(rules.ENCODER)
    return (*made, found.kept.rule, rules.CONCURRENCY)


def gather(launch: Launch) -> Found:
    """All figures, at the best of every input and at both ends."""
    settings = Settings(launch)
    static = static_fraction(launch, settings)
    kept = cells(launch, settings)
    made = shapes(launch, settings, has_media=is_multimodal(launch), is_compressed=has_compressed(launch))
    outside = gone_before(launch)
    total, weights = launch.card.total, launch.weights

    sizes = decode_graph_sizes(settings, static.graph_max_bs)
    rows = sizes[-1] if sizes else min(made.max_requests or static.graph_max_bs, static.graph_max_bs)
    return Found(
        launch=launch,
        settings=settings,
        static=static,
        kept=kept,
        shapes=made,
        outside=outside,
        best=_pools_at(kept, made, total.bytes - outside.best, weights.bytes, static.best),
        least=_pools_at(kept, made, total.low - outside.high, weights.high, static.low),
        most=_pools_at(kept, made, total.high - outside.low, weights.low, static.high),
        graphs=after.graphs(sizes),
        prefill=after.prefill_graphs(static.num_prefill_graphs),
        activations=after.activations(launch, chunk_tokens=static.chunk_tokens, rows=rows),
    )


def _pools_at(kept: Cells, made: Shapes, before: int, weights: int, fraction: Fraction) -> Pools:
    return pools(kept, made, before=max(before, 0), weights=weights, fraction=fraction)


def _terms(found: Found) -> list[Term]:
    kept = found.kept

    def term(name: str, span: Span, rule: Rule, *, is_budgeted: bool = True) -> Term:
        return Term(name=name, bytes=span.quantity(Source.PREDICTED, rule.source), rule=rule, is_budgeted=is_budgeted)

    terms = [
        term("context", found.outside, rules.OUTSIDE, is_budgeted=False),
        Term(name="weights", bytes=found.launch.weights, rule=rules.WEIGHTS),
    ]
    if found.shapes.media_bytes:
        terms.append(term("multimodal reserve", Span.exact(found.shapes.media_bytes), rules.MEDIA))
    if kept.state:
        terms.append(term("state pool", found.span("state_bytes"), rules.STATES))
        if found.shapes.num_drafts:
            terms.append(term("verification states", found.span("verify_bytes"), rules.VERIFY))
    terms += [
        term("token pool", found.span("token_bytes"), rules.STATIC),
        term("request table", found.table, rules.REQUESTS, is_budgeted=False),
        term("graphs", found.graphs, rules.GRAPHS, is_budgeted=False),
    ]
    if found.prefill.high:
        terms.append(term("prefill graphs", found.prefill, rules.PREFILL_GRAPHS, is_budgeted=False))
    terms.append(Term(name="activations", bytes=found.activations, rule=rules.ACTIVATIONS, is_budgeted=False))
    return [*terms, Term(name="left free", bytes=Quantity.exact(0, Source.DERIVED, ""), rule=rules.LEFT,
                         is_budgeted=False)]  # fmt: skip


def _concurrency(each: Pools, found: Found, thousandths: int) -> int:
    """Sequences of full length that fit, in thousandths; with states no more than slots allow."""
    return min(thousandths, each.max_requests * 1000) if found.kept.state else thousandths


def _requests_default(found: Found, best: Pools) -> tuple[tuple[str, str, str], ...]:
    if found.settings.has("max_running_requests") or found.shapes.max_requests is not None:
        return ()
    return (("max_running_requests", f"{best.max_requests:,}", "512 sequences of full length, 2,048 to 4,096"),)


def _notes(found: Found) -> tuple[str, ...]:
    launch, notes = found.launch, []
    if not found.static.is_asked and found.static.low != found.static.high:
        notes.append(
            f"Which guess of mem_fraction_static {launch.version} makes is not known for sure: between "
            f"{float(found.static.low):.3f} and {float(found.static.high):.3f}."
        )
    if found.kept.window is not None:
        notes.append(
            f"Tokens are those of the layers that see everything; the window pool has {found.best.window_tokens:,}."
        )
    if launch.rank.pp > 1:
        notes.append("Tokens are this stage's: the engine takes the fewest of all stages.")
    if drafts(found.settings) and launch.draft is None and not launch.config.mtp_layers:
        notes.append("The draft's cache is counted as one of the target's layers: name the draft to count its own.")
    return (*notes, *found.settings.unread())
