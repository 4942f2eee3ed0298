"""Options of the verbs that only plan: what requests may ask for, how the model is spread over ranks, which policy.

``Planning`` is what becomes of them: one object that plans for any knobs, limits and device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from tonnage.cli.options import PoolOptions, Text, option, read_count, setting
from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.errors import InvalidSetting
from tonnage.units import parse_bytes, parse_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tonnage.budget.reference.knobs import ReferenceKnobs
    from tonnage.costs.checkpoint import Checkpoint
    from tonnage.costs.config import ModelConfig
    from tonnage.hardware import Card
    from tonnage.planner.asked import Asked
    from tonnage.planner.predict import StageProbe
    from tonnage.terms import MemoryPlan, Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureOptions:
    """What requests may ask for, and how memory for it is set aside."""

    attention: Annotated[
        Text, option("--attention", "NAME", "Attention backend whose scratch is planned (default sdpa).")
    ] = None
    state_dtype: Annotated[Text, option("--state-dtype", "NAME", "Dtype of recurrent states.")] = None
    scratch: Annotated[
        Text, option("--scratch", "POLICY", "Scratch that grows with attended tokens: cap (default) or reserve.")
    ] = None
    attended_tokens: Annotated[
        Text, option("--attended-tokens", "N", "Most tokens one step may attend to (default: all sequences, full).")
    ] = None
    draft: Annotated[Text, option("--draft", "MODEL", "A draft model beside it, in the same pool.")] = None
    max_draft_tokens: Annotated[
        Text, option("--max-draft-tokens", "N", "Tokens drafted ahead (default 0; 4 with --draft).")
    ] = None
    lookahead_steps: Annotated[Text, option("--lookahead-steps", "N", "Steps prepared while one runs (default 0).")] = (
        None
    )
    snapshot_tokens: Annotated[
        Text, option("--snapshot-tokens", "N", "Keep a recurrent state every N tokens, for prefixes (default none).")
    ] = None
    max_adapters: Annotated[Text, option("--max-adapters", "N", "Low-rank adapters resident at once (default 0).")] = (
        None
    )
    max_adapter_rank: Annotated[Text, option("--max-adapter-rank", "N", "Rank of the largest (default 16).")] = None
    max_encoder_tokens: Annotated[
        Text, option("--max-encoder-tokens", "N", "Tokens an encoder computes at once (default: max_num_tokens).")
    ] = None
    encoder_cache_bytes: Annotated[
        Text, option("--encoder-cache-bytes", "SIZE", "Cache of encoder outputs (default 128MiB).")
    ] = None
    prompt_logprobs: Annotated[
        bool, typer.Option("--prompt-logprobs", help="Requests may ask for log-probabilities of their prompt.")
    ] = False
    without: Annotated[
        list[str] | None,
        typer.Option("--without", metavar="CLAIM", help="Switch a claim off by name; may be repeated."),
    ] = None

    def knobs(self, pool: PoolOptions) -> Knobs:
        """The pool's knobs and these. Raises ``InvalidSetting`` for the first text that cannot be read."""
        from tonnage.costs.dtypes import parse_dtype

        return replace(
            pool.knobs(),
            state_dtype=setting(self.state_dtype, "--state-dtype", parse_dtype),
            scratch=_as_typed(self.scratch, "--scratch"),
            attended_tokens=setting(self.attended_tokens, "--attended-tokens", parse_count),
            disabled_claims=frozenset(self.without or ()),
        )

    def limits(self, pool: PoolOptions) -> LimitKnobs:
        """The pool's limits and these. Raises ``InvalidSetting`` as ``knobs`` does."""

        def count(text: Text, flag: str) -> Setting[int]:
            return setting(text, flag, parse_count, allow_zero=True)

        asked = self.prompt_logprobs
        return replace(
            pool.limits(),
            max_draft_tokens=count(self.max_draft_tokens, "--max-draft-tokens"),
            lookahead_steps=count(self.lookahead_steps, "--lookahead-steps"),
            snapshot_tokens=count(self.snapshot_tokens, "--snapshot-tokens"),
            max_adapters=count(self.max_adapters, "--max-adapters"),
            max_adapter_rank=setting(self.max_adapter_rank, "--max-adapter-rank", parse_count),
            max_encoder_tokens=setting(self.max_encoder_tokens, "--max-encoder-tokens", parse_count),
            encoder_cache_bytes=setting(
                self.encoder_cache_bytes, "--encoder-cache-bytes", parse_bytes, allow_zero=True
            ),
            prompt_logprobs=Setting.flag(asked, "yes", "--prompt-logprobs") if asked else Setting(),
        )

    @property
    def backend(self) -> str:
        return ("sdpa" if self.attention is None else self.attention).strip().lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """How the model is spread over devices, and which of them is looked at."""

    tp: Annotated[Text, option("--tp", "N", "Tensor-parallel ranks (default 1).")] = None
    pp: Annotated[Text, option("--pp", "N", "Pipeline stages (default 1).")] = None
    cp: Annotated[Text, option("--cp", "N", "Context-parallel ranks (default 1).")] = None
    ep: Annotated[Text, option("--ep", "N", "Expert-parallel ranks (default 1).")] = None
    attention_dp: Annotated[
        bool, typer.Option("--attention-dp", help="Attention runs data-parallel on the tensor-parallel ranks.")
    ] = False
    stage_layers: Annotated[
        Text, option("--stage-layers", "N,N,...", "Layers of each pipeline stage (default: an even split).")
    ] = None
    stage: Annotated[
        Text, option("--stage", "N", "Pipeline stage to show, from 0 (default: the one with the smallest pool).")
    ] = None

    def given(self) -> dict[str, object]:
        """By flag what was typed; None where it was left out."""
        return {
            "--tp": self.tp, "--pp": self.pp, "--cp": self.cp, "--ep": self.ep, "--stage": self.stage,
            "--attention-dp": self.attention_dp or None, "--stage-layers": self.stage_layers,
        }  # fmt: skip

    def rank(self) -> Rank:
        """The first rank of such an engine. Raises ``InvalidSetting``."""
        from tonnage.costs.reading import LARGEST_LAYERS
        from tonnage.terms import Rank

        tp, pp, cp, ep = (
            read_count(text, flag, 1)
            for text, flag in ((self.tp, "--tp"), (self.pp, "--pp"), (self.cp, "--cp"), (self.ep, "--ep"))
        )
        if pp > LARGEST_LAYERS:
            told = f"no model has more than {LARGEST_LAYERS:,} layers"
            raise InvalidSetting("--pp", pp, told, remedy="write at most as many stages as the model has layers")
        return Rank(
            size=tp * pp * cp,
            tp=tp,
            pp=pp,
            cp=cp,
            ep=ep,
            attention_dp=self.attention_dp,
            partition=_counts(self.stage_layers, "--stage-layers"),
        )

    def shown_stage(self, num_stages: int) -> int | None:
        """The stage asked for, None for the smallest. Raises ``InvalidSetting`` for one that there is not."""
        if self.stage is None:
            return None
        stage = read_count(self.stage, "--stage", 0, allow_zero=True)
        if stage >= num_stages:
            raise InvalidSetting(
                "--stage", stage, f"stages are numbered from 0 to {num_stages - 1}", remedy="leave --stage out"
            )
        return stage


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """Whose arithmetic: ours, or the reference's with its own knobs."""

    policy: Annotated[
        Text,
        option(
            "--policy", "NAME", "own (default), or reference: TensorRT-LLM's derivation (default with --reference)."
        ),
    ] = None
    reference: Annotated[
        list[str] | None,
        typer.Option("--reference", metavar="KNOB=VALUE", help="A knob of the reference policy; may be repeated."),
    ] = None

    def keywords(self) -> dict[str, ReferenceKnobs]:
        """What ``EngineOptions`` is given; nothing under our own policy. Raises ``InvalidSetting``."""
        knobs = self.knobs()
        return {} if knobs is None else {"reference": knobs}

    def knobs(self) -> ReferenceKnobs | None:
        """The reference's knobs, None under our own policy. Raises ``InvalidSetting``."""
        name = (self.policy or ("reference" if self.reference else "own")).strip().lower()
        if name not in ("own", "reference"):
            raise InvalidSetting("--policy", self.policy, "no such policy", remedy="write own or reference")
        if name == "own":
            if self.reference:
                raise InvalidSetting(
                    "--reference", self.reference[0], "a knob of the other policy", remedy="add --policy reference"
                )
            return None
        from tonnage.cli.reference import reference_knobs

        return reference_knobs(self.reference or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """Everything a plan depends on but knobs, limits and device. ``stage`` None: the one with the smallest pool;
    ``probe`` None: the closed forms of activations."""

    config: ModelConfig
    checkpoint: Checkpoint | None
    rank: Rank
    stage: int | None
    dtype: str | None
    backend: str
    reference: ReferenceKnobs | None
    draft: ModelConfig | None = None
    probe: StageProbe | None = None

    @classmethod
    def of(
        cls,
        model: str,
        *,
        pool: PoolOptions,
        features: FeatureOptions,
        ranks: RankOptions,
        policy: PolicyOptions,
        probe: StageProbe | None = None,
    ) -> Planning:
        """Raises ``InvalidSetting`` for a text that cannot be read, and whatever the model's files raise."""
        from tonnage.planner import checkpoint_of, find_config

        rank, reference = ranks.rank(), policy.knobs()
        return cls(
            config=find_config(model),
            checkpoint=checkpoint_of(model),
            rank=rank,
            stage=ranks.shown_stage(rank.pp),
            dtype=pool.weights_dtype(),
            # The reference's arithmetic is about its own backend, unless another was asked for.
            backend="trtllm" if reference is not None and features.attention is None else features.backend,
            reference=reference,
            draft=None if features.draft is None else find_config(features.draft),
            probe=probe,
        )

    def stages(self, knobs: Knobs, limits: LimitKnobs, card: Card) -> tuple[MemoryPlan, ...]:
        """One plan for each pipeline stage. Raises as ``plan_ranks``."""
        from tonnage.planner import plan_ranks

        return plan_ranks(self.config, **self.asked(knobs, limits, card))

    def asked(self, knobs: Knobs, limits: LimitKnobs, card: Card) -> Asked:
        """The keywords of a planning call."""
        return {
            "card": card,
            "knobs": knobs,
            "limit_knobs": limits,
            "rank": self.rank,
            "dtype": self.dtype,
            "backend": self.backend,
            "checkpoint": self.checkpoint,
            "reference": self.reference,
            "draft": self.draft,
            "probe": self.probe,
        }

    def shown(self, stages: Sequence[MemoryPlan]) -> MemoryPlan:
        """The stage asked for, or the one that the others follow."""
        if self.stage is not None:
            return stages[self.stage]
        follows = {made.rank.index for made in stages if any(cap.name == "ranks" and cap.binding for cap in made.caps)}
        return next((made for made in stages if made.rank.index not in follows), stages[0])

    def plan(self, knobs: Knobs, limits: LimitKnobs, card: Card) -> MemoryPlan:
        """The plan of the stage that is shown."""
        return self.shown(self.stages(knobs, limits, card))


def _as_typed(text: Text, flag: str) -> Setting[str]:
    return Setting() if text is None else Setting.flag(text.strip().lower(), text, flag)


def _counts(text: Text, flag: str) -> tuple[int, ...]:
    return () if text is None else tuple(parse_count(part, knob=flag) for part in text.split(","))
