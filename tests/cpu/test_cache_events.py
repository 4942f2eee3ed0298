"""What the cache tells of itself: who listens from the start knows at any time what lies where.

Driven by ``cache_bench``, so by everything that can happen to a block: evicted, offloaded, loaded,
moved into the head and out, found again while it is computed anew.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_block_cache import fill

from cache_bench import ACTS, INJECTED, B, Bench, act
from tonnage.errors import DriverError
from tonnage.resources.blocks import Level
from tonnage.resources.chain import scope_digest

LEVELS = {Level.DEVICE: "device", Level.HOST: "host"}


class Listener:
    """Keeps what is stored less what is removed, by level, and that the order makes sense."""

    def __init__(self):
        self.there = {"device": {}, "host": {}}
        self.heard = []

    def __call__(self, events):
        assert events
        for event in events:
            self.heard.append(event)
            known, key = self.there[event.level], (event.digest, event.group)
            if event.kind == "removed":
                assert event.token_ids == ()
                del known[key]
            else:
                assert key not in known
                known[key] = event.token_ids
                self.check_digest(event)

    @staticmethod
    def check_digest(event):
        """The digest is what anybody can compute of parent, or scope, and tokens."""
        packed = struct.pack(f"<{len(event.token_ids)}i", *event.token_ids)
        assert event.digest == hashlib.sha256((event.parent or event.scope) + packed).digest()
        assert 1 <= len(event.token_ids) <= B


def lying(cache):
    """By level, (digest, group) and tokens of the blocks that the tree has."""
    found = {"device": {}, "host": {}}
    blocks, tree = cache.blocks, cache.tree
    for block in np.flatnonzero(blocks.nodes >= 0).tolist():
        node = int(blocks.nodes[block])
        level = LEVELS[int(blocks.levels[block])]
        found[level][tree.digest(node), int(blocks.groups[block])] = tree.token_ids(node)
    return found


@settings(max_examples=60)
@given(ACTS)
def test_stored_less_removed_is_what_the_tree_holds(acts):
    bench, listener = Bench(), Listener()
    bench.cache.events.subscribe(listener)
    for one in acts:
        act(bench, one)
        bench.cache.events.flush()
        assert listener.there == lying(bench.cache)
    bench.seqs.clear()
    bench.pins.clear()
    bench.cache.reset()
    bench.cache.events.flush()
    assert listener.there == {"device": {}, "host": {}}


@settings(max_examples=40)
@given(ACTS, st.integers(1, 30))
def test_a_copy_that_fails_is_told_as_it_ended(acts, fail_at):
    bench, listener = Bench(), Listener()
    bench.cache.events.subscribe(listener)
    for number, one in enumerate(acts):
        bench.mover.fails = INJECTED if number == fail_at else None
        try:
            act(bench, one)
        except DriverError:
            break
        bench.mover.fails = None
    bench.cache.events.flush()
    assert listener.there == lying(bench.cache)


def test_events_tell_tokens_parents_and_scope():
    bench, listener = Bench(num_slots=4, head_slots=0, num_host_slots=2), Listener()
    bench.cache.events.subscribe(listener)
    fill(bench, [1, 2, 3, 4, 5, 6])
    assert listener.heard == []  # nobody is called in the middle
    bench.cache.events.flush()
    first, second = listener.heard
    assert (first.kind, first.level, first.token_ids, first.parent) == ("stored", "device", (1, 2, 3, 4), None)
    assert (second.token_ids, second.parent, second.group) == ((5, 6), first.digest, 0)
    assert first.scope == second.scope == scope_digest()


def test_a_block_that_goes_to_the_host_is_removed_here_and_stored_there():
    bench, heard = Bench(num_slots=2, head_slots=0, num_host_slots=2), []
    fill(bench, [1] * 8)
    bench.cache.events.subscribe(heard.extend)
    bench.cache.allocate(2)
    bench.cache.events.flush()
    for kind, level in (("removed", "device"), ("stored", "host")):
        told = [event for event in heard if (event.kind, event.level) == (kind, level)]
        assert len({event.digest for event in told}) == 2
    assert len(heard) == 4


def test_nothing_is_collected_while_nobody_listens(monkeypatch):
    bench = Bench()
    monkeypatch.setattr("tonnage.resources.cache_events.KVEvent", None)  # making one would raise
    fill(bench, [1] * 8, [2] * 8)
    bench.cache.clear()
    bench.cache.events.note_nodes("stored", "device", bench.cache.tree, [(0, 0)])
    bench.cache.events.flush()
    assert not bench.cache.events.has_subscribers


def test_who_comes_later_hears_only_what_happens_later():
    bench, early, late = Bench(), Listener(), Listener()
    bench.cache.events.subscribe(early)
    fill(bench, [1] * 4)
    bench.cache.events.subscribe(late)
    fill(bench, [2] * 4)
    bench.cache.events.flush()
    assert [event.token_ids for event in early.heard] == [(1,) * 4, (2,) * 4]
    assert [event.token_ids for event in late.heard] == [(2,) * 4]


def test_a_subscription_ends_when_it_is_told_to_and_may_end_twice():
    bench, listener = Bench(), Listener()
    end = bench.cache.events.subscribe(listener)
    fill(bench, [1] * 4)
    end()
    end()
    bench.cache.events.flush()
    assert listener.heard == []
    assert not bench.cache.events.has_subscribers


def test_a_subscriber_that_raises_is_dropped_and_the_others_hear_everything():
    bench, listener, calls = Bench(), Listener(), []

    def failing(events):
        calls.append(events)
        raise ValueError("no")

    bench.cache.events.subscribe(failing)
    bench.cache.events.subscribe(listener)
    fill(bench, [1] * 4)
    with pytest.warns(RuntimeWarning, match="a cache subscriber raised ValueError: no"):
        bench.cache.events.flush()
    fill(bench, [2] * 4)
    bench.cache.events.flush()
    assert (len(calls), len(listener.heard)) == (1, 2)


def test_what_a_callback_does_is_told_next_time():
    """It may store, subscribe and end subscriptions, its own or another's."""
    bench, heard, late, other = Bench(), [], Listener(), Listener()
    ends = []

    def once(events):
        heard.append([event.token_ids for event in events])
        for end in ends:
            end()
        bench.cache.events.subscribe(late)
        fill(bench, [2] * 4)

    ends.append(bench.cache.events.subscribe(once))
    ends.append(bench.cache.events.subscribe(other))
    fill(bench, [1] * 4)
    bench.cache.events.flush()
    assert (heard, late.heard, other.heard) == ([[(1,) * 4]], [], [])
    bench.cache.events.flush()
    assert [event.token_ids for event in late.heard] == [(2,) * 4]
    assert len(heard) == 1
