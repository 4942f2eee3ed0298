"""Models with windows and soft-caps on the card: text as transformers gives it, and replays as eager steps give it."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

from small_models import library_model, save
from test_graphs_gpu import Steps

from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.engine import EngineOptions, start
from tonnage.sampling import SamplingParams
from tonnage.units import MiB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]

#: Logits as good as equal; log-probabilities over a vocabulary of such; in bfloat16, times the library's own errors.
GAP, NEAR, COARSE = 1e-3, 5e-3, 2
WINDOW, NEW_TOKENS, MAX_SEQ_LEN = 40, 24, 200
PROMPTS = [[(7 * i + n) % 250 for i in range(length)] for n, length in enumerate((1, 17, 40, 64, 100, 170))]
SIZES = (1, 2, 4, 8)
#: Heads of 64; windows alone, every second layer with one, one layer without.
WIDE = {
    "hidden_size": 256, "head_dim": 64, "sliding_window": WINDOW, "initializer_range": 0.15,
    "max_position_embeddings": 512,
}  # fmt: skip
MODELS = {
    "mistral, a window": WIDE,
    "gemma2": {**WIDE, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 64},
    "gemma3": {**WIDE, "num_hidden_layers": 6, "query_pre_attn_scalar": 64},
}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    """Folder and float32 model on the card; its attention is by plain products."""
    made = library_model(request.param, **MODELS[request.param])
    folder = save(made, tmp_path_factory.mktemp("windows"))
    yield folder, made.cuda()
    del made
    gc.collect()


def options(folder, *, dtype="float32", compiled=True, chunk_tokens=None, kv_tokens=16384, **knobs):
    return EngineOptions(
        model=str(folder), device="cuda", attention="triton", dtype=dtype, compile=compiled, chunk_tokens=chunk_tokens,
        knobs=Knobs(
            kv_tokens=Setting(kv_tokens), graphs=Setting(",".join(map(str, SIZES))),
            **{knob: Setting(value) for knob, value in knobs.items()},
        ),
        limit_knobs=LimitKnobs(
            max_batch_size=Setting(SIZES[-1]), max_num_tokens=Setting(256), max_seq_len=Setting(MAX_SEQ_LEN)
        ),
    )  # fmt: skip


def serve(engine, name="r"):
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
    for i, prompt in enumerate(PROMPTS):
        engine.submit(engine.request(f"{name}{i}", params, token_ids=prompt))
    done = {}
    while engine.has_work:
        done |= {one.request_id: one for one in engine.step()}
    assert [one.error for one in done.values()] == [None] * len(PROMPTS)
    return [done[f"{name}{i}"] for i in range(len(PROMPTS))]


def logits_of(model, prompt, completion):
    """Of the places where the completion's tokens were drawn, [NEW_TOKENS, V]."""
    import torch

    text = torch.tensor([[*prompt, *completion.token_ids[:-1]]], device="cuda")
    with torch.inference_mode():
        return model(text, use_cache=False).logits[0, len(prompt) - 1 :].float().cpu()


def require_greedy(model, completions, prompts=PROMPTS):
    """Each token is the best, or as good as it; log-probabilities are those of transformers."""
    import torch

    for prompt, completion in zip(prompts, completions, strict=True):
        logits = logits_of(model, prompt, completion)
        places = torch.arange(NEW_TOKENS), torch.tensor(completion.token_ids)
        assert float((logits.max(-1).values - logits[places]).max()) < GAP
        truth = logits.log_softmax(-1)[places]
        assert float((torch.tensor(completion.logprobs) - truth).abs().max()) < NEAR


@pytest.mark.parametrize("chunk_tokens", [None, 16])
def test_text_in_float32_is_that_of_transformers(model, chunk_tokens):
    folder, library = model
    with start(options(folder, chunk_tokens=chunk_tokens, compiled=chunk_tokens is None)) as engine:
        require_greedy(library, serve(engine))
        assert sum(engine._runtime.executor.graphs.num_replays.values()) > NEW_TOKENS / 2
        require_greedy(library, serve(engine, "again"))  # most of each prompt is cached now
        assert engine.result().cached_prompt_tokens > 0


def test_bfloat16_is_as_good_as_the_library_s_own(model, tmp_path):
    """Against float32 on the same rounded weights, on the engine's own text."""
    import copy

    import torch

    folder, library = model
    half = copy.deepcopy(library).to(torch.bfloat16)
    exact = copy.deepcopy(half).float()
    with start(options(folder, dtype="bfloat16")) as engine:
        completions = serve(engine)
    engine_error = library_error = loss = 0.0
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        logits = logits_of(exact, prompt, completion)
        places = torch.arange(NEW_TOKENS), torch.tensor(completion.token_ids)
        library_error = max(library_error, float((logits_of(half, prompt, completion) - logits).abs().max()))
        truth = logits.log_softmax(-1)[places]
        engine_error = max(engine_error, float((torch.tensor(completion.logprobs) - truth).abs().max()))
        loss = max(loss, float((logits.max(-1).values - logits[places]).max()))
    print(f"\nerrors: engine {engine_error:.3f}, library {library_error:.3f}, behind the best token {loss:.3f}")
    assert engine_error <= COARSE * library_error
    assert loss <= COARSE * library_error


@pytest.mark.parametrize("admission", ["optimistic", "reserve_all"])
def test_a_small_pool_with_a_host_tier_gives_the_same_text(model, admission):
    folder, library = model
    asked = options(folder, compiled=False, kv_tokens=MAX_SEQ_LEN + 64, host_kv_bytes=64 * MiB, admission=admission)
    with start(asked) as engine:
        for name in "abc":
            require_greedy(library, serve(engine, name))
        assert engine.stats()["kv.offloaded"] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_replay_gives_what_an_eager_step_gives(model, dtype):
    """For every batch below every bucket; a step writes the pages of its own rows, in every group, and no others."""
    import numpy as np

    near = {"rtol": 2e-4, "atol": 2e-4} if dtype == "float32" else {"rtol": 3e-2, "atol": 3e-2}
    with start(options(model[0], dtype=dtype, compiled=False)) as engine:
        steps = Steps(engine)
        for num in [*range(1, SIZES[-1] + 1), *range(SIZES[-1], 0, -1)]:
            rows, ids = steps.rows(num), steps.random.integers(0, 256, num)
            wanted, pages = steps.eager(ids, rows)
            found, same_pages = steps.replayed(ids, rows)
            if num in SIZES:  # the same kernels on the same rows
                assert steps.torch.equal(found, wanted)
            steps.torch.testing.assert_close(found, wanted, **near)
            steps.torch.testing.assert_close(same_pages, pages, **near)
            is_changed = (same_pages != steps.before).any(-1).numpy()
            places = list(enumerate(rows.starts.tolist()))
            own = {int(table[row, start // 16]) for table in rows.tables for row, start in places}
            assert set(np.flatnonzero(is_changed).tolist()) <= own


def test_the_decode_of_a_long_text_reads_its_window_alone(model):
    """What a text does not hold any more means nothing; slab 0, which stands where a table has no block, neither."""
    folder, library = model
    with start(options(folder, compiled=False)) as engine:
        params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
        engine.submit(engine.request("a", params, token_ids=PROMPTS[-1]))
        engine.step()
        kv, pool = engine._runtime.managers.kv, engine._runtime.executor._backend._pool
        held = {slab for group in kv.tables for slab in kv.cache.slots[kv.block_ids("a", group=group)].tolist()}
        with engine._runtime.active():
            for slab in set(range(engine.plan.kv.num_slabs)) - held:
                pool[slab] = float("nan")
        done = []
        while engine.has_work:
            done += engine.step()
    require_greedy(library, done, PROMPTS[-1:])
