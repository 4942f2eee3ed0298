"""``tonnage bench`` and ``tonnage soak`` as commands: what flags ask for, what is printed and kept, how they end."""

from __future__ import annotations

import builtins
import json
import signal
import sys
import types
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import Ended, FakeEngine, engine_fixture, tonnage_fixture  # noqa: F401 - fixtures
from report_samples import make_run

from tonnage.bench.measure import Measurement, Sample
from tonnage.bench.verdict import SoakReport, Verdict
from tonnage.bench.workloads import Span, Workload
from tonnage.sampling import SamplingParams

Program = Callable[..., Ended]


class Measured:
    """Stands in for ``measure``: keeps what it was asked, gives a measurement made by hand."""

    def __init__(self) -> None:
        self.workload: Any = None
        self.params: Any = None
        self.num_warmup: Any = None
        self.error: str | None = None
        self.signal: int | None = None  # sent while it measures
        self.seeds: list[int] = []
        self.names: list[str] = []

    def __call__(
        self,
        engine: FakeEngine,
        workload: Workload,
        *,
        params: SamplingParams,
        num_warmup: int,
        on_step: Any,
        is_stopped: Any,
    ) -> Measurement:
        self.workload, self.params, self.num_warmup = workload, params, num_warmup
        self.seeds.append(workload.seed)
        self.names.append(workload.name)
        on_step(1)
        if self.signal is not None:
            signal.raise_signal(self.signal)
            assert is_stopped()
        sample = Sample(
            id="job-0", num_input_tokens=1000, num_output_tokens=250, arrival_us=0, first_token_us=20_000,
            gaps_us=[4000] * 249, last_token_us=1_012_000, end_us=1_016_000, finish="length", error=self.error,
        )  # fmt: skip
        return Measurement(workload=workload, samples=(sample,), elapsed_us=2_000_000, num_suspensions=3)


@pytest.fixture(name="measured")
def measured_fixture(monkeypatch: pytest.MonkeyPatch) -> Measured:
    made = Measured()
    monkeypatch.setattr("tonnage.bench.measure.measure", made)
    return made


def test_a_workload_is_measured_and_told(tonnage: Program, engine: FakeEngine, measured: Measured) -> None:
    ended = tonnage("bench", "m", "--workload", "single", "--memory", "1500MiB", "--admission", "reserve_all")
    assert ended.code == 0
    told = " ".join(ended.out.split())
    assert "workload single, 1 request, 1,024 tokens in, 256 out, all at once; 2.00 s" in told
    assert "output tokens 125.0" in told
    assert "total tokens 625.0" in told
    assert "time to first token 20.0 ms 20.0 ms 20.0 ms" in told
    assert "time between tokens 4.0 ms" in told
    assert "end to end 1,016.0 ms" in told
    assert "1 finished; 0 waited for memory, 3 suspensions" in told
    assert "peak 70 GiB of 79.75 GiB planned" in told
    assert "start-up: load" in ended.err
    assert engine.closed
    assert engine.options.memory_bytes == 1500 * 2**20
    assert engine.options.knobs.admission.value == "reserve_all"
    assert measured.params == SamplingParams(ignore_eos=True)
    assert measured.num_warmup == 1


def test_flags_change_the_workload_and_how_tokens_are_chosen(
    tonnage: Program, engine: FakeEngine, measured: Measured
) -> None:
    flags = "--requests 7 --input-tokens 100-200 --output-tokens 80 --scale 1/4 --rate 2.5 --seed 9 --warmup 0"
    assert tonnage("bench", "m", "--workload", "uniform", *flags.split(), "--top-p", "0.9").code == 0
    drawn = measured.workload
    assert drawn.shape.num_requests == len(drawn.jobs) == 7
    assert (drawn.shape.input_tokens, drawn.shape.output_tokens) == (Span(25, 50), Span(20, 20))
    assert (drawn.rate_per_second, drawn.seed, measured.num_warmup) == (Fraction(5, 2), 9, 0)
    assert measured.params == SamplingParams(ignore_eos=True, top_p=0.9)


def test_what_was_measured_is_kept_and_printed_as_json(
    tonnage: Program, engine: FakeEngine, measured: Measured, tmp_path: Path
) -> None:
    kept = tmp_path / "bench.json"
    ended = tonnage("bench", "m", "--workload", "single", "--json", "--output", kept)
    document = json.loads(ended.out)
    assert document == json.loads(kept.read_text())
    assert document["schema"] == "tonnage.bench/1"
    assert len(document["samples"][0]["gaps_us"]) == 249
    assert document["per_second"]["output_tokens"] == 125.0
    again = tonnage("bench", "m", "--workload", "single", "--output", kept)
    assert again.code == 2
    assert "exists" in again.err
    assert tonnage("bench", "m", "--workload", "single", "--output", kept, "--force").code == 0


def test_several_workloads_and_runs_give_medians(
    tonnage: Program, engine: FakeEngine, measured: Measured, tmp_path: Path
) -> None:
    kept = tmp_path / "benches.json"
    ended = tonnage("bench", "m", "--workload", "single,long", "--runs", "3", "--seed", "5", "--output", kept)
    assert ended.code == 0
    told = " ".join(ended.out.split())
    assert "medians of 3 runs" in told
    assert "single 125 500 251 – 20.0 20.0 4.0 4.0" in told
    document = json.loads(kept.read_text())
    assert document["schema"] == "tonnage.benches/1"
    assert [series["workload"]["name"] for series in document["series"]] == ["single", "long"]
    assert all(len(series["runs"]) == 3 for series in document["series"])
    assert document["series"][0]["median_per_second"]["output_tokens"] == 125.0
    assert measured.seeds == [5, 6, 7] * 2


def test_the_bars_are_workloads(tonnage: Program, engine: FakeEngine, measured: Measured) -> None:
    assert tonnage("bench", "m", "--workload", "bars").code == 0
    assert measured.names == ["single", "prefill", "uniform", "long", "arrivals"]
    assert measured.workload.rate_per_second == 8


def test_what_a_card_needs_reaches_the_engine(tonnage: Program, engine: FakeEngine, measured: Measured) -> None:
    flags = "--random-weights --no-compile --graphs 1,2,4 --attention triton --dtype bfloat16"
    assert tonnage("bench", "m", "--workload", "single", *flags.split()).code == 0
    options = engine.options
    assert (options.random_weights, options.compile, options.attention) == (True, False, "triton")
    assert (options.knobs.graphs.value, options.dtype) == ("1,2,4", "bfloat16")
    tonnage("bench", "m", "--workload", "single")
    assert not hasattr(engine.options, "random_weights")
    assert not engine.options.knobs.graphs.is_set


def test_a_request_that_failed_is_an_exit_code(tonnage: Program, engine: FakeEngine, measured: Measured) -> None:
    measured.error = "the step failed"
    ended = tonnage("bench", "m", "--workload", "single")
    assert ended.code == 1
    assert "0 finished, 1 failed" in ended.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_was_measured_until_an_interrupt_is_kept(
    tonnage: Program, engine: FakeEngine, measured: Measured, tmp_path: Path, number: int
) -> None:
    measured.signal = number
    ended = tonnage("bench", "m", "--workload", "batch32", "--output", tmp_path / "b.json")
    assert ended.code == 128 + number
    assert "interrupted: 1 of 32 requests had finished" in ended.err
    assert json.loads((tmp_path / "b.json").read_text())["schema"] == "tonnage.bench/1"


class Soaked:
    """Stands in for ``Soak``: keeps what it was made with, gives a report made by hand."""

    broken = 0

    def __init__(
        self,
        engine: Any,
        mix: Any,
        *,
        is_over: Any,
        has_sampler: bool,
        mishaps: Any,
        adversary: Any,
        max_last_tokens: Any,
        on_step: Any,
        is_stopped: Any,
    ) -> None:
        self.adversary, self.max_last_tokens = adversary, max_last_tokens
        Soaked.last, self.is_stopped, self.mishaps = self, is_stopped, mishaps
        self.engine, self.mix, self.is_over, self.has_sampler = engine, mix, is_over, has_sampler
        on_step(1)

    def run(self) -> SoakReport:
        return SoakReport(
            verdicts=(
                Verdict(rule="blocks", meaning="no more than there are", num_broken=0),
                Verdict(rule="order", meaning="nobody is passed", num_broken=self.broken),
            ),
            told=("order: b is admitted past a",) * min(self.broken, 1),
            outcomes={"stop": 4, "refused": 1}, counts={"step": 9, "computed": 70, "suspended": 2}, num_tokens=60,
            longest_wait_steps=5, most_overtaken=3, seconds=1.5, result=make_run(),
        )  # fmt: skip


Soaked.last = None  # type: ignore[attr-defined]


@pytest.fixture(name="soaked")
def soaked_fixture(monkeypatch: pytest.MonkeyPatch) -> type[Soaked]:
    monkeypatch.setattr("tonnage.bench.soak.Soak", Soaked)
    monkeypatch.setattr("tonnage.bench.soak.make_mix", lambda engine, seed: (engine, seed))
    monkeypatch.setattr(Soaked, "broken", 0)
    return Soaked


@pytest.fixture(name="stub")
def stub_fixture(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What ``stub_engine`` was asked for."""
    asked: dict[str, Any] = {}

    def stub_engine(**sizes: Any) -> FakeEngine:
        asked.update(sizes)
        return FakeEngine()

    room = types.ModuleType("tonnage.engine.stub")
    room.stub_engine = stub_engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, room.__name__, room)
    return asked


def test_a_soak_that_holds(tonnage: Program, engine: FakeEngine, soaked: Any) -> None:
    ended = tonnage("soak", "m", "--memory", "1500MiB", "--seed", "7", "--requests", "50")
    assert ended.code == 0
    told = " ".join(ended.out.split())
    assert "requests 5: 1 refused, 4 stop" in told
    assert "9 with 70 rows in 1.5 s, 60 tokens generated" in told
    assert "2 suspensions; the longest wait was 5 steps, the oldest in the queue was passed 3 times at most" in told
    assert "blocks holds no more than there are" in told
    assert told.endswith("The engine holds.")
    assert engine.closed
    assert soaked.last.mix == (engine, 7)
    assert soaked.last.has_sampler
    assert [soaked.last.is_over(asked, 1e9) for asked in (49, 50)] == [False, True]


def test_a_soak_that_does_not_hold(tonnage: Program, engine: FakeEngine, soaked: Any) -> None:
    soaked.broken = 12
    ended = tonnage("soak", "m")
    assert ended.code == 1
    told = " ".join(ended.out.split())
    assert "order broken 12 times" in told
    assert "order: b is admitted past a" in told
    assert told.endswith("The engine does not hold.")


def test_a_soak_as_json(tonnage: Program, engine: FakeEngine, soaked: Any) -> None:
    document = json.loads(tonnage("soak", "m", "--json", "--seed", "3").out)
    assert (document["schema"], document["seed"], document["is_good"]) == ("tonnage.soak/1", 3, True)
    assert document["rules"]["order"] == {"meaning": "nobody is passed", "broken": 0}
    assert document["outcomes"] == {"stop": 4, "refused": 1}


@pytest.mark.parametrize("verb", ["bench", "soak"])
def test_a_plan_file_goes_to_the_engine(
    tonnage: Program, engine: FakeEngine, soaked: Any, tmp_path: Path, verb: str
) -> None:
    workload = ("--workload", "single") if verb == "bench" else ()
    tonnage(verb, "m", *workload, "--plan-file", str(tmp_path / "plan.json"))
    assert engine.options.plan_file == str(tmp_path / "plan.json")


@pytest.fixture(name="adversary")
def adversary_fixture(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What ``Adversary`` was made with, one entry each; and the other process, if one was started."""
    made: list[Any] = []

    class Adversary:
        storm = "storm"

        def __init__(self, engine: Any, seed: int, *, has_sampler: bool, neighbour: Any) -> None:
            made.append((seed, has_sampler, neighbour))

    class Neighbour:
        def __init__(self, ordinal: int) -> None:
            self.ordinal, self.is_open = ordinal, True

        def __enter__(self) -> Neighbour:
            return self

        def __exit__(self, *_: object) -> None:
            self.is_open = False

    monkeypatch.setattr("tonnage.bench.adversary.Adversary", Adversary)
    monkeypatch.setattr("tonnage.bench.neighbour.Neighbour", Neighbour)
    return made


def test_on_a_card_a_soak_is_adversarial(
    tonnage: Program, engine: FakeEngine, soaked: Any, adversary: list[Any]
) -> None:
    assert tonnage("soak", "m", "--device", "cuda:2", "--random-weights", "--minutes", "8", "--seed", "4").code == 0
    ((seed, has_sampler, neighbour),) = adversary
    assert (seed, has_sampler, neighbour.ordinal, neighbour.is_open) == (4, True, 2, False)
    assert (soaked.last.mix, soaked.last.max_last_tokens) == ("storm", 256)
    assert engine.options.random_weights


def test_a_soak_on_a_card_may_be_calm_or_alone(
    tonnage: Program, engine: FakeEngine, soaked: Any, adversary: list[Any]
) -> None:
    assert tonnage("soak", "m", "--device", "cuda", "--no-adversarial").code == 0
    assert adversary == []
    assert soaked.last.adversary is None
    assert tonnage("soak", "m", "--device", "cuda", "--no-neighbour", "--requests", "9").code == 0
    assert adversary == [(0, True, None)]
    assert soaked.last.max_last_tokens is None  # all is served


def test_on_the_host_a_soak_is_adversarial_if_asked(
    tonnage: Program, engine: FakeEngine, soaked: Any, adversary: list[Any], stub: dict[str, Any]
) -> None:
    assert tonnage("soak", "m").code == 0
    assert adversary == []
    assert tonnage("soak", "m", "--adversarial").code == 0
    assert tonnage("soak", "--stub", "--adversarial", "--seed", "2").code == 0
    assert adversary == [(0, True, None), (2, False, None)]


def test_a_verdict_is_kept(tonnage: Program, engine: FakeEngine, soaked: Any, tmp_path: Path) -> None:
    kept = tmp_path / "soak.json"
    ended = tonnage("soak", "m", "--json", "--output", kept)
    assert json.loads(kept.read_text()) == json.loads(ended.out)
    again = tonnage("soak", "m", "--output", kept)
    assert (again.code, "exists" in again.err) == (2, True)
    soaked.broken = 1
    assert tonnage("soak", "m", "--output", kept, "--force").code == 1
    assert not json.loads(kept.read_text())["is_good"]


def test_minutes_end_a_soak(tonnage: Program, engine: FakeEngine, soaked: Any) -> None:
    assert tonnage("soak", "m", "--minutes", "1.5").code == 0
    assert [soaked.last.is_over(10**6, seconds) for seconds in (89.9, 90.0)] == [False, True]


def test_the_stub_takes_the_same_flags(tonnage: Program, stub: dict[str, Any], soaked: Any) -> None:
    flags = "--kv-tokens 4k --max-seq-len 512 --max-batch-size 16 --chunk-tokens none --admission reserve_all"
    assert tonnage("soak", "--stub", *flags.split()).code == 0
    assert stub == {
        "kv_tokens": 4000, "max_seq_len": 512, "max_batch_size": 16, "chunk_tokens": "none",
        "admission": "reserve_all", "end_probability": 0.01, "seed": 0, "prefix_caching": True, "checks_contents": True,
        "host_kv_tokens": 16_000, "head_tokens": 1000, "load_steps": 4,
    }  # fmt: skip
    assert not soaked.last.has_sampler


def test_a_stub_says_how_large_its_stores_are(tonnage: Program, stub: dict[str, Any], soaked: Any) -> None:
    told = tonnage("soak", "--stub", "--kv-tokens", "4k").out.splitlines()[0]
    assert told == (
        "stub      a pool of 4,000 tokens, 1,000 more in a lent head, 16,000 in a host tier; a load takes up to 4 steps"
    )
    document = json.loads(tonnage("soak", "--stub", "--json").out)
    assert document["stub"] == {
        "pool_tokens": 8192, "head_tokens": 2048, "host_tier_tokens": 32_768, "load_steps": 4
    }  # fmt: skip
    bare = tonnage("soak", "--stub", "--no-prefix-caching").out
    assert bare.startswith("stub      a pool of 8,192 tokens without a prefix cache\n")


def test_an_engine_has_no_stub_to_tell_of(tonnage: Program, engine: FakeEngine, soaked: Any) -> None:
    assert "stub" not in json.loads(tonnage("soak", "m", "--json").out)


def test_faults_are_made_by_the_seed(tonnage: Program, stub: dict[str, Any], soaked: Any) -> None:
    """The engine and the judge are told of the same ones."""
    made = types.ModuleType("tonnage.engine.mishaps")
    made.Mishaps = lambda *, probability, seed: (probability, seed)  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, made.__name__, made)
        assert tonnage("soak", "--stub", "--faults", "0.05", "--seed", "9").code == 0
    assert stub["mishaps"] == soaked.last.mishaps == (0.05, 9)


def test_the_stub_can_go_without_a_cache(tonnage: Program, stub: dict[str, Any], soaked: Any) -> None:
    assert tonnage("soak", "--stub", "--no-prefix-caching", "--seed", "5").code == 0
    assert stub == {"kv_tokens": 8192, "max_seq_len": 1024, "end_probability": 0.01, "seed": 5}


#: command line -> what its paragraph must hold. "|" separates the pieces.
BAD = {
    "bench m": "does not know the workload|single, batch32|stalls|To change: add --workload",
    "bench m --workload batch": "--workload = 'batch': no such workload|batch256",
    "bench m --workload single,batch": "--workload = 'batch': no such workload|bars are single, prefill",
    "bench m --workload single --runs 0": "--runs = '0'",
    "bench m --workload single --requests 0": "--requests = '0': zero",
    "bench m --workload single --input-tokens 9-3": "--input-tokens = '9-3': ends before it begins|write 3-9",
    "bench m --workload single --output-tokens x": "--output-tokens = 'x'",
    "bench m --workload single --scale 0": "--scale = '0': not above 0|1/8",
    "bench m --workload single --scale half": "--scale = 'half': not a number",
    "bench m --workload single --rate -1": "--rate = '-1': not above 0",
    "bench m --workload single --rate 1/0": "--rate = '1/0': not a number",
    "bench m --workload single --seed -1": "--seed = '-1': negative",
    "bench m --workload single --warmup some": "--warmup = 'some'",
    "bench m --workload single --temperature -1": "--temperature = '-1': out of range",
    "bench m --workload single --output no/x.json": "there is no folder no",
    "soak": "does not know what to run|a model, or --stub",
    "soak m --faults 0.01": "only the stub fails on purpose|add --stub",
    "soak --stub --faults x": "--faults = 'x'|write 0 to 0.2",
    "soak --stub --faults 0.5": "--faults = '0.5'|write 0 to 0.2",
    "soak --stub --faults -1": "--faults = '-1'",
    "soak m --stub": "a model and --stub|leave --stub out",
    "soak m --requests 5 --minutes 1": "--requests and --minutes both say when to stop|keep one",
    "soak m --requests 0": "--requests = '0': zero",
    "soak m --minutes soon": "--minutes = 'soon': not a number above 0",
    "soak m --minutes 0": "--minutes = '0'",
    "soak m --minutes inf": "--minutes = 'inf'",
    "soak m --minutes nan": "--minutes = 'nan'",
    "soak m --seed x": "--seed = 'x'",
    "soak m --memory lots": "--memory = 'lots'",
    "soak m --graphs often": "--graphs = 'often': not a list of batch sizes|write none, default, x2, +64, +8",
    "bench m --workload single --graphs piecewise": "--graphs = 'piecewise': a step of prompts, in pieces",
    "bench m --workload single --graphs no.json": "--graphs = 'no.json' cannot be read: No such file",
}


@pytest.mark.parametrize("command", BAD)
def test_bad_flags_are_told_before_anything_starts(
    tonnage: Program, engine: FakeEngine, soaked: Any, measured: Measured, command: str
) -> None:
    ended = tonnage(*command.split())
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.count("\n") == 1
    for piece in BAD[command].split("|"):
        assert piece in ended.err
    assert engine.options is None


@pytest.mark.parametrize("command", ["bench m --workload single", "soak m", "soak --stub"])
def test_the_engine_extra_may_be_missing(tonnage: Program, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    real = builtins.__import__

    def no_torch(name: str, *args: Any, **how: Any) -> Any:
        if name in ("tonnage.engine", "tonnage.engine.stub"):
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return real(name, *args, **how)

    monkeypatch.setattr(builtins, "__import__", no_torch)
    ended = tonnage(*command.split())
    assert ended.code == 2
    assert f"tonnage {command.split()[0]} needs the engine's libraries" in ended.err
    assert "pip install 'tonnage[engine]'" in ended.err


def test_a_percentage_is_a_scale(tonnage: Program, engine: FakeEngine, measured: Measured) -> None:
    tonnage("bench", "m", "--workload", "single", "--scale", "25%")
    assert measured.workload.shape.input_tokens == Span(256, 256)


@pytest.mark.parametrize(
    "flags",
    [["--memory", "1GiB"], ["--total-bytes", "1GiB"], ["--dtype", "bfloat16"], ["--random-weights"], ["--no-compile"],
     ["--device", "cuda"], ["--attention", "triton"], ["--graphs", "x2"], ["--plan-file", "x"]],
    ids=str,
)  # fmt: skip
def test_the_stub_takes_no_flags_about_memory(tonnage: Any, flags: list[str]) -> None:
    ended = tonnage("soak", "--stub", *flags)
    assert ended.code == 2
    assert flags[0] in ended.err
    assert "plans no memory" in ended.err


@pytest.mark.parametrize(
    "flags",
    [
        ["--rate", "1e400"],
        ["--rate", "1e-300"],
        ["--scale", "1/5000"],
        ["--requests", "1000000000"],
        ["--runs", "1000000000000"],
        ["--warmup", "1000000000000"],
        ["--input-tokens", "1000000000000000000"],
        ["--input-tokens", "1000", "--requests", "1000000"],
    ],
    ids=str,
)
def test_loads_beyond_all_measure_are_refused(tonnage: Any, flags: list[str]) -> None:
    ended = tonnage("bench", "m", "--workload", "single", *flags)
    assert ended.code == 2
    assert flags[0] in ended.err
    assert "To change: " in ended.err


def test_a_mix_needs_some_length(tonnage: Any) -> None:
    ended = tonnage("soak", "--stub", "--max-seq-len", "1")
    assert ended.code == 2
    assert "--max-seq-len" in ended.err
