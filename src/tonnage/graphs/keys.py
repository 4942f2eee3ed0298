"""What a captured step is known by, and how ranks come to replay the same one (spec/runtime.md 5.2, 5.3).

A graph holds its collectives. A rank that replays another one than its peers, or none, waits for ever; so all replay
one key, or all run eagerly. Every rank says what its batch needs, one exchange brings every rank the same list of
wishes, and ``agree`` is a function of that list: whatever is known to one rank alone must be in its wish.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class SamplingTier(StrEnum):
    """How much of the sampler a graph holds; a higher one serves every batch that a lower one does."""

    NONE = "none"
    GREEDY = "greedy"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphKey:
    """One captured step. Two batches with equal keys differ in nothing that a graph has fixed.

    batch_size      sequences that decode, padding among them
    draft_tokens    tokens drafted for each of them, read from the batch: they are equal or there is no graph
    is_first_draft  the first pass of a draft model, which reads more of the past than the later ones
    is_short        captured for sequences up to the threshold of the short mode
    tier            of sampling inside the graph
    num_contexts    prompts beside the decodes, each of ``context_tokens`` new tokens; 0 and 0 for a step of decodes
    encoder_tokens  packed tokens of an encoder, padding among them; 0 without one
    adapter_dtype   dtype of the adapters' cache; None where the graph has no adapters in it
    """

    batch_size: int
    draft_tokens: int = 0
    is_first_draft: bool = False
    is_short: bool = False
    tier: SamplingTier = SamplingTier.NONE
    num_contexts: int = 0
    context_tokens: int = 0
    encoder_tokens: int = 0
    adapter_dtype: str | None = None

    def __post_init__(self) -> None:
        assert min(self.batch_size, self.draft_tokens, self.num_contexts, self.context_tokens) >= 0
        assert self.encoder_tokens >= 0
        assert self.batch_size + self.num_contexts + self.encoder_tokens >= 1
        assert bool(self.num_contexts) == bool(self.context_tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens that a replay reads: exactly so many must be written, a shorter copy leaves another step's tail."""
        return self.batch_size * (1 + self.draft_tokens) + self.num_contexts * self.context_tokens + self.encoder_tokens

    def fits(self, batch: GraphKey) -> bool:
        """Whether this graph, padded, serves that batch: rows of the same kinds, as many or more, and the rest equal;
        but for the tier, where the full one serves greedy batches too."""
        mine, other = self._rows, batch._rows
        is_enough = all(bool(here) == bool(there) and here >= there for here, there in zip(mine, other, strict=True))
        has_tier = self.tier is batch.tier or (self.tier, batch.tier) == (SamplingTier.FULL, SamplingTier.GREEDY)
        rest = replace(batch, batch_size=self.batch_size, encoder_tokens=self.encoder_tokens, tier=self.tier)
        return is_enough and has_tier and rest == self

    def pads(self, batch: GraphKey) -> bool:
        """Whether rows would have to be added to that batch."""
        return self._rows != batch._rows

    @property
    def _rows(self) -> tuple[int, int]:
        """What padding may raise."""
        return self.batch_size, self.encoder_tokens


@dataclass(frozen=True, slots=True)
class Wish:
    """What one rank says before a step.

    batch    the key of its batch without padding; None where this rank must run eagerly, for whatever reason
    may_pad  it holds what padding rows take: a row of its cache, slots, states
    """

    batch: GraphKey | None
    may_pad: bool = True


def common_keys(captured: Sequence[Collection[GraphKey]]) -> frozenset[GraphKey]:
    """What every rank has captured. A shape that one had to skip is no graph for anybody; ranks exchange their lists
    once, after capturing."""
    return frozenset.intersection(*map(frozenset, captured)) if captured else frozenset()


def agree(wishes: Sequence[Wish], captured: Iterable[GraphKey]) -> GraphKey | None:
    """The graph that all ranks replay in this step; None: all run eagerly. The same on every rank (invariant 38), for
    ``wishes`` is the same list there, in any order, and ``captured`` is what ``common_keys`` gave.

    Batches must be of one kind. Their sizes are raised to the largest of them and then to the smallest captured; where
    one rank cannot pad as far, nobody replays. Where some sample greedily and some do not, the full tier serves all.
    """
    batches = [wish.batch for wish in wishes if wish.batch is not None]
    if not batches or len(batches) < len(wishes):
        return None
    is_mixed = {batch.tier for batch in batches} == {SamplingTier.GREEDY, SamplingTier.FULL}
    need = replace(
        batches[0],
        batch_size=max(batch.batch_size for batch in batches),
        encoder_tokens=max(batch.encoder_tokens for batch in batches),
        tier=SamplingTier.FULL if is_mixed else batches[0].tier,
    )
    if not all(need.fits(batch) for batch in batches):
        return None
    fitting = [key for key in captured if key.fits(need)]
    key = min(fitting, key=lambda each: (*each._rows, each.tier is not need.tier), default=None)
    if key is None or any(key.pads(batch) and not wish.may_pad for wish, batch in zip(wishes, batches, strict=True)):
        return None
    return key
