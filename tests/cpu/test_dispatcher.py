"""The dispatcher: order by declaration, admission all or nothing, every manager gets its turn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tonnage.errors import ResourceError
from tonnage.layout import KVGroup, KVGroupKind
from tonnage.resources.base import Deferral, Grant, ProbeRequest, Refusal
from tonnage.resources.cache import BlockCache
from tonnage.resources.dispatcher import Dispatcher
from tonnage.resources.kv import KVManager
from tonnage.resources.slots import SlotManager
from tonnage.step import StepPlan, Txn

#: What goes from the first manager to the last.
FORWARD = ("admit", "prepare", "committed", "wait_loaded", "update")


class Recorder:
    """A manager without limits that writes every call of it into ``log``; ``failing`` names the call that raises."""

    unit = "thing"
    rerunnable = True

    def __init__(
        self,
        name: str,
        *,
        after: tuple[str, ...] = (),
        log: list[str] | None = None,
        failing: str = "",
        missing: int = 0,
        may_refuse: bool = False,
    ):
        self.name, self.after, self.failing, self.missing = name, frozenset(after), failing, missing
        self.may_refuse = may_refuse
        self.log = log if log is not None else []

    def _call(self, what: str) -> None:
        self.log.append(f"{self.name}.{what}")
        if what == self.failing:
            raise RuntimeError(self.name)

    def capacity(self):
        return 0

    def available(self):
        return 0

    def lifetime_need(self, request):
        return 1

    def remaining(self, request):
        return 1

    def claims(self, limits):
        return ()

    def probe(self, stage, limits):
        return ()

    def admit(self, request, txn):
        txn.undo(lambda: self.log.append(f"{self.name}.undo"))
        self._call("admit")
        return Grant(cached_tokens=3)

    def short_of(self, request_ids, ends):
        self._call("short_of")
        return self.missing

    def held_back(self):
        return "a pin" if self.missing == 9 else ""

    def prepare(self, plan, txn):
        self._call("prepare")

    def committed(self):
        self._call("committed")

    def loading(self):
        return {"somebody"} if self.failing == "loading" else ()

    def wait_loaded(self):
        self._call("wait_loaded")

    def update(self, plan, outcome):
        self._call("update")

    def free(self, request_id, *, keep_cached=True):
        self._call("free")

    def reset(self):
        self._call("reset")

    def close(self):
        self._call("close")

    def stats(self):
        return {"calls": len(self.log)}


def request(name: str = "a", prompt: int = 4, new: int = 1) -> ProbeRequest:
    return ProbeRequest(id=name, num_prompt_tokens=prompt, max_total_tokens=prompt + new)


def real(num_blocks: int = 4, num_slots: int = 2) -> tuple[Dispatcher, KVManager, SlotManager]:
    slots = SlotManager(num_slots)
    layers = KVGroup(
        name="full", kind=KVGroupKind.FULL, layers=(0,), window=None, block_tokens=4, block_bytes=64, parts=()
    )
    cache = BlockCache([layers], num_slots=num_blocks, reuse=False)
    kv = KVManager(cache, block_tokens=4, max_seq_len=64, max_batch_size=num_slots, slots=slots)
    return Dispatcher([kv, slots]), kv, slots


@pytest.mark.parametrize(
    ("declared", "order"),
    [
        ({"a": (), "b": (), "c": ()}, "abc"),
        ({"a": ("c",), "b": (), "c": ()}, "bca"),
        ({"a": ("b", "c"), "b": ("c",), "c": ()}, "cba"),
        ({}, ""),
    ],
)
def test_declared_order_then_order_given(declared, order):
    managers = [Recorder(name, after=after) for name, after in declared.items()]
    assert "".join(Dispatcher(managers).names) == order


@pytest.mark.parametrize(
    ("declared", "told"),
    [
        ([("a", ("b",)), ("b", ("a",))], "wait for each other: a, b"),
        ([("a", ("a",))], "wait for each other: a"),
        ([("a", ("x",))], "'a' comes after x, which nobody is"),
        ([("a", ()), ("a", ())], "share a name"),
    ],
)
def test_an_impossible_order_is_told(declared, told):
    with pytest.raises(ResourceError, match=told):
        Dispatcher([Recorder(name, after=after) for name, after in declared])


def test_forward_hooks_go_forward_and_the_others_backward():
    log: list[str] = []
    dispatcher = Dispatcher([Recorder(name, log=log) for name in "ab"])
    plan, txn = StepPlan.of(0, ()), Txn()
    dispatcher.admit(request())
    dispatcher.prepare(plan, txn)
    dispatcher.committed()
    dispatcher.wait_loaded()
    dispatcher.update(plan, None)
    dispatcher.free("a")
    dispatcher.reset()
    dispatcher.close()
    forward = [f"{name}.{call}" for call in FORWARD for name in "ab"]
    assert log == forward + [f"{name}.{call}" for call in ("free", "reset", "close") for name in "ba"]


@pytest.mark.parametrize("call", ["free", "reset", "close"])
def test_every_manager_gets_its_turn(call):
    log: list[str] = []
    dispatcher = Dispatcher([Recorder("a", log=log), Recorder("b", log=log, failing=call)])
    with pytest.raises(RuntimeError, match="b"):
        getattr(dispatcher, call)(*(["x"] if call == "free" else []))
    assert log == [f"b.{call}", f"a.{call}"]


@pytest.mark.parametrize("call", ["committed", "update"])
def test_a_step_is_final_for_every_manager_though_one_raises(call):
    """44, 46: else some would go on as if it had been, and others not. The first error is the one that is raised."""
    log: list[str] = []
    dispatcher = Dispatcher([Recorder(name, log=log, failing=call if name in "ab" else "") for name in "abc"])
    with pytest.raises(RuntimeError, match="a"):
        getattr(dispatcher, call)(*([StepPlan.of(0, ()), None] if call == "update" else []))
    assert log == [f"{name}.{call}" for name in "abc"]


def test_what_takes_stops_at_the_first_error():
    log: list[str] = []
    dispatcher = Dispatcher([Recorder(name, log=log, failing="prepare" if name == "b" else "") for name in "abc"])
    with pytest.raises(RuntimeError, match="b"):
        dispatcher.prepare(StepPlan.of(0, ()), Txn())
    assert log == ["a.prepare", "b.prepare"]


def test_who_loads_for_any_manager_loads():
    quiet, busy = Recorder("a"), Recorder("b", failing="loading")
    assert Dispatcher([quiet]).loading() == frozenset()
    assert Dispatcher([quiet, busy]).loading() == {"somebody"}


def test_a_step_may_land_after_the_next_is_prepared():
    """44: the hooks of what is over lag one step behind those of what begins; each hears of its own step."""
    heard: list[tuple[str, int]] = []

    class Listener(Recorder):
        def prepare(self, plan, txn):
            heard.append((f"{self.name}.prepare", plan.id))

        def update(self, plan, outcome):
            heard.append((f"{self.name}.update", plan.id))

    dispatcher = Dispatcher([Listener("a"), Listener("b")])
    steps = [StepPlan.of(number, ()) for number in range(3)]
    for before, plan in zip([None, *steps], steps, strict=False):
        dispatcher.prepare(plan, Txn())
        if before is not None:
            dispatcher.update(before, None)
    order = [("prepare", 0), ("prepare", 1), ("update", 0), ("prepare", 2), ("update", 1)]
    assert heard == [(f"{name}.{call}", number) for call, number in order for name in "ab"]


def test_a_deferral_gives_back_what_was_taken():
    dispatcher, kv, slots = real()
    assert isinstance(dispatcher.admit(request("a", 12)), dict)
    assert dispatcher.admit(request("b", 8)) == Deferral(manager="kv", need=2, have=1)
    assert (slots.available(), kv.available()) == (1, 1)


def test_an_error_gives_back_what_was_taken():
    log: list[str] = []
    dispatcher = Dispatcher([Recorder("a", log=log), Recorder("b", log=log, failing="admit")])
    with pytest.raises(RuntimeError):
        dispatcher.admit(request())
    assert log == ["a.admit", "b.admit", "b.undo", "a.undo"]


def test_the_first_manager_that_is_short_is_named():
    log: list[str] = []
    managers = [Recorder("a", log=log), Recorder("b", log=log, missing=2), Recorder("c", log=log, missing=9)]
    assert Dispatcher(managers).short_of(["x"], np.array([5])) == Deferral(manager="b", need=2, have=0)
    assert log == ["a.short_of", "b.short_of"]
    assert Dispatcher(managers[:1]).short_of(["x"], np.array([5])) is None
    told = Dispatcher(managers[2:]).short_of(["x"], np.array([5]))
    assert told == Deferral(manager="c", need=9, have=0, held_back="a pin")


def test_the_managers_hear_what_was_sampled():
    @dataclass
    class Sampled:
        request_ids = ("a",)
        tokens = (7,)

    heard: list[object] = []

    class Listener(Recorder):
        def update(self, plan, outcome):
            heard.append((plan, outcome))

    plan, outcome = StepPlan.of(0, ()), Sampled()
    Dispatcher([Listener("a")]).update(plan, outcome)
    assert heard == [(plan, outcome)]


def test_the_step_s_rollback_takes_admissions_back():
    dispatcher, kv, slots = real()
    txn = Txn()
    grants = dispatcher.admit(request("a", 12), txn)
    assert grants == {"slots": Grant(units=1), "kv": Grant(cached_tokens=0, units=3)}
    assert dispatcher.admit(request("b", 12), txn) == Deferral(manager="kv", need=3, have=1)
    assert slots.slot_of("a") == 0
    txn.rollback()
    assert (slots.available(), kv.available()) == (2, 4)


def test_an_admission_outside_a_step_is_final():
    dispatcher, kv, _ = real()
    dispatcher.admit(request("a", 12))
    assert kv.available() == 1


def test_refused_on_arrival_with_need_and_have():
    dispatcher, _, _ = real()
    assert dispatcher.refusals(request("a", 16)) == ()
    assert dispatcher.refusals(request("a", 17)) == (Refusal(manager="kv", unit="block", need=5, have=4),)


def test_who_may_refuse_is_listed_and_nobody_else_does():
    dispatcher = Dispatcher([Recorder("a"), Recorder("b", may_refuse=True)])
    assert (dispatcher.may_refuse, dispatcher.unchecked) == (("b",), ("a",))
    assert [refusal.manager for refusal in dispatcher.refusals(request())] == ["b"]
    assert Dispatcher([Recorder("a")]).refusals(request()) == ()


def test_statistics_carry_the_manager_s_name():
    dispatcher, _, _ = real()
    stats = dispatcher.stats()
    assert (stats["slots.capacity"], stats["kv.capacity"], stats["kv.available"]) == (2, 4, 4)


@pytest.mark.parametrize("fails", [False, True])
def test_probe_requests_are_given_back_whatever_happens(fails):
    dispatcher, kv, slots = real()

    def probe() -> None:
        with dispatcher.holding([request("a", 8), request("b", 4)]):
            assert kv.available() == 1
            if fails:
                raise RuntimeError("out of memory")

    if fails:
        with pytest.raises(RuntimeError):
            probe()
    else:
        probe()
    assert (slots.available(), kv.available()) == (2, 4)


def test_each_probe_request_is_given_back_though_another_is_not():
    """41: and an error of giving back comes before one of the probe, which is its context."""
    log: list[str] = []
    dispatcher = Dispatcher([Recorder("a", log=log), Recorder("b", log=log, failing="free")])

    def probe() -> None:
        with dispatcher.holding([request("x"), request("y")]):
            log.clear()
            raise MemoryError

    with pytest.raises(RuntimeError, match="b") as raised:
        probe()
    assert log == ["b.free", "a.free"] * 2
    assert isinstance(raised.value.__context__, MemoryError)


def test_probe_requests_that_do_not_fit_are_given_back_too():
    dispatcher, kv, slots = real()
    with pytest.raises(ResourceError, match="probe 'b'"), dispatcher.holding([request("a", 12), request("b", 12)]):
        pass
    assert (slots.available(), kv.available()) == (2, 4)
