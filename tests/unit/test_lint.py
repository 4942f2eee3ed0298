"""Launches linted by rules that can be reckoned by hand: each finding in its place, each suggestion one that works."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import fake_rules
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import raw_config

from tonnage.hardware import Card, find_card
from tonnage.peers import predict as predict_module  # noqa: F401 - the module is patched by its name below
from tonnage.peers.commands import commands_in
from tonnage.peers.lint import CODES, Finding, Linted, Severity
from tonnage.peers.lint.finding import CODES as LISTED
from tonnage.peers.version import Version
from tonnage.planner.linting import LintAsked, lint
from tonnage.report.lint_json import github_text, lint_text
from tonnage.units import GiB, format_bytes

PAGE = (Path(__file__).parents[2] / "docs/lint.md").read_text()
H100, T4, A100 = find_card("H100"), find_card("T4"), find_card("A100-80GB")


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = dict.fromkeys(("vllm", "sglang", "trtllm"), "fake_rules:predict")
    monkeypatch.setattr("tonnage.peers.predict.RULES", rules)


@pytest.fixture(name="model")
def model_fixture(tmp_path: Path):
    def write(key: str) -> str:
        folder = tmp_path / key
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**raw_config(key), "max_position_embeddings": 131072}))
        return str(folder)

    return write


def linted(
    text: str, model: str | None = None, *, card: Card | None = H100, name: str = "a.sh", shapes=None, **asked
) -> list[Linted]:
    models = {**({"": model} if model else {}), **(shapes or {})}
    how = LintAsked(engine=("vllm", Version.read("0.19.0")), card=card, models=models, **asked)
    return lint(commands_in(text, name=name), file=name, asked=how)


def codes(text: str, model: str | None = None, **how) -> dict[str, Finding]:
    (found,) = linted(text, model, **how)
    return {finding.code: finding for finding in found.findings}


def test_a_launch_without_faults_is_predicted_and_left_alone(model) -> None:
    (found,) = linted("vllm serve m --max-num-seqs 64 --kv-cache-dtype fp8", model("llama-3.1-8b"))
    assert found.start is not None
    assert found.start.launch.settings == {"max_num_seqs": 64}
    assert found.start.launch.kv_dtype == "float8_e4m3fn"
    assert (found.findings, found.worst) == ((), None)


def test_a_length_that_is_to_be_fitted_always_fits(model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonnage.peers.predict.RULES", {"vllm": "tonnage.peers.vllm.start:predict"})
    command = "vllm serve m --gpu-memory-utilization 0.4"
    assert "TN001" in codes(command, model("llama-3.1-8b"))  # at the model's own length
    for text in ("auto", "-1"):
        (found,) = linted(f"{command} --max-model-len {text}", model("llama-3.1-8b"))
        assert found.start is not None
        assert found.start.starts
        assert 0 < found.start.max_model_len < 131_072
        assert "TN001" not in {finding.code for finding in found.findings}


def test_the_default_number_of_sequences_has_its_price(model) -> None:
    finding = codes("vllm serve m", model("llama-3.1-8b"))["TN010"]
    assert format_bytes(40 * (1024 - 256) * 128_256) in finding.what
    assert finding.severity is Severity.WARNING
    assert finding.change == ("--max-num-seqs 256",)
    assert "TN010" not in codes("vllm serve m --max-num-seqs 1024", model("llama-3.1-8b"))


def test_tokens_that_ranks_divide_are_told_to_be_unknown(model) -> None:
    command = "python -m sglang.launch_server --model m --tp-size 8 --max-running-requests 64"
    assert "TN035" in codes(command, model("deepseek-v3"), card=find_card("H200"))
    found = codes(f"{command} --dcp-size 8", model("deepseek-v3"), card=find_card("H200"))
    assert "TN035" not in found
    assert "up to 8 times" in found["TN008"].what


def test_every_suggestion_starts(model) -> None:
    command = "vllm serve m --max-model-len 400000"
    finding = codes(command, model("llama-3.1-8b"), card=find_card("L40S"))["TN001"]
    assert finding.severity is Severity.ERROR
    assert finding.change
    for change in finding.change:
        again = codes(f"{command} {change}", model("llama-3.1-8b"), card=find_card("L40S"))
        assert "TN001" not in again, change
    longest = int(next(each for each in finding.change if "max-model-len" in each).split()[1])
    worse = f"vllm serve m --max-model-len {longest + 256}"
    assert "TN001" in codes(worse, model("llama-3.1-8b"), card=find_card("L40S"))


def test_what_nothing_can_mend_is_given_no_change(model) -> None:
    finding = codes("vllm serve m --max-model-len 1024", model("deepseek-v3"), card=T4)["TN001"]
    assert finding.change == ()


def test_ranks_that_do_not_divide(model) -> None:
    finding = codes("vllm serve m -tp 3", model("llama-3.1-8b"))["TN030"]
    assert "32 query heads" in finding.what
    assert finding.change == ("--tensor-parallel-size 2", "--tensor-parallel-size 4")


def test_heads_that_are_held_twice(model) -> None:
    finding = codes("vllm serve m -tp 8 --max-num-seqs 64", model("qwen3-30b-a3b"))["TN031"]
    assert "4 KV heads on 8 ranks: each is held 2 times" in finding.what
    assert finding.change == ("--tensor-parallel-size 4 --data-parallel-size 2",)
    assert "TN031" not in codes("vllm serve m -tp 4 --max-num-seqs 64", model("qwen3-30b-a3b"))


def test_latents_that_all_ranks_hold(model) -> None:
    found = codes("sglang serve --model-path m --tp 4", model("deepseek-v2-lite"))
    assert "held by all 4 ranks" in found["TN035"].what
    assert found["TN035"].change == ("--dp-size 4 --enable-dp-attention",)
    command = "sglang serve --model-path m --tp 4 --dp-size 4 --enable-dp-attention"
    assert "TN035" not in codes(command, model("deepseek-v2-lite"))


def test_gpus_against_ranks(model) -> None:
    few = codes("docker run --gpus 2 vllm/vllm-openai:v0.19.0 m -tp 4", model("llama-3.1-8b"))
    assert (few["TN032"].severity, few["TN032"].change) == (Severity.ERROR, ("4 GPUs",))
    assert few["TN034"].severity is Severity.WARNING
    many = codes("docker run --gpus 4 --ipc=host vllm/vllm-openai:v0.19.0 m -tp 2", model("llama-3.1-8b"))
    assert "TN033" in many
    assert "TN034" not in many
    assert "TN032" not in codes("vllm serve m -tp 4 --nnodes 2", model("llama-3.1-8b"), num_gpus=2)
    assert "TN032" in codes("CUDA_VISIBLE_DEVICES=0 vllm serve m -tp 2", model("llama-3.1-8b"))


def test_flags_that_a_release_does_not_read(model) -> None:
    found = codes("vllm serve m --swap-space 4 --max-num-seqz 8 --port 1", model("llama-3.1-8b"))
    assert found["TN005"].severity is Severity.ERROR
    assert "--swap-space" in found["TN005"].what
    assert found["TN004"].change == ("--max-num-seqs",)
    assert "0.16.0" in found["TN005"].why


def test_values_and_variables(model) -> None:
    found = codes(
        "vllm serve m --gpu-memory-utilization 2 --max-num-seqs $N --kv-cache-dtype fp9", model("llama-3.1-8b")
    )
    assert found["TN003"].severity is Severity.ERROR
    assert found["TN006"].change == ("--set N=VALUE",)
    assert "TN003" in codes("vllm serve m --dtype int7", model("llama-3.1-8b"))


def test_what_keeps_a_launch_from_being_predicted(model) -> None:
    assert "no such folder" in codes("vllm serve ./nowhere/at/all")["TN008"].what
    assert "nothing names the GPU" in codes("vllm serve m", model("llama-3.1-8b"), card=None)["TN008"].what
    assert "gives M a value" in codes("vllm serve $M")["TN008"].what
    assert "names no model" in codes("vllm serve", model("llama-3.1-8b"))["TN008"].what


def test_a_release_that_nothing_names(model) -> None:
    found = codes("docker run lmsysorg/sglang:latest sglang serve --model-path m", model("llama-3.1-8b"))
    assert "lmsysorg/sglang:latest" in found["TN007"].why
    assert "TN007" not in codes("vllm serve m", model("llama-3.1-8b"))


def test_users_that_do_not_fit(model) -> None:
    finding = codes("vllm serve m --max-num-seqs 64", model("llama-3.1-8b"), users=1000)["TN012"]
    assert (finding.severity, "are wanted" in finding.what) == (Severity.ERROR, True)
    assert finding.change
    for change in finding.change:
        assert "TN012" not in codes(f"vllm serve m --max-num-seqs 64 {change}", model("llama-3.1-8b"), users=1000)
    limit = codes("vllm serve m --max-num-seqs 2", model("llama-3.1-8b"), users=5)["TN012"]
    assert limit.change == ("--max-num-seqs 5",)
    assert "TN012" not in codes("vllm serve m --max-num-seqs 64", model("llama-3.1-8b"), users=5)


def test_nothing_left_after_start_up(model) -> None:
    finding = codes("vllm serve m --gpu-memory-utilization 1 --max-num-seqs 64", model("llama-3.1-8b"))["TN020"]
    assert finding.severity is Severity.ERROR
    assert "graphs comes first" in finding.why
    assert finding.change == ("--gpu-memory-utilization 0.99",)
    again = "vllm serve m --gpu-memory-utilization 0.99 --max-num-seqs 64"
    assert "TN020" not in codes(again, model("llama-3.1-8b"))


def test_graphs_that_are_switched_off(model) -> None:
    finding = codes("vllm serve m --enforce-eager --max-num-seqs 64", model("llama-3.1-8b"))["TN041"]
    assert "512 MiB" in finding.why
    assert finding.change == ("leave --enforce-eager out",)


def test_a_cache_in_eight_bits_only_where_the_card_reads_it(model) -> None:
    assert codes("vllm serve m", model("llama-3.1-8b"))["TN040"].severity is Severity.NOTE
    assert "TN040" not in codes("vllm serve m", model("llama-3.1-8b"), card=A100)


COMPOSE = """
services:
  a:
    image: vllm/vllm-openai:v0.19.0
    command: m --gpu-memory-utilization 0.7
    environment: [CUDA_VISIBLE_DEVICES=0]
  b:
    image: vllm/vllm-openai:v0.19.0
    command: m --gpu-memory-utilization SHARE
    environment: [CUDA_VISIBLE_DEVICES=NUMBER]
"""


@pytest.mark.parametrize(("share", "device", "is_told"), [("0.5", "0", True), ("0.3", "0", False), ("0.5", "1", False)])
def test_two_services_on_one_gpu(model, share: str, device: str, is_told: bool) -> None:
    text = COMPOSE.replace("SHARE", share).replace("NUMBER", device)
    first, second = linted(text, model("llama-3.1-8b"), name="compose.yaml")
    assert "TN021" not in {finding.code for finding in first.findings}
    told = [finding for finding in second.findings if finding.code == "TN021"]
    assert bool(told) is is_told
    if told:
        assert told[0].change == ("--gpu-memory-utilization 0.28",)


def test_other_processes_on_the_gpu(model) -> None:
    command = "vllm serve m --max-num-seqs 64 --gpu-memory-utilization 0.9"
    finding = codes(command, model("llama-3.1-8b"), in_use_bytes=20 * GiB)["TN022"]
    (change,) = finding.change
    assert "TN022" not in codes(f"{command} {change}", model("llama-3.1-8b"), in_use_bytes=20 * GiB)
    (smaller,) = linted("sglang serve --model-path m", model("llama-3.1-8b"), in_use_bytes=20 * GiB)
    assert smaller.start is not None
    assert smaller.start.launch.card.total_bytes == H100.total_bytes - 20 * GiB


def test_a_node_selector_names_the_card(model) -> None:
    manifest = """
kind: Pod
apiVersion: v1
spec:
  nodeSelector: {nvidia.com/gpu.product: NVIDIA-L40S-SHARED}
  containers: [{name: a, image: "vllm/vllm-openai:v0.19.0", args: [m, --max-num-seqs, "8"]}]
"""
    (found,) = linted(manifest, model("llama-3.1-8b"), card=None, name="pod.yaml")
    assert found.card == "L40S"


def test_a_pipeline_is_judged_by_its_poorest_stage(model) -> None:
    fake_rules.CALLED.clear()
    (found,) = linted("vllm serve m -pp 3 --max-num-seqs 64 --kv-cache-dtype fp8", model("llama-3.1-8b"))
    assert found.start is not None
    asked = {launch.rank.index: fake_rules.predict(launch) for launch in list(fake_rules.CALLED) if launch.rank.pp == 3}
    assert sorted(asked) == [0, 1, 2]
    assert found.start.pool.bytes == min(start.pool.bytes for start in asked.values())
    assert len({start.pool.bytes for start in asked.values()}) > 1


def test_json_and_annotations(model) -> None:
    found = linted("\n\nvllm serve m --swap-space 4,%", model("llama-3.1-8b"))
    document = json.loads(lint_text(found))
    assert document["schema"] == "tonnage.lint/1"
    assert document["counts"]["error"] == sum(f.severity is Severity.ERROR for f in found[0].findings)
    assert {term["name"] for term in document["launches"][0]["start"]["terms"]} >= {"weights", "pool"}
    rows = github_text(found).splitlines()
    assert len(rows) == len(found[0].findings)
    assert rows[0].startswith("::error file=a.sh,line=3,title=TN00")
    assert all("%" not in row.replace("%25", "") for row in rows)


def test_a_length_that_users_fit_in(model) -> None:
    finding = codes("vllm serve m --max-num-seqs 64 --max-model-len 131072", model("llama-3.1-8b"), users=20)["TN012"]
    (shorter,) = [change for change in finding.change if "max-model-len" in change]
    found = codes(f"vllm serve m --max-num-seqs 64 {shorter}", model("llama-3.1-8b"), users=20)
    assert "TN012" not in found
    longer = f"--max-model-len {int(shorter.split()[1]) + 256}"
    assert "TN012" in codes(f"vllm serve m --max-num-seqs 64 {longer}", model("llama-3.1-8b"), users=20)


def test_every_code_is_on_the_page() -> None:
    assert CODES is LISTED
    for code, about in CODES.items():
        assert f"| {code} | {about} |" in PAGE


_FLAGS = st.lists(
    st.sampled_from(
        ["--max-num-seqs 1", "--max-model-len 100", "--max-model-len 1M", "-tp 2", "-pp 2", "--data-parallel-size 3",
         "--kv-cache-dtype fp8", "--gpu-memory-utilization 0.01", "--gpu-memory-utilization 1", "--enforce-eager",
         "--enable-expert-parallel", "--max-num-batched-tokens 1", "--dtype half", "-tp 0"]
    ), max_size=5,
)  # fmt: skip


@settings(max_examples=25)
@given(flags=_FLAGS, card=st.sampled_from([H100, T4]))
def test_any_flags_are_judged_and_no_error_is_suggested(flags: list[str], card: Card) -> None:
    (found,) = linted("vllm serve smollm2 " + " ".join(flags), "smollm2", card=card)
    for finding in found.findings:
        assert finding.code in CODES
        if finding.code == "TN001":
            for change in finding.change:
                again = linted(f"vllm serve smollm2 {' '.join(flags)} {change}", "smollm2", card=card)[0]
                assert "TN001" not in {each.code for each in again.findings}


def test_the_fake_rules_are_those_that_are_asked(model) -> None:
    fake_rules.CALLED.clear()
    (found,) = linted("vllm serve m --gpu-memory-utilization 0.5 --max-num-seqs 64", model("llama-3.1-8b"))
    assert found.start is not None
    assert fake_rules.CALLED[0].get("gpu_memory_utilization") == Fraction(1, 2)
    assert fake_rules.CALLED[0].version == Version.read("0.19.0")


def test_weights_that_are_not_counted_as_they_will_be(model) -> None:
    command = (
        """vllm serve m --quantization torchao --speculative-config '{"model": "d", "num_speculative_tokens": 3}'"""
    )
    found = codes(command, model("llama-3.1-8b"))
    assert "draft model d" in found["TN043"].what
    assert "--quantization torchao" in found["TN044"].what
    assert not {"TN043", "TN044"} & codes("vllm serve m", model("llama-3.1-8b")).keys()


def test_plain_weights_are_packed_as_they_are_loaded(model) -> None:
    """8.46 GiB: 6.98e9 elements of the layers' matrices in a byte each, embeddings and head in two."""
    known = model("llama-3.1-8b")
    (plain,) = linted("vllm serve m", known)
    (packed,) = linted("vllm serve m --quantization fp8", known)
    assert plain.start is not None
    assert packed.start is not None
    assert plain.start.launch.weights.bytes == pytest.approx(14.96 * GiB, rel=1e-3)
    assert packed.start.launch.weights.bytes == pytest.approx(8.46 * GiB, rel=1e-3)
    assert "TN044" not in {finding.code for finding in packed.findings}


def test_flags_that_a_comment_cuts_off_are_an_error(model) -> None:
    finding = codes("vllm serve m \\\n  # none\n  --max-num-seqs 8\n", model("llama-3.1-8b"))["TN013"]
    assert "--max-num-seqs" in finding.what
    assert "TN013" not in codes("vllm serve m \\\n  --max-num-seqs 8\n# none\nls -l", model("llama-3.1-8b"))


def test_variables_among_the_flags_are_told(model) -> None:
    finding = codes("vllm serve m $EXTRA", model("llama-3.1-8b"))["TN006"]
    assert (finding.what[:6], finding.change) == ("$EXTRA", ("--set EXTRA=VALUE",))
    assert "TN006" not in codes('vllm serve m "$@"', model("llama-3.1-8b"))


def test_one_model_stands_in_where_nothing_gives_the_name(model) -> None:
    assert linted("vllm serve $HOME/m", model("llama-3.1-8b"))[0].start is not None
    assert codes("vllm serve $HOME/m")["TN008"].change == ("add --set HOME=VALUE, or --model MODEL",)
    assert codes("vllm serve $(ls | head -1)")["TN008"].change == ("add --model MODEL",)


def test_a_release_beyond_the_rules_is_told(model) -> None:
    run = "docker run --gpus 1 --ipc host vllm/vllm-openai:v{} --model m"
    assert "newer than" in codes(run.format("7.1.0"), model("llama-3.1-8b"))["TN007"].what
    assert "TN007" not in codes(run.format("0.19.0"), model("llama-3.1-8b"))


@pytest.mark.parametrize("text", ["90%", "9/10", "90", "0", "nan", "-1"])
def test_a_share_is_read_as_its_engine_reads_it(model, text: str) -> None:
    finding = codes(f"vllm serve m --gpu-memory-utilization {text}", model("llama-3.1-8b"))["TN003"]
    assert "%" not in finding.change[0]
    assert "TN003" not in codes("vllm serve m --gpu-memory-utilization 9e-1", model("llama-3.1-8b"))


def test_ranks_on_other_hosts_are_no_error(model) -> None:
    path = model("llama-3.1-70b")
    assert "TN032" in codes("vllm serve m -tp 8", path, num_gpus=4)
    assert "TN032" not in codes("vllm serve m -tp 8 --distributed-executor-backend ray", path, num_gpus=4)


def test_a_flag_that_is_gone_is_a_warning_where_the_release_is_a_guess() -> None:
    asked = LintAsked(engine=None, card=H100, models={})
    (found,) = lint(commands_in("vllm serve m --swap-space 4"), file="a.sh", asked=asked)
    assert {each.code: each.severity for each in found.findings}["TN005"] is Severity.WARNING


@pytest.mark.parametrize(
    ("flags", "name", "is_told"),
    [("-dp 2 -tp 4", "qwen3-30b-a3b", True), ("-dp 2", "qwen3-30b-a3b", False), ("-tp 4", "qwen3-30b-a3b", False),
     ("-dp 2 -tp 4", "llama-3.1-8b", False)],
)  # fmt: skip
def test_experts_that_groups_share_are_told_to_be_counted_whole(model, flags: str, name: str, is_told: bool) -> None:
    assert ("TN045" in codes(f"vllm serve m {flags}", model(name))) is is_told
