"""The start of a built engine, as releases before 1.0 have it: load, then a fraction of what is free."""

from __future__ import annotations

from fractions import Fraction

from tonnage.costs.activations import forward_peak
from tonnage.costs.kv import kv_layout
from tonnage.layout import bytes_per_token
from tonnage.peers.asked_settings import Settings
from tonnage.peers.launch import Launch
from tonnage.peers.outside import driver
from tonnage.peers.partition import fitted
from tonnage.peers.span import Span
from tonnage.peers.start import Check, Count, Start, Term
from tonnage.peers.trtllm import rules
from tonnage.peers.trtllm.knobs import MAX_BATCH_SIZE, MAX_NUM_TOKENS
from tonnage.terms import Quantity, Source
from tonnage.units import MiB, ceil_div

#: Buffers of the decoder beside the execution context, in the one log that tells, with what an order either way is.
DECODER_BYTES = Span(180 * MiB, 60 * MiB, 500 * MiB)


def predict(launch: Launch) -> Start:
    """Raises ``InvalidSetting`` for a setting that the engine would not read."""
    settings = Settings(launch)
    share = settings.share("free_gpu_memory_fraction", Fraction(9, 10), "of what is free once the engine is loaded")
    block = settings.whole("tokens_per_block", 64, "tokens of a block in engines of that time")
    length = settings.whole("max_seq_len", launch.config.max_position_embeddings, "the model's own length")
    rate = bytes_per_token(kv_layout(launch.config, kv_dtype=launch.kv_dtype, rank=launch.rank))
    gone, context = driver(launch), _context(launch, settings)
    free = Span.around(
        max(launch.card.total.bytes - gone.best - launch.weights.bytes - context.best, 0),
        max(launch.card.total.low - gone.high - launch.weights.high - context.high, 0),
        max(launch.card.total.high - gone.low - launch.weights.low - context.low, 0),
    )
    blocks = [num_blocks(each, share, block * rate) for each in (free.best, free.low, free.high)]
    if cap := settings.maybe("max_tokens"):
        blocks = [min(each, ceil_div(cap, block)) for each in blocks]
    found = Span.around(*blocks)
    tokens = found.times(block)
    return Start(
        launch=launch,
        terms=fitted(_terms(launch, gone, context, found.times(block * rate)), launch.card.total_bytes),
        pool=found.times(block * rate).quantity(Source.PREDICTED, "free_gpu_memory_fraction"),
        bytes_per_token=Fraction(rate),
        tokens=tokens.count(),
        logged_tokens=tokens.count(),
        concurrency=_concurrency(tokens, length),
        max_model_len=length,
        defaults=tuple(settings.defaults),
        checks=(_holds_one(tokens, length),),
        notes=settings.unread(),
    )


def num_blocks(free_bytes: int, share: Fraction, block_bytes: int) -> int:
    """Whole blocks of the share, rounded up: 4,060 of 64 tokens in the memory page's own log."""
    return ceil_div(int(free_bytes * share), block_bytes)


def _context(launch: Launch, settings: Settings) -> Span:
    tokens = settings.whole("max_num_tokens", MAX_NUM_TOKENS, "tokens of a step")
    rows = settings.whole("max_batch_size", MAX_BATCH_SIZE, "sequences of a step")
    dtype = launch.dtype or launch.config.dtype
    peak = forward_peak(launch.config, num_tokens=tokens, logits_rows=min(rows, tokens), dtype=dtype, rank=launch.rank)
    return Span(peak.bytes, peak.low // 2, peak.high) + DECODER_BYTES


def _terms(launch: Launch, gone: Span, context: Span, pool: Span) -> list[Term]:
    return [
        Term(name="context", bytes=gone.quantity(Source.PREDICTED, ""), rule=rules.CONTEXT),
        Term(name="weights", bytes=launch.weights, rule=rules.ENGINE_WEIGHTS),
        Term(name="execution context", bytes=context.quantity(Source.PREDICTED, ""), rule=rules.ENGINE_CONTEXT),
        Term(name="token pool", bytes=pool.quantity(Source.PREDICTED, ""), rule=rules.ENGINE_POOL),
        Term(name="left free", bytes=Quantity.exact(0, Source.DERIVED, ""), rule=rules.ENGINE_LEFT, is_budgeted=False),
    ]


def _concurrency(tokens: Span, length: int) -> Count:
    return Span(*(each * 1000 // length for each in (tokens.best, tokens.low, tokens.high))).count()


def _holds_one(tokens: Span, length: int) -> Check:
    ends = [each >= length for each in (tokens.best, tokens.low, tokens.high)]
    passes = ends[0] if len(set(ends)) == 1 else None
    return Check(
        name="pool holds one sequence", passes=passes, need=f"{length:,} tokens", have=f"{tokens.best:,} tokens",
        says="A pool of less than one sequence ends the start, or the first long request.", rule=rules.ENGINE_POOL,
        remedy="" if passes else f"--max_seq_len {max(tokens.low, 1)}, built so, or more tensor-parallel ranks",
    )  # fmt: skip
