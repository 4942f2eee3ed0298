"""Sampling inside the engine: reproducible whatever runs beside it, and true to the model's own probabilities."""

from __future__ import annotations

import pytest
import torch
from test_engine import ask, assert_idle, drain, options

from tonnage.config import Knobs, Setting
from tonnage.engine import Finish, start
from tonnage.errors import RequestRefused
from tonnage.sampling import SamplingParams
from tonnage.terms import LineKind

EVERYTHING = {
    "temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2,
    "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {5: 2.0, 9: -100.0}, "min_tokens": 4,
    "logprobs": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(tiny_llama):
    with start(options(tiny_llama)) as engine:
        yield engine


@pytest.fixture(scope="module")
def model(tiny_llama):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()


def model_logprobs(model, token_ids):
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([token_ids])).logits[0].double(), -1)


def test_a_request_draws_the_same_whatever_runs_beside_it(engine):
    alone = {}
    for i in range(5):
        ask(engine, f"r{i}", length=9 + i, max_tokens=25, seed=100 + i, **EVERYTHING)
        (done,) = drain(engine)
        alone[done.request_id] = done
    for i in (3, 1, 4, 0, 2):
        ask(engine, f"r{i}", length=9 + i, max_tokens=25, seed=100 + i, **EVERYTHING)
        ask(engine, f"other{i}", length=30, max_tokens=10 + i, temperature=1.5, seed=i)
    together = {done.request_id: done for done in drain(engine)}
    for name, done in alone.items():
        assert together[name].token_ids == done.token_ids
        assert together[name].logprobs == pytest.approx(done.logprobs, abs=1e-4)
    assert len({done.token_ids for done in alone.values()}) == 5


def test_seeds_decide_and_none_means_another_one_each_time(engine):
    for name, seed in (("a", 1), ("b", 1), ("c", 2), ("d", None), ("e", None)):
        ask(engine, name, max_tokens=30, temperature=2.0, seed=seed)
    texts = {done.request_id: done.token_ids for done in drain(engine)}
    assert texts["a"] == texts["b"]
    assert len(set(texts.values())) == 4


def test_log_probabilities_are_the_models_own(engine, model):
    request = ask(engine, "r", length=40, max_tokens=12, prompt_logprobs=4, seed=3, **EVERYTHING)
    (done,) = drain(engine)
    truth = model_logprobs(model, request.token_ids)
    for position, (token, logprob, top) in enumerate(
        zip(done.token_ids, done.logprobs, done.top_logprobs, strict=True), start=39
    ):
        assert logprob == pytest.approx(truth[position, token].item(), abs=1e-3)
        values, ids = truth[position].topk(3)
        assert [token for token, _ in top] == ids.tolist()
        assert [value for _, value in top] == pytest.approx(values.tolist(), abs=1e-3)
    assert len(done.prompt_logprobs) == 39
    for position, entry in enumerate(done.prompt_logprobs):
        assert entry.token == request.token_ids[position + 1]
        assert entry.logprob == pytest.approx(truth[position, entry.token].item(), abs=1e-3)
        assert [token for token, _ in entry.top] == truth[position].topk(4).indices.tolist()


@pytest.mark.parametrize("chunk_tokens", [16, None])
def test_prompt_log_probabilities_come_in_slices_of_bounded_memory(tiny_llama, model, monkeypatch, chunk_tokens):
    """The vocabulary projection never runs for more rows than the plan counted."""
    with start(options(tiny_llama, max_batch_size=3, max_num_tokens=64, chunk_tokens=chunk_tokens)) as engine:
        executor, rows = engine._runtime.executor, []
        logits = type(executor)._logits
        monkeypatch.setattr(
            type(executor), "_logits", lambda self, hidden: rows.append(hidden.shape[0]) or logits(self, hidden)
        )
        request = ask(engine, "r", length=100, max_tokens=2, prompt_logprobs=1)
        (done,) = drain(engine)
        del executor
    truth = model_logprobs(model, request.token_ids)
    assert [entry.token for entry in done.prompt_logprobs] == request.token_ids[1:100]
    for position, entry in enumerate(done.prompt_logprobs):
        assert entry.logprob == pytest.approx(truth[position, entry.token].item(), abs=1e-3)
    assert sum(rows) >= 99
    assert max(rows) <= engine.plan.limits.max_logits_rows == 3


def test_penalty_tables_are_planned_from_the_start_and_allocated_by_the_first_request_with_any(tiny_llama):
    with start(options(tiny_llama)) as engine:
        tables = next(line for line in engine.plan.lines if line.kind is LineKind.TABLES)
        (planned,) = [child.bytes for child in tables.children if child.name == "penalty tables"]
        before = held(engine)
        ask(engine, "plain", temperature=1.0)
        drain(engine)
        assert held(engine) == before
        ask(engine, "penalised", presence_penalty=1.0)
        drain(engine)
        assert held(engine) - before == planned == 8 * 300 * 5
        assert not engine.result().snapshot.first_uses


def held(engine):
    return sum(entry.requested_bytes for entry in engine.ledger.snapshot().entries if entry.line is LineKind.TABLES)


def test_penalties_that_are_switched_off_cost_nothing_and_are_refused(tiny_llama):
    from dataclasses import replace

    asked = replace(options(tiny_llama), knobs=Knobs(disabled_claims=frozenset({"penalty tables"})))
    with start(asked) as engine:
        with pytest.raises(RequestRefused, match="penalty tables"):
            ask(engine, "no", frequency_penalty=0.5)
        ask(engine, "yes")
        assert len(drain(engine)) == 1


def test_repetition_is_punished(engine):
    """Greedy text of a random model runs in circles; a strong penalty takes it out of them."""
    ask(engine, "free", max_tokens=60)
    ask(engine, "punished", max_tokens=60, frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=3.0)
    done = {one.request_id: one.token_ids for one in drain(engine)}
    assert len(set(done["punished"])) > len(set(done["free"]))


def test_stop_ids_and_strings_end_the_text_where_they_should(engine):
    ask(engine, "free", max_tokens=40)
    (free,) = drain(engine)
    token = free.token_ids[9]
    first = free.token_ids.index(token)
    ask(engine, "id", max_tokens=40, stop_token_ids=[token])
    ask(engine, "later", max_tokens=40, stop_token_ids=[token], min_tokens=first + 2)
    done = {one.request_id: one for one in drain(engine)}
    assert done["id"].token_ids == free.token_ids[: first + 1]
    assert (done["id"].finish_reason, done["id"].stop_reason) == (Finish.STOP, token)
    assert len(done["later"].token_ids) >= first + 2
    assert token not in done["later"].token_ids[: first + 1]
    assert_idle(engine)


def test_a_stop_string_across_tokens_ends_the_text_before_it(engine):
    ask(engine, "free", max_tokens=40)
    (free,) = drain(engine)
    # Two neighbouring characters of the text: with byte tokens they are two tokens.
    at = next(i for i in range(4, len(free.text) - 1) if "\ufffd" not in free.text[i : i + 2])
    stop = free.text[at : at + 2]
    told = []
    request = engine.request(
        "stop", SamplingParams(max_tokens=40, ignore_eos=True, stop=[stop]),
        token_ids=[(7 * i + 20) % 250 for i in range(20)], on_delta=told.append,
    )  # fmt: skip
    engine.submit(request)
    (done,) = drain(engine)
    assert done.text == free.text[: free.text.index(stop)]
    assert done.stop_reason == stop
    assert done.token_ids == free.token_ids[: len(done.token_ids)]
    assert "".join(delta.text for delta in told) == done.text
    assert_idle(engine)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"logit_bias": {300: 1.0}}, ["vocabulary", "logit_bias", "299"]),
        ({"stop_token_ids": [999]}, ["vocabulary", "stop_token_ids"]),
        ({"min_tokens": 9, "max_tokens": None}, None),
    ],
)
def test_parameters_that_do_not_fit_the_model_are_refused(engine, params, words):
    if words is None:
        assert ask(engine, "fine", **{"length": 5, **params}).max_tokens >= 9
        drain(engine)
        return
    with pytest.raises(RequestRefused) as refused:
        ask(engine, "no", **params)
    for word in words:
        assert word in str(refused.value)


def test_chunking_off_is_the_engines_own_default_cut(tiny_llama):
    """``Setting`` values travel from the options to the scheduler."""
    with start(options(tiny_llama, chunk_tokens="none", admission="reserve_all")) as engine:
        with pytest.raises(RequestRefused, match="chunked prefill is off"):
            ask(engine, "no", length=65)
        ask(engine, "yes", length=64)
        assert engine.plan.knobs.admission == Setting("reserve_all")
        assert len(drain(engine)) == 1
