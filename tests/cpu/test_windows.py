"""Models with windows in a whole engine, over texts several windows long: chunks, reuse, suspension, the host tier.

Truth is ``generate`` of transformers on the same float32 weights: equal up to the first position whose two best logits
are less than ``GAP`` apart. Everything is served several times, so that most of it is found in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from small_models import library_model, save
from test_engine import assert_idle, drain

from tonnage.caching import CacheParams
from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.engine import EngineOptions, start
from tonnage.layout import group_blocks
from tonnage.sampling import SamplingParams
from tonnage.units import MiB

pytestmark = pytest.mark.usefixtures("light_collector")

GAP = 1e-3
B, WINDOW, MAX_SEQ_LEN, NEW_TOKENS = 4, 18, 160, 14
SHARED = [(11 * i) % 250 for i in range(45)]
PROMPTS = [
    *([*SHARED, *((7 * i + n) % 250 for i in range(3 + 17 * n))] for n in range(5)),
    [3],
    [(13 * i) % 250 for i in range(B * 9)],
    [(17 * i) % 250 for i in range(130)],
]
#: Windows alone; as many layers with one as without; few without, in groups of their own.
MODELS = {
    "mistral, a window": {"sliding_window": WINDOW},
    "gemma2": {"sliding_window": WINDOW},
    "gemma3": {"sliding_window": WINDOW, "num_hidden_layers": 5, "sliding_window_pattern": 5},
}


@dataclass(frozen=True, kw_only=True)
class Model:
    """``texts``: what it generates after each of the prompts; ``sure``: up to where that is beyond doubt."""

    folder: object
    texts: list[list[int]]
    sure: list[int]


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    made = library_model(request.param, **MODELS[request.param])
    texts, sure = [], []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = made.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        best = torch.cat(list(out.logits)).topk(2, dim=-1).values
        is_close = (best[:, 0] - best[:, 1] < GAP).tolist()
        texts.append(out.sequences[0, len(prompt) :].tolist())
        sure.append(is_close.index(True) if True in is_close else NEW_TOKENS)
    assert sum(sure) > 0.9 * NEW_TOKENS * len(PROMPTS)
    return Model(folder=save(made, tmp_path_factory.mktemp("windows")), texts=texts, sure=sure)


def options(model, *, kv_tokens=None, chunk_tokens=None, max_num_tokens=96, **knobs):
    asked = {"kv_tokens": kv_tokens, "block_tokens": B, **knobs}
    return EngineOptions(
        model=str(model.folder), memory_bytes=768 * MiB, dtype="float32", chunk_tokens=chunk_tokens, fence=False,
        knobs=Knobs(**{knob: Setting(value) for knob, value in asked.items()}),
        limit_knobs=LimitKnobs(
            max_seq_len=Setting(MAX_SEQ_LEN), max_batch_size=Setting(4), max_num_tokens=Setting(max_num_tokens)
        ),
    )  # fmt: skip


def submit(engine, name, prompt, **cache):
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, cache=CacheParams(**cache))
    engine.submit(engine.request(name, params, token_ids=prompt))


def require_right(model, ended, order):
    assert [one.error for one in ended] == [None] * len(order)
    found = {int(one.request_id.partition(":")[2]): list(one.token_ids) for one in ended}
    for number in order:
        sure = model.sure[number]
        assert found[number][:sure] == model.texts[number][:sure], number


def serve(engine, model, *, times=2):
    """All at once, so many times over."""
    for time in range(times):
        for number, prompt in enumerate(PROMPTS):
            submit(engine, f"{time}:{number}", prompt)
        require_right(model, drain(engine), range(len(PROMPTS)))
    assert_idle(engine)


@pytest.mark.parametrize("chunk_tokens", [None, 12, "none"], ids=str)
def test_text_in_chunks_and_with_reuse_is_that_of_transformers(model, chunk_tokens):
    at_once = 192 if chunk_tokens == "none" else 96
    with start(options(model, chunk_tokens=chunk_tokens, max_num_tokens=at_once)) as engine:
        serve(engine, model)
        assert engine.result().cached_prompt_tokens > sum(map(len, PROMPTS))
        assert engine.plan.limits.prefix_caching


def test_a_text_alone_holds_what_its_windows_show(model):
    """While it decodes; what has left the windows is still cached, and makes way for others."""
    with start(options(model)) as engine:
        layout = engine.plan.kv.layout
        submit(engine, "a", PROMPTS[-1])
        held = []
        while engine.has_work:
            engine.step()
            held.append(engine.stats()["kv.allocated"])
        length = len(PROMPTS[-1]) + NEW_TOKENS - 1
        assert max(held[-NEW_TOKENS:-1]) <= sum(group_blocks(group, length) for group in layout.groups)
        assert engine.stats()["kv.cached"] == sum(-(-length // B) for _ in layout.groups)


@pytest.mark.parametrize("kind", ["optimistic", "reserve_all"])
def test_a_small_pool_under_load_gives_the_same_text(model, kind):
    """A pool for little more than the longest text: requests wait, what is cached makes way."""
    with start(options(model, kv_tokens=MAX_SEQ_LEN + 40, admission=kind)) as engine:
        serve(engine, model, times=3)
        stats, suspended = engine.stats(), engine.result().suspensions
        assert stats["kv.evicted"] > 0
        assert engine.result().cached_prompt_tokens > 0
        assert kind == "optimistic" or suspended == 0


def test_who_is_suspended_at_any_moment_comes_back_to_the_same_text(model):
    with start(options(model)) as engine:
        for number, prompt in enumerate(PROMPTS):
            submit(engine, f"0:{number}", prompt)
        ended, turn = [], 0
        while engine.has_work:
            ended += engine.step()
            turn += 1
            running = list(engine._scheduler.running)
            if running and turn % 3 == 0 and turn < 60:
                engine._scheduler.suspend(running[turn % len(running)])
        require_right(model, ended, range(len(PROMPTS)))
        assert engine.result().suspensions > 6
        assert_idle(engine)


def test_blocks_of_windows_go_to_the_host_and_come_back(model):
    with start(options(model, kv_tokens=MAX_SEQ_LEN + 40, host_kv_bytes=8 * MiB)) as engine:
        for time in range(2):
            for number, prompt in enumerate(PROMPTS):
                submit(engine, f"{time}:{number}", prompt)
                require_right(model, drain(engine), [number])
        assert engine.stats()["kv.offloaded"] > 0
        assert engine.stats()["kv.loaded"] > 0


def test_what_the_plan_promises_is_held_at_once(model):
    """As many of the longest sequences as the plan's tokens make, decoding side by side."""
    with start(options(model, kv_tokens=3 * MAX_SEQ_LEN, admission="reserve_all")) as engine:
        kv = engine._runtime.managers.kv
        num = engine.plan.kv.guaranteed_tokens // MAX_SEQ_LEN
        assert num == 3
        for n in range(num):
            tokens = [(n + 3 * i) % 250 for i in range(MAX_SEQ_LEN - NEW_TOKENS)]
            submit(engine, str(n), tokens, reuse=False)
        most = 0
        while engine.has_work:
            engine.step()
            most = max(most, kv.stats()["sequences"])
        assert most == num
        assert engine.result().suspensions == 0
