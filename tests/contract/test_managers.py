"""One suite for every resource manager: a new manager is one more row of ``MANAGERS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np
import pytest

from tonnage.buffers import BufferManager, Device, Stream
from tonnage.config import Limits
from tonnage.device.host import HostDriver
from tonnage.errors import ResourceError
from tonnage.layout import KVGroup, KVGroupKind
from tonnage.ledger import Ledger
from tonnage.resources.admission import ADMISSIONS
from tonnage.resources.base import Deferral, ProbeRequest, ResourceManager
from tonnage.resources.cache import BlockCache
from tonnage.resources.dispatcher import Dispatcher
from tonnage.resources.kv import KVManager
from tonnage.resources.penalties import PenaltyTables
from tonnage.resources.slots import SlotManager
from tonnage.sampling import SamplingParams
from tonnage.step import StepItem, StepPlan, Txn
from tonnage.units import MiB

LIMITS = Limits(max_seq_len=32, max_batch_size=4, max_num_tokens=64, max_logits_rows=4)


@dataclass(frozen=True)
class Row:
    """``make`` builds the manager after those it depends on; ``state`` is all that a rollback must restore."""

    make: Callable[[], tuple[ResourceManager, ...]]
    state: Callable[[ResourceManager], object]


def _group(name: str, window: int | None = None) -> KVGroup:
    kind = KVGroupKind.FULL if window is None else KVGroupKind.WINDOW
    return KVGroup(name=name, kind=kind, layers=(0,), window=window, block_tokens=4, block_bytes=64, parts=())


def _kv(slots: SlotManager | None, policy: str, groups: tuple[KVGroup, ...] = (_group("full"),)) -> KVManager:
    cache = BlockCache(groups, num_slots=14, head_slots=2, num_host_slots=4)
    return KVManager(
        cache, block_tokens=4, max_seq_len=32, max_batch_size=4, slots=slots, admission=ADMISSIONS[policy]()
    )


def _kv_after_slots(policy: str) -> tuple[ResourceManager, ...]:
    slots = SlotManager(4)
    return slots, _kv(slots, policy)


def _kv_state(kv: KVManager) -> object:
    cache = kv.cache
    queues = [queue.listed() for queue in (cache.room.body, cache.room.head, cache.room.host)]
    tables = [table.tolist() for table in kv.tables.values()]
    stats = {key: value for key, value in kv.stats().items() if key != "high_water"}
    return cache.blocks.refs.tolist(), cache.blocks.free_body.listed().tolist(), queues, tables, stats


def _penalties() -> tuple[ResourceManager, ...]:
    slots = SlotManager(4)
    buffers = BufferManager(Stream(Device(HostDriver(4 * MiB))), ledger=Ledger(0, 4 * MiB), owner="penalties")
    return slots, PenaltyTables(slots, vocab_size=50, num_slots=4, buffers=buffers)


MANAGERS = {
    "penalties": Row(_penalties, lambda penalties: {**penalties.stats(), "num_bytes": None}),
    "slots": Row(lambda: (SlotManager(4),), lambda slots: dict(slots.stats())),
    **{f"kv, {policy}": Row(lambda policy=policy: (_kv(None, policy),), _kv_state) for policy in ADMISSIONS},
    **{
        f"kv of two groups, {policy}": Row(
            lambda policy=policy: (_kv(None, policy, (_group("full"), _group("window", 8))),), _kv_state
        )
        for policy in ADMISSIONS
    },
    **{
        f"kv after slots, {policy}": Row(lambda policy=policy: _kv_after_slots(policy), _kv_state)
        for policy in ADMISSIONS
    },
}


class Bench:
    """A manager (the last made) behind a dispatcher."""

    def __init__(self, row: Row) -> None:
        self.managers = row.make()
        self.manager = self.managers[-1]
        self.dispatcher = Dispatcher(self.managers)
        self._state = row.state
        self._cached: dict[str, int] = {}

    def state(self) -> object:
        return self._state(self.manager)

    def fill(self) -> list[ProbeRequest]:
        """Requests of different lengths, admitted until one is deferred."""
        admitted: list[ProbeRequest] = []
        while True:
            request = _request(f"r{len(admitted)}", prompt=3 + 4 * len(admitted))
            grants = self.dispatcher.admit(request)
            if isinstance(grants, Deferral):
                return admitted
            self._cached[request.id] = max(grant.cached_tokens or 0 for grant in grants.values())
            admitted.append(request)

    def step(self, requests: list[ProbeRequest], txn: Txn) -> StepPlan:
        plan = _prefill(requests, self._cached)
        self.dispatcher.prepare(plan, txn)
        return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request(ProbeRequest):
    """With a penalty, so that it needs something of every manager, and a text like nobody else's."""

    params: SamplingParams = field(default_factory=lambda: SamplingParams(presence_penalty=1.0))

    @property
    def token_ids(self) -> tuple[int, ...]:
        return (crc32(self.id.encode()) % 1000,) * self.num_prompt_tokens


def _request(name: str, *, prompt: int = 6, new: int = 3) -> ProbeRequest:
    return _Request(id=name, num_prompt_tokens=prompt, max_total_tokens=prompt + new)


def _prefill(requests: list[ProbeRequest], cached: Mapping[str, int]) -> StepPlan:
    """All that is known of each, from where the cache leaves off."""
    starts = [cached.get(request.id, 0) for request in requests]
    return StepPlan.of(
        0,
        tuple(
            StepItem(request_id=request.id, start=start, count=request.num_prompt_tokens - start, samples=True)
            for request, start in zip(requests, starts, strict=True)
        ),
    )


@pytest.fixture(params=MANAGERS.values(), ids=MANAGERS.keys())
def bench(request):
    return Bench(request.param)


def test_capacity_returns_to_the_start(bench):
    capacity = bench.manager.capacity()
    for _ in range(3):
        requests, txn = bench.fill(), Txn()
        assert requests
        plan = bench.step(requests, txn)
        txn.commit()
        bench.dispatcher.update(plan, None)
        for request in requests:
            bench.dispatcher.free(request.id)
        assert bench.manager.available() == bench.manager.capacity() == capacity
    bench.dispatcher.reset()
    assert bench.manager.available() == capacity


def test_what_is_admitted_and_final_can_run(bench):
    """Nobody loads where nothing is on the host; waiting for loads then ends at once, and asking changes nothing."""
    requests, txn = bench.fill(), Txn()
    bench.dispatcher.committed()
    before = bench.state()
    assert bench.dispatcher.loading() == frozenset()
    bench.dispatcher.wait_loaded()
    bench.dispatcher.committed()
    assert bench.state() == before
    bench.step(requests, txn)
    txn.commit()
    bench.dispatcher.committed()
    assert bench.manager.loading() in ((), [], frozenset())


def test_hooks_after_everybody_has_left_do_nothing(bench):
    """A step that never lands, and the hooks of a step whose requests were all cancelled."""
    requests, txn = bench.fill(), Txn()
    plan = bench.step(requests, txn)
    for request in requests:
        bench.dispatcher.free(request.id, keep_cached=False)
    txn.commit()
    before = bench.state()
    bench.dispatcher.committed()
    bench.dispatcher.wait_loaded()
    bench.dispatcher.update(plan, None)
    assert bench.state() == before
    assert bench.manager.available() == bench.manager.capacity()


def test_reset_gives_everything_up(bench):
    bench.step(bench.fill(), Txn())
    bench.dispatcher.reset()
    assert bench.manager.available() == bench.manager.capacity()
    assert bench.fill()


def test_nothing_is_freed_twice(bench):
    requests = bench.fill()
    bench.step(requests, Txn())
    bench.dispatcher.free(requests[0].id)
    once, available = bench.state(), bench.manager.available()
    bench.dispatcher.free(requests[0].id)
    bench.dispatcher.free("nobody")
    assert (bench.state(), bench.manager.available()) == (once, available)


def test_what_is_taken_is_what_was_needed(bench):
    """The need covers everything that is taken later, and what is still to come never grows."""
    request, before = _request("a"), bench.manager.available()
    need = bench.manager.lifetime_need(request)
    grants = bench.dispatcher.admit(request)
    grant = grants[bench.manager.name]
    assert (grant.units, grant.cached_tokens or 0, grant.is_loading) == (need, 0, False)
    assert before - bench.manager.available() == need
    remaining = bench.manager.remaining(request)
    assert remaining <= need
    bench.step([request], Txn())
    assert before - bench.manager.available() == need
    assert bench.manager.remaining(request) <= remaining


def test_a_deferral_leaves_no_trace(bench):
    bench.fill()
    before, txn = bench.state(), Txn()
    answer = bench.dispatcher.admit(_request("late", prompt=20), txn)
    assert isinstance(answer, Deferral)
    assert answer.need > answer.have
    assert bench.state() == before


def test_a_failure_in_the_middle_of_admission_leaves_no_trace(bench):
    class Failing(SlotManager):
        name = "failing"
        after = frozenset({bench.manager.name})

        def admit(self, request, txn):
            raise MemoryError

    dispatcher = Dispatcher([*bench.managers, Failing(1)])
    before = bench.state()
    with pytest.raises(MemoryError):
        dispatcher.admit(_request("a"))
    assert bench.state() == before


def test_a_step_taken_back_leaves_no_trace(bench):
    requests = bench.fill()
    before, txn = bench.state(), Txn()
    bench.step(requests, txn)
    txn.rollback()
    assert bench.state() == before
    bench.step(requests, Txn())


def test_admitted_requests_are_not_short_of_what_they_know(bench):
    """Asking takes nothing; a step that may be prepared can be, and then its end is where the next one starts."""
    requests = bench.fill()
    ids, ends = [request.id for request in requests], np.array([request.num_prompt_tokens for request in requests])
    before = bench.state()
    assert bench.manager.short_of(ids, ends) == 0
    assert bench.manager.short_of([], ends[:0]) == 0
    assert bench.dispatcher.short_of(ids, ends) is None
    assert bench.state() == before
    bench.step(requests, Txn())
    assert bench.manager.short_of(ids, ends) == 0


def test_a_request_that_was_suspended_is_admitted_again(bench):
    """Suspending is freeing; what comes back is computed from its first token."""
    requests = bench.fill()
    bench.step(requests, Txn())
    bench.dispatcher.free(requests[-1].id)
    assert not isinstance(bench.dispatcher.admit(requests[-1]), Deferral)
    bench.step(requests[-1:], Txn())


def test_two_admissions_of_one_request_are_refused(bench):
    request = _request("a")
    bench.dispatcher.admit(request)
    before = bench.state()
    with pytest.raises(ResourceError):
        bench.dispatcher.admit(request)
    assert bench.state() == before


def test_closing_twice_is_closing_once(bench):
    bench.step(bench.fill(), Txn())
    bench.dispatcher.close()
    bench.dispatcher.close()
    assert bench.manager.available() == bench.manager.capacity()
    bench.manager.free("r0")
    with pytest.raises(ResourceError):
        bench.manager.admit(_request("b"), Txn())
    with pytest.raises(ResourceError):
        bench.manager.prepare(_prefill([_request("b")], {}), Txn())


@pytest.mark.parametrize("stage", ["prefill", "decode", "unheard of"])
def test_probes_take_nothing_and_have_names_of_their_own(bench, stage):
    before = bench.state()
    probes = bench.manager.probe(stage, LIMITS)
    assert bench.state() == before
    assert len({probe.id for probe in probes}) == len(probes)


def test_claims_and_statistics_carry_whole_numbers(bench):
    for claim in bench.manager.claims(LIMITS):
        assert claim.owner == bench.manager.name
        assert claim.reason
    assert all(type(value) is int for value in bench.manager.stats().values())
