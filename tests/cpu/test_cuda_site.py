"""A card's site over a simulated driver: closed when it cannot be opened, and others told apart from what is ours."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tonnage.device.cuda_devices import CudaDevice
from tonnage.device.host import HostDriver
from tonnage.engine import cuda_site
from tonnage.engine.cuda_site import CudaSite
from tonnage.engine.site import KV
from tonnage.engine.watch import Watch
from tonnage.errors import CannotMaterialize, DriverError, RangeReferenced
from tonnage.terms import LineKind, MemoryKind
from tonnage.units import MiB

CAPACITY, CONTEXT = 4096 * MiB, 500 * MiB


class Card(HostDriver):
    """Counts as a card does: a context of ours from the beginning; tells what is ours, or does not."""

    def __init__(self, *, tells: bool = True) -> None:
        super().__init__(CAPACITY)
        self.tells, self.is_closed, self.unseen_bytes = tells, False, CONTEXT
        self.nvml = SimpleNamespace(driver_version=lambda: "580.1", reason="NVML tells nothing here")

    @property
    def kind(self) -> str:
        return "cuda"

    @property
    def name(self) -> str:
        return "Card"

    def mem_info(self):
        free, total = super().mem_info()
        return free - self.unseen_bytes, total

    def own_bytes(self):
        return self.used_bytes + self.unseen_bytes if self.tells else None

    def close(self):
        self.is_closed = True
        return super().close()


class Torch(SimpleNamespace):
    """As much of torch as a site asks for; ``reserved`` is what its allocator holds on ``card``."""

    def __init__(self, card: Card) -> None:
        self.card, self.reserved = card, 0
        self.device = lambda kind, ordinal: f"{kind}:{ordinal}"
        self.cuda = SimpleNamespace(
            device=lambda _: nullcontext(), init=lambda: None, empty_cache=lambda: None, is_initialized=lambda: False,
            ExternalStream=lambda handle, device: handle, memory_reserved=lambda _: self.reserved,
        )  # fmt: skip


@pytest.fixture(params=[True, False], ids=["told", "inferred"])
def card(request):
    made = Card(tells=request.param)
    yield made
    made.close()


@pytest.fixture
def played(card, monkeypatch):
    """The module with ``card`` as device 1 of two."""
    described = CudaDevice(
        ordinal=1, name="Card", uuid="GPU-1", sm=90, num_sms=132, total_bytes=CAPACITY, integrated=False, is_slice=False
    )
    torch = Torch(card)
    free_before = SimpleNamespace(free_bytes=CAPACITY - card.foreign_bytes)
    monkeypatch.setattr(cuda_site, "torch", torch)
    monkeypatch.setattr(cuda_site, "CudaDriver", lambda ordinal: card)
    monkeypatch.setattr(cuda_site, "device_at", lambda ordinal: described)
    monkeypatch.setattr(cuda_site, "Nvml", lambda uuid: SimpleNamespace(memory=lambda: free_before))
    return torch


@pytest.fixture
def site(played):
    made = CudaSite(1)
    yield made
    made.close()


@pytest.mark.parametrize("what", ["init", "ExternalStream"])
def test_a_site_that_cannot_be_opened_closes_its_driver(played, card, what):
    def fails(*_, **__):
        raise RuntimeError("no more of them")

    setattr(played.cuda, what, fails)
    with pytest.raises(RuntimeError, match="no more"):
        CudaSite(1)
    assert card.is_closed


def ours(site, num_bytes):
    account = site.ledger.open(owner="ours", line=LineKind.KV, memory=MemoryKind.GPU)
    site.driver.mem_alloc(num_bytes)
    account.add(num_bytes, num_bytes)


def test_the_context_is_what_no_account_explains(site):
    assert site.remainder("context", LineKind.CONTEXT).bytes == CONTEXT
    assert site.foreign().bytes == 0
    assert site.beyond_accounts_bytes() == 0


def test_what_others_take_while_graphs_are_captured_is_theirs_where_the_driver_tells(site, card, played):
    site.remainder("context", LineKind.CONTEXT)

    def capture():
        card.mem_alloc(20 * MiB)
        played.reserved += 20 * MiB
        card.unseen_bytes += 6 * MiB  # what the driver keeps for them
        card.foreign_bytes += 700 * MiB

    graphs = site.captured(capture).bytes
    assert graphs == (26 * MiB if card.tells else 726 * MiB)
    assert site.foreign().bytes == (700 * MiB if card.tells else 0)
    # Either way the plan counts with all that is gone, once.
    assert site.foreign().bytes + site.ledger.accounted_bytes == CAPACITY - card.mem_info()[0]


def test_what_others_take_between_plan_and_pool_is_seen_whoever_tells(site, card):
    site.remainder("context", LineKind.CONTEXT)
    ours(site, 300 * MiB)
    assert site.beyond_accounts_bytes() == 0
    card.foreign_bytes = 900 * MiB
    assert site.beyond_accounts_bytes() == 900 * MiB


def test_once_start_up_is_over_others_are_told_apart_even_where_the_driver_does_not_tell(site, card):
    site.remainder("context", LineKind.CONTEXT)
    card.unseen_bytes += 10 * MiB  # a library's, that nobody explained
    site.settle("audit")
    site.ledger.own_is_known()
    ours(site, 200 * MiB)
    card.foreign_bytes = 1024 * MiB
    site.settle("serve")
    shot = site.ledger.snapshot()
    assert (shot.foreign, shot.own, shot.unattributed) == (1024 * MiB, CONTEXT + 210 * MiB, 10 * MiB)
    card.foreign_bytes = 0
    site.settle("serve")
    assert (site.ledger.snapshot().foreign, site.ledger.snapshot().foreign_high) == (0, 1024 * MiB)


def test_the_watch_keeps_the_least_free_and_the_most_foreign_since_the_engine_serves(site, card):
    site.remainder("context", LineKind.CONTEXT)
    site.settle("audit")
    site.ledger.own_is_known()
    watch = Watch(site, interval_s=60)  # looks come from here
    watch.start()
    card.foreign_bytes = 2048 * MiB
    watch._sampler.look()
    card.foreign_bytes = 0
    watch._sampler.look()
    watch.restart()
    assert (watch.lowest_free_bytes, watch.highest_foreign_bytes, watch.num_looks) == (CAPACITY - CONTEXT, 0, 0)
    for foreign in (300, 100):
        card.foreign_bytes = foreign * MiB
        watch._sampler.look()
    record = watch.record()
    assert (record.lowest_free_bytes, record.highest_foreign_bytes) == (CAPACITY - CONTEXT - 300 * MiB, 300 * MiB)
    assert (record.num_looks, record.interval_ms, record.problem) == (2, 60_000, "")
    shot = site.ledger.snapshot()
    assert (shot.foreign, shot.foreign_high, shot.unattributed) == (100 * MiB, 2048 * MiB, 0)
    assert shot.free_low == CAPACITY - CONTEXT - 2048 * MiB
    watch.close()
    watch.close()


class Cache:
    """What torch keeps for steps, where taking it fails with ``error``."""

    num_bytes = 64 * MiB

    def __init__(self, error=None):
        self.num_refills, self.error = 0, error

    def refill(self):
        self.num_refills += 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def cache(site, played):
    played.OutOfMemoryError = MemoryError
    played.cuda.stream = lambda _: nullcontext()
    made = site._cache = Cache()
    return made


def failing(site, monkeypatch, call, error):
    def fails(*_):
        raise error

    monkeypatch.setattr(site.stream.device.virtual, call, fails)


def test_nothing_is_taken_for_steps_while_they_sleep_and_all_of_it_once_they_wake(site, cache):
    site.release({KV})
    site.dropped(lambda: None)
    site.drain()
    assert cache.num_refills == 0
    site.materialize({KV})
    assert cache.num_refills >= 1


def test_after_a_sleep_that_was_refused_steps_have_what_torch_kept(site, cache, monkeypatch):
    failing(site, monkeypatch, "release", RangeReferenced("registered with a library"))
    with pytest.raises(RangeReferenced):
        site.release({KV})
    assert cache.num_refills == 1


def test_after_one_that_failed_half_way_nothing_is_taken(site, cache, monkeypatch):
    failing(site, monkeypatch, "release", DriverError("cuMemUnmap", "UNKNOWN"))
    with pytest.raises(DriverError):
        site.release({KV})
    site.dropped(lambda: None)
    assert cache.num_refills == 0


def test_a_wake_without_memory_for_steps_changes_nothing(site, cache):
    site.release({KV})
    cache.error = MemoryError()
    with pytest.raises(CannotMaterialize, match="waking what torch keeps for steps"):
        site.materialize({KV})
    site.dropped(lambda: None)
    assert cache.num_refills == 1
    cache.error = None
    site.materialize({KV})


def test_what_the_driver_keeps_of_dropped_graphs_is_theirs_and_counts_once(site, cache, card, played):
    site.remainder("context", LineKind.CONTEXT)
    account, pools = site.sampled("graphs", LineKind.GRAPHS), []

    def capture():
        pools.append(card.mem_alloc(20 * MiB))
        played.reserved += 20 * MiB
        if len(pools) == 1:
            card.unseen_bytes += 6 * MiB  # once: the next graphs find it there

    def clear(*, given_back=0):
        card.mem_free(pools[-1])
        played.reserved -= 20 * MiB
        card.unseen_bytes -= given_back

    for _ in range(3):
        site.captured(capture)
        assert account.physical_bytes == 26 * MiB
        assert site.beyond_accounts_bytes() == 0
        site.dropped(clear)
        assert account.physical_bytes == 6 * MiB
        assert site.beyond_accounts_bytes() == 0
    site.captured(capture)
    site.dropped(lambda: clear(given_back=4 * MiB))
    assert account.physical_bytes == 2 * MiB
