"""Digests of a token list against hashlib over struct.pack, told apart by all that they should tell apart."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.errors import ResourceError
from tonnage.resources.chain import Chain, scope_digest

IDS = st.integers(-(2**31), 2**31 - 1)
SCOPES = st.sampled_from([scope_digest(), scope_digest(salt="a"), scope_digest(adapter_id=3)])


def digests_of(scope, tokens, block_tokens):
    """The rule, said again."""
    before, found = scope, []
    for first in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = tokens[first : first + block_tokens]
        before = hashlib.sha256(before + struct.pack(f"<{block_tokens}i", *block)).digest()
        found.append(before)
    return found


@given(SCOPES, st.lists(IDS, max_size=300), st.integers(1, 7), st.data())
def test_digests_are_the_chained_hash_in_whatever_order_they_are_asked_for(scope, tokens, block_tokens, data):
    chain, expected = Chain(scope, tokens, block_tokens), digests_of(scope, tokens, block_tokens)
    assert chain.digest(-1) == scope
    for index in data.draw(st.permutations(range(len(expected)))):
        assert chain.digest(index) == expected[index]
        block = tokens[index * block_tokens : (index + 1) * block_tokens]
        assert chain.packed(index) == struct.pack(f"<{block_tokens}i", *block)


@given(st.lists(IDS, min_size=1, max_size=300), st.integers(1, 4), st.integers(0, 400), st.integers(0, 400))
def test_blocks_are_given_one_by_one_and_kept(tokens, block_tokens, num_first, num_second):
    """A walk that stops early and one that goes on from there give what one walk does."""
    chain, expected = Chain(scope_digest(), tokens, block_tokens), digests_of(scope_digest(), tokens, block_tokens)
    most = len(expected)
    for num in (min(num_first, most), min(num_second, most), most):
        assert [digest for digest, _ in chain.blocks(num)] == expected[:num]
    some = Chain(scope_digest(), tokens, block_tokens)
    for _ in some.blocks(most):
        break
    assert [digest for digest, _ in some.blocks(most)] == expected


@given(st.lists(IDS, min_size=1, max_size=20), st.lists(IDS, max_size=100), st.integers(1, 6))
def test_the_list_may_grow_while_it_is_looked_at(tokens, more, block_tokens):
    live = list(tokens)
    chain = Chain(scope_digest(), live, block_tokens)
    for token in more:
        live.append(token)
        if len(live) % block_tokens == 0:
            chain.digest(len(live) // block_tokens - 1)
    expected = digests_of(scope_digest(), live, block_tokens)
    assert [chain.digest(index) for index in range(len(expected))] == expected


@given(st.lists(IDS, min_size=1, max_size=40), st.integers(2, 6), st.data())
def test_a_partial_block_hangs_on_the_full_one_before_it(tokens, block_tokens, data):
    index = data.draw(st.integers(0, (len(tokens) - 1) // block_tokens))
    there = tokens[index * block_tokens : (index + 1) * block_tokens]
    num_tokens = data.draw(st.integers(1, len(there)))
    chain = Chain(scope_digest(), tokens, block_tokens)
    before = [scope_digest(), *digests_of(scope_digest(), tokens, block_tokens)][index]
    packed = struct.pack(f"<{num_tokens}i", *there[:num_tokens])
    assert chain.partial(index, num_tokens) == (hashlib.sha256(before + packed).digest(), packed)
    assert chain.leading(index, 10 * block_tokens)[: len(packed)] == packed


@pytest.mark.parametrize("wrong", [2**31, -(2**31) - 1, 1.5, None, "7"])
def test_what_is_no_int32_is_refused_and_leaves_the_chain_as_it_was(wrong):
    tokens = [1, 2, 3, 4, wrong, 6]
    chain = Chain(scope_digest(), tokens, 2)
    with pytest.raises(ResourceError, match="32-bit"):
        chain.digest(2)
    with pytest.raises(ResourceError, match="32-bit"):
        chain.partial(2, 1)
    assert [chain.digest(index) for index in (0, 1)] == digests_of(scope_digest(), tokens[:4], 2)


def test_blocks_that_are_not_full_are_refused():
    chain = Chain(scope_digest(), [1, 2, 3], 2)
    for call in (
        lambda: chain.digest(1),
        lambda: chain.packed(1),
        lambda: list(chain.blocks(2)),
        lambda: chain.partial(1, 2),
        lambda: chain.partial(0, 3),
        lambda: chain.partial(0, 0),
    ):
        with pytest.raises(ResourceError):
            call()
    assert chain.digest(0) == digests_of(scope_digest(), [1, 2], 2)[0]


def test_scopes_are_32_bytes_and_equal_only_for_equal_fields():
    """7, to begin with. A salt that spells an adapter is no adapter, and an empty one is there."""
    salts = [None, "", "a", "aa", "ä", "\ud800", "\0" * 8, (3).to_bytes(8, "little").decode()]
    fields = [(adapter, salt) for adapter in (None, 0, 1, 3, -1, 2**40) for salt in salts]
    scopes = [scope_digest(adapter_id=adapter, salt=salt) for adapter, salt in fields]
    assert len(set(scopes)) == len(fields)
    assert {len(scope) for scope in scopes} == {32}
    assert scope_digest(adapter_id=3, salt="a") == scope_digest(adapter_id=3, salt="a")


def test_a_scope_is_the_hash_of_a_mask_and_each_field():
    assert scope_digest() == hashlib.sha256(b"\0").digest()
    assert scope_digest(adapter_id=5) == hashlib.sha256(b"\1" + struct.pack("<q", 5)).digest()
    assert scope_digest(salt="xy") == hashlib.sha256(b"\2" + struct.pack("<Q", 2) + b"xy").digest()
    both = b"\3" + struct.pack("<q", 5) + struct.pack("<Q", 2) + b"xy"
    assert scope_digest(adapter_id=5, salt="xy") == hashlib.sha256(both).digest()
