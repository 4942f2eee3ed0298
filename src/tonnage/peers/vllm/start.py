"""vLLM's start of one rank: ``predict``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from math import floor

from tonnage.peers.launch import Launch
from tonnage.peers.start import Check, Count, Rule, Start
from tonnage.peers.vllm import eras, sharing
from tonnage.peers.vllm.budget import Budget, budget_of, partition
from tonnage.peers.vllm.checks import checks_of
from tonnage.peers.vllm.facts import Facts, filed
from tonnage.peers.vllm.notes import notes_of
from tonnage.peers.vllm.pages import Pages, concurrency, logged_tokens, longest, pages_of
from tonnage.peers.vllm.remedies import with_remedies
from tonnage.peers.vllm.setup import Setup, resolve
from tonnage.peers.vllm.sharing import token_ranks
from tonnage.peers.vllm.workers import other_stages, placed
from tonnage.terms import Quantity, Source

DRAFT_CACHE = Rule(
    name="draft's cache",
    says="a draft's layers are in the pool: a block has a page of each of them too, on the last stage",
    source="vllm/spec_decode/spec_decode_worker.py of 0.6.6; vllm#24322, vllm/v1/spec_decode/draft_model.py of 0.16.0",
)  # fmt: skip


def predict(launch: Launch, *, facts: Facts | None = None) -> Start:
    """What ``launch`` would log, with the engine's own checks and remedies that were tried.

    ``facts``: other coefficients than those that come with the package, for judging them. Raises ``InvalidSetting``.
    """
    known = filed() if facts is None else facts
    found = _predicted(placed(launch), known)
    return with_remedies(found, lambda changed: _predicted(placed(changed), known))


def _predicted(launch: Launch, facts: Facts) -> Start:
    stages = [launch, *other_stages(launch)] if launch.rank.pp > 1 else [launch]
    setups = [resolve(stage) for stage in stages]
    budgets = [budget_of(setup, facts) for setup in setups]
    counts = [_blocks(setup, budget, pages_of(setup)) for setup, budget in zip(setups, budgets, strict=True)]
    setup, budget, pages, blocks = setups[0], budgets[0], pages_of(setups[0]), _least(counts)
    checks = tuple(checks_of(setup, budgets, pages, blocks))
    length = setup.max_model_len
    if setup.is_auto_length and pages is not None and blocks is not None:
        length = longest(pages, setup, blocks.best)
    return _start(setup, budget, pages, blocks, checks=checks, pool=_pool(budget, pages, blocks), length=length)


def _start(
    setup: Setup,
    budget: Budget,
    pages: Pages | None,
    blocks: Count | None,
    *,
    checks: tuple[Check, ...],
    pool: Quantity,
    length: int,
) -> Start:
    tokens = logged = concurrent = None
    if pages is not None and blocks is not None and length:
        each = [concurrency(pages, setup, number, length) for number in (blocks.best, blocks.low, blocks.high)]
        tokens = _count([number * length for number in each])
        concurrent = _count([number * 1000 for number in each])
        numbers = (blocks.best, blocks.low, blocks.high)
        logged = _count([logged_tokens(pages, setup, number, length) for number in numbers])
    return Start(
        launch=setup.launch,
        terms=partition(budget, pool=pool),
        pool=pool,
        bytes_per_token=_rate(setup, pages),
        tokens=tokens,
        logged_tokens=logged,
        concurrency=concurrent,
        max_model_len=length,
        defaults=setup.defaults,
        checks=checks,
        notes=notes_of(setup, budget, pages),
        rules=tuple(_rules(setup)),
    )


def _rules(setup: Setup) -> Iterator[Rule]:
    """What decides about the pool's tokens beside its bytes, where it was asked for."""
    if token_ranks(setup) > 1:
        yield sharing.RULE
    if setup.launch.draft is not None:
        yield DRAFT_CACHE


def _count(numbers: Sequence[Fraction | int]) -> Count:
    best, low, high = (floor(number) for number in numbers)
    return Count(best=best, low=low, high=high)


def _blocks(setup: Setup, budget: Budget, pages: Pages | None) -> Count | None:
    if pages is None:
        return None
    if setup.num_blocks is not None:
        return Count.exact(setup.num_blocks)
    have = budget.available
    best, low, high = (max(0, number // pages.block_bytes) for number in (have.bytes, have.low, have.high))
    return Count(best=best, low=low, high=high)


def _least(counts: Sequence[Count | None]) -> Count | None:
    """Of all stages: each has its own layers, weights and peak, and all get as many blocks as the poorest."""
    known = [count for count in counts if count is not None]
    if not known:
        return None
    return Count(
        best=min(count.best for count in known),
        low=min(count.low for count in known),
        high=min(count.high for count in known),
    )


def _pool(budget: Budget, pages: Pages | None, blocks: Count | None) -> Quantity:
    """Whole blocks; what is available where its blocks are not known."""
    have = budget.available
    if pages is None or blocks is None:
        return replace(have, bytes=max(0, have.bytes), low=max(0, have.low), high=max(0, have.high))
    size = pages.block_bytes
    return Quantity(
        bytes=blocks.best * size, low=blocks.low * size, high=blocks.high * size, source=Source.PREDICTED, ref=have.ref
    )


def _rate(setup: Setup, pages: Pages | None) -> Fraction | None:
    """Pool over the token line: only where the line counts slots, or where all layers keep the same."""
    if pages is None:
        return None
    counts_slots = not (setup.is_v1 and eras.is_from(setup.launch.version, eras.TOKENS_BY_LENGTH))
    return pages.bytes_per_token if counts_slots or pages.is_uniform else None
