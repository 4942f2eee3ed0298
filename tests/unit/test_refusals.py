"""Every refusal says what to change: where it is raised, and where the program tells it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tonnage
from tonnage import errors
from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.costs.config import ModelConfig
from tonnage.errors import DoesNotFit, UserError
from tonnage.files import to_read, to_write, why
from tonnage.hardware import find_card
from tonnage.peers.own_settings import read_settings
from tonnage.planner import plan_without_device

PACKAGE = Path(tonnage.__file__).parent
LLAMA = ModelConfig.read(Path(__file__).parents[2] / "examples/configs/llama-3.1-8b")
#: ``DoesNotFit`` finds its remedies by planning again, so they are not in its call.
NAMES = {name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, UserError)} - {
    "DoesNotFit"
}


def raised() -> Iterator[tuple[str, ast.Call]]:
    """Every call that makes a refusal, with where it is."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", None) or getattr(node.func, "attr", None)
                if name in NAMES:
                    yield f"{file.relative_to(PACKAGE)}:{node.lineno}", node


def test_every_refusal_is_raised_with_a_remedy() -> None:
    found = list(raised())
    assert len(found) > 300
    silent = [where for where, call in found if not any(given.arg in ("remedy", None) for given in call.keywords)]
    assert silent == []


#: limits asked for -> what the only or the first remedy begins with
ABSURD = [
    ({"max_adapters": 10**18}, "lower max_adapters to "),
    ({"max_adapters": 10**18, "max_seq_len": 4096}, "lower max_adapters to "),
    ({"max_adapters": 8, "max_adapter_rank": 10**15}, "leave max_adapters out"),
    ({"lookahead_steps": 10**18}, "lower lookahead_steps to "),
    ({"max_draft_tokens": 10**18}, "lower max_draft_tokens to "),
    ({"max_batch_size": 10**8}, "lower max_batch_size to "),
    ({"max_batch_size": 10**18}, "lower max_batch_size to "),
    ({"max_batch_size": 10**8, "max_num_tokens": 10**8}, "leave max_batch_size and max_num_tokens out"),
    ({"max_batch_size": 10**8, "max_adapters": 10**9}, "leave max_batch_size and max_adapters out"),
]


@pytest.mark.parametrize(("asked", "told"), ABSURD)
def test_a_limit_some_zeros_too_large_has_a_remedy_that_works(asked: dict[str, int], told: str) -> None:
    card = find_card("H100")
    with pytest.raises(DoesNotFit) as refused:
        plan_without_device(LLAMA, card=card, limit_knobs=limits(asked))
    assert refused.value.remedies[0].startswith(told)
    for remedy in refused.value.remedies:
        if remedy.startswith(("lower ", "leave ")) and " and set " not in remedy:
            changed = followed(remedy.split(" (")[0], asked)
            assert plan_without_device(LLAMA, card=card, limit_knobs=limits(changed)).kv.tokens > 0


def limits(asked: dict[str, int]) -> LimitKnobs:
    return LimitKnobs(**{name: Setting.flag(value, str(value), f"--{name}") for name, value in asked.items()})


def followed(remedy: str, asked: dict[str, int]) -> dict[str, int]:
    verb, name, rest = remedy.split(" ", 2)
    if verb == "lower":
        return asked | {name: int(rest.removeprefix("to "))}
    gone = {name, *rest.removesuffix("out").replace(",", " ").split()}
    return {each: value for each, value in asked.items() if each not in gone}


def test_where_neither_is_enough_alone_settings_and_memory_change_together() -> None:
    with pytest.raises(DoesNotFit) as refused:
        plan_without_device(
            LLAMA,
            card=find_card("T4"),
            knobs=Knobs(kv_tokens=Setting.flag(10**6, "1M", "--kv-tokens")),
            limit_knobs=limits({"max_batch_size": 10**9, "max_seq_len": 10**5}),
        )
    (remedy,) = refused.value.remedies
    assert remedy.startswith("leave max_seq_len, max_batch_size and kv_tokens out and use a device of at least ")


#: typed -> pieces of the paragraph; of an engine's own knobs, where its start is asked for
OWN = {
    "vllm:max_num_seqs=8K": "reads no such suffix here|To change: write digits alone, such as 8192",
    "vllm:max_model_len=8Ki": "not a whole number in digits, and|or 8k (8,000) or 8K (8,192)",
    "vllm:num_speculative_tokens=1k": "reads no such suffix here",
    "vllm:max_seqs=4": "To change: write --like vllm:max_num_seqs or",
    "vllm:zzz=4": "To change: leave it out; tonnage plan MODEL --like help lists every knob",
    "vllm:tensor_parallel_size=2": "To change: use --tp N",
    "sglang:chunked_prefill_size=8k": "reads no such suffix here",
    "sglang:max_prefill_tokens=16K": "or 8k (8,000) or 8Ki (8,192)",
    "trtllm:max_attention_window=4k,8k": "reads no such suffix here",
    "llamacpp:ctx_size=8k": "reads no such suffix here",
    "llamacpp:fit_target=1Ki": "reads no such suffix here",
}


@pytest.mark.parametrize(("typed", "told"), OWN.items())
def test_an_engine_s_own_knob_is_read_as_the_engine_reads_it(typed: str, told: str) -> None:
    with pytest.raises(UserError) as refused:
        read_settings([typed], engines=[typed.partition(":")[0]])
    for piece in told.split("|"):
        assert piece in str(refused.value)


def test_suffixes_that_the_engines_read_are_read() -> None:
    typed = [
        "vllm:max_model_len=8K",
        "vllm:max_num_batched_tokens=8k",
        "sglang:context_length=8Ki",
    ]
    found = read_settings(typed, engines=["vllm", "sglang"])
    assert found["vllm"] == {"max_model_len": 8192, "max_num_batched_tokens": 8000}
    assert found["sglang"] == {"context_length": 8192}


def test_a_file_that_cannot_be_read_or_written_has_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(OSError) as missing:
        (tmp_path / "none").read_text()
    assert (why(missing.value), to_read(missing.value)) == ("No such file or directory", "check the path")
    with pytest.raises(OSError) as folder:
        tmp_path.read_text()
    assert to_read(folder.value) == "name a file in it"
    with pytest.raises(OSError) as nowhere:
        (tmp_path / "none" / "x").write_text("")
    assert to_write(nowhere.value) == "make its folder first, or choose another"
    assert to_write(OSError(28, "No space left on device")).startswith("free some space")
    assert to_read(OSError(5, "Input/output error")) == "name another file"
    with pytest.raises(UnicodeDecodeError) as binary:
        b"\xff".decode()
    assert (why(binary.value), to_read(binary.value)) == ("it is not UTF-8 text", "name a text file")
