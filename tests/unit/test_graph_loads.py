"""Loads: counted, blended, drifted, read from files, and played from requests."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from graph_loads import blend
from hypothesis import given
from hypothesis import strategies as st
from report_samples import make_run

from tonnage.bench.measure import Measurement, Sample
from tonnage.bench.report import bench_document, text_of
from tonnage.bench.workloads import workload
from tonnage.errors import InputError
from tonnage.graphs.histogram import Histogram, prior
from tonnage.graphs.load_files import read_load, read_step_times
from tonnage.graphs.optimise import Rules, frontier
from tonnage.graphs.price import Price
from tonnage.graphs.step_times import StepPoints, StepTimes, affine, batch_costs, measured, total_ns, unpadded_ns
from tonnage.graphs.traffic import Request, play, settled

COUNTS = st.lists(st.integers(0, 9), min_size=1, max_size=40).filter(any)


def test_counting():
    found = Histogram.of([3, 1, 3, 0])
    assert found.steps == (0, 1, 0, 2)
    assert (found.largest, found.num_steps, found.num_tokens) == (3, 3, 7)
    assert found.up_to(5) == [0, 1, 1, 3, 3, 3]


def test_a_blend_counts_shares_whatever_was_counted():
    mixed = blend([(Histogram((0, 1)), Fraction(1)), (Histogram((0, 0, 300)), Fraction(3))])
    assert mixed.steps == (0, 100, 300)


def test_the_prior_weighs_octaves_alike():
    steps = prior(1024).steps
    octaves = [sum(steps[low : 2 * low]) for low in (1, 16, 256)]
    assert max(octaves) < 1.5 * min(octaves)


@given(COUNTS, st.sampled_from([(1, 8), (1, 2), (9, 10), (1, 1), (3, 2), (4, 1)]), st.integers(1, 200))
def test_a_drifted_load_keeps_its_steps_and_its_shape(counts, factor, most):
    load, times = Histogram((0, *counts)), Fraction(*factor)
    made = load.spread(times, times, most=most)
    assert made.largest <= most
    assert 0 <= 10**6 * load.num_steps - made.num_steps <= 5 * len(counts)
    if most >= 4 * len(counts) + 4:
        # Below a size of one everything is at one, so a load that shrinks stays a little above.
        mean, before = (Fraction(each.num_tokens, each.num_steps) for each in (made, load))
        assert -1 <= mean - times * before <= 1


def test_a_drift_covers_every_size_between_its_factors():
    made = Histogram.of([100]).spread(Fraction(1), Fraction(5, 4), most=110)
    assert [size for size, count in enumerate(made.steps) if count] == list(range(100, 111))


def test_times_between_measured_points():
    times = measured(StepPoints({2: 10, 4: 15, 7: 13}), 6, file="t.csv")
    assert times.step_ns == (10, 10, 13, 15, 15, 14)
    assert times.least_ns == (10, 10, 13, 14, 14, 14)
    assert times.edges() == (2, 3, 6)
    assert times.fastest(4) == 6
    with pytest.raises(InputError, match="end at batch size 7, and max_batch_size is 8"):
        measured(StepPoints({2: 10, 7: 13}), 8, file="t.csv")


def test_what_comes_beside_a_graph_is_of_the_rows_that_are_there():
    times = measured(StepPoints({1: 10, 4: 40}, {1: 5, 4: 11}), 4, file="t.csv", eager_extra_ns=100)
    assert times.step_ns == (10, 20, 30, 40)
    assert times.beside_ns == (5, 7, 9, 11)
    load = Histogram.of([1, 2, 3, 4])
    assert batch_costs((2, 3), times) == [0, 25, 27, 39, 151]
    assert total_ns(load, (4,), times) == 4 * 40 + 32
    assert unpadded_ns(load, times) == 100 + 32
    assert times.fixed_share(4) == 1 - Fraction(4 * (51 - 27), 2) / 51


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=12),
    st.lists(st.integers(0, 5), min_size=12, max_size=12),
)
def test_what_comes_beside_changes_no_choice(drawn, counts):
    """It is the same for every list: the same sizes are best, and each list costs that much more."""
    steps, beside = (tuple(column) for column in zip(*drawn, strict=True))
    most = len(steps)
    load = Histogram((0, *counts[: most - 1], 1))
    whole, bare = StepTimes(steps, beside_ns=beside), StepTimes(steps)
    more = sum(count * beside[size - 1] for size, count in enumerate(load.steps) if size)
    for ours, plain in zip(
        frontier(load, whole, Rules(max_batch_size=most), most_graphs=most).choices,
        frontier(load, bare, Rules(max_batch_size=most), most_graphs=most).choices,
        strict=True,
    ):
        assert ours.sizes == plain.sizes
        assert ours.total_ns == plain.total_ns + more == total_ns(load, ours.sizes, whole)


def test_a_step_without_a_graph_takes_the_launches_more():
    times = affine(8, base_ns=100, row_ns=10, tile_rows=4, eager_extra_ns=1000)
    assert times.edges() == (4, 8)
    assert total_ns(Histogram.of([3, 5]), (4,), times) == 140 + 180 + 1000
    assert total_ns(Histogram.of([3, 5]), (), times) == 2 * 1000 + 140 + 180


@given(st.integers(1, 10**7), st.integers(0, 10**5), st.integers(2, 60))
def test_the_fixed_share_of_a_model(base, row, batch):
    times = affine(60, base_ns=base, row_ns=row)
    assert times.fixed_share(batch) == Fraction(base, base + row * batch)


def test_a_price_by_hand():
    """10 tokens of cache a graph, 100 tokens a request, 5 requests: a fiftieth of a seat of five, half of it fixed."""
    price = Price(graph_bytes=40, kv_token_bytes=4, request_tokens=100, num_running=5)
    assert price.kv_tokens == 10
    assert price.share(affine(8, base_ns=50, row_ns=10)) == Fraction(1, 2) / 10 / 5


def test_requests_played_step_by_step():
    """Two seats: the third request waits; the first token of each comes with its prompt."""
    times = StepTimes((10, 15))
    requests = [Request(0, 4), Request(0, 2), Request(1, 2), Request(1000, 3), Request(2000, 1)]
    played = play(requests, (1, 2), times, num_seats=2)
    # 2 run, then 2 (the third has the second's seat), then 1, then 2 steps of the fourth alone
    assert played.histogram.steps == (0, 3, 2)
    assert (played.busy_ns, played.end_ns) == (60, 1020)
    assert played.mean_step_ns == 12
    assert played.tokens_per_second == pytest.approx(7e9 / 60)
    assert play(requests, (2,), times, num_seats=2).busy_ns == 75


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(2, 9)), min_size=1, max_size=30), st.integers(1, 6))
def test_every_token_is_played_once(drawn, num_seats):
    requests = [Request(arrival, tokens) for arrival, tokens in drawn]
    played = play(requests, (2, 6), affine(6, base_ns=20, row_ns=3), num_seats=num_seats)
    assert played.histogram.num_tokens == sum(tokens - 1 for _, tokens in drawn)
    assert played.histogram.largest <= num_seats
    assert played.busy_ns <= played.end_ns


def test_the_load_is_that_under_the_chosen_list():
    """Under slower steps more requests are seated at once, so the second choice sees smaller batches."""
    times = affine(64, base_ns=10, row_ns=10)
    requests = [Request(2000 * number, 20) for number in range(200)]
    slow = play(requests, (64,), times, num_seats=64).histogram
    seen: list[Histogram] = []

    def choose(load: Histogram) -> tuple[int, ...]:
        seen.append(load)
        return tuple(range(1, 65))

    made = settled(requests, choose, times, num_seats=64, first=(64,))
    assert seen == [slow]
    assert made.largest < slow.largest


# -- files ---------------------------------------------------------------------------------------------------------


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("h.csv", "batch_size,count\n1,2\n3,1\n"),
        ("h.csv", "count, batch_size ,rank\n1,1,0\n1,3,0\n\n1,1,1\n"),
        ("h.json", '{"1": 2, "3": 1}'),
        ("h.json", '{"schema": "any", "counts": {"1": 2, "3": 1}}'),
        ("h.json", '[{"batch_size": 1, "count": 2}, {"batch_size": 3}]'),
        ("h.jsonl", '{"batch_size": 1}\n{"batch_size": 3, "at": 0.5}\n\n{"batch_size": 1}\n{"batch_size": 0}\n'),
    ],
)
def test_histograms_and_traces_of_steps(tmp_path, name, text):
    assert read_load(written(tmp_path, name, text)) == Histogram((0, 2, 0, 1))


def test_traces_of_requests(tmp_path):
    made = (Request(0, 5), Request(1_500, 7))
    csv = "arrival_us,input_tokens,output_tokens\n0,9,5\n1.5,9,7\n"
    lines = '{"arrival_us": 0, "output_tokens": 5}\n{"arrival_us": 1.5, "output_tokens": 7}\n'
    assert read_load(written(tmp_path, "r.csv", csv)) == made
    assert read_load(written(tmp_path, "r.jsonl", lines)) == made


def test_what_a_bench_kept_is_a_trace_of_requests(tmp_path):
    """As ``tonnage bench`` writes it: one request that never got a token is left out."""
    samples = (
        Sample(id="a", num_input_tokens=9, num_output_tokens=5, arrival_us=0),
        Sample(id="b", num_input_tokens=9, num_output_tokens=0, arrival_us=1, error="refused"),
        Sample(id="c", num_input_tokens=9, num_output_tokens=7, arrival_us=2000),
    )
    shape = workload("single", num_requests=3)
    measured_ = Measurement(workload=shape, samples=samples, elapsed_us=3000, num_suspensions=0)
    text = text_of(bench_document(measured_, make_run(), command=["tonnage", "bench"]))
    assert read_load(written(tmp_path, "b.json", text)) == (Request(0, 5), Request(2_000_000, 7))


def test_step_times_from_a_file(tmp_path):
    path = written(tmp_path, "t.csv", "batch_size,step_us\n1,4000\n8,4100.25\n")
    assert read_step_times(path) == StepPoints({1: 4_000_000, 8: 4_100_250})


def test_samples_of_step_times(tmp_path):
    """Rows of one size are samples, in any order; the median of an even number lies between two."""
    path = written(tmp_path, "t.csv", "batch_size,step_us\n8,5\n1,4\n8,9\n8,6\n8,7\n")
    assert read_step_times(path) == StepPoints({1: 4_000, 8: 6_500}, told=", medians of 5 samples")


APART = {"rows": 3, "bucket": 4, "step_us": 20.5, "graph_us": 15, "head_us": 1, "sampler_us": 1, "host_us": 3.5}


def test_steps_taken_apart(tmp_path):
    """The graph's time by its size, the rest by the rows that were there; samples before the figure made of them."""
    rows = [
        APART,
        {"rows": 8, "bucket": 8, "step_us": 30, "graph_us": 22, "graph_samples_us": [20, 21, 40]},
        {"rows": 6, "bucket": 8, "step_us": 27, "graph_us": 23},
    ]
    found = read_step_times(written(tmp_path, "t.json", json.dumps({"date": "today", "rows": rows})))
    assert found.graph_ns == {4: 15_000, 8: 22_000}
    assert found.beside_ns == {3: 5_500, 8: 9_000, 6: 4_000}
    assert found.told == ", medians of 5 samples; a padded row charged as a sequence"


def test_padding_is_charged_as_padding_where_that_was_measured(tmp_path):
    rows = [APART | {"padded_us": 10}, APART | {"rows": 4, "padded_us": 10, "padded_samples_us": [12, 11, 10]}]
    found = read_step_times(written(tmp_path, "t.json", json.dumps(rows)))
    assert found.graph_ns == {4: 10_500}
    assert found.beside_ns == {3: 10_500, 4: 9_500}
    assert "padding as in a graph of padding alone" in found.told
    mixed = read_step_times(written(tmp_path, "t.json", json.dumps([*rows, APART])))
    assert mixed.graph_ns == {4: 15_000}, "all of it is read one way"


def test_a_step_faster_than_its_graph_is_noise(tmp_path):
    (row,) = json.loads(json.dumps([APART | {"step_us": 14}]))
    assert read_step_times(written(tmp_path, "t.jsonl", json.dumps(row))).beside_ns == {3: 0}


STEP_PARTS = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-30-h200-step-parts.json"


def test_step_times_of_a_card_as_they_are_filed():
    times = measured(read_step_times(STEP_PARTS), 256, file="parts")
    for size, step_us in ((1, 4573.9), (32, 6054.5), (256, 17028.8)):
        assert times.unpadded(size) == round(1000 * step_us)
    assert times.at(256) == 7_701_700, "of padding alone: rows that pad attend to nothing"
    assert times.told.startswith("15 measured sizes")


BAD_LOADS = {
    ("h.csv", ""): "holds no rows",
    ("h.csv", "batch_size\n"): "holds no rows",
    ("h.csv", "size,count\n1,2\n"): "line 2: has 'size', 'count'",
    ("h.csv", "batch_size,count\n1,2\n3\n"): "line 3: has 1 cells, and the header 2",
    ("h.csv", "batch_size,count\n1,2\nx,3\n"): "line 3: batch_size = 'x' is not a number",
    ("h.csv", "batch_size,count\n1,-2\n"): "count = '-2' is not a number of at least 0",
    ("h.csv", "batch_size,count\n1.5,2\n"): "batch_size = 1.5 is not a whole number",
    ("h.csv", "batch_size\n1000000\n"): "not a whole number up to 65,536",
    ("h.csv", "batch_size,count\n0,7\n3,0\n"): "no step with a sequence",
    ("h.json", "{"): "is not JSON",
    ("h.json", "3"): "neither an object nor an array",
    ("h.json", "[3]"): "row 1: is not an object",
    ("h.json", '{"counts": [1]}'): "counts: is not an object",
    ("h.json", '{"1": NaN}'): "NaN is not a number of JSON",
    ("h.json", '{"1": true}'): "count = True is not a number",
    ("h.jsonl", '{"batch_size": 1}\nnonsense\n'): "line 2: is not JSON",
    ("h.jsonl", '{"batch_size": 1}\n{"count": 1}\n'): "line 2: has no batch_size",
    ("r.csv", "arrival_us,output_tokens\n0,0\n"): "line 2: output_tokens is 0",
    ("r.csv", "arrival_us,output_tokens\n0,1\n"): "nothing is ever decoded",
    ("h.txt", "1 2"): r"ends in '\.txt'",
}


@pytest.mark.parametrize(("name", "text"), BAD_LOADS, ids=str)
def test_what_cannot_be_read_is_told_with_its_place(tmp_path, name, text):
    path = written(tmp_path, name, text)
    with pytest.raises(InputError, match=BAD_LOADS[name, text]) as caught:
        read_load(path)
    assert str(path) in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("batch_size\n1\n", "line 2: has no step_us"),
        ("batch_size,step_us\n0,5\n", "is no step"),
        ("batch_size,step_us\n4,0\n", "is no step"),
        ("rows,bucket,graph_us\n4,4,6\n", "line 2: has no step_us"),
        ("rows,bucket,graph_us,step_us\n4,0,6,7\n", "line 2: a step of no sequences"),
        ("rows,graph_us,step_us\n4,6,7\n", "line 2: has no bucket"),
        ("batch_size,step_us,step_samples_us\n4,6,7\n", "step_samples_us is no array"),
        ("batch_size,step_us\n", "holds no rows"),
    ],
)
def test_step_times_that_cannot_be_read(tmp_path, text, told):
    with pytest.raises(InputError, match=told):
        read_step_times(written(tmp_path, "t.csv", text))


def test_files_that_are_not_there_or_no_text(tmp_path):
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_load(tmp_path / "h.csv")
    (tmp_path / "h.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is not text"):
        read_load(tmp_path / "h.csv")
