"""Texts as the cache sees them: what a request may find there, and which neighbour is computing it right now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tonnage.caching import CacheParams
from tonnage.resources.base import RequestView
from tonnage.resources.cache import BlockCache
from tonnage.resources.chain import Chain, scope_digest
from tonnage.resources.match import Match

#: Requests that were deferred, of which the chain is kept so that asking again hashes nothing. The head of the queue
#: asks at every step, and few others ask between two of its turns.
MAX_REMEMBERED = 8


@dataclass(slots=True, eq=False)
class Text:
    """The tokens of one request, a list that grows, and their digests block by block.

    stores    what it computes may be found by others; may_match: it may begin with what others have computed
    is_distrusted  what it holds gave no numbers: nobody may find any of it
    num_asked tokens it had when it was last looked for
    promised  [first, last) of the prompt's blocks that nobody else is known to compute
    copied_from  the block that it goes on from a copy of, one a group, with its digest
    seen      which neighbour it waited for when it last asked, and how far that one was
    """

    request: RequestView
    tokens: Sequence[int]
    chain: Chain
    retention: CacheParams
    stores: bool
    may_match: bool
    is_distrusted: bool = False
    num_asked: int = 0
    promised: range = range(0)
    seen: tuple[str, object] | None = None
    copied_from: Sequence[tuple[int, bytes]] = ()


class Prefixes:
    """Makes texts, matches them, and knows which running sequence has promised to compute which block.

    A request whose next block is promised had better wait a step than compute it again; but only while its neighbour
    moves, so that nobody waits for one that stands still.
    """

    def __init__(self, cache: BlockCache, *, block_tokens: int, is_on: bool) -> None:
        self._cache, self._block_tokens, self._is_on = cache, block_tokens, is_on
        self._remembered: dict[str, Text] = {}
        self._promises: dict[bytes, str] = {}
        #: Tokens that admitted requests looked for in the cache, and those that they found.
        self.counts = {"queried_tokens": 0, "hit_tokens": 0}

    def text(self, request: RequestView) -> Text:
        """Of a request that asks to be admitted, the same one as long as it is the same request."""
        known = self._remembered.pop(request.id, None)
        if known is not None and known.request is request and len(known.tokens) == len(request.token_ids):
            return known
        params, tokens = request.params, request.token_ids
        # Entries of a request that says it has some were not computed here: nobody may find them.
        shares = self._is_on and params.cache.reuse and not request.num_computed_tokens
        return Text(
            request=request,
            tokens=tokens,
            chain=Chain(
                scope_digest(adapter_id=request.adapter_id, salt=params.cache.salt), tokens, self._block_tokens
            ),
            retention=params.cache,
            stores=shares,
            # Log-probabilities of the prompt come out of computing it.
            may_match=shares and params.prompt_logprobs is None,
        )

    def remember(self, text: Text) -> None:
        """It was deferred and will ask again."""
        self._remembered[text.request.id] = text
        if len(self._remembered) > MAX_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]

    def match(self, text: Text) -> Match:
        """What is cached of it, its last known token excepted: that one is computed for its logits."""
        text.num_asked = len(text.tokens) if text.may_match else 0
        return self._cache.match(text.chain, max_tokens=text.num_asked - 1)

    def count(self, text: Text, match: Match, times: int) -> None:
        """An admission (``times`` 1), or one that is taken back (-1)."""
        self.counts["queried_tokens"] += times * text.num_asked
        self.counts["hit_tokens"] += times * match.num_tokens

    def neighbour(self, text: Text, num_blocks: int, progress: Callable[[str], object]) -> str | None:
        """Who is computing the block after the first ``num_blocks``, if it has moved since the text asked last.

        ``progress``: how far a running sequence is, anything that changes when it moves.
        """
        if not text.may_match or (num_blocks + 1) * self._block_tokens >= len(text.tokens):
            return None
        other = self._promises.get(text.chain.digest(num_blocks))
        if other is None or other == text.request.id:
            return None
        seen = (other, progress(other))
        if seen == text.seen:
            return None
        text.seen = seen
        return other

    def promise(self, text: Text, first: int) -> None:
        """It runs now and computes its known blocks from ``first`` on."""
        text.promised = range(first, len(text.tokens) // self._block_tokens if text.stores else first)
        if text.promised:
            text.chain.digest(text.promised[-1])  # all of them in one go
        for index in text.promised:
            self._promises.setdefault(text.chain.digest(index), text.request.id)

    def keep(self, text: Text, index: int) -> None:
        """The block is in the tree: the promise is kept."""
        if index in text.promised:
            self._withdraw(text, index)
            text.promised = range(index + 1, text.promised.stop)

    def retract(self, text: Text) -> None:
        """It does not run any more."""
        for index in text.promised:
            self._withdraw(text, index)
        text.promised = range(0)
        text.seen = None

    def _withdraw(self, text: Text, index: int) -> None:
        digest = text.chain.digest(index)
        if self._promises.get(digest) == text.request.id:
            del self._promises[digest]
