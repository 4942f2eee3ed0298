"""Steps in which something breaks: rows without numbers, stores without memory, loads that do not come, Ctrl-C.

Whoever is hit ends, nobody else does, and what it held is there for the next; nobody waits for ever.
"""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
import torch
from fake_kv import FakeKV, engine_on_fake
from test_engine import drain as drained
from test_engine_cache import TEXTS, B, asked, texts_of
from test_engine_cache import serve as serve_texts
from test_engine_cache import submit as submit_text
from test_engine_failures import Broken
from test_soak import STUB, TIERED, soaked

from tonnage.engine import Finish, start
from tonnage.engine.core import Engine
from tonnage.engine.mishaps import NOT_FINITE, Mishaps
from tonnage.engine.queue import MAX_OVERTAKEN
from tonnage.engine.stub import stub_engine
from tonnage.errors import DriverError, DriverOOM
from tonnage.resources import mover
from tonnage.resources.blocks import Blocks
from tonnage.resources.chain import Chain, scope_digest
from tonnage.resources.dispatcher import Dispatcher
from tonnage.sampling import SamplingParams
from tonnage.units import MiB

pytestmark = pytest.mark.usefixtures("light_collector")

BLOCK = 16


def tokens(length, kind=0):
    return [1 + (7 * i + 13 * kind) % 250 for i in range(length)]


def submit(engine, name, ids, max_tokens=4, **params):
    params = SamplingParams(max_tokens=max_tokens, seed=len(ids), ignore_eos=True, **params)
    engine.submit(engine.request(name, params, token_ids=ids))


def drain(engine, *, most=500):
    done = {}
    for _ in range(most):
        if not engine.has_work:
            return done
        done |= {one.request_id: one for one in engine.step()}
    raise AssertionError(f"still at work after {most} steps: {engine.progress()}")


def stub(num_blocks=40, **fields):
    fields = {"max_seq_len": 320, "max_batch_size": 8, "max_num_tokens": 320, "admission": "reserve_all", **fields}
    return stub_engine(kv_tokens=num_blocks * BLOCK, prefix_caching=True, checks_contents=True, **fields)


def assert_all_is_back(engine):
    stats = engine.stats()
    held = ("slots.used", "kv.sequences", "kv.live", "kv.reserved", "kv.loading")
    assert {name: stats[name] for name in held} == dict.fromkeys(held, 0)
    assert stats["kv.free"] + stats["kv.cached"] == stats["kv.available"] == stats["kv.capacity"]
    assert engine._ids == set()
    assert engine._runtime.shadow is None or engine._runtime.shadow.told == []


def num_on_host(engine, ids):
    """Blocks of the prefix of ``ids`` that lie on the host."""
    found = engine._cache.match(Chain(scope_digest(), ids, BLOCK), max_tokens=len(ids) - 1)
    return len(found.host_blocks)


def tiered(ids, *, num_stored=None, num_blocks=20, load_steps=5, **fields):
    """An engine with the blocks of ``ids`` on the host, the first ``num_stored`` tokens of them; loads of any other
    kind are done at once until then, and take ``load_steps`` afterwards."""
    engine = stub(num_blocks, host_kv_tokens=800 * BLOCK, **fields)
    num_stored = len(ids) if num_stored is None else num_stored
    submit(engine, "stored", ids[:num_stored], 1)
    drain(engine)
    for number in range(400):
        if num_on_host(engine, ids) >= (num_stored - 1) // BLOCK:
            break
        submit(engine, f"filler{number}", [1 + number % 250, *tokens(60, number + 1)], 60)
        drain(engine)
    engine._runtime.mover._load_steps = lambda: load_steps
    return engine


# -- rows without numbers ----------------------------------------------------------------------------------------------


class Spoils(Mishaps):
    """Rows come out as no numbers, the first ``num_rows`` of them or some of all; nothing else ever fails."""

    def __init__(self, num_rows=None, *, probability=1.0, seed=0):
        super().__init__(probability=probability, seed=seed)
        self.num_rows = num_rows

    def spoils_row(self):
        if self.num_rows is not None:
            self.num_rows -= 1
            self.is_on = self.num_rows >= 0
        return super().spoils_row()

    def before_launch(self):
        pass

    def before_copy(self, call):
        pass

    def driver(self, driver):
        return driver


def test_a_row_without_numbers_leaves_nothing_to_be_found():
    engine = stub(mishaps=Spoils(1))
    submit(engine, "a", tokens(50))
    failed = drain(engine)["a"]
    assert (failed.finish_reason, failed.error) == (Finish.ERROR, NOT_FINITE)
    assert engine.stats()["kv.cached"] == 0
    submit(engine, "b", tokens(50))
    again = drain(engine)["b"]
    assert (again.finish_reason, again.num_cached_tokens) == (Finish.LENGTH, 0)
    assert_all_is_back(engine)


@pytest.mark.parametrize(
    "length",
    [
        50,
        12,
    ],
    ids=["whole blocks", "a copied part of one"],
)
def test_what_a_row_without_numbers_began_with_is_not_found_either(length):
    """Whose entries are at fault nobody knows."""
    engine = stub(mishaps=(spoils := Spoils(0)))
    submit(engine, "a", tokens(length))
    submit(engine, "other", tokens(40, 5))
    drain(engine)
    spoils.num_rows, spoils.is_on = 1, True
    submit(engine, "b", [*tokens(length), 9])
    failed = drain(engine)["b"]
    assert (failed.finish_reason, failed.num_cached_tokens) == (Finish.ERROR, length)
    submit(engine, "c", [*tokens(length), 9])
    submit(engine, "unharmed", tokens(40, 5))
    done = drain(engine)
    assert {name: one.finish_reason for name, one in done.items()} == dict.fromkeys(("c", "unharmed"), Finish.LENGTH)
    assert (done["c"].num_cached_tokens, done["unharmed"].num_cached_tokens >= 32) == (0, True)
    assert_all_is_back(engine)


def test_what_others_hold_of_it_stays_theirs():
    """Two run on one prefix, and one of them comes out without numbers: the other goes on to its end."""
    engine = stub(mishaps=(spoils := Spoils(0)))
    submit(engine, "a", [*tokens(48), 1], 30)
    engine.step()
    engine.step()
    spoils.num_rows, spoils.is_on = 1, True  # of the last row that samples: who came last
    submit(engine, "b", [*tokens(48), 2])
    done = drain(engine)
    assert (done["b"].finish_reason, done["b"].num_cached_tokens) == (Finish.ERROR, 48)
    assert done["a"].finish_reason is Finish.LENGTH
    assert_all_is_back(engine)


def no_number_once(engine):
    """A fault of the real model that comes and goes: one forward gives no numbers."""
    executor = engine._runtime.executor
    model = next(found for found in vars(executor).values() if isinstance(found, torch.nn.Module))
    layer = next(found for found in model.modules() if type(found).__name__ == "LlamaDecoderLayer")

    def spoiled(module, arguments, result):
        handle.remove()
        hidden, *rest = result if isinstance(result, tuple) else (result,)
        hidden = torch.full_like(hidden, float("nan"))
        return (hidden, *rest) if isinstance(result, tuple) else hidden

    handle = layer.register_forward_hook(spoiled)


@pytest.mark.parametrize("has_prefix", [False, True], ids=["nothing cached", "a prefix matched"])
def test_after_a_fault_of_the_model_the_same_prompt_is_computed_anew(tiny_llama, has_prefix):
    with start(asked(tiny_llama, prefix_caching=False)) as engine:
        expected = texts_of(serve_texts(engine, TEXTS[:2]))
    with start(asked(tiny_llama)) as engine:
        if has_prefix:
            serve_texts(engine, TEXTS[:1], name="before")
        no_number_once(engine)
        submit_text(engine, "spoiled", TEXTS[0])
        (failed,) = drained(engine)
        assert (failed.finish_reason, failed.num_cached_tokens > 0) == (Finish.ERROR, has_prefix)
        assert NOT_FINITE in failed.error
        found = serve_texts(engine, TEXTS[:2])
        assert texts_of(found) == expected
        assert [cached for _, cached in found.values()] == [0, 3 * B + found[1][1] % B]
        again = serve_texts(engine, TEXTS[:2], name="again")
        assert texts_of(again) == expected
        assert all(cached >= 6 * B for _, cached in again.values())


@pytest.mark.parametrize("seed", range(3))
def test_with_rows_spoiled_all_the_time_nobody_reads_what_they_left(seed):
    spoils = Spoils(probability=0.1, seed=seed)
    report = soaked(stub_engine(**STUB, **TIERED, mishaps=spoils), 300, seed=seed, mishaps=spoils)
    assert report.is_good, "\n".join(report.told)
    assert report.faults["not finite"] > 50
    assert report.cache["hit_tokens"] > 0


# -- stores without memory ---------------------------------------------------------------------------------------------


def cannot_store_the_last_block(monkeypatch, engine, error, *, times=1):
    """A block that is not full goes into the tree when its sequence ends."""
    tree, left = engine._cache.tree, [times]
    insert = tree.insert

    def broken(parent, chain, index, num_tokens):
        if num_tokens < BLOCK and left[0]:
            left[0] -= 1
            raise error
        return insert(parent, chain, index, num_tokens)

    monkeypatch.setattr(tree, "insert", broken)
    return left


def test_who_is_cancelled_gives_all_back_though_what_it_leaves_cannot_be_stored(monkeypatch):
    engine = stub(max_num_tokens=64)
    left = cannot_store_the_last_block(monkeypatch, engine, MemoryError())
    submit(engine, "a", tokens(40), 20)
    submit(engine, "b", tokens(40, 5), 3)
    engine.step()
    engine.step()
    engine.cancel("a")
    assert left == [0]
    done = drain(engine)
    assert {name: one.finish_reason for name, one in done.items()} == {"a": Finish.CANCELLED, "b": Finish.LENGTH}
    assert_all_is_back(engine)
    submit(engine, "a", [1, 2])  # the id is free again
    assert drain(engine)["a"].finish_reason is Finish.LENGTH


@pytest.mark.parametrize("times", [1, 2])
def test_who_ends_in_a_step_completes_though_what_it_leaves_cannot_be_stored(monkeypatch, times):
    """And so do the others of the step, whether they end in it as well or go on."""
    engine = stub(max_num_tokens=64)
    for name, most in (("a", 3), ("b", 3), ("c", 9)):
        submit(engine, name, tokens(20, ord(name)), most)
    left = cannot_store_the_last_block(monkeypatch, engine, MemoryError(), times=times)
    done = drain(engine)
    assert left == [0]
    assert {(one.finish_reason, one.error) for one in done.values()} == {(Finish.LENGTH, None)}
    assert {name: len(one.token_ids) for name, one in done.items()} == {"a": 3, "b": 3, "c": 9}
    assert_all_is_back(engine)


@pytest.mark.parametrize("who", ["store", "penalties", "slots"])
def test_a_manager_that_cannot_give_back_fails_neither_the_request_nor_the_step(monkeypatch, who):
    """It is a defect, and told as one; every manager has had its turn."""
    engine = stub(max_num_tokens=64)
    for name, most in (("a", 3), ("b", 5)):
        submit(engine, name, tokens(20, ord(name)), most)
    if who == "store":
        cannot_store_the_last_block(monkeypatch, engine, RuntimeError("broken"))
    else:
        Broken(monkeypatch, getattr(engine._runtime.managers, who), "free", RuntimeError("broken"), after=True)
    with pytest.warns(RuntimeWarning, match="giving back what request 'a' held raised RuntimeError: broken"):
        done = drain(engine)
    assert {one.finish_reason for one in done.values()} == {Finish.LENGTH}
    assert_all_is_back(engine)


# -- prompts that may not be cut ---------------------------------------------------------------------------------------


def uncut(num_blocks, **fields):
    """A prompt of 64 tokens of which one block lies on the host; nothing may be cut, and a step takes 64 tokens."""
    fields = {"max_seq_len": 200, "max_num_tokens": 64, "chunk_tokens": "none", "load_steps": 2, **fields}
    engine = tiered(tokens(64), num_stored=20, num_blocks=num_blocks, **fields)
    assert num_on_host(engine, tokens(64)) == 1
    return engine


def test_a_loaded_prompt_is_not_starved_by_who_comes_later():
    """It needs 48 of the 64 tokens of a step, and short decodes never leave so many while others come in."""
    engine = uncut(150, max_batch_size=32)
    num_short = 0

    def submit_short():
        nonlocal num_short
        number, num_short = num_short, num_short + 1
        submit(engine, f"s{number}", [1 + number % 250, 1 + number // 250], 20 + 7 * number % 23)

    for _ in range(30):
        submit_short()
    engine.step()
    submit(engine, "victim", tokens(64))
    for _ in range(MAX_OVERTAKEN + 100):
        while engine.progress().num_waiting < 4:
            submit_short()
        if any(one.request_id == "victim" for one in engine.step()):
            return
    raise AssertionError("it starves")


def test_a_running_prompt_that_may_not_be_cut_and_finds_no_memory_ends(monkeypatch):
    """It runs, for it has loaded its first block: the second try is too small for it, and so would be all others."""
    engine = uncut(20, max_batch_size=4)
    real, sizes = type(engine._runtime).launch, []

    def launch(self, scheduled, batch):
        sizes.append(scheduled.plan.shape.num_tokens)
        if sizes[-1] > 40:
            raise DriverOOM("launch", "too large")
        return real(self, scheduled, batch)

    monkeypatch.setattr(type(engine._runtime), "launch", launch)
    submit(engine, "v", tokens(64))
    done = drain(engine, most=50)
    assert done["v"].finish_reason is Finish.ERROR
    assert "the step failed: launch failed: too large" in done["v"].error
    assert len(sizes) < 5
    submit(engine, "small", tokens(30, 3))
    assert drain(engine)["small"].finish_reason is Finish.LENGTH
    assert_all_is_back(engine)


# -- loads that do not come --------------------------------------------------------------------------------------------


def no_load_comes(monkeypatch, kind):
    """Loads of the class ``kind`` are never done, and whoever waits is told that they failed."""

    def failed(self, *_):
        raise DriverError("event_sync", "unspecified launch failure")

    monkeypatch.setattr(kind, "is_done", property(lambda _: False))
    monkeypatch.setattr(kind, "wait", failed)


def test_a_load_that_fails_is_computed_instead_and_costs_nobody_else_anything():
    engine = tiered(tokens(64), load_steps=30)
    submit(engine, "r", tokens(20, 77), 30)
    submit(engine, "l", tokens(64))
    engine.step()
    assert engine.progress().num_loading == 1
    (load,) = engine._runtime.mover._under_way
    broken = type("Broken", (), {"is_done": property(lambda _: 1 / 0), "wait": lambda _: 1 / 0})()
    (one,) = engine._cache.incoming._loading
    assert one.load is load
    one.load = broken
    for number in range(3):
        submit(engine, f"q{number}", tokens(20, 30 + number))
    done = drain(engine)
    assert {(one.finish_reason, one.error) for one in done.values()} == {(Finish.LENGTH, None)}
    assert sorted(done) == ["l", "q0", "q1", "q2", "r"]
    assert done["l"].num_cached_tokens == 0
    assert engine.stats()["kv.lost"] == 3
    assert_all_is_back(engine)
    engine.close()


def test_a_real_engine_serves_on_and_closes_though_no_load_comes(tiny_llama, monkeypatch):
    options = replace(asked(tiny_llama, host_kv_bytes=4 * MiB, kv_tokens=9 * B), fence=True)
    with start(options) as engine:
        expected = texts_of(serve_texts(engine))
        assert engine.stats()["kv.host_cached"] > 20
        with monkeypatch.context() as broken:
            no_load_comes(broken, mover._DeviceLoad)
            for number in range(2):
                submit_text(engine, "again", TEXTS[number])
                again = drain(engine)["again"]
                assert (again.token_ids, again.error) == (expected[number], None)
            assert engine.stats()["kv.lost"] > 0
            assert engine.stats()["kv.live"] == 0
            engine.close()
        site = engine._runtime.site
        assert (site._closing, site.driver.used_bytes) == ([], 0)


def test_an_error_of_another_manager_is_not_blamed_on_loads(monkeypatch):
    """It takes its step with it, and who loads meanwhile goes on loading."""
    engine = tiered(tokens(64), load_steps=6)
    submit(engine, "run", tokens(20, 77), 8)
    submit(engine, "l", tokens(64))
    Broken(monkeypatch, engine._runtime.managers.penalties, "committed", RuntimeError("penalties broke"))
    done = drain(engine)
    assert done["run"].finish_reason is Finish.ERROR
    assert "penalties broke" in done["run"].error
    assert (done["l"].finish_reason, done["l"].num_cached_tokens, done["l"].num_suspended) == (Finish.LENGTH, 48, 0)
    assert_all_is_back(engine)


def test_a_load_for_which_no_room_can_be_made_costs_nobody_else_anything(monkeypatch):
    """What lies in its way cannot be offloaded: who loads computes all by itself, and who runs goes on."""
    engine = tiered(tokens(64))
    submit(engine, "run", tokens(20, 77), 8)
    engine.step()
    assert engine._cache.num_free < 3
    Broken(monkeypatch, engine._runtime.mover, "offload", DriverError("offload", "the link is down"))
    submit(engine, "l", tokens(64))
    done = drain(engine)
    told = {name: (one.finish_reason, one.error) for name, one in done.items()}
    assert told == dict.fromkeys(("run", "l"), (Finish.LENGTH, None))
    assert_all_is_back(engine)


# -- transfers and pins ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_pinned", [False, True], ids=["nothing pinned", "a pin is open"])
def test_who_runs_alone_waits_for_a_cancelled_load_and_then_runs(is_pinned):
    """It needs 15 of 20 blocks, of which a pin holds one at most, and the transfer nine for as long as it lasts."""
    engine = tiered(tokens(160))
    submit(engine, "p", [249, *tokens(20, 77)])
    engine.step()
    pin = engine.pin("p") if is_pinned else None
    submit(engine, "l", tokens(160))
    for _ in range(3):
        engine.step()
    assert list(engine._scheduler.running) == ["l"]
    assert engine.progress().num_loading == 1
    engine.cancel("l")
    submit(engine, "big", [248, *tokens(199, 55)], 40)
    done = drain(engine, most=60)
    assert {name: one.finish_reason for name, one in done.items()} == {"l": Finish.CANCELLED, "big": Finish.LENGTH}
    if pin is not None:
        assert engine.stats()["kv.live"] == 1
        pin.close()
    assert_all_is_back(engine)


def test_ctrl_c_while_a_pin_is_closed_comes_after_all_is_given_back(monkeypatch):
    engine = stub(max_seq_len=640, max_num_tokens=64)
    submit(engine, "a", tokens(40), 20)
    engine.step()
    pin = engine.pin("a")
    engine.cancel("a")
    drain(engine)
    assert engine.stats()["kv.live"] == 2
    let_go = Blocks.let_go

    def interrupted(self, ids):
        idle = let_go(self, ids)
        signal.raise_signal(signal.SIGINT)
        return idle

    monkeypatch.setattr(Blocks, "let_go", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pin.close()
    monkeypatch.undo()
    assert not pin.is_open
    pin.close()
    assert_all_is_back(engine)
    submit(engine, "big", [250, *tokens(600, 3)], 39)  # all of the pool
    assert drain(engine)["big"].finish_reason is Finish.LENGTH


# -- managers that know different things -------------------------------------------------------------------------------


@pytest.mark.parametrize("second", [0, 16, 48])
def test_two_managers_that_begin_a_request_at_different_tokens_fail_it_alone(second):
    """The one computes too much and the other too little: nobody may choose for them. No cache at all says nothing."""
    engine, kv = engine_on_fake(max_batch_size=4, max_num_tokens=64)
    managers = engine._runtime.managers
    other = FakeKV(managers.slots, num_blocks=64, block_tokens=BLOCK)
    other.name = "states"
    kv.cached = lambda _: 32
    other.cached = lambda request: second if request.id == "bad" else 32
    dispatcher = Dispatcher([*managers.dispatcher.managers, other])
    engine._runtime.managers = replace(managers, dispatcher=dispatcher)
    engine = Engine(engine._runtime, engine.text, ())
    for name in ("bad", "good"):
        submit(engine, name, tokens(60))
    done = drain(engine)
    assert done["bad"].finish_reason is Finish.ERROR
    assert f"managers begin 'bad' at different tokens: {sorted({second, 32})}" in done["bad"].error
    assert (done["good"].finish_reason, done["good"].num_cached_tokens) == (Finish.LENGTH, 32)
    assert (kv.held, other.held, engine.stats()["slots.used"]) == ({}, {}, 0)
