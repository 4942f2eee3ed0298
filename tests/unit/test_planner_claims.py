"""What the planner lists beside weights, cache and probes, and what switching a claim off does."""

from __future__ import annotations

import pytest
from test_planner import SMOLLM2, checked, limits

from tonnage.config import Knobs
from tonnage.errors import InvalidSetting
from tonnage.hardware import generic_card, host_card
from tonnage.layout import metadata_bytes_per_block, penalty_table_bytes, table_bytes
from tonnage.planner import claims_for, plan_without_device, resolve_limits
from tonnage.planner.claims import step_input_bytes
from tonnage.planner.limits import HOST_MAX_BATCH_SIZE
from tonnage.terms import Fixed, LineKind, PerBlock, Source
from tonnage.units import GiB


def test_claims_that_cannot_be_switched_off():
    with pytest.raises(InvalidSetting, match="disabled_claims"):
        plan_without_device(SMOLLM2, card=host_card(2 * GiB), knobs=Knobs(disabled_claims=frozenset({"page table"})))


def test_tables_on_the_host_are_what_the_formulas_of_the_layout_say():
    """Managers claim by the same names and formulas; a plan takes each name once."""
    made, _ = resolve_limits(SMOLLM2, limits(max_seq_len=100), device_kind="host")
    tables = {
        claim.name: claim.cost
        for claim in claims_for(SMOLLM2, made, block_tokens=8, device_kind="host")
        if claim.line == LineKind.TABLES and claim.applies
    }
    table = table_bytes(max_batch_size=HOST_MAX_BATCH_SIZE, max_seq_len=100, block_tokens=8)
    assert tables == {
        "page table": Fixed(bytes=table),
        "block metadata": PerBlock(bytes_per_block=metadata_bytes_per_block()),
        "penalty tables": Fixed(bytes=penalty_table_bytes(max_batch_size=HOST_MAX_BATCH_SIZE, vocab_size=49_152)),
    }


def test_claims_of_this_path():
    made, _ = resolve_limits(SMOLLM2, limits(max_seq_len=100, max_batch_size=4, max_num_tokens=64))
    found = {claim.name: claim for claim in claims_for(SMOLLM2, made, device_kind="cuda")}
    assert found["page table"].cost == Fixed(bytes=4 * 7 * 4)
    assert found["step inputs"].cost == Fixed(bytes=step_input_bytes(made)) == Fixed(bytes=8 * (3 * 64 + 3 * 5))
    assert found["penalty tables"].cost == Fixed(bytes=4 * 49_152 * (4 + 1))
    assert not found["block metadata"].applies
    assert [claim.source for claim in found.values() if claim.line == LineKind.SCRATCH and claim.applies] == [Source.DECLARED]


@pytest.mark.parametrize("card", [generic_card(80 * GiB), host_card(2 * GiB)], ids=lambda card: card.name)
def test_penalty_tables_are_paid_from_the_start_unless_they_are_switched_off(card):
    """256 sequences on a card and 32 on the host, over 49,152 tokens: an int32 and a bool each."""
    made = checked(plan_without_device(SMOLLM2, card=card))
    size = {256: 62_914_560, 32: 7_864_320}[made.limits.max_batch_size]
    assert [c.bytes for c in made.line(LineKind.TABLES).children if c.name == "penalty tables"] == [size]
    assert (made.limits.penalties, made.limits.max_logprobs) == (True, 20)
    off = Knobs(disabled_claims=frozenset({"penalty tables"}))
    without = checked(plan_without_device(SMOLLM2, card=card, knobs=off))
    assert not without.limits.penalties
    assert without.bytes_of(LineKind.TABLES) < made.bytes_of(LineKind.TABLES)
    assert without.kv.bytes > made.kv.bytes + size // 2
    assert without.fingerprint != made.fingerprint
