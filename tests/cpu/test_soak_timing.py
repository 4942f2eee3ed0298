"""When tokens came, against a clock that the test moves."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from tonnage.bench.moves import Ask
from tonnage.bench.timing import THOUSANDTHS, Timing, percentiles
from tonnage.sampling import SamplingParams


@given(st.lists(st.integers(0, 300), min_size=1, max_size=400))
def test_percentiles_are_nearest_ranks(values):
    found = percentiles(Counter(values))
    assert found.keys() == {*THOUSANDTHS, "max"}
    assert found["max"] == max(values)
    for name, share in THOUSANDTHS.items():
        below = sum(value <= found[name] for value in values)
        assert below * 1000 >= share * len(values)
        under = [value for value in values if value < found[name]]
        assert len(under) * 1000 < share * len(values)


def test_nothing_has_no_percentiles():
    assert percentiles(Counter()) is None


class Clock:
    def __init__(self):
        self.now = 0
        self.timing = Timing(lambda: self.now, max_batch_size=2)

    def ask(self, name, phase, at):
        self.now = at
        request = SimpleNamespace(token_ids=[1, 2])
        ask = Ask(id=name, token_ids=[1, 2], params=SamplingParams(), phase=phase)
        self.timing.arrived(ask, request)
        return ask, request

    def step(self, at, *requests, num_running=1, num_waiting=0, num_tokens=1):
        self.now = at
        for request in requests:
            request.token_ids += [5] * num_tokens
        self.timing.stepped(num_running=num_running, num_waiting=num_waiting)

    def end(self, ask, request, finish="length"):
        tokens = tuple(request.token_ids[2:])
        self.timing.ended(ask, SimpleNamespace(token_ids=tokens, finish_reason=finish))


def test_times_of_two_phases():
    clock = Clock()
    first, one = clock.ask("a", "crowd", 100)
    second, two = clock.ask("b", "late", 150)
    clock.step(200, one)
    clock.step(230, one, two, num_running=2)
    clock.step(290, two, num_waiting=3)
    clock.end(first, one)
    clock.step(350, two, num_tokens=2)
    clock.end(second, two, "stop")
    crowd, late = clock.timing.phases["crowd"], clock.timing.phases["late"]
    assert (crowd.first_us, crowd.gaps_us) == (Counter({100: 1}), Counter({30: 1}))
    assert (late.first_us, late.gaps_us) == (Counter({80: 1}), Counter({60: 2, 0: 1}))
    assert (crowd.num_tokens, late.num_tokens) == (2, 4)
    assert (crowd.active_us, late.active_us) == (190, 200)
    assert crowd.tokens_per_second == 2 / (190 / 10**6)
    assert (crowd.outcomes, late.outcomes) == ({"length": 1}, {"stop": 1})
    load = clock.timing.load
    assert (load.num_steps, load.num_full, load.running_sum, load.waiting_sum) == (4, 2, 5, 3)


def test_time_asleep_is_nobodys():
    clock = Clock()
    ask, request = clock.ask("a", "crowd", 0)
    clock.step(10, request)
    clock.timing.paused()
    clock.step(5000, request)
    clock.step(5020, request)
    clock.end(ask, request)
    assert clock.timing.phases["crowd"].gaps_us == Counter({20: 1})


def test_a_phase_without_anybody_is_not_active():
    clock = Clock()
    for at in (0, 1000):
        ask, request = clock.ask(f"a{at}", "crowd", at)
        clock.step(at + 50, request)
        clock.end(ask, request)
    assert clock.timing.phases["crowd"].active_us == 100


def test_a_token_that_came_with_the_end_counts():
    clock = Clock()
    ask, request = clock.ask("a", "crowd", 0)
    request.token_ids.append(3)
    clock.now = 40
    clock.end(ask, request)
    assert clock.timing.phases["crowd"].first_us == Counter({40: 1})
