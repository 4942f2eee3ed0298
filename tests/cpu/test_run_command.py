"""``tonnage run`` in a process of its own as a user starts it: caps too small, broken input, sampling."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Probes run full steps, which take one core some seconds; here nothing depends on how long a step is.
SMALL_STEPS = ("--max-num-tokens", "64")


def tonnage(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tonnage", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.model
def test_weights_that_do_not_fit_are_refused_with_a_size_that_works():
    asked = ("run", "smollm2", "--prompt", "hello", *SMALL_STEPS)
    refused = tonnage(*asked, "--memory", "300MiB")
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    assert "weights" in refused.stderr
    assert "Need: " in refused.stderr
    size = re.search(r"give it (\d+[MG]iB) of memory", refused.stderr)
    assert size is not None, refused.stderr
    worked = tonnage(*asked, "--memory", size[1], "--max-tokens", "4", "--json")
    assert worked.returncode == 0, worked.stderr


@pytest.mark.model
def test_a_pool_below_one_sequence_names_the_length_that_fits_and_it_does():
    asked = ("run", "smollm2", "--prompt", "hello", "--memory", "900MiB", *SMALL_STEPS)
    refused = tonnage(*asked, "--max-seq-len", "8192")
    assert refused.returncode == 2
    assert "less than one sequence of max_seq_len = 8,192" in refused.stderr
    length = re.search(r"lower max_seq_len to (\d+)", refused.stderr)
    assert length is not None, refused.stderr
    worked = tonnage(*asked, "--max-seq-len", length[1], "--max-tokens", "4", "--json")
    assert worked.returncode == 0, worked.stderr
    assert json.loads(worked.stdout)["plan"]["limits"]["max_seq_len"] == int(length[1])


@pytest.mark.model
def test_a_broken_line_and_a_request_too_long_fail_alone(tmp_path):
    prompts = tmp_path / "in.jsonl"
    prompts.write_text(
        '{"id": "good", "prompt": "Say hello.", "max_tokens": 4}\n'
        "{broken\n"
        + json.dumps({"id": "long", "prompt": "word " * 600})
        + '\n{"id": "never", "prompt": "hi", "max_tokens": 5000}\n'
        '{"id": "last", "prompt": "Say bye.", "max_tokens": 4}\n'
    )
    kept = tmp_path / "out.jsonl"
    done = tonnage("run", "smollm2", "--input", str(prompts), "--output", str(kept), "--memory", "900MiB",
                   "--max-seq-len", "256", *SMALL_STEPS, "--json")  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert re.search(r"line 2", done.stderr)
    assert "too long" in done.stderr
    assert "can never fit" in done.stderr
    assert json.loads(done.stdout)["requests"] | {"waited": 0} == {
        "finished": 2, "failed": 3, "cancelled": 0, "waited": 0, "suspensions": 0,
    }  # fmt: skip


def test_samples_come_again_with_their_seed_and_tell_their_probabilities(tiny_llama, tmp_path):
    """The same line alone and beside others: seeds decide, not what else runs. And cut where a stop string says so."""

    def served(*lines):
        path, kept = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        done = tonnage("run", str(tiny_llama), "--input", str(path), "--output", str(kept), "--memory", "500MiB",
                       "--max-tokens", "12", "--ignore-eos", "--no-chat", "--temperature", "2", "--force")  # fmt: skip
        assert done.returncode == 0, done.stderr
        return {record["id"]: record for record in map(json.loads, kept.read_text().splitlines())}

    line = {"id": "a", "prompt": "hello", "seed": 11}
    asked = {**line, "n": 3, "logprobs": 2, "prompt_logprobs": 0}
    once = served(asked)["a"]
    texts = [sample["text"] for sample in once["samples"]]
    stop = texts[0][len(texts[0]) // 2]
    others = [{"prompt": "other " * n, "top_k": n} for n in range(1, 5)]
    found = served(*others, asked, {**line, "id": "cut", "stop": stop})
    assert texts == [sample["text"] for sample in found["a"]["samples"]]
    assert len(set(texts)) == 3
    assert found["cut"]["text"] == texts[0][: texts[0].index(stop)]
    assert (found["cut"]["finish_reason"], found["cut"]["stop_reason"]) == ("stop", stop)
    assert len(once["prompt_logprobs"]) == once["num_prompt_tokens"] - 1
    for sample in once["samples"]:
        assert sample["finish_reason"] == "length"
        assert len(sample["logprobs"]) == 12
        for at in sample["logprobs"]:
            first, second = (other["logprob"] for other in at["top"])
            assert 0 >= first >= second
            assert at["logprob"] <= first


def test_what_lines_ask_of_the_cache_is_done_and_told(tiny_llama, tmp_path):
    """Behind a hard cap on the process, with a host tier beside it."""
    path, kept = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"id": f"r{i}", "prompt": "begins alike " * 8 + str(i)} for i in range(12)]
    lines += [
        {**lines[0], "id": "alone", "cache": {"salt": "a"}},
        {**lines[0], "id": "again", "cache": {"priority": 80}},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = ["run", str(tiny_llama), "--input", str(path), "--output", str(kept), "--memory", "500MiB", "--max-tokens",
             "8", "--ignore-eos", "--no-chat", "--max-seq-len", "160", "--kv-tokens", "160", "--force"]  # fmt: skip

    def served(*more):
        done = tonnage(*asked, *more)
        assert done.returncode == 0, done.stderr
        return done.stdout, {record["id"]: record for record in map(json.loads, kept.read_text().splitlines())}

    told, found = served("--host-kv-bytes", "4MiB")
    assert "found in the KV cache" in told
    assert (found["r0"]["num_cached_tokens"], found["alone"]["num_cached_tokens"]) == (0, 0)
    assert all(found[f"r{i}"]["num_cached_tokens"] >= 96 for i in range(1, 12))
    assert found["again"]["num_cached_tokens"] >= 96
    none_told, none = served("--no-prefix-caching")
    assert "found in the KV cache" not in none_told
    assert {record["num_cached_tokens"] for record in none.values()} == {0}
    assert {name: record["text"] for name, record in none.items()} == {
        name: record["text"] for name, record in found.items()
    }
