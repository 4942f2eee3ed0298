"""Both policies run the same engine: another number of blocks, the same text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_engine import ask, assert_idle, drain, options, texts

from tonnage.budget.reference.knobs import ReferenceKnobs
from tonnage.config import Knobs, Setting
from tonnage.engine import start
from tonnage.errors import InvalidSetting
from tonnage.terms import LineKind
from tonnage.units import MiB


def served(asked):
    with start(asked) as engine:
        for i in range(6):
            ask(engine, f"r{i}", length=10 + 7 * i, max_tokens=12)
        found = texts(drain(engine))
        assert_idle(engine)
        return engine.plan, engine.result(), found


def test_the_reference_policy_runs_the_same_engine(tiny_llama):
    own_plan, _, own = served(options(tiny_llama))
    plan, result, found = served(replace(options(tiny_llama), reference=ReferenceKnobs(tokens_per_block=16)))
    assert (own_plan.policy, plan.policy) == ("own", "reference")
    assert found == own
    assert sum(line.bytes for line in plan.lines) == plan.device_bytes
    kv = next(entry for entry in result.snapshot.entries if entry.line == LineKind.KV)
    assert 0 <= kv.physical_bytes - plan.kv.bytes < 2 * 2 * MiB  # whole pages of what was planned
    assert plan.bytes_of(LineKind.SLACK) > 0


def test_its_cap_is_obeyed(tiny_llama):
    plan, _, _ = served(replace(options(tiny_llama), reference=ReferenceKnobs(tokens_per_block=16, max_tokens=256)))
    assert plan.kv.tokens == 256


def test_our_money_beside_it_is_refused_before_anything_is_read(tiny_llama):
    asked = replace(options(tiny_llama), knobs=Knobs(kv_bytes=Setting(MiB)), reference=ReferenceKnobs())
    with pytest.raises(InvalidSetting, match=r"kv_bytes.*knobs of its own"):
        start(asked)
