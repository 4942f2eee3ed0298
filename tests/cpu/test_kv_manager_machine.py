"""A stateful machine over slots, KV blocks, their dispatcher and both policies: any order of calls keeps the books.

The model is a few numbers per request and the set of texts that were ever stored. It says by itself what must be
reserved, what is missing, what a prefix may find at most and must find at least, and what a rollback restores. Slabs
remember what was written (``kv_cases``), so that every step checks what its blocks hold. Numbers in comments are those
of docs/invariants.md.

The calls are drawn from a list and not by Hypothesis's rules, which leave out half of the kinds of calls in each
example: here nothing happens unless requests arrive, run and leave together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_cases import ask, check_entries, compute, manager, state, step

from tonnage.resources.admission import FINISH_DECAY, SUSPENSION_STEP, Optimistic, ReserveAll
from tonnage.resources.base import Deferral
from tonnage.resources.blocks import NONE, Level
from tonnage.resources.dispatcher import Dispatcher
from tonnage.resources.slots import SlotManager
from tonnage.step import StepPlan, Txn, Veto

NUM_BLOCKS, NUM_SLOTS, MAX_SEQ_LEN = 10, 4, 24
#: Prompts begin with a part of one of these, so that they share what they can.
BEGINNINGS = ([1, 2, 3, 1, 2, 3, 1, 2, 3], [1, 2, 3, 1, 9, 9, 9, 9, 9], [4] * 9)


class Saboteur(SlotManager):
    """The last manager in line; it raises ``error`` when it is asked for anything."""

    name = "saboteur"
    after = frozenset({"kv"})
    error: Exception | None = None

    def admit(self, request, txn):
        self._fail()
        return super().admit(request, txn)

    def prepare(self, plan, txn):
        self._fail()
        super().prepare(plan, txn)

    def _fail(self):
        if self.error is not None:
            raise self.error


@dataclass
class Life:
    """What the model knows of a live request: how far it is scheduled and computed, and the least still to come.

    num_returned  tokens it had generated when it was admitted; first: the cached tokens it began with
    num_known, row  tokens it had then, and its row
    stored, due     blocks of it that can be found, and the number of computed ones with which the next can
    """

    request: object
    num_returned: int
    num_known: int = 0
    row: int = 0
    stored: int = 0
    due: int = 0
    first: int = 0
    scheduled: int = 0
    computed: int = 0
    has_run: bool = False
    remaining: list[int] = field(default_factory=list)

    @property
    def most(self):
        return self.request.max_total_tokens - self.request.num_prompt_tokens

    @property
    def generated(self):
        drawn = max(self.num_returned, self.scheduled + 1 - self.request.num_prompt_tokens)
        return min(drawn, self.most)


def scope(request):
    return request.params.cache.salt


class Books:
    """``live``: each admitted request; ``suspended``: those that wait to come back; ``launched``: steps in flight;
    ``stored``: every text, with its salt, whose last block was put into the tree at some time."""

    def __init__(self, *, block_tokens, extra, history, head, host):
        """``history``: lengths of requests that finished before, for the optimistic policy; None: whole lives."""
        self.slots, self.saboteur = SlotManager(NUM_SLOTS), Saboteur(NUM_SLOTS)
        self.policy = ReserveAll() if history is None else Optimistic()
        self.kv = manager(
            NUM_BLOCKS,
            head=head,
            host=host,
            block_tokens=block_tokens,
            max_seq_len=MAX_SEQ_LEN,
            max_batch_size=NUM_SLOTS,
            slots=self.slots,
            admission=self.policy,
            extra_tokens=extra,
        )
        self.cache = self.kv.cache
        self.dispatcher = Dispatcher([self.saboteur, self.kv, self.slots])
        self.live: dict[str, Life] = {}
        self.suspended: list[object] = []
        self.launched: list[tuple[StepPlan, dict[str, Life]]] = []
        self.stored: set[tuple[object, tuple[int, ...]]] = set()
        self.has_forgotten = False
        self.pins: list[object] = []
        self.lengths: list[int] = []
        self.pessimism = 0.0
        for length in history or ():
            self.learn(length)
        self.num_seen = 0

    # The model.

    def blocks(self, tokens):
        return -(-tokens // self.kv.block_tokens)

    def expected(self, life):
        """Blocks in the end, by the definition of the policies, one request at a time."""
        new = most = life.most
        if isinstance(self.policy, Optimistic) and life.generated < most:
            longer = [min(length, most) for length in self.lengths if length > life.generated]
            mean = -(-Fraction(sum(longer) + most) // (len(longer) + 1))
            new = int(mean) + int(self.pessimism * (most - mean))
        prompt = life.request.num_prompt_tokens
        return self.blocks(max(prompt, prompt + new - 1) + self.kv.extra_tokens)

    def held(self, life):
        """Positions with a block: those of a first partial one arrive with the first step."""
        return self.blocks(life.scheduled) if life.has_run else life.scheduled // self.kv.block_tokens

    def num_reserved(self):
        return sum(max(0, self.expected(life) - self.held(life)) for life in self.live.values())

    def holders(self):
        """Block ids by how often sequences, pins, loads and copies to come hold them."""
        held = [block for name in self.live for block in self.kv.block_ids(name).tolist()]
        held += [block for pin in self.pins for block in pin.ids]
        waiting = (*self.kv._holdings._partials.values(), *self.kv._holdings._copied.values())
        return held + [block for one in waiting for block in one.sources], self.cache.incoming.ids()

    def have(self):
        held, loading = self.holders()
        return max(0, NUM_BLOCKS - len({*held, *loading}) - self.num_reserved())

    def longest(self, request, texts):
        """Tokens of the request that are found if just these texts are stored; the last token is never."""
        size, tokens, most = self.kv.block_tokens, tuple(request.token_ids), len(request.token_ids) - 1
        whole = 0
        while (whole + 1) * size <= most and (scope(request), tokens[: (whole + 1) * size]) in texts:
            whole += 1
        best = start = whole * size
        for salt, text in texts:
            if (
                salt == scope(request)
                and len(text) > start
                and text[:start] == tokens[:start]
                and len(text) <= start + size
            ):
                same = next(
                    (i for i in range(start, min(len(text), most)) if text[i] != tokens[i]), min(len(text), most)
                )
                best = max(best, same)
        return best

    def committed(self):
        """Stored blocks of running sequences: they cannot be evicted."""
        size = self.kv.block_tokens
        return {
            (scope(life.request), tuple(life.request.token_ids[: end * size]))
            for life in self.live.values()
            for end in range(1, life.stored + 1)
        }

    def set_due(self, life):
        """What was known is stored block by block; what is generated when the blocks and the row, as numbers, add up
        to a multiple of four."""
        due = life.stored + 1
        while due > life.num_known // self.kv.block_tokens and (due + life.row) % 4:
            due += 1
        life.due = due

    def note_stored(self, life, *, at_end):
        size, tokens = self.kv.block_tokens, life.request.token_ids
        if not at_end and life.computed // size >= life.due:
            life.stored = life.computed // size
            self.set_due(life)
        num_stored = life.computed // size if at_end else life.stored
        ends = [end * size for end in range(1, num_stored + 1)]
        if at_end and life.computed % size and self.held(life) > life.computed // size:
            ends.append(life.computed)
        self.stored |= {(scope(life.request), tuple(tokens[:end])) for end in ends}

    def snapshot(self):
        """Everything that a rollback must restore: with the order of the free blocks and of what may be evicted."""
        return (*state(self.kv), self.slots.stats(), self.saboteur.stats())

    def assert_as(self, before):
        """Exactly as before; where something had to make way, but for what is cached and which blocks are free."""
        now = self.snapshot()
        if all(now[5][key] == before[5][key] for key in ("evicted", "offloaded", "moved")):
            assert now == before
        else:
            assert now[4] == before[4]
            assert now[6:] == before[6:]
            assert [now[5][key] for key in ("available", "live")] == [before[5][key] for key in ("available", "live")]

    def runnable(self):
        return {name: life for name, life in self.live.items() if name not in self.dispatcher.loading()}

    def draw_step(self, data):
        """Some live requests, each with 1 to all of its tokens still to come; what it generates is known by then."""
        items = []
        for name, life in self.runnable().items():
            left = self.kv.kv_tokens(life.request) - life.scheduled
            count = data.draw(st.one_of(st.just(min(1, left)), st.integers(0, left)), label=name)
            tokens = life.request.token_ids
            tokens += [7] * (life.scheduled + count - len(tokens))
            if count:
                items.append((name, life.scheduled, count))
        return step(*items)

    def num_missing(self, plan):
        new = sum(self.blocks(item.end) - self.held(self.live[item.request_id]) for item in plan.items)
        held, loading = self.holders()
        return max(0, new - NUM_BLOCKS + len({*held, *loading}))

    def leave(self, name, **how):
        """Out of everything, twice: the second time changes nothing (15)."""
        life = self.live.pop(name)
        if how.get("keep_cached", True):
            self.note_stored(life, at_end=True)
        else:
            self.has_forgotten = True
        self.dispatcher.free(name, **how)
        after = self.snapshot()
        self.dispatcher.free(name)
        assert self.snapshot() == after
        return life

    # Admission.

    def admitted(self, request, txn):
        """Try; a deferral must be true and leave no trace (13)."""
        before, have, live = self.snapshot(), self.have(), self.cache.num_live
        life = Life(request, len(request.token_ids) - request.num_prompt_tokens)
        need, least, most = (
            self.expected(life),
            self.longest(request, self.committed()),
            self.longest(request, self.stored),
        )
        answer = self.dispatcher.admit(request, txn)
        no_slot = len(self.live) == NUM_SLOTS
        if isinstance(answer, Deferral):
            assert self.snapshot() == before
            self.deferral_is_true(answer, request, have=have, full=need, no_slot=no_slot)
            return False
        grant = answer["kv"]
        assert not no_slot
        life.first = life.scheduled = life.computed = grant.cached_tokens
        life.num_known, life.row = len(request.token_ids), self.kv.row_index(request.id)
        life.stored = grant.cached_tokens // self.kv.block_tokens
        self.set_due(life)
        # What it takes is what it makes held and what it is still expected to take (20).
        assert grant.units == need - self.held(life) + self.cache.num_live - live <= have
        self.what_is_found_is_what_is_there(grant.cached_tokens, least, most, request)
        self.live[request.id] = life
        return True

    def deferral_is_true(self, answer, request, *, have, full, no_slot):
        size = self.kv.block_tokens
        if answer.waits_for is not None:
            other = self.live[answer.waits_for].request
            common = next(
                (i for i, (a, b) in enumerate(zip(request.token_ids, other.token_ids, strict=False)) if a != b),
                min(len(request.token_ids), len(other.token_ids)),
            )
            assert common >= size
            assert scope(request) == scope(other)
            # It has not moved when it is asked again: nobody waits for it.
            again = Txn()
            second = self.dispatcher.admit(request, again)
            assert not isinstance(second, Deferral) or second.waits_for is None
            again.rollback()
        elif not no_slot:
            assert (answer.manager, answer.have) == ("kv", have)
            assert have < answer.need <= full  # 20
        else:
            assert answer.need > answer.have
        assert self.live or self.pins or self.cache.incoming.ids(), "the first request in an empty pool gets in"

    def what_is_found_is_what_is_there(self, cached, least, most, request):
        """5, 6, 7: at least what runs has committed, at most what was ever stored; all of it while nothing is gone.
        The block to copy from may be done without where the pool is full."""
        size = self.kv.block_tokens
        assert cached < len(request.token_ids)
        assert least // size * size <= cached <= most
        gone = self.cache.stats()
        if not (self.has_forgotten or gone["evicted"] or gone["offloaded"]):
            assert cached in (most, most // size * size)

    def arrive(self, data):
        self.num_seen += 1
        beginning, common = data.draw(st.sampled_from(BEGINNINGS)), data.draw(st.integers(0, 9), label="common")
        own, new = data.draw(st.integers(1, 4), label="own"), data.draw(st.integers(1, 10), label="new")
        salt = data.draw(st.sampled_from([None, None, None, "x"]))
        request = ask(f"r{self.num_seen}", [*beginning[:common], *([100 + self.num_seen % 3] * own)], new, salt=salt)
        refused = self.blocks(self.kv.kv_tokens(request)) > NUM_BLOCKS
        assert bool(self.dispatcher.refusals(request)) == refused  # 28
        if not refused and self.blocks(self.kv.kv_tokens(request)) <= self.kv.table.shape[1]:
            self.enter(request)

    def enter(self, request):
        txn = Txn()
        if not self.admitted(request, txn):
            return False
        txn.commit()
        self.what_is_known_can_be_computed()
        self.dispatcher.committed()
        return True

    def come_back(self, data):
        if self.suspended and self.enter(self.suspended[0]):
            del self.suspended[0]

    def what_is_known_can_be_computed(self):
        """Right after an admission, the step that brings every sequence to its last known token is never short."""
        known = [life.request.num_prompt_tokens + life.generated for life in self.live.values()]
        most = [self.kv.kv_tokens(life.request) for life in self.live.values()]
        assert self.dispatcher.short_of(tuple(self.live), np.minimum(known, most)) is None

    # Steps.

    def launch(self, data):
        """A step goes out if and only if its blocks are there; a veto leaves no trace."""
        plan, txn = self.draw_step(data), Txn()
        missing, before = self.num_missing(plan), self.snapshot()
        short = self.dispatcher.short_of(plan.request_ids, plan.ends)
        assert (short.need if short else 0) == missing
        if missing:
            with pytest.raises(Veto):
                self.dispatcher.prepare(plan, txn)
            txn.rollback()
            assert self.snapshot() == before
            return
        self.dispatcher.prepare(plan, txn)
        compute(self.kv, plan, {name: life.request for name, life in self.live.items()})
        txn.commit()
        self.dispatcher.committed()
        self.launched.append((plan, {item.request_id: self.live[item.request_id] for item in plan.items}))
        for item in plan.items:
            self.live[item.request_id].scheduled = item.end
            self.live[item.request_id].has_run = True

    def take_back(self, data):
        """An admission and a step in one transaction; whatever ends it, everything is as it was (13)."""
        fails = data.draw(st.sampled_from([None, RuntimeError("defect"), Veto("saboteur", "no"), MemoryError()]))
        self.num_seen += 1
        request = ask(f"r{self.num_seen}", data.draw(st.sampled_from(BEGINNINGS))[:3], 2)
        before, txn = self.snapshot(), Txn()
        missing = 0
        try:
            if self.admitted(request, txn):
                self.live[request.id].has_run = False
            plan = self.draw_step(data)
            missing = self.num_missing(plan)
            self.saboteur.error = fails
            self.dispatcher.prepare(plan, txn)
        except (RuntimeError, Veto, MemoryError):
            assert fails is not None or missing
        finally:
            self.saboteur.error = None
            self.live.pop(request.id, None)
            txn.rollback()
        self.assert_as(before)

    def fail_to_admit(self, data):
        before, fails = self.snapshot(), data.draw(st.sampled_from([RuntimeError("defect"), MemoryError()]))
        self.saboteur.error = fails
        request = ask("never", data.draw(st.sampled_from(BEGINNINGS))[:4], 2)
        try:
            answer = self.dispatcher.admit(request)
        except type(fails):
            answer = None
        self.saboteur.error = None
        assert answer is None or isinstance(answer, Deferral)
        assert self.snapshot() == before

    def cancel_in_the_middle(self, data):
        """What is cancelled is gone, everybody else is as before the step."""
        plan, txn = self.draw_step(data), Txn()
        if not self.live or self.num_missing(plan):
            return
        others = self.snapshot()[4]
        self.dispatcher.prepare(plan, txn)
        name = data.draw(st.sampled_from(sorted(self.live)))
        del others[name]
        self.leave(name)
        txn.rollback()
        assert self.snapshot()[4] == others

    def land(self, data):
        """Of whoever left since, and may be back under its name, nothing changes."""
        if not self.launched:
            return
        plan, lives = self.launched.pop(0)
        self.dispatcher.update(plan, None)
        for item in plan.items:
            lives[item.request_id].computed = item.end
            if self.live.get(item.request_id) is lives[item.request_id]:
                self.note_stored(lives[item.request_id], at_end=False)

    # The end of a life.

    def finish(self, data):
        if self.live:
            name, keep = data.draw(st.sampled_from(sorted(self.live))), data.draw(st.integers(0, 3)) > 0
            self.learn(self.leave(name, keep_cached=keep).generated)

    def learn(self, length):
        self.policy.finished(length)
        self.lengths.append(length)
        self.pessimism *= FINISH_DECAY

    def suspend(self, data):
        if not self.live:
            return
        life = self.leave(data.draw(st.sampled_from(sorted(self.live))))
        self.policy.suspended()
        self.pessimism = min(1.0, self.pessimism + SUSPENSION_STEP)
        request, known = life.request, min(life.generated, life.most - 1)
        back = ask(request.id, request.token_ids[: request.num_prompt_tokens + known], 0, salt=scope(request))
        back.token_ids += [7] * (request.num_prompt_tokens + known - len(back.token_ids))
        back.num_prompt_tokens, back.max_total_tokens = request.num_prompt_tokens, request.max_total_tokens
        self.suspended.append(back)

    # Whoever else holds and moves blocks.

    def pin(self, data):
        """11."""
        if not self.live or len(self.pins) > 1:
            return
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.kv.pin(name).close()  # the first time, what is computed is stored
        life = self.live[name]
        life.stored = max(life.stored, life.computed // self.kv.block_tokens)
        self.note_stored(life, at_end=False)
        before = self.snapshot()
        self.kv.pin(name).close()
        assert self.snapshot() == before
        self.pins.append(self.kv.pin(name))

    def unpin(self, data):
        if self.pins:
            pin = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
            assert (self.cache.blocks.refs[list(pin.ids)] > 0).all()
            pin.close()

    def take_the_head(self, data):
        """What somebody holds moves with its contents; the tables follow."""
        before = {name: self.kv.block_ids(name).tolist() for name in self.live}
        if self.cache.take_back(data.draw(st.integers(0, self.cache.head_slots))) is None:
            self.check_contents()
        assert {name: self.kv.block_ids(name).tolist() for name in self.live} == before

    def lend_the_head(self, data):
        self.cache.lend()

    def slow_down_loads(self, data):
        self.cache.mover.hold_loads = not self.cache.mover.hold_loads

    def finish_loads(self, data):
        waiting = set(self.dispatcher.loading())
        if waiting:
            self.dispatcher.wait_loaded()
            assert set(self.dispatcher.loading()) < waiting

    # What always holds.

    def check(self):
        self.free_cached_and_held_are_all()
        self.what_is_held_is_known()
        self.queues_hold_just_what_may_be_evicted()
        self.parents_are_full()
        self.reservations_add_up()
        self.whole_lives_fit_where_they_are_reserved()
        self.what_is_to_come_only_falls()
        self.sequences_are_where_the_model_says()
        self.check_contents()

    def free_cached_and_held_are_all(self):
        """1, 4."""
        blocks = self.cache.blocks
        on_device = np.flatnonzero(blocks.levels == Level.DEVICE)
        assert self.cache.num_free + self.cache.room.lent + on_device.size == blocks.num_slots
        assert np.unique(blocks.slots[on_device]).size == on_device.size
        assert self.cache.num_live <= NUM_BLOCKS

    def what_is_held_is_known(self):
        held, loading = self.holders()
        assert self.cache.num_live == len({*held, *loading})
        expected = np.bincount([*held, *loading], minlength=self.cache.blocks.num_blocks)
        assert (self.cache.blocks.refs == expected).all()

    def queues_hold_just_what_may_be_evicted(self):
        """2, 3."""
        blocks, room = self.cache.blocks, self.cache.room
        queued = [*room.body.listed(), *room.head.listed(), *room.host.listed()]
        evictable = np.flatnonzero((blocks.refs == 0) & (blocks.nodes != NONE))
        assert sorted(queued) == evictable.tolist()
        assert all(room.is_offered(block) for block in queued)

    def parents_are_full(self):
        """8."""
        tree = self.cache.tree
        for node in set(self.cache.blocks.nodes.tolist()) - {NONE}:
            parent = tree.parent(node)
            assert parent == tree.ROOT or tree.num_tokens(parent) == self.kv.block_tokens
            assert tree.num_tokens(node) == self.kv.block_tokens or not tree.children(node)

    def reservations_add_up(self):
        assert self.kv.stats()["reserved"] == self.num_reserved()
        assert self.kv.available() == self.have()

    def whole_lives_fit_where_they_are_reserved(self):
        """16: computed to their very ends, extra tokens included, running sequences together find their blocks."""
        if not self.policy.may_suspend and not self.pins:
            ends = np.array([self.kv.kv_tokens(life.request) for life in self.live.values()], np.int64)
            short = self.dispatcher.short_of(tuple(self.live), ends)
            waiting = len(self.kv._holdings._partials) + len(self.cache.incoming.ids())
            assert (0 if short is None else short.need) <= waiting

    def what_is_to_come_only_falls(self):
        """19."""
        for life in self.live.values():
            life.remaining.append(self.kv.remaining(life.request))
            assert life.remaining[-2:] == sorted(life.remaining[-2:], reverse=True)
            assert (life.remaining[-1] == 0) == (self.held(life) == self.blocks(self.kv.kv_tokens(life.request)))

    def sequences_are_where_the_model_says(self):
        assert (
            len({self.kv.row_index(name) for name in self.live}) == len(self.live) == NUM_SLOTS - self.slots.available()
        )
        for name, life in self.live.items():
            marks = self.kv.watermarks(name)
            assert (marks.scheduled, marks.computed) == (life.scheduled, life.computed)
            assert marks.scheduled >= marks.computed >= marks.committed
            num_blocks = self.kv.block_ids(name).size
            assert num_blocks == self.held(life)
            assert not self.kv.table[self.kv.row_index(name)][num_blocks:].any()

    def check_contents(self):
        """4, 6, 7: every running sequence sees its own text, whoever computed it and wherever it lies by now."""
        for life in self.runnable().values():
            size = self.kv.block_tokens
            check_entries(self.kv, life.request, life.scheduled if life.has_run else life.scheduled // size * size)

    def end(self):
        """15."""
        for name in self.live:
            self.dispatcher.free(name)
        for pin in self.pins:
            pin.close()
        self.cache.mover.finish_loads()
        assert not self.dispatcher.loading()
        assert (self.cache.num_live, self.kv.available(), self.slots.available()) == (0, NUM_BLOCKS, NUM_SLOTS)
        assert not self.kv.table.any()
        self.kv.reset()
        blocks = self.cache.blocks
        assert (self.cache.num_free + self.cache.room.lent, len(blocks.free_host)) == (
            blocks.num_slots,
            blocks.num_host_slots,
        )
        assert self.cache.tree.num_nodes == 0


#: What is called, as often as its share of the list.
CALLS = (
    *[Books.arrive] * 5,
    *[Books.launch] * 7,
    *[Books.land] * 4,
    *[Books.finish] * 2,
    Books.suspend,
    *[Books.come_back] * 2,
    Books.take_back,
    Books.fail_to_admit,
    Books.cancel_in_the_middle,
    Books.pin,
    *[Books.unpin] * 2,
    Books.take_the_head,
    Books.lend_the_head,
    Books.slow_down_loads,
    *[Books.finish_loads] * 2,
)


@settings(max_examples=50, deadline=None)
@given(
    data=st.data(),
    block_tokens=st.sampled_from([1, 3, 4]),
    extra=st.sampled_from([0, 0, 2]),
    history=st.one_of(st.none(), st.lists(st.integers(1, 3), min_size=8, max_size=20)),
    head=st.sampled_from([0, 3]),
    host=st.sampled_from([0, 0, 6]),
    calls=st.lists(st.sampled_from(CALLS), min_size=20, max_size=40),
)
def test_the_books_balance(data, block_tokens, extra, history, head, host, calls):
    books = Books(block_tokens=block_tokens, extra=extra, history=history, head=head, host=host)
    for call in calls:
        call(books, data)
        books.check()
    books.end()
