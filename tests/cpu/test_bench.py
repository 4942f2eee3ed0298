"""Workloads as they are drawn, and times as they are measured, against a clock that only steps move."""

from __future__ import annotations

import io
import json
import random
import statistics
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.bench.limits import Limits
from tonnage.bench.measure import Measurement, Sample, measure
from tonnage.bench.report import BENCH_SCHEMA, bench_document, figures, percentile, show_bench, text_of
from tonnage.bench.series import Series, series_document, show_series
from tonnage.bench.workloads import BAR_WORKLOADS, QUIET_STEPS, WORKLOADS, Span, Workload, workload, workload_names
from tonnage.engine.stub import stub_engine
from tonnage.errors import InputError, InvalidSetting
from tonnage.report.draw import console_for
from tonnage.sampling import SamplingParams

STEP_US = 1000


class Timed:
    """A stub engine in which a step takes a millisecond, and the clock and the sleep that go with it."""

    def __init__(self, **sizes):
        self.engine = stub_engine(**{"kv_tokens": 8192, "max_seq_len": 1024, "max_batch_size": 16, **sizes})
        self.now_ns, self.slept = 10**9, []
        step = self.engine.step

        def timed_step():
            self.now_ns += STEP_US * 1000
            return step()

        self.engine.step = timed_step

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now_ns += round(seconds * 10**9)

    def measure(self, drawn, **how):
        with self.engine:
            return measure(self.engine, drawn, clock_ns=lambda: self.now_ns, sleep=self.sleep, **how)


# -- workloads -----------------------------------------------------------------------------------------------------


def test_the_named_workloads_are_the_ones_that_engines_are_compared_by():
    fixed = {name: (s.num_requests, str(s.input_tokens), str(s.output_tokens)) for name, s in WORKLOADS.items()}
    assert fixed == {
        "single": (1, "1,024", "256"),
        "batch32": (32, "1,024", "256"),
        "batch256": (256, "1,024", "256"),
        "prefill": (256, "1,024", "1"),
        "uniform": (256, "100-1,024", "100-1,024"),
        "long": (512, "1,000", "1,000"),
        "stalls": (8, "32", "512"),
        "arrivals": (256, "100-1,024", "100-1,024"),
    }
    assert {name: s.interrupting for name, s in WORKLOADS.items() if s.interrupting} == {"stalls": Span(2000, 2000)}


@pytest.mark.parametrize(
    ("text", "span"), [("1024", Span(1024, 1024)), ("100-1,024", Span(100, 1024)), ("1k-2k", Span(1000, 2000))]
)
def test_spans_are_read(text, span):
    assert Span.parse(text, knob="--input-tokens") == span


@pytest.mark.parametrize("text", ["", "x", "0", "5-", "-5", "9-3", "1-2-3", "1.5"])
def test_spans_that_are_none(text):
    with pytest.raises(InvalidSetting, match="--input-tokens"):
        Span.parse(text, knob="--input-tokens")


def test_a_name_that_there_is_not_is_refused_with_those_there_are():
    with pytest.raises(InvalidSetting, match=r"'batch'.*batch32.*stalls"):
        workload("batch")


@given(
    low=st.integers(1, 500), more=st.integers(0, 500), scale=st.fractions(Fraction(1, 1000), 4), seed=st.integers(0, 99)
)
def test_lengths_lie_in_their_scaled_span(low, more, scale, seed):
    drawn = workload("uniform", num_requests=20, input_tokens=Span(low, low + more), scale=scale, seed=seed)
    for job in drawn.jobs:
        assert max(1, int(low * scale)) <= job.num_input_tokens <= max(1, int((low + more) * scale))
        assert max(1, int(100 * scale)) <= job.num_output_tokens <= max(1, int(1024 * scale))
        assert job.arrival_us == 0
    assert drawn == workload("uniform", num_requests=20, input_tokens=Span(low, low + more), scale=scale, seed=seed)


def test_uniform_lengths_fill_their_span():
    lengths = [job.num_input_tokens for job in workload("uniform", num_requests=4000).jobs]
    assert (min(lengths), max(lengths)) == (100, 1024)
    assert abs(statistics.mean(lengths) - 562) < 15


def test_arrivals_are_a_poisson_process():
    """Gaps of an exponential distribution: mean 1/rate, and as much spread as mean."""
    times = [job.arrival_us for job in workload("single", num_requests=4000, rate_per_second=Fraction(50)).jobs]
    gaps = [after - before for before, after in zip([0, *times], times, strict=False)]
    assert abs(statistics.mean(gaps) - 20_000) < 1500
    assert abs(statistics.stdev(gaps) - 20_000) < 1500


def test_prompts_are_drawn_from_the_vocabulary_and_come_again():
    drawn = workload("uniform", seed=3)
    prompt = drawn.prompt(7, 50_000)
    assert len(prompt) == drawn.jobs[7].num_input_tokens
    assert all(1000 <= token < 50_000 for token in prompt)
    assert prompt == workload("uniform", seed=3).prompt(7, 50_000)
    assert prompt != workload("uniform", seed=4).prompt(7, 50_000)[: len(prompt)]
    assert all(128 <= token < 256 for token in drawn.prompt(0, 256))


# -- times ---------------------------------------------------------------------------------------------------------


def test_one_request_is_timed_token_by_token():
    """40 tokens in steps of 16: the first token comes with the third step, each later one with one step more."""
    timed = Timed(max_num_tokens=16)
    measured = timed.measure(workload("single", input_tokens=Span(40, 40), output_tokens=Span(5, 5)))
    (sample,) = measured.samples
    assert (sample.arrival_us, sample.first_token_us, sample.end_us) == (0, 3 * STEP_US, 7 * STEP_US)
    assert sample.gaps_us == [STEP_US] * 4
    assert sample.interrupted_gaps_us == []
    assert (sample.num_input_tokens, sample.num_output_tokens, sample.finish) == (40, 5, "length")
    assert measured.elapsed_us == 7 * STEP_US


def test_warming_up_is_not_timed():
    timed = Timed(max_num_tokens=16)
    measured = timed.measure(
        workload("single", num_requests=3, input_tokens=Span(40, 40), output_tokens=Span(5, 5)), num_warmup=2
    )
    assert [sample.arrival_us for sample in measured.samples] == [0, 0, 0]
    assert len(measured.samples) == 3
    assert measured.samples[0].first_token_us == 3 * STEP_US


def test_prompts_that_warmed_up_are_not_found_in_the_cache():
    timed = Timed(max_num_tokens=16, prefix_caching=True)
    measured = timed.measure(workload("single", input_tokens=Span(40, 40), output_tokens=Span(5, 5)), num_warmup=1)
    assert measured.samples[0].first_token_us == 3 * STEP_US
    assert timed.engine.result().cached_prompt_tokens == 0


def test_a_workload_may_have_a_rate_of_its_own():
    drawn = workload("arrivals", num_requests=2000)
    assert drawn.rate_per_second == drawn.shape.rate_per_second == 8
    assert drawn.jobs[-1].arrival_us == pytest.approx(250 * 10**6, rel=0.1)
    assert workload("arrivals", rate_per_second=Fraction(3)).rate_per_second == 3


@pytest.mark.parametrize(
    ("text", "names"),
    [("single", ["single"]), ("long, single,long", ["long", "single"]), ("stalls,bars", ["stalls", *BAR_WORKLOADS])],
)
def test_names_of_workloads_between_commas(text, names):
    assert list(workload_names(text)) == names


def test_series_are_told_by_their_medians():
    """Runs of 4, 5 and 9 ms for 2 tokens each; the one that a card would need 2 ms for is half as fast as that."""
    runs = tuple(
        replace(by_hand(made(gaps_us=[gap], num_output_tokens=2, last_token_us=5000 + gap)), elapsed_us=elapsed)
        for elapsed, gap in ((4000, 10), (9000, 50), (5000, 20))
    )
    series = Series(runs=runs, limits=Limits(input_tokens=40_000, output_tokens=1000, decode_tokens=10**5))
    assert series.medians() == {"output_tokens": 400.0, "input_tokens": 20_000.0, "decode_tokens": 50_000.0}
    assert series.of_limit() == {"output_tokens": 0.4, "input_tokens": 0.5, "decode_tokens": 0.5}
    assert series.percentiles_us()["time_between_tokens"] == {"p50": 20, "p90": 20, "p99": 20}
    with stub_engine(kv_tokens=8192) as engine:
        result, out = engine.result(), io.StringIO()
    document = json.loads(text_of(series_document([series], result, command=["tonnage", "bench"])))
    (found,) = document["series"]
    assert found["of_limit"]["input_tokens"] == 0.5
    assert [run["elapsed_us"] for run in found["runs"]] == [4000, 9000, 5000]
    show_series([series], result, console_for(out))
    assert "stalls 400 20,000 50,000 50 %" in " ".join(out.getvalue().split())


def test_requests_come_when_they_arrive_and_wait_is_counted_from_there():
    timed = Timed()
    drawn = workload(
        "single", num_requests=6, input_tokens=Span(8, 8), output_tokens=Span(3, 3), rate_per_second=Fraction(20)
    )
    measured = timed.measure(drawn)
    assert [sample.arrival_us for sample in measured.samples] == [job.arrival_us for job in drawn.jobs]
    for sample in measured.samples:
        # Between its arrival and the end of the step under way, and then its own step.
        assert STEP_US <= sample.first_token_us - sample.arrival_us <= 2 * STEP_US + 1
    assert sum(timed.slept) > 0.1
    assert measured.elapsed_us >= drawn.jobs[-1].arrival_us + 3 * STEP_US


def test_suspensions_and_waits_are_counted():
    """Short answers first, so that the optimistic policy lets too many long ones in."""
    timed = Timed(kv_tokens=320, max_seq_len=256, max_num_tokens=64)
    for number in range(6):
        timed.engine.submit(timed.engine.request(f"short-{number}", SamplingParams(max_tokens=3), token_ids=[7] * 10))
    while timed.engine.has_work:
        timed.engine.step()
    measured = timed.measure(
        workload("batch32", num_requests=4, input_tokens=Span(40, 40), output_tokens=Span(120, 120))
    )
    assert measured.num_suspensions == sum(sample.num_suspended for sample in measured.samples) > 0
    assert any(sample.waited for sample in measured.samples)
    assert max(max(sample.gaps_us) for sample in measured.samples) > 10 * STEP_US


def test_prompts_that_come_between_are_told_apart():
    """With 8 decodes beside them, 96 prompt tokens take two steps: 64 at most in one that decodes."""
    timed = Timed()
    drawn = workload("stalls", output_tokens=Span(100, 100))
    shape = replace(drawn.shape, interrupting=Span(96, 96))
    measured = timed.measure(replace(drawn, shape=shape))
    own, between = measured.requests, [sample for sample in measured.samples if sample.is_interrupting]
    assert len(own) == 8
    assert len(between) == 5  # 99 gaps, 16 quiet and 2 interrupted each time
    first = max(sample.first_token_us for sample in own)
    for number, sample in enumerate(between):
        assert sample.arrival_us == first + QUIET_STEPS * STEP_US + number * (QUIET_STEPS + 2) * STEP_US
        assert sample.first_token_us - sample.arrival_us == 2 * STEP_US
    for sample in own:
        assert len(sample.interrupted_gaps_us) == 10
        assert len(sample.gaps_us) == 89
    found = figures(measured).percentiles_us
    assert found["time_between_tokens, interrupted"] == {"p50": STEP_US, "p90": STEP_US, "p99": STEP_US}
    assert found["time_to_first_token, interrupting"]["p50"] == 2 * STEP_US


def test_a_prompt_that_nobody_is_left_for_is_taken_back():
    timed = Timed()
    drawn = workload("stalls", num_requests=1, output_tokens=Span(QUIET_STEPS + 3, QUIET_STEPS + 3))
    measured = timed.measure(replace(drawn, shape=replace(drawn.shape, interrupting=Span(960, 960))))
    assert [sample.finish for sample in measured.samples] == ["length", "cancelled"]
    assert measured.num_failed == 0
    assert timed.engine.progress().kv_used_tokens == 0


def test_a_workload_that_can_never_be_served_is_refused_before_anything_runs():
    timed = Timed(max_seq_len=512)
    with pytest.raises(InputError, match=r"workload 'batch32'.*Need: .*Have: .*--scale"):
        timed.measure(workload("batch32"))
    assert timed.now_ns == 10**9


def test_prompts_longer_than_any_sequence_are_refused_before_they_are_made(monkeypatch):
    timed = Timed(max_seq_len=512)
    monkeypatch.setattr(Workload, "prompt", lambda *_: pytest.fail("made"))
    with pytest.raises(InputError, match=r"19,000,000 prompt tokens.*Need: .*Have: max_seq_len = 512.*To change: "):
        timed.measure(workload("single", input_tokens=Span(19_000_000, 19_000_000)))
    with pytest.raises(InvalidSetting, match=r"more than 20,000,000 tokens of prompts. To change: lower --requests"):
        workload("batch32", input_tokens=Span(1, 10**18))


# -- figures -------------------------------------------------------------------------------------------------------


@given(values=st.lists(st.integers(0, 1000), min_size=1), percent=st.integers(1, 100))
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(values, percent):
    found = percentile(sorted(values), percent)

    def share(bound):
        return sum(value <= bound for value in values) * 100 >= percent * len(values)

    assert found in values
    assert share(found)
    assert not any(share(value) for value in values if value < found)


def made(**fields):
    given = {
        "id": "a", "num_input_tokens": 100, "num_output_tokens": 3, "arrival_us": 1000, "first_token_us": 5000,
        "gaps_us": [10, 20], "end_us": 6000, "finish": "length",
    }  # fmt: skip
    return Sample(**{**given, **fields})


def by_hand(*samples):
    return Measurement(workload=workload("stalls"), samples=samples, elapsed_us=2_000_000, num_suspensions=4)


def test_figures_by_hand():
    found = figures(
        by_hand(
            made(),
            made(first_token_us=9000, end_us=21000, gaps_us=[30], interrupted_gaps_us=[500]),
            made(error="no", num_output_tokens=1000),
            made(is_interrupting=True, num_input_tokens=2000, first_token_us=1700, gaps_us=[]),
        )
    )
    assert (found.output_tokens, found.input_tokens, found.total_tokens, found.requests) == (3.0, 100.0, 103.0, 1.0)
    assert found.percentiles_us == {
        "time_to_first_token": {"p50": 4000, "p90": 8000, "p99": 8000},
        "time_between_tokens": {"p50": 20, "p90": 500, "p99": 500},
        "end_to_end": {"p50": 5000, "p90": 20000, "p99": 20000},
        "time_between_tokens, uninterrupted": {"p50": 20, "p90": 30, "p99": 30},
        "time_between_tokens, interrupted": {"p50": 500, "p90": 500, "p99": 500},
        "time_to_first_token, interrupting": {"p50": 700, "p90": 700, "p99": 700},
    }


def test_one_token_each_has_no_time_between_tokens():
    timed = Timed()
    measured = timed.measure(workload("prefill", num_requests=3, input_tokens=Span(20, 20)))
    assert figures(measured).percentiles_us["time_between_tokens"] is None
    out = io.StringIO()
    show_bench(measured, timed.engine.result(), console_for(out))
    assert "time between tokens" in out.getvalue()


def test_the_file_has_the_raw_samples_that_the_figures_come_from():
    timed = Timed()
    drawn = workload("uniform", num_requests=12, scale=Fraction(1, 16), rate_per_second=Fraction(1, 2), seed=5)
    measured = timed.measure(drawn)
    result = timed.engine.result()
    document = json.loads(text_of(bench_document(measured, result, command=["tonnage", "bench", "m"])))
    assert document["schema"] == BENCH_SCHEMA == "tonnage.bench/1"
    assert document["command"] == "tonnage bench m"
    assert document["machine"]["torch_threads"] >= 1
    assert document["versions"]["torch"] is not None
    assert document["limits"]["max_seq_len"] == 1024
    assert document["memory"]["device_bytes"] == result.plan.device_bytes
    assert document["workload"] == {
        "name": "uniform", "requests": 12, "input_tokens": [6, 64], "output_tokens": [6, 64],
        "interrupting_tokens": None, "rate_per_second": "1/2", "seed": 5,
    }  # fmt: skip
    seconds = document["elapsed_us"] / 10**6
    output = sum(1 + len(sample["gaps_us"]) for sample in document["samples"])
    assert output == sum(job.num_output_tokens for job in drawn.jobs)
    assert document["per_second"]["output_tokens"] == pytest.approx(output / seconds, rel=1e-3)
    waits = sorted(sample["first_token_us"] - sample["arrival_us"] for sample in document["samples"])
    assert document["percentiles_us"]["time_to_first_token"]["p50"] == waits[5]


def test_the_table_says_what_ran_and_how_it_went():
    timed, out = Timed(), io.StringIO()
    measured = timed.measure(workload("stalls", output_tokens=Span(60, 60), scale=Fraction(1, 2)))
    show_bench(measured, timed.engine.result(), console_for(out))
    told = " ".join(out.getvalue().split())
    assert "stub on host: workload stalls, 8 requests, 16 tokens in, 30 out, interrupted by 1 prompt of 1,000" in told
    assert "output tokens 8,000.0" in told  # 8 rows in each step of a millisecond
    assert "time between tokens, uninterrupted 1.0 ms 1.0 ms 1.0 ms" in told
    assert "8 finished; 0 waited for memory, 0 suspensions" in told
    failed = replace(measured, samples=(replace(measured.samples[0], error="the step failed"), *measured.samples[1:]))
    show_bench(failed, timed.engine.result(), console_for(out))
    assert "7 finished, 1 failed" in out.getvalue()


def test_random_prompts_do_not_move_the_global_generator():
    before = random.getstate()
    workload("uniform", rate_per_second=Fraction(1)).prompt(0, 300)
    assert random.getstate() == before


def test_a_run_that_is_stopped_gives_what_there_is_and_leaves_nothing_behind():
    timed, steps = Timed(max_batch_size=2), []
    drawn = workload("batch32", input_tokens=Span(20, 20), output_tokens=Span(10, 10))
    found = timed.measure(drawn, on_step=lambda _: steps.append(1), is_stopped=lambda: len(steps) >= 25)
    finishes = [sample.finish for sample in found.requests]
    assert finishes.count("length") >= 2
    assert finishes.count("cancelled") >= 28
    assert timed.engine.progress().kv_used_tokens == 0
    told = figures(found)
    assert told.requests * found.elapsed_us / 10**6 == pytest.approx(finishes.count("length"))
