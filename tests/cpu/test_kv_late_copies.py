"""Seeded traffic over every layout of groups, with copies that come late, fail, and are cancelled half way.

One manager serves requests over few tokens, so that nearly all of them share, while slots run short, blocks go to the
host and come back, the head is lent and taken back, steps and admissions are taken back, and requests leave at any
moment. Slabs remember what was written (``kv_cases``), so a block that is found where it is not shows as another text.
What the tree holds is mirrored by what the cache tells.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from contextlib import suppress

import numpy as np
import pytest
from kv_cases import Slabs, ask, compute, group, step, window

from tonnage.errors import DriverError, TransferFailed
from tonnage.resources.base import Deferral
from tonnage.resources.blocks import NONE, Level
from tonnage.resources.cache import BlockCache
from tonnage.resources.kv import KVManager
from tonnage.resources.mover import CountingMover
from tonnage.resources.transfers import TransferBudget
from tonnage.step import Txn, Veto

B = 4
LAYOUTS = {
    "full": [group()],
    "full and window": [group(), window(6)],
    "window": [window(6)],
    "two full": [group("full-1"), group("full-2")],
    "window and full": [window(9), group()],
}


def injected():
    return DriverError("copy", "UNKNOWN", "injected")


class LateLoad:
    """Blocks that come when a test says so, in the order in which they were asked for; or that do not come."""

    def __init__(self, slabs, host_slots, slots):
        self._slabs, self.host_slots, self.slots = slabs, host_slots, slots
        self.has_come = self.has_failed = False

    @property
    def is_done(self):
        if self.has_failed:
            raise injected()
        return self.has_come

    def wait(self):
        if not (self.has_come or self.has_failed):
            self._slabs.arrive(self)
        if self.has_failed:
            raise injected()


class LateSlabs(Slabs):
    """Slabs that copies reach as late as a stream may run them: an offload reads its slots at the last moment at which
    it may, a load writes its slots when it is done, and until then they hold nothing that anybody may read.

    ``fault_rate``: how often a batch is refused, while ``may_fail``.
    """

    def __init__(self, num_slots, num_host_slots=0, *, fault_rate=0.0, seed=0):
        super().__init__(num_slots, num_host_slots, block_tokens=B)
        self.under_way, self.may_fail = [], True
        self._offloads, self._fault_rate, self._rng = [], fault_rate, random.Random(seed)

    def offload(self, slots, host_slots):
        self._refuse_some()
        CountingMover.offload(self, slots, host_slots)
        self._offloads.append((slots.tolist(), host_slots.tolist()))

    def move(self, src, dst):
        self._refuse_some()
        CountingMover.move(self, src, dst)
        self._offload_now()
        self._carry(self.device, src, self.device, dst)

    def load(self, host_slots, slots):
        self._offload_now()
        self._refuse_some()
        CountingMover.load(self, host_slots, slots)
        self._blank(slots.tolist())
        self.under_way.append(load := LateLoad(self, host_slots.tolist(), slots.tolist()))
        return load

    def before_launch(self):
        super().before_launch()
        self._offload_now()

    def arrive(self, last=None):
        """The oldest load, or all up to the ``last``, are done."""
        last = last or self.under_way[0]
        while not (last.has_come or last.has_failed):
            load = self.under_way.pop(0)
            for host_slot, slot in zip(load.host_slots, load.slots, strict=True):
                self.device[slot] = copy.copy(self.host[host_slot])
            load.has_come = True

    def lose(self):
        """The oldest load does not come."""
        load = self.under_way.pop(0)
        self._blank(load.slots)
        load.has_failed = True

    def scribble(self, num_slots):
        """Somebody works in the first slots of the head."""
        self._blank(range(num_slots))

    def sync(self):
        while self.under_way:
            self.arrive()

    close = sync

    def _blank(self, slots):
        for slot in slots:
            self.device[slot] = ["junk"] * B

    def _offload_now(self):
        for slots, host_slots in self._offloads:
            for slot, host_slot in zip(slots, host_slots, strict=True):
                self.host[host_slot] = copy.copy(self.device[slot])
        self._offloads.clear()

    def _refuse_some(self):
        if self.may_fail and self._rng.random() < self._fault_rate:
            raise injected()


class Traffic:
    """One manager, who runs on it, who waits for blocks, and who has pinned some. An act is a method of its own."""

    MAX_ROWS = 3

    def __init__(self, groups, *, seed, fault_rate):
        self.rng = rng = random.Random(seed)
        self.now = 0.0
        self.num_slots, self.num_head = rng.randint(9, 13) * len(groups), rng.choice([0, 3])
        num_host = rng.choice([1, 8, 24]) * len(groups)
        self.texts = [[rng.randint(0, 1) for _ in range(24)] for _ in range(4)]
        self.slabs = LateSlabs(self.num_slots + self.num_head, num_host, fault_rate=fault_rate, seed=seed)
        self.loses = bool(fault_rate)
        slow = TransferBudget(slab_bytes=64, bytes_per_second=128, slice_s=1.0)
        self.cache = BlockCache(
            groups,
            num_slots=self.num_slots + self.num_head,
            head_slots=self.num_head,
            num_host_slots=num_host,
            mover=self.slabs,
            budget=rng.choice([None, slow]),
            clock=lambda: self.now,
        )
        self.kv = KVManager(
            self.cache, block_tokens=B, max_seq_len=32, max_batch_size=self.MAX_ROWS, max_pending_tokens=12
        )
        self.live, self.loading, self.pins = {}, set(), []
        self.done, self.num_asked = Counter(), 0
        self.heard = set()
        self.cache.events.subscribe(self.hear)

    def acts(self):
        return {
            self.admit: 30,
            self.compute: 45,
            self.leave: 7,
            self.unpin: 4,
            self.let_a_load_come: 6,
            self.lose_a_load: 1,
            self.take_the_head_back: 4,
            self.lend_the_head: 4,
        }

    def go(self, num_acts):
        acts = self.acts()
        for act in self.rng.choices(list(acts), acts.values(), k=num_acts):
            self.now += self.rng.choice([0, 0.3])
            if self.rng.random() < 0.7:
                self.cache.begin_step()
                self.look()
            if act() is not False:
                self.done[act.__name__] += 1
            self.check()

    # -- acts: False where there was nothing to do -----------------------------------------------------------------

    def admit(self):
        if len(self.live) == self.MAX_ROWS:
            return False
        request = self.request()
        if self.kv.lifetime_need(request) > self.kv.capacity():
            return False
        txn = Txn()
        try:
            answer = self.kv.admit(request, txn)
        except DriverError:
            txn.rollback()
            return False
        if isinstance(answer, Deferral) or self.rng.random() < 0.2:
            txn.rollback()
            return False
        txn.commit()
        self.live[request.id] = request
        if answer.is_loading:
            self.loading.add(request.id)
            self.done["loading"] += 1
        self.done["cached"] += answer.cached_tokens
        self.finish_step()
        return True

    def compute(self):
        """Some of those that run go on; the step may be taken back, and who is at its end leaves."""
        self.look()
        items = [self.next_item(name) for name in self.live if name not in self.loading and self.rng.random() < 0.8]
        items = [item for item in items if item is not None]
        if not items:
            return False
        plan, txn = step(*items), Txn()
        try:
            self.kv.prepare(plan, txn)
        except DriverError:
            txn.rollback()
            return False
        except Veto as veto:
            raise AssertionError("whole lives are reserved") from veto
        compute(self.kv, plan, self.live)
        if self.rng.random() < 0.15:
            txn.rollback()
            self.done["taken back"] += 1
            return False
        txn.commit()
        self.finish_step()
        self.kv.update(plan, None)
        for name, start, count in items:
            self.draw_token(name, start + count)
        return True

    def leave(self):
        """Whoever it is, and whatever it waits for."""
        if not self.live:
            return False
        name = self.rng.choice(list(self.live))
        self.done["left while loading"] += name in self.loading
        pin = self.free(name, keep_cached=self.rng.random() < 0.8, pin_on_release=self.rng.random() < 0.2)
        self.pins += [pin] if pin is not None else []
        return True

    def unpin(self):
        if not self.pins:
            return False
        self.pins.pop().close()
        return True

    def let_a_load_come(self):
        if not self.slabs.under_way:
            return False
        self.slabs.arrive()
        return True

    def lose_a_load(self):
        if not (self.loses and self.slabs.under_way):
            return False
        self.slabs.lose()
        self.look()
        return True

    def take_the_head_back(self):
        with suppress(DriverError):
            self.cache.take_back(self.rng.randint(0, self.num_head))
            self.cache.flush()
        self.slabs.scribble(self.cache.room.lent)
        return bool(self.num_head)

    def lend_the_head(self):
        self.cache.lend()
        return bool(self.num_head)

    # -- what acts are made of --------------------------------------------------------------------------------------

    def request(self):
        rng = self.rng
        self.num_asked += 1
        kept = {"priority": rng.choice([0, 30, 35, 80]), "retain_seconds": rng.choice([None, 1.0])}
        return ask(
            f"r{self.num_asked}",
            [*rng.choice(self.texts)[: rng.randint(8, 22)], *rng.choices([0, 1], k=rng.randint(1, 3))],
            rng.randint(1, 8),
            reuse=rng.random() < 0.95,
            prompt_logprobs=0 if rng.random() < 0.15 else None,  # it computes what others may be loading
            salt=rng.choice([None, None, None, "x"]),
            **(kept if rng.random() < 0.3 else {}),
        )

    def next_item(self, name):
        start = self.kv.watermarks(name).scheduled
        rest = len(self.live[name].token_ids) - start
        return (name, start, min(rest, self.rng.randint(1, 12))) if rest else None

    def draw_token(self, name, end):
        """It has all its tokens computed: it ends, or knows one more."""
        request = self.live.get(name)
        if request is None or end < len(request.token_ids):
            return
        if len(request.token_ids) + 1 >= request.max_total_tokens:
            self.free(name)
        else:
            request.token_ids.append(self.rng.randint(0, 1))

    def finish_step(self):
        try:
            self.kv.committed()
        except TransferFailed:
            self.give_up_loading()
        except DriverError:  # a block that has to make way for a load
            self.give_up_loading()

    def look(self):
        """As a step begins: who has all its blocks runs from now on."""
        try:
            self.loading &= set(self.kv.loading())
        except TransferFailed:
            self.give_up_loading()

    def give_up_loading(self):
        self.done["gave up loading"] += bool(self.loading)
        for name in list(self.loading):
            self.free(name)

    def free(self, name, **how):
        del self.live[name]
        self.loading.discard(name)
        return self.kv.free(name, **how)

    # -- what must be true ------------------------------------------------------------------------------------------

    def hear(self, events):
        for event in events:
            key = (event.level, event.digest, event.group)
            if event.kind == "stored":
                assert key not in self.heard, "stored twice"
                self.heard.add(key)
            else:
                assert key in self.heard, "removed twice"
                self.heard.remove(key)

    def check(self):
        self.cache.events.flush()
        assert self.cache.events.has_subscribers, "what was told was wrong"
        assert self.heard == self.in_tree()
        blocks = self.cache.blocks
        held = np.flatnonzero(blocks.refs)
        assert dict(zip(held.tolist(), blocks.refs[held].tolist(), strict=True)) == self.holders()
        assert self.cache.num_live == held.size <= self.cache.capacity
        assert (blocks.levels[held] != Level.NOWHERE).all()
        for level, owners in ((Level.DEVICE, blocks.owners), (Level.HOST, blocks.host_owners)):
            here = np.flatnonzero(blocks.levels == level)
            assert np.array_equal(owners[blocks.slots[here]], here), "two blocks in one slot"
            assert np.count_nonzero(owners != NONE) == here.size

    def holders(self):
        """How many hold each block: rows, pins, transfers, and copies that are still to be made or to be final."""
        live, books = self.kv._live, self.kv._holdings
        found = Counter()
        for row in self.kv._row_of.values():
            found.update(books.tables.row(row, 0, int(live.held[row])).tolist())
        for pin in self.pins:
            found.update(pin.ids)
        for load in self.cache.incoming._loading:
            found.update(load.ids.tolist())
        for partial in (*books._partials.values(), *books._copied.values()):
            found.update(block for block in partial.sources if block != NONE)
        return dict(found)

    def in_tree(self):
        """(level, digest, group) of every block that the tree knows."""
        tree, blocks = self.cache.tree, self.cache.blocks
        return {
            ("host" if blocks.levels[block] == Level.HOST else "device", tree.digest(node), index)
            for node in tree.subtree(tree.ROOT)
            if node != tree.ROOT
            for index in range(tree.num_groups)
            if (block := tree.block(node, index)) != NONE
        }

    def end(self):
        """All leave, and everything has come back."""
        self.slabs.may_fail = False
        for name in list(self.live):
            self.free(name)
        while self.pins:
            self.pins.pop().close()
        self.cache.incoming.wait_all()
        self.cache.lend()
        self.check()
        assert (self.cache.num_live, self.kv.available()) == (0, self.kv.capacity())
        assert self.cache.num_free + self.cache.num_cached == self.num_slots + self.num_head
        assert not self.kv._prefixes._promises
        self.cache.clear()
        self.check()
        assert (self.heard, self.cache.tree.num_nodes) == (set(), 0)
        assert self.cache.num_free == self.num_slots + self.num_head
        assert self.cache.stats()["host_free"] == self.cache.num_host_slots


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("fault_rate", [0.0, 0.05], ids=["sound copies", "copies that fail"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whatever_happens_everybody_reads_its_own_and_everything_comes_back(layout, fault_rate, seed):
    traffic = Traffic(LAYOUTS[layout], seed=seed, fault_rate=fault_rate)
    traffic.go(300)
    traffic.end()
