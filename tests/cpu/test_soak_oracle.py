"""The oracle itself: it finds nothing in the log of a sound engine, and every violation in a doctored one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tonnage.bench import inside
from tonnage.bench.oracle import Oracle
from tonnage.bench.rules import RULES, Act, Limits
from tonnage.bench.texts import Held, Past, Text
from tonnage.caching import CacheParams
from tonnage.engine.events import Event, EventKind
from tonnage.engine.request import Finish
from tonnage.engine.stub import stub_engine
from tonnage.sampling import SamplingParams

ARRIVED, REFUSED, ADMITTED = EventKind.ARRIVED, EventKind.REFUSED, EventKind.ADMITTED
SUSPENDED, COMPUTED, LEFT, ENDED = EventKind.SUSPENDED, EventKind.COMPUTED, EventKind.LEFT, EventKind.ENDED


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


def told(kind, **fields):
    return Event(kind=kind, step=fields.pop("step", 0), request_id=fields.pop("id", "a"), **fields)


def ended(**fields):
    return told(LEFT, **fields), told(ENDED, **fields)


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
    """Index of a prefill row that is neither the first nor the last of its prompt."""
    for i, entry in enumerate(log):
        if entry.kind == COMPUTED and entry.count > 1 and entry.start and log[i + 1].kind != COMPUTED:
            arrived = next(e for e in log if e.kind == ARRIVED and e.request_id == entry.request_id)
            if entry.start + entry.count < arrived.num_prompt_tokens:
                return i
    raise AssertionError("no chunk")


def test_a_sound_log_is_found_sound(recorded):
    log, limits = recorded
    taken_back = {EventKind.RETRIED, EventKind.WITHDRAWN}
    assert {entry.kind for entry in log} >= {*EventKind} - taken_back | {"step", "cancel"}
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
    return Act("cancel", name), *ended(id=name, num_known_tokens=known, finish=Finish.CANCELLED, step=10**6)


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
    finished = ended(id=log[i].request_id, num_known_tokens=log[i].num_known_tokens, finish=Finish.STOP)
    return with_entries(log, i + 1, *finished), limits


@doctored("endings")
def it_ends_and_has_not_left(log, limits):
    return without(log, first(log, LEFT)), limits


@doctored("endings")
def it_leaves_twice(log, limits):
    i = first(log, LEFT)
    return with_entries(log, i, log[i]), limits


@pytest.mark.parametrize("name", DOCTORED)
def test_a_doctored_log_is_found_out(recorded, name):
    rule, make = DOCTORED[name]
    assert rule in broken_in(*make(*recorded))


# -- prefixes ------------------------------------------------------------------------------------------------------


SYSTEM = list(range(1, 41))  # two blocks and a half


@pytest.fixture(scope="module")
def shared():
    """The log of a stub engine that shares prefixes and fills its pool to the last block: hits of whole blocks and of
    parts, one request that comes while a neighbour computes what it begins with, one that loads, a pin, another salt.
    """
    engine = stub_engine(
        kv_tokens=320, max_seq_len=256, max_batch_size=8, max_num_tokens=64, chunk_tokens=16,
        prefix_caching=True, host_kv_tokens=640, load_steps=9, checks_contents=True, seed=2,
    )  # fmt: skip
    limits, log, pins = inside.oracle_limits(engine), [], []
    engine.observe = log.append

    def submit(name, tokens, most, **cache):
        params = SamplingParams(max_tokens=most, seed=len(log), cache=CacheParams(**cache), ignore_eos=True)
        request = engine.request(name, params, token_ids=tokens)
        text = Text(
            request.token_ids, scope=cache.get("salt") if cache.get("reuse", True) else name,
            block_tokens=16, shares=cache.get("reuse", True), may_match=cache.get("reuse", True),
        )  # fmt: skip
        log.append(Act("ask", name, text))
        engine.submit(request)

    def steps(most):
        while engine.has_work and most:
            log.append(Act("step"))
            engine.step()
            most -= 1

    submit("first", SYSTEM, 60)
    submit("neighbour", [*SYSTEM, 99, 98], 20)
    steps(12)
    pins.append(engine.pin("first"))
    log.append(Act("pin", "first"))
    submit("salted", SYSTEM, 5, salt="s")
    submit("alone", SYSTEM, 5, reuse=False)
    submit("half", [*SYSTEM[:36], 77], 5)
    steps(-1)
    log.append(Act("unpin", "first"))
    pins.pop().close()
    submit("large", [200] * 250, 6)
    steps(-1)
    submit("larger", [201] * 250, 6)
    steps(-1)
    submit("loads", [*SYSTEM, 5], 5)
    submit("beside", [150] * 20, 9)
    steps(-1)
    assert engine.stats()["kv.loaded"] > 0
    engine.close()
    return log, limits


def test_a_sound_log_of_shared_prefixes_is_found_sound(shared):
    log, limits = shared
    assert broken_in(log, limits) == {}
    cached = {entry.request_id: entry.num_cached_tokens for entry in log if entry.kind == ADMITTED}
    assert cached.pop("loads") >= 32
    found = {name: count for name, count in cached.items() if count}
    assert found == {"neighbour": 32, "half": 36}


#: As above, of the second log.
DOCTORED_SHARED = {}


def doctored_shared(rule):
    def register(make):
        DOCTORED_SHARED[make.__name__] = rule, make
        return make

    return register


@doctored_shared("reuse")
def found_without_being_computed(log, limits):
    return changed(log, first(log, ADMITTED, request_id="large"), num_cached_tokens=16), limits


@doctored_shared("reuse")
def found_under_another_salt(log, limits):
    return changed(log, first(log, ADMITTED, request_id="salted"), num_cached_tokens=32), limits


@doctored_shared("reuse")
def found_by_one_that_must_compute_all(log, limits):
    return changed(log, first(log, ADMITTED, request_id="alone"), num_cached_tokens=32), limits


@doctored_shared("reuse")
def found_to_the_last_token(log, limits):
    """The first has computed all of it; what is left to compute is nothing."""
    i = first(log, ADMITTED, request_id="neighbour")
    return changed(log, i, num_cached_tokens=log[i].num_known_tokens), limits


@doctored_shared("reuse")
def more_of_a_part_than_anybody_computed(log, limits):
    return changed(log, first(log, ADMITTED, request_id="half"), num_cached_tokens=37), limits


@doctored_shared("reuse")
def what_runs_is_not_found(log, limits):
    return changed(log, first(log, ADMITTED, request_id="half"), num_cached_tokens=0), limits


@doctored_shared("reuse")
def found_where_nothing_is_shared(log, limits):
    return log, replace(limits, shares=False)


@doctored_shared("rows")
def computed_again_though_found(log, limits):
    i = first(log, COMPUTED, request_id="half")
    assert log[i].start == 36
    return changed(log, i, start=0, count=37), limits


@doctored_shared("blocks")
def more_are_held_than_there_are(log, limits):
    """The large one needs 16 blocks: what others have left cached must make way, and one less would be too few."""
    return log, replace(limits, num_blocks=15)


@doctored_shared("blocks")
def blocks_that_differ_are_counted_as_two(log, limits):
    """Two that begin alike hold their common blocks once; with other tokens they would hold more than there are."""
    one = most_held(log, limits)
    assert "blocks" not in broken_in(log, replace(limits, num_blocks=max(one, 16)))
    i = first(log, "ask", request_id="neighbour")
    other = Text([*range(100, 140), 99, 98], scope=None, block_tokens=16)
    return changed(log[: first(log, "ask", request_id="large")], i, text=other), replace(limits, num_blocks=one)


def most_held(log, limits):
    """The fewest blocks with which nothing is wrong before the large one comes."""
    head = log[: first(log, "ask", request_id="large")]
    return next(n for n in range(1, 30) if "blocks" not in broken_in(head, replace(limits, num_blocks=n)))


@doctored_shared("blocks")
def what_is_pinned_is_held(log, limits):
    """The first's blocks stay until they are unpinned, though it ends before."""
    i = first(log, "unpin")
    late = [*log[:i], *log[i + 1 :], log[i]]
    return late, replace(limits, num_blocks=16)


@doctored_shared("waiting")
def a_load_that_takes_too_long(log, limits):
    steps = {
        entry.step
        for entry in log[first(log, ADMITTED, request_id="loads") : first(log, COMPUTED, request_id="loads")]
        if entry.kind == COMPUTED
    }
    # Neither the step that admitted it nor the one that computed it had to do without.
    spared = len(steps - {log[first(log, kind, request_id="loads")].step for kind in (ADMITTED, COMPUTED)})
    assert spared > 1
    assert "waiting" not in broken_in(log, replace(limits, max_load_steps=spared))
    return log, replace(limits, max_load_steps=spared - 1)


@doctored_shared("waiting")
def admitted_without_a_row_and_without_a_load(log, limits):
    i = first(log, ADMITTED, request_id="loads")
    return changed(log, i, num_cached_tokens=0), limits


@doctored_shared("idleness")
def waits_for_a_neighbour_that_computes_something_else(log, limits):
    i = first(log, "ask", request_id="neighbour")
    other = Text([*range(100, 140), 99, 98], scope=None, block_tokens=16)
    return changed(log, i, text=other), limits


@doctored_shared("idleness")
def two_steps_that_move_nothing_while_somebody_loads(log, limits):
    i = first(log, COMPUTED, request_id="loads")
    alone = [entry for entry in log if entry.request_id != "beside"]
    start = max(j for j in range(alone.index(log[i])) if alone[j].kind == "step")
    return with_entries(alone, start, Act("step"), Act("step")), limits


@pytest.mark.parametrize("name", DOCTORED_SHARED)
def test_a_doctored_log_of_shared_prefixes_is_found_out(shared, name):
    rule, make = DOCTORED_SHARED[name]
    assert rule in broken_in(*make(*shared))


def test_every_rule_is_tried():
    assert {rule for rule, _ in [*DOCTORED.values(), *DOCTORED_SHARED.values()]} == RULES.keys()


LIMITS = Limits(
    num_blocks=8, block_tokens=16, max_seq_len=128, max_batch_size=4, max_num_tokens=64, max_overtaken=4
)  # fmt: skip


def test_a_step_tried_again_takes_its_admissions_back():
    begin = [
        told(ARRIVED, num_prompt_tokens=40, max_tokens=1, num_known_tokens=40),
        Act("step"),
        told(ADMITTED, num_known_tokens=40),
    ]
    retried = [
        told(EventKind.WITHDRAWN, num_known_tokens=40),
        told(EventKind.RETRIED, id=""),
        told(ADMITTED, num_known_tokens=40),
    ]
    end = [
        told(COMPUTED, start=0, count=20),
        Act("step"),
        told(COMPUTED, start=20, count=20, step=1),
        *ended(num_known_tokens=41, finish=Finish.LENGTH, step=2),
    ]
    assert broken_in([*begin, *retried, *end], LIMITS) == {}
    assert broken_in([*begin, retried[2], *end], LIMITS) == {"states": 1}
    assert broken_in([*begin, *retried[:2], *end], LIMITS).keys() == {"states", "rows"}
    # Of a step that is no smaller but vetoed nobody hears more.
    assert broken_in([*begin, retried[0], retried[2], *end], LIMITS) == {}


def test_a_row_whose_logits_are_no_numbers_gives_no_token():
    log = [
        told(ARRIVED, num_prompt_tokens=4, max_tokens=9, num_known_tokens=4),
        Act("step"),
        told(ADMITTED, num_known_tokens=4),
        told(COMPUTED, start=0, count=4),
        *ended(num_known_tokens=4, finish=Finish.ERROR, step=1),
    ]
    assert broken_in(log, LIMITS) == {}
    assert broken_in(changed(log, 5, finish=Finish.LENGTH), LIMITS).keys() == {"rows", "endings"}


def test_who_has_left_runs_no_more_though_its_end_is_told_later():
    limits, names = replace(LIMITS, max_batch_size=1), ("a", "b")
    log = [told(ARRIVED, id=name, num_prompt_tokens=4, max_tokens=1, num_known_tokens=4) for name in names]
    log += [Act("step"), told(ADMITTED, num_known_tokens=4), told(COMPUTED, start=0, count=4), Act("step")]
    left, end = ended(num_known_tokens=5, finish=Finish.LENGTH, step=1)
    next_one = told(ADMITTED, id="b", num_known_tokens=4, step=1)
    rest = [
        told(COMPUTED, id="b", start=0, count=4, step=1), end, Act("step"),
        *ended(id="b", num_known_tokens=5, finish=Finish.LENGTH, step=2),
    ]  # fmt: skip
    assert broken_in([*log, left, next_one, *rest], limits) == {}
    assert broken_in([*log, next_one, left, *rest], limits) == {"sequences": 1}


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
            *ended(id=name, num_known_tokens=5, finish=Finish.LENGTH, step=step + 1),
        ]

    names = {"low": -1, "high-1": 1, "high-2": 1}
    log = [told(ARRIVED, id=n, num_prompt_tokens=4, max_tokens=1, priority=p) for n, p in names.items()]
    for step, name in enumerate(("high-1", "high-2", "low")):
        log += [Act("step"), *request(name, names[name], step)]
    oracle = Oracle(replace(LIMITS, max_batch_size=1))
    oracle.read_all(log)
    assert (oracle.broken, oracle.longest_wait_steps, oracle.most_overtaken) == ({}, 2, 2)


SHARING = replace(LIMITS, shares=True)
NEIGHBOURS = {"a": list(range(64)), "b": [*range(60), 7, 7]}


def neighbours():
    """Two that begin alike have arrived, and the first computes its first block."""
    log = []
    for name, tokens in NEIGHBOURS.items():
        log.append(Act("ask", name, Text(tokens, scope=None, block_tokens=16)))
        log.append(told(ARRIVED, id=name, num_prompt_tokens=len(tokens), max_tokens=1, num_known_tokens=len(tokens)))
    return [*log, Act("step"), told(ADMITTED, num_known_tokens=64), told(COMPUTED, start=0, count=16)]


def test_a_neighbour_is_waited_for_while_it_computes_what_both_begin_with():
    moving = [Act("step"), told(COMPUTED, start=16, count=16, step=1), Act("step")]
    last_common = told(COMPUTED, start=32, count=16, step=2)
    end = [
        Act("step"),
        told(ADMITTED, id="b", num_known_tokens=62, num_cached_tokens=48, step=3),
        told(COMPUTED, start=48, count=16, step=3),
        told(COMPUTED, id="b", start=48, count=14, step=3),
        *ended(num_known_tokens=65, finish=Finish.LENGTH, step=4),
        *ended(id="b", num_known_tokens=63, finish=Finish.LENGTH, step=4),
    ]
    assert broken_in([*neighbours(), *moving, last_common, *end], SHARING) == {}
    # The last block of the one is none of the other's: nobody waits for that.
    late = [Act("step"), told(COMPUTED, start=48, count=16, step=3), *end[:2], *end[3:]]
    assert broken_in([*neighbours(), *moving, last_common, *late], SHARING).keys() == {"idleness"}


def test_a_neighbour_that_stands_still_is_not_waited_for():
    """It loads, a third one decodes, and the other might compute all itself."""
    before = [
        Act("ask", "x", Text(NEIGHBOURS["a"][:17], scope=None, block_tokens=16)),
        told(ARRIVED, id="x", num_prompt_tokens=17, max_tokens=1, num_known_tokens=17),
        Act("step"),
        told(ADMITTED, id="x", num_known_tokens=17),
        told(COMPUTED, id="x", start=0, count=17),
        *ended(id="x", num_known_tokens=18, finish=Finish.LENGTH),
        told(ARRIVED, id="c", num_prompt_tokens=1, max_tokens=12, num_known_tokens=1, priority=1),
    ]
    waits = neighbours()
    waits[-2:] = [
        told(ADMITTED, id="c", num_known_tokens=1),
        told(ADMITTED, num_known_tokens=64, num_cached_tokens=16),
        told(COMPUTED, id="c", start=0, count=1),
    ]
    for step in range(1, 9):
        waits += [Act("step"), told(COMPUTED, id="c", start=step, count=1, step=step)]
    broken = broken_in([*before, *waits], replace(SHARING, num_blocks=20))
    assert broken == {"waiting": 4, "endings": 3}, "the first of nine steps, and as many as it has blocks"


def test_a_load_that_failed_lets_go_of_who_loads_and_nobody_else():
    text = Text(list(range(40)), scope=None, block_tokens=16)
    begin = [
        Act("ask", "a", text),
        told(ARRIVED, num_prompt_tokens=40, max_tokens=1, num_known_tokens=40),
        Act("step"),
        told(ADMITTED, num_known_tokens=40),
        told(COMPUTED, start=0, count=40),
        *ended(num_known_tokens=41, finish=Finish.LENGTH, step=1),
        Act("ask", "b", text),
        told(ARRIVED, id="b", num_prompt_tokens=40, max_tokens=1, num_known_tokens=40),
        Act("step"),
        told(ADMITTED, id="b", num_known_tokens=40, num_cached_tokens=39, step=1),
    ]
    suspended = told(SUSPENDED, id="b", num_known_tokens=40, step=1)
    end = [
        Act("step"),
        told(ADMITTED, id="b", num_known_tokens=40, step=1),
        told(COMPUTED, id="b", start=0, count=40, step=1),
        *ended(id="b", num_known_tokens=41, finish=Finish.LENGTH, step=2),
    ]
    assert broken_in([*begin, Act("fault"), suspended, *end], SHARING) == {}
    assert broken_in([*begin, suspended, *end], SHARING).keys() == {"suspension", "idleness"}
    loaded = replace(suspended, num_known_tokens=41)
    row = told(COMPUTED, id="b", start=39, count=1, step=1)
    assert "suspension" in broken_in([*begin, row, Act("step"), Act("fault"), loaded, *end], SHARING)


# -- texts ---------------------------------------------------------------------------------------------------------


def text(tokens, scope=None, **how):
    return Text(tokens, scope=scope, block_tokens=4, **how)


@pytest.mark.parametrize(
    ("other", "most", "common"),
    [
        (text(list(range(12))), 9, 3),
        (text(list(range(12))), 2, 2),
        (text([*range(8), 0, 0, 0, 0]), 9, 2),
        (text([*range(10)]), 9, 2),
        (text([9, *range(1, 12)]), 9, 0),
        (text(list(range(12)), scope="salt"), 9, 0),
        (text([]), 9, 0),
    ],
)
def test_texts_begin_alike_in_whole_blocks_of_one_scope(other, most, common):
    one = text(list(range(13)))
    assert one.num_common(other, most) == other.num_common(one, most) == common


def test_the_past_knows_whole_blocks_and_parts_of_texts_that_have_gone():
    past, one = Past(), text(list(range(10)))
    assert past.has(one, 0)
    past.add(one, 1)
    assert [past.has(one, n) for n in range(1, 6)] == [True, True, True, True, False]
    past.add(one, 2)
    past.add_part(one, 10)
    assert all(past.has(one, n) for n in range(11))
    longer = text(list(range(12)))
    assert not past.has(longer, 11)
    assert past.has(text([*range(9), 5, 5]), 9)
    assert not past.has(text([*range(9), 5, 5]), 10)
    assert not past.has(text(list(range(10)), scope="salt"), 1)
    assert not past.has(text([3, 4, 5]), 1), "the middle of a text is no beginning"


def test_common_blocks_are_held_once():
    held, one, other = Held(), text(list(range(12))), text([*range(8), 0, 0, 0, 0])
    held.add(one, 0, 3)
    held.add(other, 0, 2)
    assert len(held) == 3
    held.add(other, 2, 3)
    assert len(held) == 4
    held.drop(one, 3)
    assert len(held) == 3
    held.drop(other, 3)
    assert len(held) == 0
