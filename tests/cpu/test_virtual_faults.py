"""Every driver call of an allocation, a release, a materialise and a free fails in turn, once and for ever."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
from virtual_bench import EVERYTHING, PAGE, Bench, is_intact

from tonnage.buffers.chunk import State
from tonnage.buffers.restore import Restore
from tonnage.device.fault import ALLOCATING
from tonnage.errors import BufferOOM, CannotMaterialize, DriverError, RangePoisoned

ASLEEP, AWAKE = State.RELEASED, State.MATERIALIZED
both = pytest.mark.parametrize("forever", [False, True], ids=["once", "for ever"])


class Reached:
    """Whether a failure was injected, however often the driver is armed anew afterwards."""

    def __init__(self, bench: Bench) -> None:
        self._fault, self._arm, self._any = bench.fault, bench.fault.arm, False
        bench.fault.arm = self.arm  # type: ignore[method-assign]

    def arm(self, nth: int | None, **arguments: object) -> None:
        self._any = bool(self)
        self._arm(nth, **arguments)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return self._any or self._fault.num_injected > 0


def points(
    forever: bool, run: Callable[[Bench], None], *, prepare: Callable[[Bench], None], calls: frozenset[str] = EVERYTHING
) -> int:
    """Call ``run`` with failure 1, 2, 3 ... of ``calls`` until none was injected; the number of points reached."""
    for nth in count(1):
        bench = Bench()
        prepare(bench)
        bench.fault.arm(nth, forever=forever, calls=calls)
        reached = Reached(bench)
        run(bench)
        bench.close()
        if not reached:
            return nth - 1
    raise AssertionError("unreachable")


def attempt(bench: Bench, call: Callable[[], object], *, may_pass: bool = False) -> Exception | None:
    """The failure that ``call`` reports; it reports every one that is injected, unless it may get over it."""
    try:
        call()
    except (BufferOOM, DriverError) as error:
        assert "INJECTED" in str(error)  # noqa: PT017 - whatever is raised says why
        return error
    assert may_pass or not bench.fault.num_injected
    return None


def some(bench: Bench) -> None:
    """Three that sleep together, one of every kind of restoring, and one of another tag."""
    for num_pages, restore in ((3, Restore.CPU), (2, Restore.MEMSET), (4, Restore.PINNED)):
        bench.allocate(num_pages, "kv", restore).keep_zero(200, 10)
    bench.allocate(5, "other", Restore.CPU)


@both
def test_an_allocation_is_all_or_nothing(forever: bool) -> None:
    def run(bench: Bench) -> None:
        failed = attempt(bench, lambda: bench.allocate(3, "kv", Restore.CPU, zero_ranges=[(200, 10)]))
        if failed:
            assert bench.made == []
            left = bench.memory.leftovers()
            assert {one.why for one in left} <= {"poisoned"}
            assert sum(one.held_bytes for one in left) == bench.host.used_bytes
        bench.require_balance()

    assert points(forever, run, prepare=lambda _: None) >= 5


@both
def test_a_release_changes_nothing_until_all_is_saved_and_then_goes_on(forever: bool, capsys) -> None:
    seen = set()

    def run(bench: Bench) -> None:
        attempt(bench, lambda: bench.memory.release("kv"))
        bench.fault.arm(None)
        bench.require_balance()
        states = bench.states()
        assert states[3] is AWAKE
        assert is_intact(bench.made[3])
        bad = bench.memory.bad_handles()
        assert bench.memory.bad_handles() == ()
        if AWAKE in states[:3]:
            seen.add("refused")
            assert (states[:3], bad) == ([AWAKE] * 3, ())
            assert all(is_intact(one) for one in bench.made)
            bench.memory.sweep()  # host memory, too, that the driver would not free
            assert bench.memory.backings.held_bytes == 0  # nothing new is kept
            bench.memory.release("kv")
            bad = ()
        elif bad:
            seen.add("poisoned")
            assert {one.address for one in bench.made[:3] if one.state is State.ERRORED} == set(bad)
            assert {one.address for one in bench.memory.leftovers("kv")} == set(bad)
            with pytest.raises(RangePoisoned, match="free it first"):
                bench.memory.materialize("kv")
            for one in bench.made:
                if one.address in bad:
                    one.free(sync=True)
        bench.memory.materialize("kv").sync()
        assert all(is_intact(one) for one in (bench.made[0], bench.made[2]) if one.address not in bad)

    reached = points(forever, run, prepare=some)
    with capsys.disabled():
        print(f"\n  release, {'for ever' if forever else 'once'}: {reached} points", end="")
    assert reached >= 10
    assert seen == {"refused", "poisoned"}


@both
def test_a_wake_is_all_or_nothing_and_may_be_repeated(forever: bool, capsys) -> None:
    def prepare(bench: Bench) -> None:
        some(bench)
        bench.memory.release("kv", "other")
        bench.memory.materialize("other").sync()

    def run(bench: Bench) -> None:
        failed = attempt(bench, lambda: bench.memory.materialize("kv", "other"))
        bench.fault.arm(None)
        bench.require_balance()
        assert bench.states()[3] is AWAKE  # it was awake before, so the roll-back leaves it alone
        assert is_intact(bench.made[3])
        bad = bench.memory.bad_handles()
        if failed is not None:
            assert isinstance(failed, CannotMaterialize)  # what is injected is a want of memory
            assert AWAKE not in bench.states()[:3]
            assert {one.address for one in bench.made if one.state is State.ERRORED} == set(bad)
            for one in bench.made:
                if one.address in bad:
                    one.free(sync=True)
            bench.memory.materialize("kv").sync()
        assert all(is_intact(one) for one in bench.made if one.address not in bad and one is not bench.made[1])
        bench.require_balance()

    reached = points(forever, run, prepare=prepare)
    with capsys.disabled():
        print(f"\n  materialise, {'for ever' if forever else 'once'}: {reached} points", end="")
    assert reached >= 15


def test_a_wake_that_fails_for_want_of_memory_is_repeated_without_loss() -> None:
    """The allocating calls alone: then the roll-back works, and nothing may be poisoned."""

    def prepare(bench: Bench) -> None:
        some(bench)
        bench.memory.release("kv")

    def run(bench: Bench) -> None:
        injected = True
        try:
            bench.memory.materialize("kv").sync()
            injected = False
        except CannotMaterialize:
            assert (bench.host.used_bytes, bench.states()[:3]) == (5 * PAGE, [ASLEEP] * 3)
            assert bench.memory.bad_handles() == ()
        bench.fault.arm(None)
        if injected:
            bench.memory.materialize("kv").sync()
        assert [is_intact(bench.made[number]) for number in (0, 2, 3)] == [True] * 3

    for forever in (False, True):
        assert points(forever, run, prepare=prepare, calls=ALLOCATING) >= 9


@both
@pytest.mark.parametrize("sync", [False, True], ids=["later", "at once"])
@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "asleep"])
def test_freeing_forgets_nothing(forever: bool, sync: bool, asleep: bool) -> None:
    def prepare(bench: Bench) -> None:
        some(bench)
        if asleep:
            bench.memory.release("kv")

    def run(bench: Bench) -> None:
        def free() -> None:
            for one in bench.made:
                one.free(sync=sync)
            bench.device.fences.reap()

        attempt(bench, free, may_pass=True)
        bench.fault.arm(None)
        bench.require_balance()
        assert sum(one.held_bytes for one in bench.memory.leftovers()) == bench.host.used_bytes

    assert points(forever, run, prepare=prepare) >= 8
