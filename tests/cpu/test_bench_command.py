"""``tonnage bench`` and ``tonnage soak`` as a user starts them, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys


def tonnage(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tonnage", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_small_model_is_measured(tiny_llama, tmp_path):
    kept = tmp_path / "bench.json"
    flags = "--workload uniform --requests 6 --scale 1/16 --rate 20 --memory 500MiB --max-seq-len 128 --seed 3"
    done = tonnage("bench", tiny_llama, *flags.split(), "--output", kept)
    assert done.returncode == 0, done.stderr
    assert "6 finished; " in done.stdout
    assert "start-up: " in done.stderr
    document = json.loads(kept.read_text())
    assert document["schema"] == "tonnage.bench/1"
    assert len(document["samples"]) == 6
    for sample in document["samples"]:
        assert sample["finish"] == "length"
        assert len(sample["gaps_us"]) == sample["num_output_tokens"] - 1
        assert sample["arrival_us"] < sample["first_token_us"] <= sample["end_us"]
    memory = document["memory"]
    assert 0 < memory["peak_bytes"] <= memory["planned_bytes"] <= memory["device_bytes"]


def test_a_soak_without_a_model():
    done = tonnage(
        "soak", "--stub", "--requests", 100, "--kv-tokens", 2048, "--max-seq-len", 256, "--seed", 1, "--json"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert document["is_good"]
    assert sum(document["outcomes"].values()) == 100
