"""The waiting queue: priorities, arrival, and a bound on being passed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tonnage.engine.queue import MAX_OVERTAKEN, SPARE_ENTRIES, WaitingQueue
from tonnage.engine.request import Request
from tonnage.sampling import SamplingParams


def waiting(arrival, priority=0):
    params = SamplingParams(priority=priority)
    return Request(id=f"r{arrival}", token_ids=[1], num_prompt_tokens=1, max_tokens=1, params=params, arrival=arrival)


def drained(queue):
    order = []
    while len(queue):
        order.append(queue.pop().request)
    return order


@given(st.lists(st.integers(-3, 3), max_size=40))
def test_larger_priorities_first_then_arrival(priorities):
    queue = WaitingQueue()
    requests = [waiting(arrival, priority) for arrival, priority in enumerate(priorities)]
    for request in requests:
        queue.push(request)
    assert drained(queue) == sorted(requests, key=lambda request: (-request.priority, request.arrival))
    assert queue.peek() is None


def test_nobody_is_passed_for_ever():
    """An endless supply of urgent requests: each patient one still gets its turn, after a bounded number of others."""
    queue = WaitingQueue()
    patient = [waiting(arrival) for arrival in range(3)]
    for request in patient:
        queue.push(request)
    served, arrival = [], 3
    while not set(patient) <= set(served):
        queue.push(waiting(arrival, priority=9))
        arrival += 1
        served.append(queue.pop().request)
        assert len(served) <= (MAX_OVERTAKEN + 1) * len(patient)
    assert [request for request in served if request in patient] == patient
    assert len(served) == (MAX_OVERTAKEN + 1) * len(patient)


@given(st.data())
def test_undoing_a_turn_restores_the_order_and_the_counts(data):
    queue = WaitingQueue()
    requests = [waiting(arrival, data.draw(st.integers(-2, 2))) for arrival in range(data.draw(st.integers(1, 12)))]
    for request in requests:
        queue.push(request)
    for name in data.draw(st.lists(st.sampled_from([request.id for request in requests]), max_size=4)):
        queue.remove(name)
    counts = [request.num_overtaken for request in requests]
    turns = [queue.pop() for _ in range(data.draw(st.integers(0, len(queue))))]
    left = len(queue)
    for turn in reversed(turns):
        queue.undo(turn)
    assert len(queue) == left + len(turns)
    assert [request.num_overtaken for request in requests] == counts
    assert [turn.request for turn in turns] == drained(queue)[: len(turns)]


def test_what_has_left_is_forgotten():
    """Behind requests that always go first, thousands come and are cancelled: the queue keeps no trace of them."""
    queue = WaitingQueue()
    for arrival in range(10):
        queue.push(waiting(arrival, priority=9))
    for arrival in range(10, 5000):
        queue.push(waiting(arrival))
        queue.remove(f"r{arrival}")
    assert len(queue) == 10
    assert len(queue._by_rank) + len(queue._by_age) <= 4 * len(queue) + SPARE_ENTRIES + 2
    assert [request.arrival for request in drained(queue)] == list(range(10))


def test_a_request_that_left_and_came_back_is_there_once():
    queue = WaitingQueue()
    first, second = waiting(0), waiting(1)
    queue.push(first)
    queue.push(second)
    assert queue.remove("r0") is first
    assert queue.remove("r0") is None
    queue.push(first)
    assert drained(queue) == [first, second]
