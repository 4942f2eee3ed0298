"""Plans from measurements: the same arithmetic, claims of others beside the planner's own, remedies that last."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from test_planner import SMOLLM2, checked, limits

from tonnage.config import Knobs, Setting
from tonnage.errors import DoesNotFit
from tonnage.hardware import host_card
from tonnage.layout import metadata_bytes_per_block
from tonnage.planner import claims_for, plan_measured, plan_without_device, resolve_limits
from tonnage.planner.predict import predict
from tonnage.terms import (
    Claim,
    Fixed,
    Lifetime,
    LineKind,
    Maker,
    Measured,
    Quantity,
    Rank,
    Source,
    StagePeak,
    StepShape,
)
from tonnage.units import MiB


class TestMeasured:
    """An engine's probes in the place of closed forms."""

    CARD = host_card(1200 * MiB, page_bytes=4096)
    LIMITS = limits(max_seq_len=512, max_batch_size=16, max_num_tokens=256)

    def measured(self, **changes: object) -> Measured:
        def stage(name: str, allocated: int, reserved: int) -> StagePeak:
            sizes = [Quantity.exact(n * MiB, Source.MEASURED, name) for n in (allocated, reserved)]
            return StagePeak(stage=name, shape=StepShape(), allocated=sizes[0], reserved=sizes[1])

        made = Measured(
            rank=Rank(),
            device_bytes=1200 * MiB,
            weights=Quantity.exact(538_060_032, Source.COUNTED, "arena"),
            context=Quantity.exact(40 * MiB, Source.MEASURED, "remainder"),
            libraries=Quantity.exact(12 * MiB, Source.MEASURED, "remainder"),
            stages=(stage("prefill", 20, 31), stage("decode", 9, 14)),
            graphs=None,
            foreign_bytes=Quantity.exact(0, Source.MEASURED, ""),
        )
        return replace(made, **changes)

    def test_lines_are_what_was_measured(self):
        made = checked(plan_measured(SMOLLM2, card=self.CARD, measured=self.measured(), limit_knobs=self.LIMITS))
        assert made.line(LineKind.TRANSIENT).bytes == 20 * MiB
        assert next(line.bytes for line in made.lines if line.name == "fragmentation") == 11 * MiB
        assert made.bytes_of(LineKind.CONTEXT) == 40 * MiB
        assert made.line(LineKind.CONTEXT).source == Source.MEASURED

    def test_the_same_arithmetic_as_without_a_device(self):
        """What the closed forms say, handed in as if it had been measured, gives the same partition."""
        planned = plan_without_device(SMOLLM2, card=self.CARD, limit_knobs=self.LIMITS)
        forms = predict(
            SMOLLM2,
            card=self.CARD,
            limits=planned.limits,
            rank=Rank(),
            dtype="float32",
            weights=Quantity.exact(538_060_032, Source.DERIVED, ""),
        )
        again = plan_measured(SMOLLM2, card=self.CARD, measured=forms, limit_knobs=self.LIMITS)
        assert [(line.name, line.bytes) for line in again.lines] == [(line.name, line.bytes) for line in planned.lines]

    def test_the_device_is_as_large_as_measured(self):
        measured = self.measured(device_bytes=1100 * MiB)
        made = checked(plan_measured(SMOLLM2, card=self.CARD, measured=measured, limit_knobs=self.LIMITS))
        assert made.device_bytes == 1100 * MiB

    def test_extra_claims_and_versions(self):
        extra = Claim(
            name="penalties",
            owner="sampler",
            line=LineKind.TABLES,
            cost=Fixed(bytes=MiB),
            lifetime=Lifetime.LAZY,
            maker=Maker.TORCH,
            source=Source.DERIVED,
            reason="first request with a penalty",
            can_disable=True,
        )
        kwargs = {"card": self.CARD, "measured": self.measured(), "limit_knobs": self.LIMITS, "extra_claims": [extra]}
        with_it = checked(plan_measured(SMOLLM2, versions={"torch": "2.13.0"}, **kwargs))
        without = checked(plan_measured(SMOLLM2, knobs=Knobs(disabled_claims=frozenset({"penalties"})), **kwargs))
        saved = with_it.bytes_of(LineKind.TABLES) - without.bytes_of(LineKind.TABLES)
        blocks = without.kv.num_slabs - with_it.kv.num_slabs
        each = metadata_bytes_per_block(prefix_caching=True)
        assert saved == MiB - each * blocks
        assert with_it.fingerprint != plan_measured(SMOLLM2, **kwargs).fingerprint

    def manager_claims(self, **changes: object) -> list[Claim]:
        """Those of the host's claims that a resource manager could also say, by another owner."""
        made, _ = resolve_limits(SMOLLM2, self.LIMITS, device_kind="host")
        listed = [claim for claim in claims_for(SMOLLM2, made, device_kind="host") if claim.line == LineKind.TABLES]
        return [replace(claim, owner="kv", **changes) for claim in listed]

    @pytest.mark.parametrize("asked", [LIMITS, replace(LIMITS, max_seq_len=Setting())])
    def test_a_claim_said_twice_counts_once(self, asked):
        kwargs = {"card": self.CARD, "measured": self.measured(), "limit_knobs": asked}
        made, _ = resolve_limits(SMOLLM2, asked, device_kind="host")
        listed = claims_for(SMOLLM2, made, device_kind="host")
        once = checked(plan_measured(SMOLLM2, **kwargs))
        twice = checked(plan_measured(SMOLLM2, extra_claims=[replace(c, owner="kv") for c in listed], **kwargs))
        assert twice.lines == once.lines
        slots = replace(listed[1], name="slots", cost=Fixed(bytes=64))
        extra = [checked(plan_measured(SMOLLM2, extra_claims=[slots] * n, **kwargs)) for n in (1, 2)]
        assert extra[0].lines == extra[1].lines != once.lines

    @pytest.mark.parametrize("changes", [{"cost": Fixed(bytes=1)}, {"applies": False}])
    def test_claims_of_one_name_that_cost_unalike_are_a_defect(self, changes):
        kwargs = {"card": self.CARD, "measured": self.measured(), "limit_knobs": self.LIMITS}
        with pytest.raises(ValueError, match=r"two claims are named 'page table', of resources\.kv and kv"):
            plan_measured(SMOLLM2, extra_claims=self.manager_claims(**changes), **kwargs)

    def test_a_refusal_with_a_claim_said_twice_still_finds_remedies(self):
        """The search changes the limits, and with them the listed claims; the others stay as they were said."""
        asked = replace(self.LIMITS, max_seq_len=Setting.flag(512, "512", "--max-seq-len"))
        kwargs = {"card": self.CARD, "measured": self.measured(device_bytes=874 * MiB), "limit_knobs": asked}
        with pytest.raises(DoesNotFit, match="lower max_seq_len to"):
            plan_measured(SMOLLM2, extra_claims=self.manager_claims(), **kwargs)

    def test_a_remedy_leaves_room_for_the_next_measurement(self):
        measured = self.measured(device_bytes=900 * MiB)
        asked = replace(self.LIMITS, max_seq_len=Setting.flag(8192, "8192", "--max-seq-len"))
        with pytest.raises(DoesNotFit) as caught:
            plan_measured(SMOLLM2, card=self.CARD, measured=measured, limit_knobs=asked)
        (length,) = re.findall(r"max_seq_len to (\d+)", str(caught.value))
        noisier = replace(measured, context=Quantity.exact(56 * MiB, Source.MEASURED, ""))
        shorter = replace(asked, max_seq_len=Setting.flag(int(length), length, "--max-seq-len"))
        checked(plan_measured(SMOLLM2, card=self.CARD, measured=noisier, limit_knobs=shorter))
        assert "max_num_tokens" not in str(caught.value)
