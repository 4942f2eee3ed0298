"""The names of a token list's blocks: each a digest of its tokens and of all that comes before."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence

from tonnage.errors import ResourceError

#: Blocks that are packed at once: a walk that ends early has packed little in vain.
_PACK_BLOCKS = 64
_HAS_ADAPTER, _HAS_SALT = 1, 2


def scope_digest(*, adapter_id: int | None = None, salt: str | None = None) -> bytes:
    """What the chains of one adapter and one salt begin with, 32 bytes: a mask of the fields that are there, then each.

    A cryptographic hash, here and below, because a match goes by it: who could make two texts of one digest could
    read what others wrote.
    """
    mask = (adapter_id is not None) * _HAS_ADAPTER + (salt is not None) * _HAS_SALT
    told = bytes([mask])
    if adapter_id is not None:
        told += adapter_id.to_bytes(8, "little", signed=True)
    if salt is not None:
        raw = salt.encode(errors="surrogatepass")
        told += len(raw).to_bytes(8, "little") + raw
    return hashlib.sha256(told).digest()


class Chain:
    """Digests of ``tokens`` by blocks of ``block_tokens``, made when they are first asked for and kept.

    digest(i) = SHA-256(digest(i - 1) || tokens of block i as int32, little-endian), with digest(-1) = ``scope``.
    ``tokens`` is looked at, not copied: it may grow at its end and must not change otherwise. Raises ``ResourceError``
    for tokens that are no int32 and for blocks that are not full.
    """

    __slots__ = ("_digests", "_packed", "block_tokens", "scope", "tokens")

    def __init__(self, scope: bytes, tokens: Sequence[int], block_tokens: int) -> None:
        self.scope, self.tokens, self.block_tokens = scope, tokens, block_tokens
        self._digests: list[bytes] = []
        self._packed: list[bytes] = []

    def digest(self, index: int) -> bytes:
        """Of full block ``index``; -1: the scope."""
        if index < 0:
            return self.scope
        if index >= len(self._digests):
            self._extend(index + 1)
        return self._digests[index]

    def packed(self, index: int) -> bytes:
        """The tokens of full block ``index``, 4 bytes each."""
        return self.full(index)[1]

    def full(self, index: int) -> tuple[bytes, bytes]:
        """Digest and tokens of full block ``index``."""
        if index >= len(self._digests):
            self._extend(index + 1)
        return self._digests[index], self._packed[index]

    def share(self, digests: list[bytes], packed: list[bytes]) -> None:
        """Equal ones of its first blocks that somebody else keeps: many texts that begin alike then keep them once."""
        self._digests[: len(digests)], self._packed[: len(packed)] = digests, packed

    def partial(self, index: int, num_tokens: int) -> tuple[bytes, bytes]:
        """Digest and tokens of the first ``num_tokens`` tokens of block ``index``."""
        packed = self.leading(index, num_tokens)
        if len(packed) != 4 * num_tokens or not 0 < num_tokens <= self.block_tokens:
            raise ResourceError(f"{num_tokens} tokens of block {index} of {len(self.tokens)} tokens")
        return hashlib.sha256(self.digest(index - 1) + packed).digest(), packed

    def leading(self, index: int, num_tokens: int) -> bytes:
        """At most so many of the tokens from block ``index`` on, as far as they are there, 4 bytes each."""
        first = index * self.block_tokens
        return _pack(self.tokens[first : first + num_tokens])

    def blocks(self, num_blocks: int) -> Iterator[tuple[bytes, bytes]]:
        """Digest and tokens of the first full blocks, one after the other; what is not asked for is not made."""
        made = min(len(self._digests), num_blocks)
        yield from zip(self._digests[:made], self._packed[:made], strict=True)
        yield from self._more(num_blocks)

    def _more(self, num_blocks: int) -> Iterator[tuple[bytes, bytes]]:
        """Those that have no digest yet, each kept before it is given."""
        digests, sha256 = self._digests, hashlib.sha256
        while (first := len(digests)) < num_blocks:
            end = min(first + _PACK_BLOCKS, num_blocks)
            self._pack(end)
            before = digests[first - 1] if first else self.scope
            for packed in self._packed[first:end]:
                before = sha256(before + packed).digest()
                digests.append(before)
                yield before, packed

    def _extend(self, num_blocks: int) -> None:
        index = len(self._digests)
        if num_blocks == index + 1 and index == len(self._packed):  # as a text grows; without the machinery for many
            packed = self.leading(index, self.block_tokens)
            if len(packed) != 4 * self.block_tokens:
                raise self._not_full(index)
            before = self._digests[-1] if index else self.scope
            self._packed.append(packed)
            self._digests.append(hashlib.sha256(before + packed).digest())
            return
        for _ in self._more(num_blocks):
            """Each is kept as it is made."""

    def _not_full(self, index: int) -> ResourceError:
        told = f"block {index} of {self.block_tokens} tokens is not full: there are {len(self.tokens)}"
        return ResourceError(told)

    def _pack(self, num_blocks: int) -> None:
        size, first = self.block_tokens, len(self._packed)
        if num_blocks <= first:
            return
        if num_blocks * size > len(self.tokens):
            raise self._not_full(num_blocks - 1)
        raw, width = _pack(self.tokens[first * size : num_blocks * size]), 4 * size
        self._packed += [raw[at : at + width] for at in range(0, len(raw), width)]


def _pack(tokens: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(tokens)}i", *tokens)
    except struct.error as error:
        raise ResourceError(f"a token id is no 32-bit integer ({error})") from None
