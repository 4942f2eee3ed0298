"""What a look into the prefix tree costs: 4,000 tokens that are cached, in a tree of 100,000 blocks of 16.

The bar is for ``BlockCache.match`` with a fresh chain over a plain list, so that everything is done: packing, hashing,
finding, comparing tokens. It may take 3 times what the chained SHA-256 over the same list takes alone, with the fastest
packing of the standard library or numpy. Both by turns, on texts that differ. Beside it what the same match costs with
a chain that is kept, a miss, ``claim`` and ``unclaim``, and storing one block of a text that is being decoded.

    python benchmarks/prefix_tree.py --output benchmarks/results/prefix-tree.json
"""

from __future__ import annotations

import gc
import hashlib
import random
import statistics
import struct
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from filing import file_away, parser
from tonnage.caching import CacheParams
from tonnage.layout import KVGroup, KVGroupKind
from tonnage.resources.cache import BlockCache
from tonnage.resources.chain import Chain, scope_digest
from tonnage.resources.match import Match
from tonnage.resources.tree import PrefixTree

BLOCK_TOKENS, TEXT_BLOCKS, NUM_TEXTS = 16, 250, 400
TEXT_TOKENS = BLOCK_TOKENS * TEXT_BLOCKS
VOCAB_TOKENS = 128_000
#: Times the bare hash.
BAR = 3.0
SCOPE = scope_digest()
DEFAULTS = CacheParams()
FULL = KVGroup(
    name="full", kind=KVGroupKind.FULL, layers=(0,), window=None, block_tokens=BLOCK_TOKENS, block_bytes=64, parts=()
)

Text: TypeAlias = list[int]
#: Turns tokens into int32, little-endian.
Packing: TypeAlias = Callable[[Text], bytes]
PACKINGS: Mapping[str, Packing] = {
    "array": lambda tokens: array("i", tokens).tobytes(),
    "struct": lambda tokens: struct.pack(f"<{len(tokens)}i", *tokens),
    "numpy": lambda tokens: np.array(tokens, np.int32).tobytes(),
}


def bare_digests(text: Text, pack: Packing) -> list[bytes]:
    """The chain's digests and nothing else."""
    raw, width, sha256 = pack(text), 4 * BLOCK_TOKENS, hashlib.sha256
    before, digests = SCOPE, []
    for at in range(0, len(raw), width):
        before = sha256(before + raw[at : at + width]).digest()
        digests.append(before)
    return digests


def filled(texts: list[Text]) -> BlockCache:
    """A cache in which all of the texts lie and nobody holds them, with room for one text more."""
    cache = BlockCache((FULL,), num_slots=(len(texts) + 1) * TEXT_BLOCKS)
    for text in texts:
        cache.release(store_all(cache, Chain(SCOPE, text, BLOCK_TOKENS)))
    return cache


def store_all(cache: BlockCache, chain: Chain) -> list[int]:
    ids, node = cache.allocate(TEXT_BLOCKS).tolist(), PrefixTree.ROOT
    for index, block in enumerate(ids):
        node, _ = cache.store(chain, index, BLOCK_TOKENS, node, [block], DEFAULTS)
    return ids


def time_us(run: Callable[[], object]) -> float:
    began = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - began) / 1000


def match_rounds(cache: BlockCache, texts: list[Text], *, repeats: int) -> dict[str, list[float]]:
    """Microseconds of each entry by turns, one text a round."""
    found: dict[str, list[float]] = {}
    picked = random.Random(1)
    for number in range(repeats + 3):
        if number == 3:
            found.clear()  # warm
        text = list(picked.choice(texts))  # as a request brings it: no list of the tree's own
        for name, taken_us in match_round(cache, text, missed=[VOCAB_TOKENS + number, *text[1:]]):
            found.setdefault(name, []).append(taken_us)
    return found


def match_round(cache: BlockCache, text: Text, *, missed: Text) -> Iterator[tuple[str, float]]:
    """``missed``: a text of which the tree has nothing."""

    def match(chain: Chain) -> Match:
        return cache.match(chain, max_tokens=TEXT_TOKENS)

    for name, pack in PACKINGS.items():
        yield f"bare hash, {name}", time_us(partial(bare_digests, text, pack))
    yield "match", time_us(lambda: match(Chain(SCOPE, text, BLOCK_TOKENS)))
    kept = Chain(SCOPE, text, BLOCK_TOKENS)
    found = match(kept)
    assert found.num_tokens == TEXT_TOKENS
    yield "match, kept chain", time_us(lambda: match(kept))
    yield "match, nothing found", time_us(lambda: match(Chain(SCOPE, missed, BLOCK_TOKENS)))
    yield "claim", time_us(lambda: cache.claim(found))
    yield "unclaim", time_us(lambda: cache.unclaim(found))


def store_samples(cache: BlockCache, *, repeats: int) -> dict[str, list[float]]:
    """Microseconds of one ``store`` as sequences decode: the block is full, its parent is held and in the tree.
    What the hash and the packing of one block take is a part of it."""
    made, taken, hashing, released = random.Random(2), [], [], []
    for _ in range(max(1, repeats // 10)):
        text = [made.randrange(VOCAB_TOKENS) for _ in range(TEXT_TOKENS)]
        chain, node = Chain(SCOPE, text, BLOCK_TOKENS), PrefixTree.ROOT
        ids = cache.allocate(TEXT_BLOCKS).tolist()
        for index, block in enumerate(ids):
            began = time.perf_counter_ns()
            node, _ = cache.store(chain, index, BLOCK_TOKENS, node, [block], DEFAULTS)
            taken.append((time.perf_counter_ns() - began) / 1000)
        fresh = Chain(SCOPE, text, BLOCK_TOKENS)
        hashing += [time_us(partial(fresh.digest, index)) for index in range(TEXT_BLOCKS)]
        released.append(time_us(partial(cache.release, ids)))
    return {"store of a block": taken, "of it, packing and hash": hashing, "release of a text": released}


def measure(*, repeats: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    made = random.Random(0)
    texts = [[made.randrange(VOCAB_TOKENS) for _ in range(TEXT_TOKENS)] for _ in range(NUM_TEXTS)]
    cache = filled(texts)
    size = {"num_nodes": cache.tree.num_nodes, "tree_bytes": cache.tree.num_bytes, "cache_bytes": cache.num_bytes}
    assert size["num_nodes"] == NUM_TEXTS * TEXT_BLOCKS
    gc.collect()
    gc.disable()
    try:
        return {**match_rounds(cache, texts, repeats=repeats), **store_samples(cache, repeats=repeats)}, size
    finally:
        gc.enable()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=201)
    asked = options.parse_args()
    samples, size = measure(repeats=asked.repeats)
    rows: list[dict[str, Any]] = [
        {"name": name, "median_us": round(statistics.median(taken), 2), "least_us": round(min(taken), 2)}
        for name, taken in samples.items()
    ]
    medians = {row["name"]: row["median_us"] for row in rows}
    bare = min(cost for name, cost in medians.items() if name.startswith("bare"))
    ratio = round(medians["match"] / bare, 2)
    for row in rows:
        print(f"{row['name']:28} {row['median_us']:>10,.1f} us   least {row['least_us']:>10,.1f} us")
    print(f"{size['num_nodes']:,} nodes, about {size['tree_bytes'] / 2**20:,.0f} MiB of the heap")
    print(f"a match takes {ratio} times the bare hash; the bar is {BAR}")
    figures = {"bar": BAR, "ratio": ratio, "met": ratio <= BAR, "repeats": asked.repeats, **size, "rows": rows}
    file_away(asked.output, figures, commit=asked.commit)
    if ratio > BAR:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
