"""The oracle where steps are planned ahead: rows are told after what was admitted and suspended for the next step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tonnage.bench import inside
from tonnage.bench.oracle import Oracle
from tonnage.bench.rules import Act
from tonnage.engine.events import Event, EventKind
from tonnage.engine.request import Finish
from tonnage.engine.stub import stub_engine
from tonnage.sampling import SamplingParams

ADMITTED, COMPUTED, ENDED = EventKind.ADMITTED, EventKind.COMPUTED, EventKind.ENDED
ARRIVED, SUSPENDED = EventKind.ARRIVED, EventKind.SUSPENDED


def broken_in(log, limits):
    oracle = Oracle(limits)
    oracle.read_all(log)
    return dict(oracle.broken)


@pytest.fixture(scope="module")
def recorded():
    """The log of a stub with room for everybody: chunks, ends by a stop, two cancellations, late arrivals."""
    engine = stub_engine(
        kv_tokens=16_384, max_seq_len=256, max_batch_size=32, max_num_tokens=512, chunk_tokens=64, end_probability=0.05
    )
    limits, log = replace(inside.oracle_limits(engine), steps_ahead=1), []
    engine.observe = log.append

    def submit(number, length, most, priority=0):
        params = SamplingParams(max_tokens=most, priority=priority, seed=number)
        engine.submit(engine.request(f"r{number}", params, token_ids=[7] * length))

    def steps(most):
        while engine.has_work and most:
            log.append(Act("step"))
            engine.step()
            most -= 1

    for number in range(10):
        submit(number, 20 + 13 * number, 40)
    steps(8)
    for name in ("r3", "r9"):
        log.append(Act("cancel", name))
        engine.cancel(name)
    steps(2)
    for number in range(10, 16):
        submit(number, 90, 30, priority=number % 3)
    steps(-1)
    engine.close()
    return log, limits


def delayed(log):
    """The same as an engine that plans ahead would tell it, which computes what has ended once more.

    Rows and ends of a call come in the next one, behind what is admitted there; whoever stopped has one row more.
    """
    calls = [[]]
    for entry in log:
        if entry.kind == "step":
            calls.append([])
        calls[-1].append(entry)
    late = (COMPUTED, ENDED)
    told, landing, zombies = [*calls[0]], [], []
    for call in [*calls[1:], [Act("step")]]:
        own = [entry for entry in call if entry.kind in late]
        first_late = next((i for i, entry in enumerate(call) if entry.kind in late), len(call))
        behind = [entry for entry in call[first_late:] if entry.kind not in late]
        told += [*call[:first_late], *landing, *behind]
        computed = [entry for entry in own if entry.kind == COMPUTED]
        more = [replace(zombie, step=computed[0].step) for zombie in zombies if computed]
        zombies = [
            Event(kind=COMPUTED, step=0, request_id=e.request_id, start=e.num_known_tokens - 1, count=1)
            for e in own
            if e.kind == ENDED and e.finish is Finish.STOP
        ]
        landing = [*computed, *more, *(entry for entry in own if entry.kind == ENDED)]
    return told


def test_a_delayed_log_is_found_sound(recorded):
    log, limits = recorded
    assert {entry.finish for entry in log if entry.kind == ENDED} == {Finish.STOP, Finish.LENGTH, Finish.CANCELLED}
    assert broken_in(log, replace(limits, steps_ahead=0)) == {}
    assert broken_in(delayed(log), limits) == {}


def test_an_undelayed_log_is_found_sound_as_well(recorded):
    """An engine that plans ahead may still have nothing under way, as after a sleep."""
    log, limits = recorded
    assert broken_in(log, limits) == {}


def test_a_delayed_log_needs_the_tolerance(recorded):
    log, limits = recorded
    assert {"idleness", "waiting"} & broken_in(delayed(log), replace(limits, steps_ahead=0)).keys()


def rows_of(log, name):
    return [i for i, entry in enumerate(log) if entry.kind == COMPUTED and entry.request_id == name]


def stalled(log, name, *, num_steps, num_rows=4):
    """``name`` has no rows in so many steps, and goes on after them as if there had been none."""
    (*rows,) = rows_of(log, name)
    gone = rows[num_rows : num_rows + num_steps]
    return [entry for i, entry in enumerate(log) if i not in gone]


def test_a_decode_that_is_left_out_again_and_again(recorded):
    log, limits = recorded
    assert "idleness" in broken_in(stalled(delayed(log), "r0", num_steps=3), limits)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_decode_may_be_left_out_where_its_turn_could_not_be_known(recorded, num_steps):
    """What is missing shows in its rows, which this log has no others for; nobody is called idle."""
    log, limits = recorded
    assert "idleness" not in broken_in(stalled(delayed(log), "r0", num_steps=num_steps), limits)


def test_a_head_of_the_queue_that_never_comes_in(recorded):
    log, limits = recorded
    ghost = Event(kind=ARRIVED, step=0, request_id="ghost", num_prompt_tokens=5, max_tokens=5, priority=-1)
    gone = (
        Act("cancel", "ghost"),
        Event(kind=ENDED, step=0, request_id="ghost", num_known_tokens=5, finish=Finish.CANCELLED),
    )
    told = delayed(log)
    at = max(i for i, entry in enumerate(told) if entry.kind == ARRIVED)
    assert "idleness" in broken_in([*told[: at + 1], ghost, *told[at + 1 :], *gone], limits)


def test_two_calls_that_move_nothing(recorded):
    log, limits = recorded
    told = delayed(log)
    at = next(i for i, entry in enumerate(told) if entry.kind == "step" and i > rows_of(told, "r12")[3])
    assert "idleness" not in broken_in([*told[:at], Act("step"), *told[at:]], limits)
    assert "idleness" in broken_in([*told[:at], Act("step"), Act("step"), *told[at:]], limits)


def test_a_row_of_somebody_who_left_long_ago(recorded):
    log, limits = recorded
    told = delayed(log)
    ended = next(i for i, entry in enumerate(told) if entry.kind == ENDED and entry.finish is Finish.STOP)
    name, known = told[ended].request_id, told[ended].num_known_tokens
    later = [i for i, entry in enumerate(told) if entry.kind == "step" and i > ended][4]
    row = Event(kind=COMPUTED, step=told[later + 1].step, request_id=name, start=known - 1, count=1)
    assert "states" in broken_in([*told[: later + 1], row, *told[later + 1 :]], limits)


def test_two_rows_in_a_step(recorded):
    log, limits = recorded
    told = delayed(log)
    at = rows_of(told, "r5")[-2]
    assert "rows" in broken_in([*told[: at + 1], told[at], *told[at + 1 :]], limits)


# -- suspended, cancelled while a row is under way -----------------------------------------------------------------


def event(kind, name, step, **fields):
    return Event(kind=kind, step=step, request_id=name, **fields)


def suspended(*, keeps):
    """Two run; the younger is suspended for the third step while its row of the second is under way, whose token it
    keeps or loses; later it is computed again."""
    both = [(name, event(ARRIVED, name, 0, num_prompt_tokens=4, max_tokens=4)) for name in ("a", "b")]
    log = [arrived for _, arrived in both]
    log += [Act("step"), *(event(ADMITTED, name, 0, num_known_tokens=4) for name, _ in both)]
    log += [Act("step"), *(event(COMPUTED, name, 0, start=0, count=4) for name, _ in both)]
    log += [Act("step"), event(SUSPENDED, "b", 1, num_known_tokens=5), event(COMPUTED, "a", 1, start=4, count=1)]
    log += [event(COMPUTED, "b", 1, start=4, count=1)] if keeps else []
    log += [Act("step"), event(COMPUTED, "a", 2, start=5, count=1)]
    known = 6 if keeps else 5
    log += [Act("step"), event(ADMITTED, "b", 3, num_known_tokens=known), event(COMPUTED, "a", 3, start=6, count=1)]
    log += [event(ENDED, "a", 4, num_known_tokens=8, finish=Finish.LENGTH)]
    log += [Act("step"), event(COMPUTED, "b", 4, start=0, count=known)]
    for step, start in enumerate(range(known, 7), 5):
        log += [Act("step"), event(COMPUTED, "b", step, start=start, count=1)]
    return [*log, event(ENDED, "b", 9, num_known_tokens=8, finish=Finish.LENGTH)]


@pytest.fixture
def narrow(recorded):
    return replace(recorded[1], max_num_tokens=8, max_beside_decode_tokens=None, max_chunk_tokens=None)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_token_that_was_under_way_is_kept_or_lost(narrow, keeps):
    assert broken_in(suspended(keeps=keeps), narrow) == {}


def test_more_tokens_than_were_under_way(narrow):
    log = suspended(keeps=True)
    at = max(i for i, entry in enumerate(log) if entry.kind == ADMITTED)
    log[at] = replace(log[at], num_known_tokens=7)
    assert "rows" in broken_in(log, narrow)


@pytest.mark.parametrize(("known", "is_sound"), [(5, True), (6, True), (7, False)])
def test_what_is_taken_back_may_keep_the_token_that_was_under_way(narrow, known, is_sound):
    log = [event(ARRIVED, "a", 0, num_prompt_tokens=4, max_tokens=9)]
    log += [Act("step"), event(ADMITTED, "a", 0, num_known_tokens=4)]
    log += [Act("step"), event(COMPUTED, "a", 0, start=0, count=4), Act("cancel", "a")]
    log += [Act("step"), event(COMPUTED, "a", 1, start=4, count=1)]
    log += [event(ENDED, "a", 1, num_known_tokens=known, finish=Finish.CANCELLED)]
    assert (broken_in(log, narrow) == {}) == is_sound
