"""The script that compiles FlashInfer's kernels, up to the compiler: what it would compile, and what it refuses."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import pytest

from tonnage.attention.flashinfer_modules import Variant

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("build_flashinfer", ROOT / "scripts" / "build_flashinfer.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def run(script, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["build_flashinfer.py", *map(str, words)])
    return script.main()


def test_only_kernels_that_are_called_are_compiled(script):
    kernels = [f"batch_prefill_{kind}_kernel_mask_{mask}.cu" for kind in ("paged", "ragged") for mask in range(4)]
    hopper = [name.replace("_kernel", "_sm90_kernel") for name in kernels]
    others = ["batch_prefill.cu", "batch_prefill_jit_binding.cu"]

    def kept(names, family):
        return [path.name for path in script._needed([Path(name) for name in names], script.FAMILIES[family])]

    assert kept(kernels + others, "fa2") == [kernels[0], kernels[1], *others], "decodes see all, prompts what is before"
    assert kept(hopper + others, "fa3") == [hopper[1], *others], "prompts alone"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--head-dim", "64"], [Variant(dtype="bfloat16", head_dim=64)]),
        (["--head-dim", "256", "--dtype", "float16", "--window", "--softcap"],
         [Variant(dtype="float16", head_dim=256, has_window=True, has_softcap=True)]),
        ([ROOT / "examples/configs/llama-3.1-8b"], [Variant(dtype="bfloat16", head_dim=128)]),
    ],
)  # fmt: skip
def test_what_is_compiled_for(script, words, expected):
    asked = script._arguments().parse_args(list(map(str, words)))
    assert isinstance(asked, argparse.Namespace)
    assert script._variants(asked) == expected


def test_the_command_that_a_refusal_names_makes_what_was_missing(script):
    variant = Variant(dtype="float16", head_dim=64, has_window=True, has_softcap=True)
    _, path, *words = variant.build_command.split()
    assert (ROOT / path).is_file()
    assert script._variants(script._arguments().parse_args(words)) == [variant]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "nothing says what to compile"),
        (["examples/configs/nowhere"], "nowhere"),
        (["--head-dim", "128"], "flashinfer-python 0.6.14, whose sources are compiled, is not installed"),
    ],
)
def test_what_is_missing_is_refused_in_one_paragraph(script, monkeypatch, capsys, tmp_path, words, says):
    monkeypatch.setenv("TONNAGE_FLASHINFER", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run(script, monkeypatch, *words) == 2
    told = capsys.readouterr().err.strip()
    assert says in told
    assert "\n" not in told


def test_a_module_that_is_there_is_not_compiled_again(script, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TONNAGE_FLASHINFER", str(tmp_path))
    monkeypatch.setattr(script, "_set_up_compiler", lambda asked, build: None)
    (tmp_path / "0.6.14").mkdir()
    for family in ("fa2", "fa3"):
        (tmp_path / "0.6.14" / f"{family}-bfloat16-128.so").touch()
    assert run(script, monkeypatch, "--head-dim", "128") == 0
    assert capsys.readouterr().out.count("is there") == 2
    assert run(script, monkeypatch, "--head-dim", "128", "--arch", "8.0") == 0
    assert capsys.readouterr().out.count("is there") == 1, "fa3 is for Hopper"


def test_headers_come_from_the_toolkit_or_a_package(script, monkeypatch, tmp_path):
    include = tmp_path / "nvidia" / "cu13" / "include"
    include.mkdir(parents=True)
    where = importlib.machinery.ModuleSpec("nvidia", None)
    where.submodule_search_locations = [str(tmp_path / "nvidia")]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: where)
    with pytest.raises(script.InvalidSetting, match="pip install nvidia-curand"):
        script._packaged_headers()
    (include / "curand_kernel.h").touch()
    assert script._packaged_headers() == include


def test_the_release_is_the_one_that_is_pinned(script):
    extras = importlib.metadata.requires("tonnage") or []
    pinned = [line for line in extras if line.startswith("flashinfer-python")]
    assert not pinned or f"=={script.VERSION}" in pinned[0]
    assert f"flashinfer-python=={script.VERSION}" in (ROOT / "pyproject.toml").read_text()
