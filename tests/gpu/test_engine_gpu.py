"""The engine on the card: text as transformers gives it, a plan that holds, and everything given back."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

from tiny import save_tiny_llama

from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.engine import EngineOptions, start
from tonnage.sampling import SamplingParams
from tonnage.terms import LineKind
from tonnage.units import GiB, MiB, format_bytes

pytestmark = [
    pytest.mark.gpu,
    # What compiling tells: that torch could multiply less exactly, and that parts of it are old.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]

GAP = 1e-3
LENGTHS = (1, 2, 5, 15, 16, 17, 33, 64, 100, 180)
NEW_TOKENS = 40
LLAMA_8B = Path(__file__).parents[2] / "examples" / "configs" / "llama-3.1-8b"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama of 4 layers with heads of 64, in float32."""
    return save_tiny_llama(
        tmp_path_factory.mktemp("small"),
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=4,
        initializer_range=0.15,
        max_position_embeddings=512,
    )


@pytest.fixture(scope="module")
def prompts():
    text = (Path(__file__).parents[2] / "LICENSE").read_bytes()
    return [list(text[31 * i : 31 * i + length]) for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def truths(folder, prompts):
    """Tokens of ``generate`` on the card, and the gap of the two best logits at each position."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()
    model.generation_config.eos_token_id = None
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        best = torch.cat(list(out.logits)).float().topk(2, dim=-1).values
        found.append((out.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()))
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return found


def asked(folder, *, attention, kv_tokens=8192, **how):
    return EngineOptions(
        model=str(folder),
        device="cuda",
        attention=attention,
        knobs=Knobs(kv_tokens=Setting(kv_tokens)),
        limit_knobs=LimitKnobs(max_batch_size=Setting(16), max_num_tokens=Setting(256), max_seq_len=Setting(400)),
        **how,
    )


def texts(engine, prompts):
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.submit(engine.request(str(i), params, token_ids=prompt))
    done = {}
    while engine.has_work:
        done |= {one.request_id: one for one in engine.step()}
    assert [one.error for one in done.values()] == [None] * len(prompts)
    return [list(done[str(i)].token_ids) for i in range(len(prompts))]


def assert_equal_up_to_a_gap(found, truths):
    whole = 0
    for tokens, (wanted, gaps) in zip(found, truths, strict=True):
        end = next((i for i, gap in enumerate(gaps) if gap < GAP), len(gaps))
        assert tokens[:end] == wanted[:end]
        whole += tokens == wanted
    assert whole >= 0.9 * len(truths)


@pytest.mark.parametrize("attention", ["sdpa", "triton"])
@pytest.mark.parametrize("chunk_tokens", [None, 16])
def test_text_is_that_of_transformers(folder, prompts, truths, attention, chunk_tokens):
    compiled = chunk_tokens is None
    with start(asked(folder, attention=attention, chunk_tokens=chunk_tokens, compile=compiled)) as engine:
        assert_equal_up_to_a_gap(texts(engine, prompts), truths)
        if attention == "triton":
            assert sum(engine._runtime.executor.graphs.num_replays.values()) > NEW_TOKENS / 2
        again = texts(engine, prompts)  # most of each prompt is cached now
        assert engine.result().cached_prompt_tokens > 0
    assert_equal_up_to_a_gap(again, truths)


@pytest.mark.parametrize("attention", ["sdpa", "triton"])
def test_a_small_pool_with_a_host_tier_gives_the_same_text(folder, prompts, truths, attention):
    knobs = Knobs(kv_tokens=Setting(480), host_kv_bytes=Setting(64 * MiB))
    with start(replace(asked(folder, attention=attention, compile=False), knobs=knobs)) as engine:
        for _ in range(3):
            assert_equal_up_to_a_gap(texts(engine, prompts), truths)
        assert engine.stats()["kv.offloaded"] > 0
        assert engine.stats()["kv.loaded"] > 0


def test_an_engine_gives_the_card_back(folder, prompts):
    from tonnage.device.cuda import CudaDriver

    driver = CudaDriver(0)
    with start(asked(folder, attention="triton")) as engine:  # whatever libraries keep for ever, they have now
        texts(engine, prompts)
    gc.collect()
    before = driver.mem_info()[0]
    with start(asked(folder, attention="triton", kv_tokens=2**20)) as engine:
        texts(engine, prompts)
        assert before - driver.mem_info()[0] > GiB
    del engine
    gc.collect()
    assert before - driver.mem_info()[0] <= 32 * MiB
    driver.close()


def test_the_plan_of_an_8b_model_holds(capsys):
    """Random weights of the real size: what the report says is there is there, line by line."""
    options = EngineOptions(
        model=str(LLAMA_8B), device="cuda", attention="triton", dtype="bfloat16", random_weights=True,
        limit_knobs=LimitKnobs(max_batch_size=Setting(256), max_num_tokens=Setting(8192), max_seq_len=Setting(4096)),
    )  # fmt: skip
    with start(options) as engine:
        for i in range(64):
            params = SamplingParams(max_tokens=16, ignore_eos=True)
            engine.submit(engine.request(str(i), params, token_ids=[1000 + i] * 700))
        done = []
        while engine.has_work:
            done += engine.step()
        assert [one.error for one in done] == [None] * 64
        rows = {row.line: row for row in engine.ledger.audit()}
        with capsys.disabled():
            print()
            for stage in engine.stages:
                print(f"  {stage.name:10s} {stage.elapsed_ms:7d} ms")
            for row in rows.values():
                planned = format_bytes(row.planned_bytes)
                print(f"  {row.line!s:14s} planned {planned:>12s} actual {row.actual_bytes or 0:>16,d}")
            print("  ", "; ".join(engine.plan.warnings))
        others = sum(
            row.actual_bytes or 0
            for line, row in rows.items()
            if line not in (LineKind.KV, LineKind.WEIGHTS, LineKind.KEEP_FREE, LineKind.FOREIGN)
        )
        assert others <= 6 * GiB
        assert abs(rows[LineKind.UNATTRIBUTED].actual_bytes or 0) <= 150 * MiB
