"""From the limits that were asked for to the limits in force, with where each came from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tonnage.config import (
    DEFAULT_ADAPTER_RANK,
    DEFAULT_ENCODER_CACHE_BYTES,
    DEFAULT_MAX_BATCH_SIZE,
    DEFAULT_MAX_NUM_TOKENS,
    LimitKnobs,
    Limits,
    Origin,
    Setting,
)
from tonnage.costs.config import ModelConfig
from tonnage.costs.layers import Attention, Recurrent
from tonnage.errors import InvalidSetting
from tonnage.layout import PENALTY_TABLES
from tonnage.planner.drafts import DEFAULT_DRAFT_TOKENS
from tonnage.planner.graphs import graph_sizes
from tonnage.sampling import MAX_LOGPROBS
from tonnage.units import LARGEST, shown

#: Defaults on the host device: a probe of 8,192 tokens would take tens of seconds on a CPU.
HOST_MAX_BATCH_SIZE, HOST_MAX_NUM_TOKENS = 32, 512


def resolve_limits(
    config: ModelConfig,
    asked: LimitKnobs,
    *,
    device_kind: str = "cuda",
    fitted_seq_len: int | None = None,
    disabled_claims: frozenset[str] = frozenset(),
    graphs: Setting[str] | None = None,
    has_draft: bool = False,
) -> tuple[Limits, LimitKnobs]:
    """Limits, and the settings they come from (now with a value each); ``device_kind`` chooses the defaults.

    Every running sequence may decode a token in every step, so a step computes at least ``max_batch_size`` tokens:
    a smaller ``max_num_tokens`` lowers a batch size left open, and is refused beside one that was asked for.
    A step cannot hold more than ``max_batch_size * max_seq_len`` tokens, so ``max_num_tokens`` left open stops there
    (at the model's length where max_seq_len is fitted, so that fitting it does not change the probes).
    ``graphs`` is the knob; a host has none. ``has_draft``: a draft model proposes tokens. Requests may have penalties
    unless their tables are among the ``disabled_claims``. Prefixes are cached unless that is switched off, or cannot
    be (``why_no_prefixes``).
    Raises ``InvalidSetting`` for limits below 1 or beyond the model's positions.
    """
    for name in ("max_seq_len", "max_batch_size", "max_num_tokens"):
        _check_whole(name, getattr(asked, name), least=1)
    for name in (
        "max_draft_tokens",
        "lookahead_steps",
        "snapshot_tokens",
        "max_adapters",
        "max_adapter_rank",
        "max_encoder_tokens",
        "encoder_cache_bytes",
    ):
        _check_whole(name, getattr(asked, name), least=0)
    seq_len = _seq_len(config, asked.max_seq_len, fitted_seq_len)
    longest = asked.max_seq_len.or_else(config.max_position_embeddings)
    step_tokens = 1 + num_drafts(asked, has_draft=has_draft)
    on_host = device_kind == "host"
    batch, tokens = _batch_and_tokens(asked, seq_len=longest, on_host=on_host, step_tokens=step_tokens)
    settings = replace(asked, max_seq_len=seq_len, max_batch_size=batch, max_num_tokens=tokens)
    num_rows, num_tokens = batch.or_else(1), tokens.or_else(1)
    limits = Limits(
        max_seq_len=seq_len.or_else(1),
        max_batch_size=num_rows,
        max_num_tokens=num_tokens,
        max_logits_rows=min(num_rows * step_tokens, num_tokens),
        max_logprobs=MAX_LOGPROBS,
        penalties=PENALTY_TABLES not in disabled_claims,
        graph_batch_sizes=graph_sizes(
            graphs or Setting(),
            max_batch_size=num_rows,
            max_num_tokens=num_tokens,
            step_tokens=step_tokens,
            on_host=on_host,
        ),
        **_features(config, asked, num_tokens=num_tokens, has_draft=has_draft),
    )
    return limits, settings


def _features(config: ModelConfig, asked: LimitKnobs, *, num_tokens: int, has_draft: bool) -> dict[str, Any]:
    """What requests may ask for beyond plain text.

    An encoder that nobody mentions may run in any step. Where cross attention keeps what it gives, that is at most
    what it gives one sequence; beside the text its tokens are tokens of the step.
    """
    has_encoder = bool(config.towers) or any(
        isinstance(mixer, Attention) and mixer.is_cross for layer in config.layers for mixer in layer.mixers
    )
    for name in ("max_encoder_tokens", "encoder_cache_bytes"):
        if getattr(asked, name).or_else(0) and not has_encoder:
            raise InvalidSetting(
                name, getattr(asked, name).value, f"{config.name} has no encoder", remedy=f"leave {name} out"
            )
    adapters = asked.max_adapters.or_else(0)
    encoder_tokens = num_tokens if config.encoder_tokens is None else config.encoder_tokens
    return {
        "max_draft_tokens": num_drafts(asked, has_draft=has_draft),
        "lookahead_steps": asked.lookahead_steps.or_else(0),
        "snapshot_tokens": asked.snapshot_tokens.or_else(0),
        "max_adapters": adapters,
        "max_adapter_rank": asked.max_adapter_rank.or_else(DEFAULT_ADAPTER_RANK) if adapters else 0,
        "max_encoder_tokens": asked.max_encoder_tokens.or_else(encoder_tokens if has_encoder else 0),
        "encoder_cache_bytes": asked.encoder_cache_bytes.or_else(DEFAULT_ENCODER_CACHE_BYTES if has_encoder else 0),
        "prompt_logprobs": asked.prompt_logprobs.or_else(False),
        "prefix_caching": asked.prefix_caching.or_else(True) and not why_no_prefixes(config, asked),
    }


def why_no_prefixes(config: ModelConfig, asked: LimitKnobs) -> str:
    """Why no text can go on from the cache of another, whatever was asked; empty: it can."""
    is_recurrent = any(isinstance(mixer, Recurrent) for layer in config.layers for mixer in layer.mixers)
    if not is_recurrent or asked.snapshot_tokens.or_else(0):
        return ""
    return f"layers of {config.name} keep a recurrent state, which is that of one whole text"


def _seq_len(config: ModelConfig, asked: Setting[int], fitted: int | None) -> Setting[int]:
    most = config.max_position_embeddings
    if asked.value is None:
        if fitted is None:
            return Setting(most, None, Origin.DEFAULT, "the model's length")
        return Setting(fitted, None, Origin.FIT, "the largest that fits")
    if asked.value > most:
        raise InvalidSetting(
            "max_seq_len",
            asked.value,
            f"{config.name} has {most:,} positions",
            remedy=f"use at most {most}",
        )
    return asked


def num_drafts(asked: LimitKnobs, *, has_draft: bool) -> int:
    """Tokens drafted ahead for every sequence in a step."""
    return asked.max_draft_tokens.or_else(DEFAULT_DRAFT_TOKENS if has_draft else 0)


def _batch_and_tokens(
    asked: LimitKnobs, *, seq_len: int, on_host: bool, step_tokens: int
) -> tuple[Setting[int], Setting[int]]:
    """``step_tokens`` of every running sequence are computed in a decode step: its next one, and its drafts."""
    batch, tokens = asked.max_batch_size, asked.max_num_tokens
    where = "host device" if on_host else None
    if batch.value is None:
        usual = HOST_MAX_BATCH_SIZE if on_host else DEFAULT_MAX_BATCH_SIZE
        rows = max(1, min(usual, tokens.or_else(usual * step_tokens) // step_tokens))
        batch = Setting(rows, None, Origin.DEFAULT, where if rows == usual else "max_num_tokens")
    rows = batch.or_else(1) * step_tokens
    if tokens.value is None:
        usual = HOST_MAX_NUM_TOKENS if on_host else DEFAULT_MAX_NUM_TOKENS
        default = max(rows, min(usual, rows * seq_len))
        reason = "max_batch_size" if default > usual else "max_batch_size x max_seq_len"
        tokens = Setting(default, None, Origin.DEFAULT, where if default == usual else reason)
    elif tokens.value < rows:
        raise _too_few_tokens(tokens.value, batch.or_else(1), step_tokens)
    return batch, tokens


def _too_few_tokens(num_tokens: int, num_rows: int, step_tokens: int) -> InvalidSetting:
    decoded = "a token" if step_tokens == 1 else f"{step_tokens} tokens, drafts included,"
    return InvalidSetting(
        "max_num_tokens",
        num_tokens,
        f"below max_batch_size = {num_rows}, and every running sequence decodes {decoded} in each step",
        remedy=f"raise max_num_tokens to {num_rows * step_tokens} or lower max_batch_size to "
        f"{max(1, num_tokens // step_tokens)}",
    )


def _check_whole(name: str, setting: Setting[int], *, least: int) -> None:
    value = setting.value
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        told = "not a whole number above 0" if least else "not a whole number"
        raise InvalidSetting(name, shown(setting.text or value), told, remedy=f"write {least} or more")
    if value > LARGEST:
        raise InvalidSetting(name, shown(value), "larger than any there is", remedy=f"write at most {LARGEST}")
