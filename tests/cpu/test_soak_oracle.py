"""The oracle itself: it finds nothing in the log of a sound engine, and every violation in a doctored one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tonnage.bench import inside
from tonnage.bench.oracle import RULES, Act, Limits, Oracle
from tonnage.engine.events import Event, EventKind
from tonnage.engine.request import Finish
from tonnage.engine.stub import stub_engine
from tonnage.sampling import SamplingParams

ARRIVED, REFUSED, ADMITTED = EventKind.ARRIVED, EventKind.REFUSED, EventKind.ADMITTED
SUSPENDED, COMPUTED, ENDED = EventKind.SUSPENDED, EventKind.COMPUTED, EventKind.ENDED


def broken_in(log, limits):
    oracle = Oracle(replace(limits, malformed=set(limits.malformed)))
    oracle.read_all(log)
    assert set(oracle.broken) <= RULES.keys()
    assert bool(oracle.told) == bool(oracle.broken)
    return dict(oracle.broken)


@pytest.fixture(scope="module")
def recorded():
    """The log of a stub engine under pressure: chunks, suspensions, priorities, a refusal, a cancellation."""
    engine = stub_engine(kv_tokens=320, max_seq_len=256, max_batch_size=8, max_num_tokens=64, chunk_tokens=32)
    limits, log = inside.oracle_limits(engine), []
    engine.observe = log.append

    def submit(name, length, most, priority=0):
        params = SamplingParams(max_tokens=most, priority=priority, seed=len(log))
        engine.submit(engine.request(name, params, token_ids=[7] * length))

    def steps(most):
        while engine.has_work and most:
            log.append(Act("step"))
            engine.step()
            most -= 1

    # Short answers first, so that long ones are let in too freely and must give way.
    for number in range(6):
        submit(f"short-{number}", 10, 3)
    steps(-1)
    for number in range(4):
        submit(f"long-{number}", 40, 120, priority=number % 2)
    steps(30)
    log.append(Act("cancel", "long-2"))
    engine.cancel("long-2")
    with pytest.raises(Exception, match="can never fit"):
        submit("huge", 200, 100)
    submit("late", 90, 5, priority=1)
    steps(-1)
    engine.close()
    return log, limits


def first(log, kind, *, after=0, **fields):
    """Index of the first such event."""
    return next(
        i for i, entry in enumerate(log)
        if i >= after and entry.kind == kind and all(getattr(entry, name) == value for name, value in fields.items())
    )  # fmt: skip


def changed(log, index, **fields):
    return [*log[:index], replace(log[index], **fields), *log[index + 1 :]]


def without(log, index):
    return [*log[:index], *log[index + 1 :]]


def with_entries(log, index, *entries):
    return [*log[:index], *entries, *log[index:]]


def a_decode(log):
    """Index of a decode row in a step of several rows."""
    for i, entry in enumerate(log):
        if entry.kind == COMPUTED and entry.count == 1 and entry.start > 0:
            same = [e for e in log if e.kind == COMPUTED and e.step == entry.step]
            if len(same) > 2 and log[i - 1].kind == COMPUTED and log[i + 1].kind == COMPUTED:
                return i
    raise AssertionError("no step with several decodes")


def a_chunk(log):
    """Index of a prefill row that is not the last of its prompt."""
    for i, entry in enumerate(log):
        if entry.kind == COMPUTED and entry.count > 1 and log[i + 1].kind != COMPUTED:
            arrived = next(e for e in log if e.kind == ARRIVED and e.request_id == entry.request_id)
            if entry.start + entry.count < arrived.num_prompt_tokens:
                return i
    raise AssertionError("no chunk")


def test_a_sound_log_is_found_sound(recorded):
    log, limits = recorded
    assert {entry.kind for entry in log} >= {*EventKind} - {EventKind.RETRIED} | {"step", "cancel"}
    assert broken_in(log, limits) == {}


#: Each makes one thing wrong: (rule that must find it, what is done to log and limits).
DOCTORED = {}


def doctored(rule):
    def register(make):
        assert rule in RULES
        DOCTORED[make.__name__] = rule, make
        return make

    return register


def arrived(name="ghost", **fields):
    given = {"num_prompt_tokens": 5, "max_tokens": 5, "num_known_tokens": 5, "priority": 0}
    return Event(kind=ARRIVED, step=0, request_id=name, **{**given, **fields})


def gone(name="ghost", known=5):
    return (
        Act("cancel", name),
        Event(kind=ENDED, step=10**6, request_id=name, num_known_tokens=known, finish=Finish.CANCELLED),
    )


@doctored("refusals")
def refused_though_it_fits(log, limits):
    return [replace(arrived(), kind=REFUSED), *log], limits


@doctored("refusals")
def accepted_longer_than_a_sequence_may_be(log, limits):
    return [arrived(num_prompt_tokens=252, num_known_tokens=252), *gone(known=252), *log], limits


@doctored("refusals")
def accepted_with_more_blocks_than_there_are(log, limits):
    limits = replace(limits, max_seq_len=400)
    blocks = limits.num_blocks * limits.block_tokens
    assert not broken_in([arrived(max_tokens=blocks - 4), *gone()], limits)  # the last token needs no entry
    return [arrived(max_tokens=blocks - 3), *gone(), *log], limits


@doctored("refusals")
def accepted_a_prompt_longer_than_a_step_that_must_not_be_cut(log, limits):
    return log, replace(limits, cuts_prompts=False, max_num_tokens=80, max_chunk_tokens=None)


@doctored("refusals")
def accepted_without_a_prompt(log, limits):
    return [arrived(num_prompt_tokens=0, num_known_tokens=0), *gone(known=0), *log], limits


@doctored("refusals")
def accepted_what_makes_no_sense(log, limits):
    return log, replace(limits, malformed={"late"})


@doctored("states")
def admitted_twice(log, limits):
    i = first(log, ADMITTED)
    return with_entries(log, i, log[i]), limits


@doctored("states")
def computed_without_admission(log, limits):
    return without(log, first(log, ADMITTED)), limits


@doctored("states")
def suspended_while_it_waits(log, limits):
    i = first(log, SUSPENDED)
    return with_entries(log, i, log[i]), limits


@doctored("states")
def computed_after_its_end(log, limits):
    i, row = first(log, ENDED), first(log, COMPUTED)
    return [*log, replace(log[row], request_id=log[i].request_id)], limits


@doctored("states")
def computed_after_it_was_cancelled(log, limits):
    i = first(log, COMPUTED)
    return with_entries(log, i, Act("cancel", log[i].request_id)), limits


@doctored("rows")
def a_row_starts_late(log, limits):
    i = a_decode(log)
    return changed(log, i, start=log[i].start + 1), limits


@doctored("rows")
def a_row_computes_what_nobody_knows(log, limits):
    return changed(log, a_decode(log), count=2), limits


@doctored("rows")
def an_empty_row(log, limits):
    return changed(log, a_decode(log), count=0), limits


@doctored("rows")
def a_row_twice(log, limits):
    i = a_decode(log)
    return with_entries(log, i, log[i]), limits


@doctored("rows")
def a_row_is_lost(log, limits):
    return without(log, a_decode(log)), limits


@doctored("rows")
def a_chunk_is_left_out(log, limits):
    i = a_chunk(log)
    return changed(log, i, start=log[i].start + 16), limits


@doctored("rows")
def a_token_appears_from_nowhere(log, limits):
    i = first(log, ENDED, finish=Finish.CANCELLED)
    return changed(log, i, num_known_tokens=log[i].num_known_tokens + 1), limits


@doctored("rows")
def a_suspended_request_forgets_a_token(log, limits):
    i = first(log, SUSPENDED)
    return changed(log, i, num_known_tokens=log[i].num_known_tokens - 1), limits


def tokens_of_steps(log):
    found = {}
    for entry in log:
        if entry.kind == COMPUTED:
            found.setdefault(entry.step, []).append(entry)
    return list(found.values())


@doctored("tokens")
def more_tokens_than_a_step_may_have(log, limits):
    most = max(sum(row.count for row in rows) for rows in tokens_of_steps(log))
    assert most == limits.max_num_tokens
    return log, replace(limits, max_num_tokens=most - 1)


@doctored("tokens")
def more_prefill_beside_decodes_than_allowed(log, limits):
    return log, replace(limits, max_beside_decode_tokens=limits.max_beside_decode_tokens - 1)


@doctored("tokens")
def a_chunk_longer_than_allowed(log, limits):
    return log, replace(limits, max_chunk_tokens=limits.max_chunk_tokens - 1)


@doctored("sequences")
def more_run_than_may(log, limits):
    return log, replace(limits, max_batch_size=max(len(rows) for rows in tokens_of_steps(log)) - 1)


@doctored("blocks")
def more_blocks_are_held_than_there_are(log, limits):
    """The engine filled its pool to the last block, so one less is too few."""
    return log, replace(limits, num_blocks=limits.num_blocks - 1)


@doctored("order")
def an_older_request_of_higher_priority_is_passed(log, limits):
    return [arrived(priority=1), *log, *gone()], limits


@doctored("order")
def an_older_request_of_the_same_priority_is_passed(log, limits):
    i = first(log, ARRIVED, request_id="long-0")
    return [*log[:i], arrived(priority=1), *log[i:], *gone()], limits


@doctored("starvation")
def the_oldest_is_passed_too_often(log, limits):
    passes = sum(entry.kind == ADMITTED for entry in log)
    ghost = arrived(priority=-5)
    assert "starvation" not in broken_in([ghost, *log, *gone()], replace(limits, max_overtaken=passes))
    return [ghost, *log, *gone()], replace(limits, max_overtaken=passes - 1)


@doctored("suspension")
def the_oldest_is_suspended(log, limits):
    i = first(log, SUSPENDED)
    oldest = first(log, ADMITTED, request_id="long-0")
    known = log[oldest].num_known_tokens
    return with_entries(log, i, replace(log[i], request_id="long-0", num_known_tokens=known)), limits


@doctored("suspension")
def suspended_where_lives_are_reserved(log, limits):
    return log, replace(limits, may_suspend=False)


@doctored("idleness")
def a_step_that_moves_nothing(log, limits):
    i = first(log, "step", after=first(log, COMPUTED))
    return with_entries(log, i, log[i]), limits


@doctored("idleness")
def a_decode_is_left_out(log, limits):
    return without(log, a_decode(log)), limits


@doctored("idleness")
def a_prefill_is_left_out(log, limits):
    return without(log, a_chunk(log)), limits


@doctored("idleness")
def the_head_of_the_queue_waits_though_it_fits(log, limits):
    """The ghost arrives last and would fit beside whoever runs at the end."""
    i = max(i for i, entry in enumerate(log) if entry.kind == "step")
    return [*log[:i], arrived(priority=-1), *log[i:], *gone()], limits


@doctored("endings")
def it_never_ends(log, limits):
    return without(log, first(log, ENDED)), limits


@doctored("endings")
def it_ends_twice(log, limits):
    i = first(log, ENDED)
    return with_entries(log, i, log[i]), limits


@doctored("endings")
def it_arrives_while_it_is_there(log, limits):
    i = first(log, ARRIVED)
    return with_entries(log, i, log[i]), limits


@doctored("endings")
def it_ends_short_of_its_length(log, limits):
    i = first(log, ARRIVED, request_id="short-0")
    return changed(log, i, max_tokens=4), limits


@doctored("endings")
def it_stops_without_a_token(log, limits):
    i = first(log, ENDED, request_id="late")
    return changed(log, i, finish=Finish.STOP, num_known_tokens=90), limits


@doctored("endings")
def it_ends_without_a_reason(log, limits):
    return changed(log, first(log, ENDED), finish=None), limits


@doctored("endings")
def cancelled_and_nobody_asked(log, limits):
    return without(log, first(log, "cancel")), limits


@doctored("states")
def it_finishes_while_it_waits(log, limits):
    i = first(log, SUSPENDED)
    known = log[i].num_known_tokens
    finished = Event(kind=ENDED, step=0, request_id=log[i].request_id, num_known_tokens=known, finish=Finish.STOP)
    return with_entries(log, i + 1, finished), limits


@pytest.mark.parametrize("name", DOCTORED)
def test_a_doctored_log_is_found_out(recorded, name):
    rule, make = DOCTORED[name]
    assert rule in broken_in(*make(*recorded))


def test_every_rule_is_tried():
    assert {rule for rule, _ in DOCTORED.values()} == RULES.keys()


LIMITS = Limits(
    num_blocks=8, block_tokens=16, max_seq_len=128, max_batch_size=4, max_num_tokens=64, max_overtaken=4
)  # fmt: skip


def told(kind, **fields):
    return Event(kind=kind, step=fields.pop("step", 0), request_id=fields.pop("id", "a"), **fields)


def test_a_step_tried_again_takes_its_admissions_back():
    begin = [
        told(ARRIVED, num_prompt_tokens=40, max_tokens=1, num_known_tokens=40),
        Act("step"),
        told(ADMITTED, num_known_tokens=40),
    ]
    retried = [told(EventKind.RETRIED, id=""), told(ADMITTED, num_known_tokens=40)]
    end = [
        told(COMPUTED, start=0, count=20),
        Act("step"),
        told(COMPUTED, start=20, count=20, step=1),
        told(ENDED, num_known_tokens=41, finish=Finish.LENGTH, step=2),
    ]
    assert broken_in([*begin, *retried, *end], LIMITS) == {}
    assert broken_in([*begin, retried[1], *end], LIMITS) == {"states": 1}
    assert broken_in([*begin, retried[0], *end], LIMITS).keys() == {"states", "rows"}


def test_a_row_whose_logits_are_no_numbers_gives_no_token():
    log = [
        told(ARRIVED, num_prompt_tokens=4, max_tokens=9, num_known_tokens=4),
        Act("step"),
        told(ADMITTED, num_known_tokens=4),
        told(COMPUTED, start=0, count=4),
        told(ENDED, num_known_tokens=4, finish=Finish.ERROR, step=1),
    ]
    assert broken_in(log, LIMITS) == {}
    assert broken_in(changed(log, 4, finish=Finish.LENGTH), LIMITS).keys() == {"rows", "endings"}


def test_only_the_first_few_of_a_kind_are_told_and_all_are_counted():
    oracle = Oracle(LIMITS)
    oracle.read_all([told(ENDED, id=f"r{n}", finish=Finish.STOP) for n in range(20)])
    assert oracle.broken == {"endings": 20}
    assert len(oracle.told) == Oracle.MAX_TOLD


def test_waits_and_passes_are_measured():
    def request(name, priority, step):
        return [
            told(ADMITTED, id=name, num_known_tokens=4, step=step),
            told(COMPUTED, id=name, start=0, count=4, step=step),
            told(ENDED, id=name, num_known_tokens=5, finish=Finish.LENGTH, step=step + 1),
        ]

    names = {"low": -1, "high-1": 1, "high-2": 1}
    log = [told(ARRIVED, id=n, num_prompt_tokens=4, max_tokens=1, priority=p) for n, p in names.items()]
    for step, name in enumerate(("high-1", "high-2", "low")):
        log += [Act("step"), *request(name, names[name], step)]
    oracle = Oracle(replace(LIMITS, max_batch_size=1))
    oracle.read_all(log)
    assert (oracle.broken, oracle.longest_wait_steps, oracle.most_overtaken) == ({}, 2, 2)
