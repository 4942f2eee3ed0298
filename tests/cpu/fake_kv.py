"""A KV manager that finds in its cache what a test says, behind the real dispatcher, scheduler and engine.

It keeps whole lives of blocks, checks every step against what it granted, and writes down what it was asked.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from tonnage.engine.core import Engine
from tonnage.engine.stub import stub_engine
from tonnage.resources.base import Deferral, Grant
from tonnage.resources.cache_events import CacheEvents
from tonnage.resources.dispatcher import Dispatcher


class FakeKV:
    """``cached``, ``loads`` and ``neighbour`` are asked with each request: tokens found, whether some lie on the host,
    and the id of whoever computes the next ones. ``fails``: hook -> error that it raises, as often as it is there."""

    name, unit, after = "kv", "block", frozenset({"slots"})
    may_refuse = rerunnable = True

    def __init__(self, slots, *, num_blocks, block_tokens):
        self.block_tokens, self._num_blocks, self._slots = block_tokens, num_blocks, slots
        self.cached = lambda _: 0
        self.loads = lambda _: False
        self.neighbour = lambda _: None
        self.held, self.scheduled, self.fails, self.calls = {}, {}, {}, []
        self.asked, self.begun = [], []
        self.tables = {0: np.zeros((slots.capacity(), num_blocks), np.int32)}
        room = SimpleNamespace(budget=SimpleNamespace(num_left=0))
        self.cache = SimpleNamespace(
            events=CacheEvents(), begin_step=lambda: None, num_host_slots=0, num_free=num_blocks, room=room
        )

    def _call(self, hook, *what):
        self.calls.append((hook, *what))
        if hook in self.fails:
            raise self.fails[hook]

    def count(self, hook):
        return sum(call[0] == hook for call in self.calls)

    # Sizes.

    @property
    def num_used(self):
        return sum(self.held.values())

    def capacity(self):
        return self._num_blocks

    def available(self):
        return self._num_blocks - self.num_used

    def lifetime_need(self, request):
        return -(-request.max_total_tokens // self.block_tokens)

    def remaining(self, request):
        return 0 if request.id in self.held else self.lifetime_need(request)

    def claims(self, _):
        return ()

    def probe(self, *_):
        return ()

    def stats(self):
        return {"sequences": len(self.held), "loading": len(self.asked) + len(self.begun)}

    # Hooks.

    def admit(self, request, txn):
        self._call("admit", request.id)
        assert request.id not in self.held
        assert request.num_computed_tokens == 0
        if (other := self.neighbour(request)) is not None:
            return Deferral(manager=self.name, need=0, have=0, waits_for=other)
        need = self.lifetime_need(request)
        if need > self.available():
            return Deferral(manager=self.name, need=need, have=self.available())
        reuses = request.params.cache.reuse
        cached = self.cached(request) if reuses else 0
        is_loading = bool(cached and self.loads(request))
        self.held[request.id], self.scheduled[request.id] = need, cached
        if is_loading:
            self.asked.append(request.id)
        txn.undo(lambda: self._unadmit(request.id))
        return Grant(cached_tokens=cached, units=need, is_loading=is_loading)

    def _unadmit(self, name):
        if name in self.held:
            self.calls.append(("return", name))
            self.free(name)

    def short_of(self, *_):
        return 0

    def held_back(self):
        return ""

    def prepare(self, plan, txn):
        self._call("prepare")
        for row in plan.items:
            assert row.request_id not in self.asked + self.begun, "it is loading"
            assert row.start == self.scheduled[row.request_id]
            self.scheduled[row.request_id] = row.end
            txn.undo(lambda row=row: self._unprepare(row))

    def _unprepare(self, row):
        if row.request_id in self.scheduled:
            self.scheduled[row.request_id] = row.start

    def committed(self):
        self._call("committed")
        self.begun, self.asked = self.begun + self.asked, []

    def loading(self):
        self._call("loading")
        return [*self.asked, *self.begun]

    def wait_loaded(self):
        self._call("wait_loaded")
        assert not self.asked, "the transaction that asked is final"
        del self.begun[:1]

    def update(self, plan, outcome):
        self._call("update")

    def free(self, name, *, keep_cached=True):
        self.held.pop(name, None)
        self.scheduled.pop(name, None)
        self.asked = [one for one in self.asked if one != name]
        self.begun = [one for one in self.begun if one != name]

    def reset(self):
        for name in list(self.held):
            self.free(name)

    def close(self):
        self.reset()


def engine_on_fake(*, kv_tokens=4096, block_tokens=16, plan=None, **limits):
    """A stub engine over a ``FakeKV``, and that. ``plan``: fields of its plan that are other than planned."""
    stub = stub_engine(kv_tokens=kv_tokens, block_tokens=block_tokens, **{"max_seq_len": 1024, **limits})
    runtime = stub._runtime
    managers = runtime.managers
    kv = FakeKV(managers.slots, num_blocks=kv_tokens // block_tokens, block_tokens=block_tokens)
    dispatcher = Dispatcher([managers.slots, kv, managers.penalties])
    runtime.managers = replace(managers, kv=kv, dispatcher=dispatcher)
    runtime.plan = replace(runtime.plan, **(plan or {}))
    return Engine(runtime, stub.text, ()), kv
