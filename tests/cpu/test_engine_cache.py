"""The knobs of the cache in a whole engine: reuse, the host tier, the head of the pool; and what they take.

Text is compared with an engine that keeps nothing, which ``test_engine`` compares with transformers.
"""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from test_engine import assert_idle, drain, options

from tonnage.budget.reference.knobs import ReferenceKnobs
from tonnage.caching import CacheParams
from tonnage.config import Setting
from tonnage.device.host import HostDriver
from tonnage.engine import start
from tonnage.errors import DoesNotFit, InvalidSetting
from tonnage.report.run_table import show_run
from tonnage.sampling import SamplingParams
from tonnage.terms import IDLE_TIER, HostPlan, LineKind
from tonnage.units import MiB

B = 16
#: Eight texts of seven blocks each begin alike in three of them.
SHARED = [(5 * i) % 250 for i in range(3 * B)]
TEXTS = [[*SHARED, *((7 * i + n) % 250 for i in range(4 * B - 3))] for n in range(8)]


def asked(model, *, prefix_caching=None, host_kv_bytes=None, kv_tokens=None, **rest):
    made = options(model, kv_tokens=kv_tokens, **rest)
    return replace(
        made,
        knobs=replace(made.knobs, host_kv_bytes=Setting(host_kv_bytes)),
        limit_knobs=replace(made.limit_knobs, prefix_caching=Setting(prefix_caching)),
    )


def submit(engine, name, tokens, **cache):
    params = SamplingParams(max_tokens=6, ignore_eos=True, cache=CacheParams(**cache))
    engine.submit(engine.request(name, params, token_ids=tokens))


def serve(engine, texts=TEXTS, *, name="r", **cache):
    """One text after the other; by number the tokens generated, and how many of the prompt were cached."""
    found = {}
    for number, tokens in enumerate(texts):
        submit(engine, f"{name}{number}", tokens, **cache)
        (ended,) = drain(engine)
        found[number] = (ended.token_ids, ended.num_cached_tokens)
    return found


def texts_of(found):
    return {number: tokens for number, (tokens, _) in found.items()}


@pytest.fixture(scope="module")
def plain(tiny_llama):
    """What an engine generates that keeps nothing."""
    with start(asked(tiny_llama, prefix_caching=False)) as engine:
        assert not engine.plan.limits.prefix_caching
        first, second = serve(engine), serve(engine, name="again")
        assert first == second
        assert {cached for _, cached in first.values()} == {0}
        assert engine.result().cached_prompt_tokens == 0
        return texts_of(first)


def test_what_begins_alike_is_computed_once_and_the_text_is_the_same(tiny_llama, plain):
    with start(asked(tiny_llama)) as engine:
        first, second = serve(engine), serve(engine, name="again")
        assert texts_of(first) == texts_of(second) == plain
        assert [cached >= len(SHARED) for _, cached in first.values()] == [False] + [True] * 7
        assert all(cached >= 6 * B for _, cached in second.values())
        computed = sum(map(len, TEXTS)) - sum(cached for _, cached in second.values())
        assert computed < 0.15 * sum(map(len, TEXTS))
        result = engine.result()
        assert result.cached_prompt_tokens == sum(cached for found in (first, second) for _, cached in found.values())
        assert (result.offloaded_blocks, result.loaded_blocks) == (0, 0)
        assert_idle(engine)


def test_a_salt_shares_with_its_own_and_who_wants_no_reuse_with_nobody(tiny_llama, plain):
    with start(asked(tiny_llama)) as engine:
        serve(engine, TEXTS[:1])
        for name, cache, cached in (
            ("other", {"salt": "a"}, 0),
            ("same", {"salt": "a"}, 6 * B),
            ("no", {"reuse": False}, 0),
        ):
            ((tokens, found),) = serve(engine, TEXTS[:1], name=name, **cache).values()
            assert (tokens, found // B * B) == (plain[0], cached)


def test_hits_survive_eviction_through_the_host_tier(tiny_llama, plain):
    """The device holds a quarter of what the texts take; the host holds all of it."""
    slab_bytes = 2 * 2 * 2 * 16 * B * 4  # layers, keys and values, heads, elements a head, tokens, bytes of a float32
    host_bytes = 48 * slab_bytes + 100
    with start(asked(tiny_llama, kv_tokens=10 * B, host_kv_bytes=host_bytes)) as engine:
        assert engine.plan.kv.layout.slab_bytes == slab_bytes
        assert engine.plan.host == HostPlan(kv_bytes=host_bytes, taken_bytes=48 * slab_bytes)
        assert any("48 blocks" in told and "100 bytes of what was asked" in told for told in engine.plan.warnings)
        first, second = serve(engine), serve(engine, name="again")
        assert texts_of(first) == texts_of(second) == plain
        assert all(cached >= 6 * B for _, cached in second.values())
        result = engine.result()
        assert result.offloaded_blocks > 20
        assert result.loaded_blocks > 20
        assert not result.retried_steps
        assert_idle(engine)


def test_the_tier_lies_beside_the_device_and_its_books_inside(tiny_llama):
    """Books of a tier a hundred times as large as the pool: planned on a host device, where they lie on the device."""
    small, drivers = 10 * B, []

    def driver(capacity):
        drivers.append(HostDriver(capacity))
        return drivers[-1]

    with start(asked(tiny_llama, kv_tokens=small)) as engine:
        alone = engine.plan
    with start(asked(tiny_llama, kv_tokens=small, host_kv_bytes=32 * MiB), make_driver=driver) as engine:
        plan = engine.plan
        assert plan.kv == alone.kv
        num_blocks = 32 * MiB // plan.kv.layout.slab_bytes
        assert num_blocks > 100 * plan.kv.num_slabs // 2
        (tables,) = (line for line in plan.lines if line.kind == LineKind.TABLES)
        assert any(child.name == "host block metadata" for child in tables.children)
        (row,) = (row for row in engine.result().audit if row.line == LineKind.TABLES)
        assert 0 < row.actual_bytes <= row.planned_bytes
        assert not any("tables holds" in told for told in plan.warnings)
        assert drivers[0].own_bytes() < 320 * MiB
    assert drivers[0].close() == ()


@pytest.mark.parametrize("policy", ["own", "reference"])
def test_without_a_prefix_cache_no_tier_is_taken_and_the_plan_says_so(tiny_llama, plain, policy):
    """A tier that could not be had at all is not looked for."""
    if policy == "own":
        made = asked(tiny_llama, kv_tokens=10 * B, prefix_caching=False, host_kv_bytes=2**50)
    else:
        reference = ReferenceKnobs(
            tokens_per_block=B, max_tokens=10 * B, host_cache_bytes=2**50, enable_block_reuse=False
        )
        made = replace(options(tiny_llama), reference=reference)
    with start(made) as engine:
        assert texts_of(serve(engine)) == plain
        assert engine.stats()["kv.host_capacity"] == 0
        assert engine.plan.host == HostPlan(kv_bytes=2**50, taken_bytes=0)
        assert engine.plan.warnings.count(f"host_kv_bytes has no effect here: {IDLE_TIER}") == 1
        (row,) = (row for row in engine.result().audit if row.line == LineKind.TABLES)
        assert 0 < row.actual_bytes <= row.planned_bytes


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_books_are_priced_to_the_byte(tiny_llama, prefix_caching):
    """One entry more than there are blocks is a slot for the id that stands for none."""
    made = asked(tiny_llama, kv_tokens=10 * B, prefix_caching=prefix_caching)
    without_penalties = replace(made.knobs, disabled_claims=frozenset({"penalty tables"}))
    with start(replace(made, knobs=without_penalties)) as engine:
        (row,) = (row for row in engine.result().audit if row.line == LineKind.TABLES)
        assert 0 < row.actual_bytes <= row.planned_bytes
        assert not any("tables holds" in told for told in engine.plan.warnings)


def test_a_small_pool_is_not_over_a_plan_that_the_probes_knew_nothing_of(tiny_llama):
    with start(asked(tiny_llama, kv_tokens=10 * B, max_batch_size=32)) as engine:
        result = engine.result()
        (row,) = (row for row in result.audit if row.line == LineKind.KV)
        assert row.planned_bytes >= row.high_water_bytes >= row.actual_bytes
        out = io.StringIO()
        show_run(result, Console(file=out, width=120), with_plan=False)
        (told,) = (line for line in out.getvalue().splitlines() if line.startswith("kv "))
        assert "within" in told
        assert "over" not in told


def test_the_reference_host_cache_size_is_obeyed(tiny_llama, plain):
    reference = ReferenceKnobs(tokens_per_block=B, max_tokens=10 * B, host_cache_bytes=4 * MiB)
    with start(replace(options(tiny_llama), reference=reference)) as engine:
        assert texts_of(serve(engine)) == plain
        assert texts_of(serve(engine, name="again")) == plain
        assert engine.result().loaded_blocks > 0


@pytest.mark.parametrize("host_kv_bytes", [1, 2**50])
def test_a_tier_that_cannot_be_is_refused_with_numbers_and_nothing_is_kept(tiny_llama, host_kv_bytes):
    drivers = []

    def driver(capacity):
        drivers.append(HostDriver(capacity))
        return drivers[-1]

    with pytest.raises(DoesNotFit) as refused:
        start(asked(tiny_llama, host_kv_bytes=host_kv_bytes), make_driver=driver)
    assert refused.value.where == "host"
    assert refused.value.need_bytes > refused.value.have_bytes
    assert drivers[0].close() == ()


def test_one_sequence_must_fit_on_the_device_whatever_the_host_holds(tiny_llama):
    """F123: the tier relaxes what is kept, not what runs."""
    told = []
    for host_kv_bytes in (None, 32 * MiB):
        with pytest.raises(DoesNotFit) as refused:
            start(asked(tiny_llama, kv_tokens=4 * B, host_kv_bytes=host_kv_bytes))
        told.append((refused.value.need_bytes, refused.value.have_bytes, refused.value.need))
    assert told[0] == told[1]


# -- the head ----------------------------------------------------------------------------------------------------


def test_a_head_is_lent_to_cached_blocks_and_taken_back_in_the_middle_of_a_text(tiny_llama, plain):
    slab_bytes = 2 * 2 * 2 * 16 * B * 4
    with start(asked(tiny_llama, kv_tokens=20 * B, scratch_head_bytes=5 * slab_bytes - 1)) as engine:
        kv = engine.plan.kv
        assert (kv.reachable_tokens, kv.guaranteed_tokens) == (20 * B, 15 * B)
        cache = engine._runtime.managers.kv.cache
        assert (cache.head_slots, cache.capacity) == (5, 15)
        assert texts_of(serve(engine)) == plain
        found = {}
        for number, tokens in enumerate(TEXTS[:2]):
            submit(engine, f"again{number}", tokens)
        while engine.has_work:
            found |= {ended.request_id: ended.token_ids for ended in engine.step()}
            assert cache.take_back() is None
            assert not (cache.blocks.owners[: cache.head_slots] >= 0).any()
            cache.lend()
        assert found == {f"again{number}": plain[number] for number in range(2)}
        assert engine.stats()["kv.taken_back"] > 0
        assert_idle(engine)


def test_a_head_as_large_as_the_pool_is_refused(tiny_llama):
    with pytest.raises(InvalidSetting, match=r"scratch_head_bytes.*write at most"):
        start(asked(tiny_llama, kv_tokens=10 * B, scratch_head_bytes=MiB))
