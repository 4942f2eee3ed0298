"""Launches read from what people write: each spelling comes to the same command, and nothing comes to a traceback."""

from __future__ import annotations

import shlex
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tonnage.errors import InputError, UserError
from tonnage.peers.commands import Command, commands_in, settings_of
from tonnage.peers.commands import documents as documents_module
from tonnage.peers.commands.command import Flag
from tonnage.peers.commands.docker import DEFAULT_SHM_BYTES, size_of
from tonnage.peers.commands.documents import documents
from tonnage.peers.commands.images import engine_of_image, version_of_image
from tonnage.peers.commands.kinds import KINDS, Kind
from tonnage.peers.commands.known import standing
from tonnage.peers.commands.kubernetes import size_of as kubernetes_size
from tonnage.peers.commands.meaning import draft_model, drafts_inside, meaning
from tonnage.peers.commands.shell import simple_commands
from tonnage.peers.commands.values import value_of
from tonnage.peers.own_settings import OWN
from tonnage.peers.version import Version
from tonnage.units import GiB, MiB


def one(text: str, **how: object) -> Command:
    found = commands_in(text, **how)  # type: ignore[arg-type]
    assert len(found) == 1
    return found[0]


#: command -> engine, model, settings
COMMANDS: list[tuple[str, str, str, dict[str, object]]] = [
    ("vllm serve m -tp 2 --max-model-len 8k", "vllm", "m", {"tensor_parallel_size": 2, "max_model_len": 8000}),
    ("vllm serve m --max_model_len=8K", "vllm", "m", {"max_model_len": 8192}),
    ("vllm serve --max-num-seqs 4 m", "vllm", "m", {"max_num_seqs": 4}),
    ("vllm serve --trust-remote-code m", "vllm", "m", {"trust_remote_code": True}),
    ("vllm serve m --no-enable-prefix-caching --enforce-eager", "vllm", "m",
     {"enable_prefix_caching": False, "enforce_eager": True}),
    ("vllm serve m --enable-chunked-prefill False", "vllm", "m", {"enable_chunked_prefill": False}),
    ("vllm serve m --gpu-memory-utilization .85", "vllm", "m", {"gpu_memory_utilization": Fraction(17, 20)}),
    ("vllm serve m --kv-cache-memory-bytes 25G", "vllm", "m", {"kv_cache_memory_bytes": 25 * GiB}),
    ("vllm serve m -O3", "vllm", "m", {"optimization_level": 3}),
    ("vllm serve m --compilation-config.cudagraph_mode NONE", "vllm", "m",
     {"compilation_config": {"cudagraph_mode": "NONE"}}),
    ("""vllm serve m --speculative-config '{"method": "mtp", "num_speculative_tokens": 2}'""", "vllm", "m",
     {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}),
    ("vllm serve m --max-model-len auto", "vllm", "m", {"max_model_len": -1}),
    ("vllm serve m --tensor-parallel 2", "vllm", "m", {"tensor_parallel_size": 2}),
    ("python3 -m vllm.entrypoints.openai.api_server --model m --max-num-seqs 8", "vllm", "m", {"max_num_seqs": 8}),
    ("uvx --from vllm==0.19.0 vllm serve m", "vllm", "m", {}),
    ("python -m sglang.launch_server --model-path m --tp 4 --mem-fraction-static 0.85", "sglang", "m",
     {"tp_size": 4, "mem_fraction_static": Fraction(17, 20)}),
    ("sglang serve --model m --cuda-graph-bs 1 2 4 --disable-radix-cache", "sglang", "m",
     {"cuda_graph_bs": (1, 2, 4), "disable_radix_cache": True}),
    ("sglang serve --model-path m --chunked-prefill-size -1", "sglang", "m", {"chunked_prefill_size": -1}),
    ("trtllm-serve m --tp_size 2 --kv_cache_free_gpu_memory_fraction 0.8", "trtllm", "m",
     {"tp_size": 2, "free_gpu_memory_fraction": Fraction(4, 5)}),
    ("trtllm-serve serve m --max_batch_size 8", "trtllm", "m", {"max_batch_size": 8}),
    ("bash -c 'exec vllm serve m --max-num-seqs 2'", "vllm", "m", {"max_num_seqs": 2}),
    ("sudo docker run -it --gpus all vllm/vllm-openai:v0.11.0 --model m -pp 2", "vllm", "m",
     {"pipeline_parallel_size": 2}),
    ("docker run --rm lmsysorg/sglang:latest python3 -m sglang.launch_server --model-path m", "sglang", "m", {}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "engine", "model", "wanted"), COMMANDS, ids=[row[0][:50] for row in COMMANDS])
def test_each_spelling_is_read(text: str, engine: str, model: str, wanted: dict[str, object]) -> None:
    found = one(text)
    values, wrong = settings_of(found)
    assert (found.engine, found.model, values, wrong) == (engine, model, wanted, [])


@pytest.mark.parametrize("text", ["8k", "8K", "1,024", "64.0", "0x10", "-1", "9" * 50])
@pytest.mark.parametrize("command", ["vllm serve m --max-num-seqs", "sglang serve --model-path m --page-size",
                                     "trtllm-serve m --max_batch_size"])  # fmt: skip
def test_a_count_is_in_digits_as_the_engines_read_it(command: str, text: str) -> None:
    """vLLM reads suffixes of lengths, of tokens of a step and of bytes alone."""
    values, wrong = settings_of(one(f"{command}={text}"))
    assert (values, len(wrong)) == ({}, 1)
    values, wrong = settings_of(one(f"{command}=1_024"))
    assert (list(values.values()), wrong) == ([1024], [])


@pytest.mark.parametrize("engine", sorted(KINDS))
def test_a_flag_is_read_alike_on_a_command_line_and_behind_like(engine: str) -> None:
    """Two tables, for one is of what people type to us: what both read comes to the same value."""
    apart = (Kind.WORD, Kind.JSON)
    common = [knob for knob in OWN[engine] if KINDS[engine].get(knob.name, Kind.WORD) not in apart]
    assert len(common) > 5
    for knob in common:
        found = []
        for text in ("1", "64", "4096", "0.5", "1/2", "true", "false", "1,2,4", "-1", "auto", "4G"):
            flag = Flag(name=knob.name, written=f"--{knob.name}", text=text)
            try:
                found.append((value_of(engine, flag, KINDS[engine][knob.name]), knob.read(text, knob.name)))
            except UserError:
                continue
        assert found, knob.name
        assert all(one == other for one, other in found), (knob.name, found)


def test_a_script_with_all_its_trimmings() -> None:
    script = (
        "#!/bin/bash\nset -e\nexport MODEL=org/m   # which one\nTP=2\n"
        'CUDA_VISIBLE_DEVICES=0,1 vllm serve "$MODEL" \\\n  --tensor-parallel-size ${TP} --seed $SEED '
        "--max-num-seqs ${SEQS:-64} > out.log 2>&1 &\nsleep 1; echo done | tee x\n"
    )
    found = one(script)
    assert (found.where, found.model) == ("line 5", "org/m")
    assert settings_of(found)[0] == {"tensor_parallel_size": 2, "max_num_seqs": 64}
    assert found.place.variables["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert [(flag.name, flag.unknown) for flag in found.flags if flag.unknown] == [("seed", ("SEED",))]
    assert one(script, variables={"SEED": "7"}).text("seed") == "7"


def test_a_variable_of_the_outer_shell_stays_unknown_inside() -> None:
    found = one('docker run lmsysorg/sglang:v0.5.9 bash -c "sglang serve --model-path $M --tp $(nproc)"')
    assert (found.unknown, found.version) == (("M",), "0.5.9")
    assert found.flags[-1].unknown == ("$(...)",)


def test_docker_gives_devices_memory_and_a_release() -> None:
    found = one(
        "docker run --gpus '\"device=1,3\"' --shm-size=16g -e A=b --env-file x vllm/vllm-openai:v0.19.0-cu130 --model m"
    )
    place = found.place
    assert (place.devices, place.num_gpus, place.shm_bytes) == (("1", "3"), 2, 16 * GiB)
    assert (dict(place.variables), found.version) == ({"A": "b"}, "0.19.0")
    assert one("docker run vllm/vllm-openai:v0.19.0 --model m").place.shm_bytes == DEFAULT_SHM_BYTES
    assert one("docker run --ipc host vllm/vllm-openai:v0.19.0 m").place.is_host_shm


COMPOSE = """
services:
  db: {image: postgres}
  llm:
    image: vllm/vllm-openai:${TAG:-v0.11.0}
    command: >
      --model org/m --tensor-parallel-size 2
      --gpu-memory-utilization 0.5
    environment: [HF_HOME=/hf, CUDA_VISIBLE_DEVICES=0]
    shm_size: 2gb
    deploy: {resources: {reservations: {devices: [{driver: nvidia, count: 1, capabilities: [gpu]}]}}}
  other:
    image: lmsysorg/sglang:v0.5.9
    entrypoint: python3 -m sglang.launch_server
    command: ["--model-path", "org/n", "--tp", "2"]
    ipc: host
    deploy: {resources: {reservations: {devices: [{device_ids: ["2", "3"], capabilities: [gpu]}]}}}
"""
MANIFEST = """
apiVersion: v1
kind: ConfigMap
metadata: {name: options}
data: {extra.yaml: "kv_cache_config: {free_gpu_memory_fraction: 0.7, dtype: fp8}\\ncuda_graph_config: null\\n"}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: llm}
spec:
  template:
    spec:
      nodeSelector: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}
      volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 8Gi}}]
      containers:
      - name: main
        image: nvcr.io/nvidia/tensorrt-llm/release:1.2.1
        command: ["/bin/sh", "-c"]
        args: ["trtllm-serve $(MODEL) --tp_size 4 --config /etc/options/extra.yaml"]
        env: [{name: MODEL, value: org/m}]
        resources: {limits: {nvidia.com/gpu: "4"}}
        volumeMounts: [{name: shm, mountPath: /dev/shm}]
"""


def test_a_compose_file() -> None:
    first, second = commands_in(COMPOSE, name="compose.yaml")
    assert (first.engine, first.model, first.version, first.where) == ("vllm", "org/m", "0.11.0", "service llm")
    assert settings_of(first)[0] == {"tensor_parallel_size": 2, "gpu_memory_utilization": Fraction(1, 2)}
    assert (first.place.num_gpus, first.place.shm_bytes) == (1, 2 * GiB)
    assert (second.engine, second.model, second.version) == ("sglang", "org/n", "0.5.9")
    assert (second.place.devices, second.place.is_host_shm) == (("2", "3"), True)
    assert commands_in(COMPOSE, name="-", variables={"TAG": "v0.12.0"})[0].version == "0.12.0"


def test_a_manifest_with_its_config_map() -> None:
    found = one(MANIFEST, name="llm.yaml")
    assert (found.engine, found.model, found.version) == ("trtllm", "org/m", "1.2.1")
    assert found.where == "Deployment llm, container main"
    assert settings_of(found)[0] == {
        "tp_size": 4, "free_gpu_memory_fraction": Fraction(7, 10), "kv_cache_dtype": "fp8", "cuda_graph_config": "null",
    }  # fmt: skip
    place = found.place
    assert (place.num_gpus, place.gpu_name, place.shm_bytes) == (4, "NVIDIA-H100-80GB-HBM3", 8 * GiB)
    assert found.files == ("/etc/options/extra.yaml",)


def test_an_options_file_beside_the_script_and_inside_it(tmp_path: Path) -> None:
    (tmp_path / "v.yaml").write_text("max-model-len: 4096\nenforce-eager: true\nmodel: org/m\n")
    found = one("vllm serve --config v.yaml --max-model-len 1K", folder=tmp_path)
    assert (found.model, settings_of(found)[0]) == ("org/m", {"max_model_len": 1024, "enforce_eager": True})
    inside = "cat > /tmp/e.yml <<EOF\nmax_batch_size: 4\nEOF\ntrtllm-serve org/m --extra_llm_api_options /tmp/e.yml\n"
    assert settings_of(one(inside))[0] == {"max_batch_size": 4}
    assert one("vllm serve m --config nowhere.yaml", folder=tmp_path).files == ()


MEANINGS: list[tuple[str, dict[str, object]]] = [
    ("vllm serve m --compilation-config.cudagraph_mode NONE", {"cudagraph_mode": "NONE", "enforce_eager": True}),
    ("vllm serve m -O0", {"optimization_level": 0, "enforce_eager": True}),
    ("""vllm serve m --compilation-config '{"cudagraph_capture_sizes": [1, 2], "level": 3}'""",
     {"cudagraph_capture_sizes": (1, 2)}),
    ("""vllm serve m --speculative-config '{"method": "mtp", "num_speculative_tokens": 2}'""",
     {"speculative_method": "mtp", "num_speculative_tokens": 2}),
    ("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0 VLLM_USE_V1=0 vllm serve m --dtype half",
     {"cudagraph_mem_estimate_enabled": False, "engine_core": "V0"}),
    ("sglang serve --model-path m --cuda-graph-max-bs-decode 8 --kv-cache-dtype fp8_e5m2", {"cuda_graph_max_bs": 8}),
    ("sglang serve --model-path m --cuda-graph-backend-decode disabled",
     {"cuda_graph_backend_decode": "disabled", "disable_cuda_graph": True}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "wanted"), MEANINGS, ids=[row[0][:60] for row in MEANINGS])
def test_what_settings_come_to(text: str, wanted: dict[str, object]) -> None:
    found = one(text)
    assert meaning(found.engine, settings_of(found)[0], found.place.variables) == wanted


def test_drafts_beside_and_inside() -> None:
    def read(text: str) -> tuple[str | None, bool]:
        values = settings_of(one(text))[0]
        engine = text.split()[0]
        return draft_model(engine, values), drafts_inside(engine, values)

    assert read("""vllm serve m --speculative-config '{"model": "d", "num_speculative_tokens": 2}'""") == ("d", False)
    assert read("""vllm serve m --speculative-config '{"method": "mtp"}'""") == (None, True)
    assert read("sglang serve --model-path m --speculative-algorithm EAGLE") == (None, True)
    assert read("vllm serve m") == (None, False)


def test_values_that_the_engine_refuses_are_named() -> None:
    values, wrong = settings_of(one("vllm serve m --gpu-memory-utilization 1.5 --max-num-seqs x --max-model-len 1k"))
    assert values == {"max_model_len": 1000}
    assert [fault.knob for fault in wrong] == ["--gpu-memory-utilization", "--max-num-seqs"]


@pytest.mark.parametrize(
    ("image", "engine", "version"),
    [
        ("vllm/vllm-openai:v0.19.0", "vllm", "0.19.0"),
        ("vllm/vllm-openai:latest", "vllm", None),
        ("registry.local:5000/vllm/vllm-openai:v0.9.2-cu128", "vllm", "0.9.2"),
        ("vllm/vllm-openai@sha256:0123", "vllm", None),
        ("lmsysorg/sglang:v0.5.9-cu129-amd64", "sglang", "0.5.9"),
        ("nvcr.io/nvidia/tensorrt-llm/release:1.2.1", "trtllm", "1.2.1"),
        ("postgres:16.1", None, None),
        (None, None, None),
    ],
)
def test_images(image: str | None, engine: str | None, version: str | None) -> None:
    assert (engine_of_image(image), version_of_image(image)) == (engine, version)


@pytest.mark.parametrize(
    ("engine", "flag", "version", "is_read"),
    [
        ("vllm", "swap_space", "0.16.0", True),
        ("vllm", "swap_space", "0.19.0", False),
        ("vllm", "swap_space", "0.17", None),  # between two releases that disagree
        ("vllm", "kv_offloading_size", "0.33.0", True),
        ("vllm", "kv_offloading_size", "0.8.5", False),
        ("vllm", "gpu_memory_utilization", "0.2x", True),
        ("vllm", "port", "0.33.0", True),
        ("vllm", "no_such_flag", "0.19.0", False),
        ("sglang", "cuda_graph_max_bs", "0.5.9", True),
        ("sglang", "cuda_graph_max_bs", "0.5.23", False),
        ("trtllm", "max_batch_size", "1.2", True),
        ("trtllm", "max_batch_sizes", "1.2", False),
    ],
)
def test_which_release_reads_a_flag(engine: str, flag: str, version: str, is_read: bool | None) -> None:
    assert standing(engine, flag, Version.read(version)).is_read is is_read


def test_sizes() -> None:
    assert (size_of("16g"), size_of("2gb"), size_of("64m"), size_of("1048576")) == (16 * GiB, 2 * GiB, 64 * MiB, MiB)
    assert (size_of("much"), kubernetes_size("8Gi"), kubernetes_size("1G")) == (None, 8 * GiB, 10**9)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("echo hello", "starts no engine"),
        ("vllm serve 'm", "a quote"),
        ("services: {a: {command: '", "is not YAML"),
        ("kind: {{ .Values.kind }}\n{{- end }}\nx: ]", "helm template"),
        ("services: &a [*a]", "refers to itself"),
        ("kind: !!python/object/apply:os.system ['true']", "is not YAML"),
        ("services: 2001-99-99", "cannot be read"),
        ("x: " + "[" * 700, "nested too deep"),
        ("x: 1\n" * 500_000, "too many"),
    ],
)
def test_what_cannot_be_used_is_one_paragraph(text: str, told: str) -> None:
    with pytest.raises(InputError, match=told) as raised:
        commands_in(text, name="a.yaml" if ":" in text else "a.sh")
    assert "\n" not in str(raised.value)


def test_an_alias_bomb_is_refused_before_anything_walks_it() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    with pytest.raises(InputError, match="once its aliases are followed"):
        documents("\n".join(lines), name="bomb.yaml")


def test_without_pyyaml_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name == "yaml":
            raise ModuleNotFoundError(name=name)
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"tonnage\[yaml\]"):
        documents_module.documents("a: 1", name="a.yaml")
    assert one("vllm serve m").model == "m"


_PLAIN = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12)


def _value(kind: Kind) -> st.SearchStrategy[tuple[str, object]]:
    if kind in (Kind.COUNT, Kind.LENGTH):
        return st.integers(1, 10**9).map(lambda n: (str(n), n))
    if kind is Kind.SHARE:
        return st.integers(1, 100).map(lambda n: (f"{n / 100:.2f}", Fraction(n, 100)))
    if kind is Kind.SWITCH:
        return st.just(("", True))
    return st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True).map(lambda word: (word, word))


@st.composite
def launches(draw: st.DrawFn) -> tuple[str, str, list[str], dict[str, object]]:
    engine = draw(st.sampled_from(["vllm", "sglang", "trtllm"]))
    kinds = {name: kind for name, kind in KINDS[engine].items()
             if kind in (Kind.COUNT, Kind.LENGTH, Kind.SHARE, Kind.SWITCH, Kind.WORD)}  # fmt: skip
    chosen = draw(st.lists(st.sampled_from(sorted(kinds)), max_size=6, unique=True))
    words: list[str] = []
    wanted: dict[str, object] = {}
    for name in chosen:
        text, value = draw(_value(kinds[name]))
        flag = "--" + (name.replace("_", "-") if draw(st.booleans()) else name)
        words += [flag] if not text else [f"{flag}={text}"] if draw(st.booleans()) else [flag, text]
        wanted[name] = value
    return engine, draw(_PLAIN.filter(lambda text: not text.startswith("-") and text != "serve")), words, wanted


@settings(max_examples=30)
@given(launches())
def test_what_is_written_is_read_back(launch: tuple[str, str, list[str], dict[str, object]]) -> None:
    engine, model, flags, wanted = launch
    start = {"vllm": ["vllm", "serve", model], "sglang": ["sglang", "serve", "--model-path", model],
             "trtllm": ["trtllm-serve", model]}[engine]  # fmt: skip
    found = one(shlex.join([*start, *flags]))
    assert (found.engine, found.model, found.unknown) == (engine, model, ())
    assert settings_of(found) == (wanted, [])


@settings(max_examples=30)
@given(st.lists(st.text(max_size=8), min_size=1, max_size=6))
def test_words_are_cut_as_a_shell_cuts_them(words: list[str]) -> None:
    text = "\0".join(words).replace("\r", " ").split("\0")
    found = simple_commands("echo " + shlex.join(text))
    assert [[word.text for word in simple.words] for simple in found] == [["echo", *text]]


_PIECES = st.sampled_from(
    ["vllm serve m ", "docker run ", "sglang serve ", "trtllm-serve ", "bash -c ", "--tp ", "--max-model-len ", "'",
     '"', "$X", "${", "$(", "`", "\\", "\n", "<<EOF\n", "services:\n", "kind: Pod\n", "spec: ", "- ", "{", "[",
     "&a ", "*a ",
     "-O3 ", "=", ";", "|", "--speculative-config ", "{}", "-e ", "vllm/vllm-openai:v0.1 ", "\0", "é", "command: "]
)  # fmt: skip


@settings(max_examples=80)
@given(
    st.one_of(st.lists(_PIECES, max_size=14).map("".join), st.text(max_size=60)),
    st.sampled_from(["a.sh", "a.yaml", "-"]),
)
@example("vllm serve m --compilation-config.a.b", "-")
@example("vllm serve m --max-model-len", "-")
def test_garbage_is_read_or_refused_in_words(text: str, name: str) -> None:
    try:
        found = commands_in(text, name=name)
    except UserError:
        return
    for command in found:
        settings_of(command)


#: Texts of a few hundred bytes, or of half a megabyte, that would take gigabytes or minutes if they were followed.
_VAST = {
    "a value that doubles": ("A=aaaaaaaaaa\n" + "A=$A$A\n" * 40 + "vllm serve m", "a.sh"),
    "an array that doubles": ("A=(a b)\n" + 'A+=("${A[@]}")\n' * 40 + "vllm serve m", "a.sh"),
    "one value many times": ("A=" + "a" * 19_000 + "\nvllm serve m " + "$A " * 20_000, "a.sh"),
    "one variable of a pod": (
        "kind: Pod\napiVersion: v1\nspec:\n  containers:\n  - image: vllm/vllm-openai\n    env: [{name: A, value: "
        + "a" * 50_000 + '}]\n    args: ["' + "$(A)" * 1000 + '"]\n', "a.yaml"),
    "mappings merged into one another": (
        "services: {}\na0: &a0 {k: 1}\n"
        + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 60)), "a.yaml"),
    "a number of thousands of digits": (
        "services:\n  x: {image: vllm/vllm-openai, command: [0x" + "F" * 6000 + "]}\n", "a.yaml"),
    "blank lines in a document": ("cat <<E\n" + "\n" * 200_000, "a.sh"),
    "documents in documents": ("cat > a <<E\n" * 40_000, "a.sh"),
    "a wide manifest": (
        "kind: Pod\napiVersion: v1\nspec:\n  containers: []\n  x: [" + "1," * 40_000 + "1]\n", "a.yaml"),
}  # fmt: skip


@pytest.mark.parametrize("case", _VAST)
def test_a_vast_text_is_refused_in_words_and_soon(case: str) -> None:
    text, name = _VAST[case]
    began = time.monotonic()
    with pytest.raises(InputError):
        commands_in(text, name=name)
    assert time.monotonic() - began < 5  # each takes a tenth of a second at most, where it is not followed


def test_a_vast_exponent_is_no_number() -> None:
    found = one("""vllm serve m --speculative-config '{"a": 1e999999999}' --gpu-memory-utilization 1e-999999999""")
    values, wrong = settings_of(found)
    assert (values, len(wrong)) == ({}, 2)


def test_a_document_inside_of_a_document_begins_none() -> None:
    script = "cat > a.yaml <<A\ncat > b.yaml <<B\nmax-num-seqs: 3\nB\nA\nvllm serve m --config b.yaml\n"
    assert one(script).files == ()
    assert one(script.replace("cat > b.yaml <<B\n", "").replace("B\n", "").replace("b.y", "a.y")).files == ("a.yaml",)


#: script -> the flags of its only launch, as a shell would hand them over
SHELL_WORDS: list[tuple[str, list[tuple[str, str | None]]]] = [
    ('A="--tp 2 --pp 3"\nvllm serve m $A', [("tensor_parallel_size", "2"), ("pipeline_parallel_size", "3")]),
    ('A="--tp 2"\nB="$A --pp 3"\nvllm serve m $B', [("tensor_parallel_size", "2"), ("pipeline_parallel_size", "3")]),
    ('S="a b"\nvllm serve m --served-model-name "$S"', [("served_model_name", "a b")]),
    ("E=\nvllm serve m $E --tp 2", [("tensor_parallel_size", "2")]),
    ("A=(m --tp 2\n  # none\n  --pp 3\n)\nA+=(--seed 1)\nvllm serve \"${A[@]}\"",
     [("tensor_parallel_size", "2"), ("pipeline_parallel_size", "3"), ("seed", "1")]),
    ('CMD="vllm serve m"\nCMD="$CMD --tp 2"\neval $CMD', [("tensor_parallel_size", "2")]),
    ('CMD="vllm serve m --tp 2"\n$CMD', [("tensor_parallel_size", "2")]),
    ("""eval "vllm serve m --tp '2'" """, [("tensor_parallel_size", "2")]),
    ('tmux new-session -d -s x "vllm serve m --tp 2"', [("tensor_parallel_size", "2")]),
    ("ssh host 'cd /x && vllm serve m --tp 2'", [("tensor_parallel_size", "2")]),
    (': "${TP:=2}"\nvllm serve m --tp $TP', [("tensor_parallel_size", "2")]),
    ("vllm serve m --tp ${3:-2}", [("tensor_parallel_size", "2")]),
    ("X=1 \\\n#Y=2 \\\nvllm serve m --tp 2", [("tensor_parallel_size", "2")]),
    ("vllm serve m --t\\\np 2", [("tensor_parallel_size", "2")]),
    ('vllm serve m --seed "1\\\n2"', [("seed", "12")]),
]  # fmt: skip


@pytest.mark.parametrize(("script", "flags"), SHELL_WORDS)
def test_words_are_those_that_a_shell_hands_over(script: str, flags: list[tuple[str, str | None]]) -> None:
    found = one(script)
    assert [(flag.name, flag.text) for flag in found.flags] == flags
    assert (found.model, found.open_words, found.lost) == ("m", (), ())


def test_what_a_shell_would_print_is_no_launch() -> None:
    with pytest.raises(InputError, match="starts no engine"):
        commands_in('echo "now: vllm serve m"')


@pytest.mark.parametrize("end", ["# --seed 1 \\\n", "# why\n", "--seed 1 \\ \n"])
def test_flags_behind_the_end_of_a_command_are_lost(end: str) -> None:
    found = one(f"vllm serve m \\\n  --tp 2 \\\n  {end}  --pp 3 --enforce-eager\nls -l")
    assert found.lost == ("--pp", "--enforce-eager")
    assert found.flag("pipeline_parallel_size") is None


def test_words_that_nothing_gives_are_kept_apart() -> None:
    assert [word.unknown for word in one("vllm serve m $EXTRA --tp 2 $(cat f)").open_words] == [("EXTRA",), ("$(...)",)]
    assert one("vllm serve $MODEL $EXTRA").unknown == ("MODEL",)


def test_powershell_continues_with_a_backtick() -> None:
    assert one("vllm serve m `\r\n  --tp 2", name="run.ps1").text("tensor_parallel_size") == "2"


LEADER = """
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata: {name: big}
spec:
  leaderWorkerTemplate:
    size: 2
    leaderTemplate:
      spec:
        containers:
        - image: vllm/vllm-openai:v0.8.5
          command: [sh, -c, "start-ray leader; python3 -m vllm.entrypoints.openai.api_server --model m -tp 8 -pp 2"]
          resources: {limits: {nvidia.com/gpu: "8"}}
"""


def test_the_hosts_of_a_group_are_counted_together() -> None:
    assert one(LEADER, name="a.yaml").place.num_gpus == 16
    for size in ("1", "none", "true", "-3"):
        assert one(LEADER.replace("size: 2", f"size: {size}"), name="a.yaml").place.num_gpus == 8


RUNTIME = """
apiVersion: serving.kserve.io/v1alpha1
kind: ServingRuntime
metadata: {{name: r}}
spec:
  containers:
  - image: {image}
    args: {args}
"""


def test_images_that_others_built_are_vllm_where_they_are_given_a_model() -> None:
    for image in ("quay.io/org/tgis-vllm:2", "registry/odh-vllm-cuda-rhel9@sha256:12", "org/vllm_openai:1"):
        found = one(RUNTIME.format(image=image, args="[--model=/mnt/models, --max-num-seqs=512]"), name="a.yaml")
        assert (found.engine, found.version, found.text("max_num_seqs")) == ("vllm", None, "512")
    for image, args in (
        ("org/vllm-router:1", "[--port=1]"),
        ("org/svllm:1", "[--model=m]"),
        ("org/tgis:1", "[--model=m]"),
    ):
        with pytest.raises(InputError):
            commands_in(RUNTIME.format(image=image, args=args), name="a.yaml")
