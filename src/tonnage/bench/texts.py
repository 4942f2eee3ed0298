"""What the oracle knows of texts: which begin alike, which prefixes somebody has computed, and what is held of them."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence


class Text:
    """Tokens that grow at their end, in blocks of ``block_tokens``.

    scope      texts of different scopes share nothing, whatever their tokens; one that does not share has its own
    shares     others may find what is computed of it; may_match: it may begin with what others have computed
    """

    def __init__(
        self, tokens: Sequence[int], *, scope: object, block_tokens: int, shares: bool = True, may_match: bool = True
    ) -> None:
        self.tokens, self.block_tokens = tokens, block_tokens
        self.shares, self.may_match = shares, may_match
        self._borders = [hashlib.blake2b(repr(scope).encode(), digest_size=16).digest()]

    def border(self, num_blocks: int) -> bytes:
        """A name of its first ``num_blocks`` blocks, scope included."""
        while len(self._borders) <= num_blocks:
            block = self.packed((len(self._borders) - 1) * self.block_tokens, self.block_tokens)
            self._borders.append(hashlib.blake2b(self._borders[-1] + block, digest_size=16).digest())
        return self._borders[num_blocks]

    def packed(self, first: int, count: int) -> bytes:
        return array("i", self.tokens[first : first + count]).tobytes()

    def num_common(self, other: Text, most: int) -> int:
        """Whole blocks, of at most ``most``, with which both begin."""
        least, most = -1, min(most, len(self.tokens) // self.block_tokens, len(other.tokens) // self.block_tokens)
        while least < most:
            middle = (least + most + 1) // 2
            if self.border(middle) == other.border(middle):
                least = middle
            else:
                most = middle - 1
        return max(0, least)


class Past:
    """Every prefix that was computed, whole blocks and the last part of texts that have gone."""

    def __init__(self) -> None:
        self._whole: set[bytes] = set()
        self._parts: dict[bytes, list[bytes]] = {}  # what came next after a border, sorted

    def add(self, text: Text, num_blocks: int) -> None:
        """Block ``num_blocks`` of the text, counted from 1, is computed."""
        if text.border(num_blocks) not in self._whole:
            self._whole.add(text.border(num_blocks))
            self._add_part(text, (num_blocks - 1) * text.block_tokens, text.block_tokens)

    def add_part(self, text: Text, num_tokens: int) -> None:
        """The text has gone with so many tokens computed."""
        if rest := num_tokens % text.block_tokens:
            self._add_part(text, num_tokens - rest, rest)

    def has(self, text: Text, num_tokens: int) -> bool:
        """Whether somebody computed the text's first ``num_tokens`` tokens."""
        num_blocks, rest = divmod(num_tokens, text.block_tokens)
        border = text.border(num_blocks)
        if num_blocks and border not in self._whole:
            return False
        if not rest:
            return True
        part, there = text.packed(num_blocks * text.block_tokens, rest), self._parts.get(border, [])
        at = bisect_left(there, part)
        return at < len(there) and there[at].startswith(part)

    def _add_part(self, text: Text, first: int, count: int) -> None:
        part, there = text.packed(first, count), self._parts.setdefault(text.border(first // text.block_tokens), [])
        at = bisect_left(there, part)
        if at == len(there) or there[at] != part:
            insort(there, part)


class Held:
    """Whole blocks that must be held: those with which several texts of one scope begin are one block."""

    def __init__(self) -> None:
        self._holders: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, text: Text, first: int, last: int) -> None:
        """Blocks [first, last) of the text, counted from 0."""
        for index in range(first, last):
            self._holders[text.border(index + 1)] += 1

    def drop(self, text: Text, num_blocks: int) -> None:
        """The text's first blocks are held once less."""
        for index in range(num_blocks):
            border = text.border(index + 1)
            self._holders[border] -= 1
            if not self._holders[border]:
                del self._holders[border]
