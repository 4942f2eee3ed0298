"""The adversarial soak: it holds over stubs and a tiny model, and what it does to an engine is judged."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from itertools import accumulate

import pytest

from tonnage.bench import adversary as adversary_module
from tonnage.bench import inside
from tonnage.bench.adversary import FLOOR_BYTES, MARGIN_BYTES, Adversary
from tonnage.bench.moves import Cancel, Nap, Phase, Settle, Step, Take
from tonnage.bench.neighbour import Neighbour, serve
from tonnage.bench.phases import PHASES
from tonnage.bench.probes import GAP, Probes
from tonnage.bench.soak import Soak, make_mix
from tonnage.bench.soak_report import show_soak, soak_document
from tonnage.bench.storm import FILLER, Storm
from tonnage.bench.watch import FreeWatch
from tonnage.config import LimitKnobs, Setting
from tonnage.device.host import HostDriver
from tonnage.engine import Completion, EngineOptions, Finish, start
from tonnage.engine.mishaps import Mishaps
from tonnage.engine.stub import stub_engine
from tonnage.errors import UserError
from tonnage.report.draw import console_for
from tonnage.units import GiB, MiB

ROOMY = {"kv_tokens": 16_384, "max_seq_len": 256, "max_batch_size": 16, "max_num_tokens": 512, "chunk_tokens": 512}
TIERED = {
    "kv_tokens": 2048, "max_seq_len": 256, "max_batch_size": 32, "max_num_tokens": 256, "prefix_caching": True,
    "checks_contents": True, "head_tokens": 512, "host_kv_tokens": 4096, "load_steps": 4,
}  # fmt: skip
SETTINGS = {
    "roomy": ROOMY,
    "tiers": TIERED,
    "tight": {**TIERED, "kv_tokens": 512, "end_probability": 0.05},
    "reserve_all": {**TIERED, "admission": "reserve_all"},
    "uncut": {**TIERED, "chunk_tokens": "none"},
}


def stormed(engine, num_requests, *, seed=0, has_sampler=False, neighbour=None, **how):
    """The report of a storm that ends after so many requests."""
    with engine:
        adversary = Adversary(engine, seed, has_sampler=has_sampler, neighbour=neighbour)
        soak = Soak(
            engine, adversary.storm, adversary=adversary, has_sampler=has_sampler, sleep=lambda _: None,
            **{"is_over": lambda asked, _: asked >= num_requests, **how},
        )  # fmt: skip
        return soak.run()


def broken(report):
    return {verdict.rule for verdict in report.verdicts if verdict.num_broken}


# -- it holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_the_stub_holds_in_a_storm(setting):
    report = stormed(stub_engine(**setting), 1100 if setting is ROOMY else 900, seed=4)
    assert report.is_good, "\n".join(report.told)
    asked = {phase.name: phase for phase in report.phases}
    # It is no storm if not all of it came.
    assert asked.keys() >= PHASES.keys() - {"neighbour"} | {FILLER}
    assert all(phase.num_tokens and phase.outcomes for phase in report.phases)
    assert report.outcomes["cancelled"] > 20
    assert report.outcomes["refused"] > 0
    assert report.counts["step"] == report.load.num_steps
    assert sum(phase.num_tokens for phase in report.phases) == report.num_tokens
    found = report.adversities
    assert found.probes["storm"].same_share == found.probes["after"].same_share == 1.0
    assert found.probes["after"].num_texts == 6
    assert (found.free, found.allocator, found.neighbour_takes) == (None, {}, None)


def test_the_stub_holds_though_steps_and_copies_fail():
    mishaps = Mishaps(probability=0.005, seed=2)
    report = stormed(stub_engine(**TIERED, mishaps=mishaps), 700, seed=5, mishaps=mishaps)
    assert report.is_good, "\n".join(report.told)
    assert sum(report.faults.values()) > 5
    failed = {one.kind: one for one in report.failures}
    assert failed["made to fail"].num_requests > 0
    assert not any(one.num_feasible for one in report.failures)
    assert sum(one.num_requests for one in report.failures) == report.outcomes["error"] + report.outcomes["refused"]


def test_a_storm_repeats_itself():
    once, again = (stormed(stub_engine(**TIERED), 350, seed=8) for _ in range(2))
    assert (once.outcomes, once.counts, once.num_tokens, once.cache) == (
        again.outcomes, again.counts, again.num_tokens, again.cache,
    )  # fmt: skip
    assert stormed(stub_engine(**TIERED), 350, seed=9).counts != once.counts


def test_a_real_engine_holds_in_a_storm(tiny_llama):
    limits = LimitKnobs(max_seq_len=Setting(96), max_batch_size=Setting(8), max_num_tokens=Setting(64))
    options = EngineOptions(model=str(tiny_llama), memory_bytes=GiB, limit_knobs=limits, fence=False)
    report = stormed(start(options), 180, seed=2, has_sampler=True)
    assert report.is_good, "\n".join(report.told)
    assert report.adversities.is_exact
    assert report.adversities.probes["after"].num_texts == 6
    document = json.loads(json.dumps(soak_document(report, seed=2, command=["tonnage", "soak"])))
    assert document["is_good"]
    assert document["rules"]["probes"]["broken"] == 0
    phase = document["phases"]["filler"]
    assert phase["output_tokens"] > 0
    assert phase["time_between_tokens_us"].keys() == {"p50", "p99", "p99.9", "max"}
    assert {row["line"] for row in document["audit"]} >= {"weights", "kv"}


def test_the_table_tells_of_phases_and_probes():
    report, out = stormed(stub_engine(**ROOMY), 400, seed=1), io.StringIO()
    show_soak(report, console_for(out))
    told = " ".join(out.getvalue().split())
    assert "Phases, times in ms" in told
    assert "probes after: 6 of 6 as alone, 100.0 % of tokens up to a difference" in told
    assert re.search(r"naps \d+ of ", told)
    for name in ("crowd", "lengths", "probes"):
        assert f" {name} " in told


def test_what_has_long_to_go_is_taken_back_in_the_end():
    def most_steps(**how):
        with stub_engine(**ROOMY) as engine:
            adversary, steps, asked_all = Adversary(engine, 3, has_sampler=False), [0], [0]

            def over(asked, _):
                if asked < 200:
                    return False
                asked_all[0] = asked_all[0] or steps[0]
                return True

            report = Soak(
                engine, adversary.storm, adversary=adversary, has_sampler=False, is_over=over, sleep=lambda _: None,
                on_step=lambda _: steps.__setitem__(0, steps[0] + 1), **how,
            ).run()  # fmt: skip
            assert report.is_good, "\n".join(report.told)
            return steps[0] - asked_all[0]

    last_probes = 6 * 64
    assert most_steps(max_last_tokens=16) <= 16 + last_probes + 40
    assert most_steps() > 16 + last_probes + 40


@pytest.mark.parametrize("most_steps", [0, 400, 900])
def test_a_storm_that_is_stopped_judges_what_there_was(most_steps):
    steps = []
    report = stormed(
        stub_engine(**TIERED), 10**6, on_step=lambda _: steps.append(1), is_stopped=lambda: len(steps) >= most_steps
    )
    assert report.is_good, "\n".join(report.told)
    assert most_steps <= len(steps) < most_steps + 10


# -- the storm's own moves -----------------------------------------------------------------------------------------


class Seen:
    """An engine that is always full and never through."""

    has_work, num_running, num_waiting = True, 16, 8

    def stage(self, request_id):
        return "decoding"


def storm_of(*, seed=0, **how):
    sizes = {"seed": seed, "vocab_size": 300, "max_seq_len": 256, "block_tokens": 16}
    probes = Probes(**sizes, is_exact=True, tell=lambda *_: None)
    return Storm(**sizes, max_batch_size=16, pool_tokens=2048, probes=probes, **how)


def moves_of(storm, view, most=20_000):
    return [move for move, _ in zip(storm.moves(view), range(most), strict=False)]


@pytest.mark.parametrize("is_possible", [True, False])
def test_a_round_has_every_phase_and_naps_and_the_neighbour_where_they_are_possible(is_possible):
    view = Seen()
    moves = moves_of(storm_of(can_sleep=is_possible, has_neighbour=is_possible), view, 60_000)
    begun = [move.name for move in moves if isinstance(move, Phase) and move.begins]
    assert begun[0] == "lengths"
    assert set(begun) == set(PHASES) - (set() if is_possible else {"nap", "neighbour"})
    assert all(begun.count(name) == 2 for name in set(begun) - {"lengths"})
    assert any(isinstance(move, Nap) for move in moves) == is_possible
    assert any(isinstance(move, Take) for move in moves) == is_possible
    assert any(isinstance(move, Cancel) for move in moves)
    ends = [move.name for move in moves if isinstance(move, Phase) and not move.begins]
    num_open = accumulate(1 if move.begins else -1 for move in moves if isinstance(move, Phase))
    assert max(num_open) == 3
    assert sorted(ends) == sorted(begun)  # the round is over, and waits until all has ended
    assert moves[-1] == Step()


def test_between_two_rounds_everything_must_be_back():
    class Idle(Seen):
        has_work, num_waiting = False, 0

        def stage(self, request_id):
            return None

    moves = moves_of(storm_of(), Idle(), 60_000)
    (at, *_) = [i for i, move in enumerate(moves) if isinstance(move, Settle)]
    assert 0.2 <= moves[at + 1].seconds <= 1.0


def test_while_too_many_wait_nothing_more_is_asked():
    class Crowded(Seen):
        num_waiting = 100

    assert {type(move) for move in moves_of(storm_of(), Crowded(), 100)} == {Phase, Step}


# -- naps ----------------------------------------------------------------------------------------------------------


class Sleepy:
    """What ``Engine.sleep`` and ``wake`` are to do, on a stub: whoever runs is suspended, the cache is empty."""

    def __init__(self, engine, **defects):
        self.engine, self.defects, self.is_asleep, self.step = engine, defects, False, engine.step
        engine.sleep, engine.wake, engine.step = self.sleep, self.wake, self.stepped

    def sleep(self, *tags):
        assert set(tags) <= {"weights", "kv"}
        self.is_asleep = True
        scheduler = self.engine._scheduler
        for name in list(scheduler.running):
            if self.defects.get("forgets"):
                scheduler.remove(name)
            else:
                scheduler.suspend(name)
        self.engine._runtime.managers.kv.cache.clear()

    def wake(self, *tags):
        self.is_asleep = False

    def stepped(self):
        if self.is_asleep and not self.defects.get("steps"):
            raise UserError("asleep")
        return self.step()


@pytest.fixture
def sleeping():
    def make(sizes, **defects):
        engine = stub_engine(**sizes)
        Sleepy(engine, **defects)
        return engine

    return make


@pytest.mark.parametrize("setting", ["roomy", "tight", "reserve_all"])
def test_an_engine_sleeps_and_wakes_in_a_storm(sleeping, setting):
    report = stormed(sleeping(SETTINGS[setting]), 1200, seed=6)
    assert report.is_good, "\n".join(report.told)
    assert sum(report.adversities.naps.values()) == report.counts["sleep"] == report.counts["wake"] >= 2
    assert report.counts["suspended"] >= 16


def test_an_engine_that_steps_in_its_sleep(sleeping):
    assert "sleep" in broken(stormed(sleeping(ROOMY, steps=True), 1200, seed=6))


def test_an_engine_that_forgets_who_ran_when_it_slept(sleeping):
    assert broken(stormed(sleeping(ROOMY, forgets=True), 1200, seed=6)) >= {"endings", "completions"}


def test_an_engine_that_gives_nothing_back_in_its_sleep(sleeping, monkeypatch):
    monkeypatch.setattr(inside, "device_free", lambda _: lambda: GiB)
    assert "sleep" in broken(stormed(sleeping(ROOMY), 1200, seed=6))


def test_suspending_the_oldest_is_still_found_where_nobody_slept():
    engine = stub_engine(**ROOMY)
    step, calls = engine.step, []

    def suspends():
        calls.append(1)
        running = engine._scheduler.running
        if len(calls) == 500 and running:
            engine._scheduler.suspend(min(running.values(), key=lambda request: request.arrival).id)
        return step()

    engine.step = suspends
    assert "suspension" in broken(stormed(engine, 500, seed=6))


# -- the card: free memory, torch's allocator, another process -----------------------------------------------------


def test_free_memory_is_watched_and_has_a_floor(monkeypatch):
    lows = iter([GiB, GiB, FLOOR_BYTES - 1])
    monkeypatch.setattr(inside, "device_free", lambda _: lambda: next(lows, GiB))
    monkeypatch.setattr(inside, "allocator_counts", lambda _: {"num_ooms": 0})
    monkeypatch.setattr(inside, "can_sleep", lambda _: False)
    monkeypatch.setattr(
        adversary_module, "free_watch", lambda engine: FreeWatch(inside.device_free(engine), interval_s=0.01)
    )
    report = stormed(stub_engine(**ROOMY), 300)
    assert broken(report) == {"free"}
    free = report.adversities.free
    assert free.lowest_bytes == FLOOR_BYTES - 1
    assert free.num_samples > 10
    assert min(free.lowest_by_second) == free.lowest_bytes


def test_a_watch_that_fails_is_told(monkeypatch):
    looks = iter([GiB])
    monkeypatch.setattr(inside, "device_free", lambda _: lambda: next(looks))  # then StopIteration
    monkeypatch.setattr(inside, "allocator_counts", lambda _: {})
    monkeypatch.setattr(inside, "can_sleep", lambda _: False)
    report = stormed(stub_engine(**ROOMY), 300)
    assert broken(report) == {"free"}
    assert "nobody watched" in "".join(report.told)


def test_the_watch_looks_at_fixed_times():
    seen = []

    def read():
        seen.append(time.monotonic())
        time.sleep(0.004)
        return 5

    with FreeWatch(read, interval_s=0.02) as watch:
        time.sleep(0.5)
    figures = watch.figures()
    assert 15 <= figures.num_samples <= 28
    assert (figures.lowest_bytes, figures.interval_ms) == (5, 20)
    assert watch.failure is None


def test_every_failure_of_torchs_allocator_counts(monkeypatch):
    counts = iter([{"num_ooms": 3, "num_alloc_retries": 5}, {"num_ooms": 4, "num_alloc_retries": 7}])
    monkeypatch.setattr(inside, "allocator_counts", lambda _: next(counts))
    report = stormed(stub_engine(**ROOMY), 200)
    assert {v.rule: v.num_broken for v in report.verdicts if v.num_broken} == {"allocator": 3}
    assert report.adversities.allocator == {"num_ooms": 1, "num_alloc_retries": 2}


class Paper:
    """A neighbour made of paper."""

    is_silent = False

    def __init__(self, room_bytes):
        self.room_bytes = room_bytes
        self.num_bytes = self.num_taken = self.most_bytes = 0

    def take(self, num_bytes):
        if self.num_bytes + num_bytes > self.room_bytes:
            return False
        self.num_bytes += num_bytes
        self.num_taken += 1
        self.most_bytes = max(self.most_bytes, self.num_bytes)
        return True

    def give(self):
        self.num_bytes = 0


def test_another_process_takes_what_keep_free_leaves():
    lent = 256 * MiB - FLOOR_BYTES - MARGIN_BYTES
    neighbour = Paper(lent)
    report = stormed(stub_engine(**ROOMY), 900, neighbour=neighbour)
    assert report.is_good, "\n".join(report.told)
    assert report.adversities.neighbour_takes == neighbour.num_taken >= 4
    assert 10 * MiB <= report.adversities.neighbour_bytes <= lent
    assert neighbour.num_bytes == 0


def test_another_process_that_is_refused_is_told():
    assert broken(stormed(stub_engine(**ROOMY), 900, neighbour=Paper(8 * MiB))) == {"free"}


def test_the_other_process_serves_a_driver():
    driver, out = HostDriver(64 * MiB), io.StringIO()
    free = driver.mem_info()[0]
    lefts = []

    def lines():
        for line in ("take 4194304\n", "take 4194304\n", f"take {GiB}\n", "give\n"):
            lefts.append(free - driver.mem_info()[0])
            yield line
        lefts.append(free - driver.mem_info()[0])

    serve(driver, lines(), out)
    assert out.getvalue().split() == ["ready", "ok", "ok", "refused", "ok"]
    assert lefts == [0, 4 * MiB, 8 * MiB, 8 * MiB, 0]


CHILD = """
import sys
from tonnage.bench.neighbour import serve
from tonnage.device.host import HostDriver
serve(HostDriver(64 << 20), sys.stdin, sys.stdout)
"""


def test_the_other_process_takes_and_gives_over_a_pipe():
    with Neighbour(command=[sys.executable, "-c", CHILD]) as neighbour:
        assert neighbour.take(16 * MiB)
        assert neighbour.take(32 * MiB)
        assert not neighbour.take(32 * MiB)
        assert (neighbour.num_bytes, neighbour.num_taken, neighbour.most_bytes) == (48 * MiB, 2, 48 * MiB)
        neighbour.give()
        assert neighbour.take(48 * MiB)
    neighbour.close()
    assert not neighbour.take(MiB)


def test_another_process_that_does_not_come_up():
    with pytest.raises(UserError, match="--no-neighbour"):
        Neighbour(command=[sys.executable, "-c", "print('no card')"])


@pytest.mark.parametrize(("unexplained", "is_sound"), [(150 * MiB, True), (150 * MiB + 1, False)])
def test_what_no_line_explains_has_a_bar_on_a_card(monkeypatch, unexplained, is_sound):
    engine = stub_engine(**ROOMY)
    result = engine.result
    monkeypatch.setattr(inside, "is_on_card", lambda _: True)
    monkeypatch.setattr(
        engine, "result", lambda: replace(r := result(), snapshot=replace(r.snapshot, unattributed=unexplained))
    )
    soak = Soak(engine, make_mix(engine, 0), is_over=lambda asked, _: asked >= 1, has_sampler=False)
    assert broken(soak.run()) == (set() if is_sound else {"ledger"})
    engine.close()


# -- what fails, and what is raised --------------------------------------------------------------------------------


def test_an_engine_that_raises_is_judged_by_what_there_was():
    engine = stub_engine(**ROOMY)
    step, calls = engine.step, []

    def raises():
        calls.append(1)
        if len(calls) == 600:
            raise RuntimeError("the device is lost")
        return step()

    engine.step = raises
    report = stormed(engine, 10**6)
    assert broken(report) >= {"crashes", "endings", "completions"}
    assert any("the device is lost" in told for told in report.told)
    assert report.num_tokens > 0


def test_failures_are_told_apart_by_whether_they_had_a_reason():
    engine = stub_engine(**ROOMY)
    launch, calls = engine._runtime.launch, []

    def fails(*given):
        calls.append(1)
        if len(calls) % 150 == 0:
            raise ValueError("a kernel that was not there")
        return launch(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engine._runtime), "launch", lambda self, *given: fails(*given))
        report = stormed(engine, 500)
    assert "outcomes" in broken(report)
    found = {one.kind: one for one in report.failures}
    (kind,) = [kind for kind in found if "a kernel that was not there" in kind]
    assert found[kind].num_feasible == found[kind].num_requests > 0
    assert found["refused on arrival"].num_feasible == 0


# -- probes --------------------------------------------------------------------------------------------------------


def answer(ask, tokens, gaps):
    tops = [((token, -0.5), (token + 1, -0.5 - gap)) for token, gap in zip(tokens, gaps, strict=True)]
    return Completion(
        request_id=ask.id, text="", token_ids=tuple(tokens), logprobs=(-0.5,) * len(tokens), num_prompt_tokens=1,
        finish_reason=Finish.LENGTH, error=None, waited=False, top_logprobs=tops,
    )  # fmt: skip


def compared(tokens, gaps, *, is_exact=True):
    """What is told of a second answer to the first probe; the first one was 1, 2, 3, 4."""
    told = []
    probes = Probes(
        seed=0, vocab_size=50, max_seq_len=64, block_tokens=16, is_exact=is_exact, tell=lambda *each: told.append(each)
    )
    first, second = probes.asks()[0], probes.asks()[0]
    assert (first.token_ids, first.params) == (second.token_ids, second.params)
    assert first.id != second.id
    probes.take(first, answer(first, [1, 2, 3, 4], gaps))
    probes.moment = "storm"
    probes.take(second, answer(second, tokens, [1.0] * len(tokens)))
    return told, probes.compared["storm"]


def test_equal_texts_of_probes():
    told, found = compared([1, 2, 3, 4], [1.0] * 4)
    assert not told
    assert (found.num_whole, found.same_share, found.widest_gap) == (1, 1.0, None)


def test_a_text_may_go_another_way_where_rounding_decides():
    told, found = compared([1, 2, 7, 8], [1.0, 1.0, GAP / 2, 1.0])
    assert not told
    assert (found.num_whole, found.num_same, found.num_tokens) == (0, 2, 4)
    assert found.widest_gap == pytest.approx(GAP / 2)
    told, _ = compared([1, 2, 3, 8], [1.0, GAP / 2, 1.0, 1.0])  # after it everything may differ
    assert not told


def test_a_text_that_goes_another_way_for_no_reason():
    told, found = compared([1, 7, 3, 4], [1.0, 2 * GAP, 1.0, 1.0])
    assert [rule for rule, _ in told] == ["probes"]
    assert found.widest_gap == pytest.approx(2 * GAP)
    told, found = compared([1, 7, 3, 4], [1.0, 2 * GAP, 1.0, 1.0], is_exact=False)
    assert not told
    assert found.same_share == 0.25


def test_a_probe_that_was_taken_back_is_compared_with_nothing():
    probes = Probes(seed=0, vocab_size=50, max_seq_len=64, block_tokens=16, is_exact=True, tell=lambda *_: None)
    ask = probes.asks()[0]
    probes.take(ask, replace(answer(ask, [1], [1.0]), finish_reason=Finish.CANCELLED))
    probes.take(ask, answer(ask, [1, 2], [1.0, 1.0]))
    assert probes.compared == {}


def test_other_tokens_in_a_storm_are_found():
    """A stub whose tokens change with what runs beside them."""
    engine = stub_engine(**ROOMY)
    with pytest.MonkeyPatch.context() as patch:
        kind = type(engine._runtime)
        tokens = kind._tokens
        patch.setattr(
            kind, "_tokens",
            lambda self, seeds, *rest: [1 + token % 200 if len(seeds) > 8 else token
                                        for token in tokens(self, seeds, *rest)],
        )  # fmt: skip
        assert broken(stormed(engine, 900, seed=4)) == {"probes"}


# -- beside the mix ------------------------------------------------------------------------------------------------


def test_the_mix_has_no_adversities():
    with stub_engine(**ROOMY) as engine:
        report = Soak(engine, make_mix(engine, 1), is_over=lambda asked, _: asked >= 60, has_sampler=False).run()
    assert report.adversities is None
    assert {phase.name for phase in report.phases} == {"mix"}
    assert {verdict.rule for verdict in report.verdicts}.isdisjoint(adversary_module.RULES)


def test_a_storm_as_a_command(tmp_path):
    kept = tmp_path / "soak.json"
    flags = "--stub --adversarial --requests 250 --kv-tokens 4096 --max-seq-len 256 --max-batch-size 16 --seed 1"
    command = [sys.executable, "-m", "tonnage", "soak", *flags.split(), "--output", str(kept)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(kept.read_text())
    assert document["is_good"]
    assert document["adversities"]["probes"]["after"]["same_share"] == 1.0
    assert "Phases" in done.stdout
