"""On a card: the adversarial soak with another process beside it, the watch on free memory, and the benchmarks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

from tiny import save_tiny_llama

from tonnage.bench import inside
from tonnage.bench.adversary import FLOOR_BYTES, Adversary
from tonnage.bench.neighbour import Neighbour
from tonnage.bench.soak import Soak
from tonnage.bench.watch import free_watch
from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.engine import EngineOptions, start
from tonnage.units import GiB, MiB

pytestmark = [
    pytest.mark.gpu,
    # What compiling tells: that torch could multiply less exactly, and that parts of it are old.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]

#: A storm of some hundred requests, then what has long to go is taken back. With this seed the neighbour comes early.
NUM_REQUESTS, LAST_TOKENS, SEED = 600, 64, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A llama of a few layers with heads of 64."""
    return save_tiny_llama(
        tmp_path_factory.mktemp("small"),
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=4,
        initializer_range=0.15,
        max_position_embeddings=512,
    )


def asked(folder, **how):
    limits = LimitKnobs(max_batch_size=Setting(32), max_num_tokens=Setting(512), max_seq_len=Setting(400))
    return EngineOptions(
        model=str(folder), device="cuda", knobs=Knobs(kv_tokens=Setting(8192)), limit_knobs=limits, compile=False, **how
    )


def stormed(engine, *, neighbour=None):
    adversary = Adversary(engine, SEED, has_sampler=True, neighbour=neighbour)
    return Soak(
        engine, adversary.storm, adversary=adversary, max_last_tokens=LAST_TOKENS,
        is_over=lambda asked, seconds: asked >= NUM_REQUESTS or seconds > 90,
    ).run()  # fmt: skip


@pytest.mark.parametrize(("attention", "dtype"), [("triton", "float32"), ("triton", "bfloat16"), ("sdpa", "float32")])
def test_an_engine_holds_in_a_storm_beside_another_process(folder, attention, dtype, capsys):
    with Neighbour(0) as neighbour, start(asked(folder, attention=attention, dtype=dtype)) as engine:
        report = stormed(engine, neighbour=neighbour)
    found = report.adversities
    with capsys.disabled():
        print(f"\n  {attention} {dtype}: {found.free}, {found.allocator}, {dict(found.probes)}, {report.outcomes}")
    assert report.is_good, "\n".join(report.told)
    assert found.free.lowest_bytes >= FLOOR_BYTES
    assert found.allocator == {"num_ooms": 0, "num_alloc_retries": 0}
    assert found.neighbour_takes > 0
    assert found.is_exact == (dtype == "float32")
    assert found.probes["after"].num_texts == 6


def test_the_other_process_takes_what_the_card_loses(folder):
    with start(asked(folder)) as engine:
        free = inside.device_free(engine)
        with Neighbour(0) as neighbour:
            before = free()
            assert neighbour.take(256 * MiB)
            assert before - free() == 256 * MiB
            neighbour.give()
            assert before == free()
            assert not neighbour.take(1024 * GiB)


def test_the_watch_sees_what_is_taken_for_a_moment(folder):
    with start(asked(folder)) as engine, Neighbour(0) as neighbour:
        free = inside.device_free(engine)
        before = free()
        with free_watch(engine) as watch:
            assert neighbour.take(512 * MiB)
            watch._over.wait(0.35)
            neighbour.give()
        figures = watch.figures()
    assert before - figures.lowest_bytes >= 512 * MiB
    assert figures.num_samples >= 3
    assert watch.failure is None


def test_soak_and_bench_as_commands(folder, tmp_path):
    """Without weights: a folder with a config.json will do."""
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((folder / "config.json").read_text())
    card = "--device cuda --random-weights --no-compile --graphs 1,2,4,8 --attention triton --dtype bfloat16"
    limits = "--max-seq-len 400 --max-batch-size 8 --max-num-tokens 256 --kv-tokens 4096"
    from tonnage.cli.app import main

    kept = tmp_path / "soak.json"
    flags = [*card.split(), *limits.split(), "--output", str(kept)]
    assert main(["soak", str(bare), *flags, "--requests", "300"]) == 0
    document = json.loads(kept.read_text())
    assert document["adversities"]["neighbour_takes"] is not None
    assert document["adversities"]["free"]["lowest_bytes"] >= FLOOR_BYTES
    kept = tmp_path / "bench.json"
    flags[-1] = str(kept)
    flags += ["--workload", "single,uniform", "--scale", "1/8", "--requests", "8", "--runs", "2"]
    assert main(["bench", str(bare), *flags]) == 0
    assert len(json.loads(kept.read_text())["series"]) == 2
