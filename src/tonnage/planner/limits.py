"""From the limits that were asked for to the limits in force, with where each came from."""

from __future__ import annotations

from tonnage.config import DEFAULT_MAX_BATCH_SIZE, DEFAULT_MAX_NUM_TOKENS, LimitKnobs, Limits, Origin, Setting
from tonnage.costs.config import ModelConfig
from tonnage.errors import InvalidSetting
from tonnage.layout import PENALTY_TABLES
from tonnage.sampling import MAX_LOGPROBS

#: Defaults on the host device: a probe of 8,192 tokens would take tens of seconds on a CPU.
HOST_MAX_BATCH_SIZE, HOST_MAX_NUM_TOKENS = 32, 512


def resolve_limits(
    config: ModelConfig,
    asked: LimitKnobs,
    *,
    device_kind: str = "cuda",
    fitted_seq_len: int | None = None,
    disabled_claims: frozenset[str] = frozenset(),
) -> tuple[Limits, LimitKnobs]:
    """Limits, and the settings they come from (now with a value each); ``device_kind`` chooses the defaults.

    Every running sequence may decode a token in every step, so a step computes at least ``max_batch_size`` tokens:
    a smaller ``max_num_tokens`` lowers a batch size left open, and is refused beside one that was asked for.
    A step cannot hold more than ``max_batch_size * max_seq_len`` tokens, so ``max_num_tokens`` left open stops there
    (at the model's length where max_seq_len is fitted, so that fitting it does not change the probes).
    Requests may have penalties unless their tables are among the ``disabled_claims``.
    Raises ``InvalidSetting`` for limits below 1 or beyond the model's positions.
    """
    for name in ("max_seq_len", "max_batch_size", "max_num_tokens"):
        _check_positive(name, getattr(asked, name))
    seq_len = _seq_len(config, asked.max_seq_len, fitted_seq_len)
    longest = asked.max_seq_len.or_else(config.max_position_embeddings)
    batch, tokens = _batch_and_tokens(asked, seq_len=longest, on_host=device_kind == "host")
    settings = LimitKnobs(max_seq_len=seq_len, max_batch_size=batch, max_num_tokens=tokens)
    num_rows, num_tokens = batch.or_else(1), tokens.or_else(1)
    limits = Limits(
        max_seq_len=seq_len.or_else(1),
        max_batch_size=num_rows,
        max_num_tokens=num_tokens,
        max_logits_rows=min(num_rows, num_tokens),
        max_logprobs=MAX_LOGPROBS,
        penalties=PENALTY_TABLES not in disabled_claims,
    )
    return limits, settings


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


def _batch_and_tokens(asked: LimitKnobs, *, seq_len: int, on_host: bool) -> tuple[Setting[int], Setting[int]]:
    batch, tokens = asked.max_batch_size, asked.max_num_tokens
    where = "host device" if on_host else None
    if batch.value is None:
        usual = HOST_MAX_BATCH_SIZE if on_host else DEFAULT_MAX_BATCH_SIZE
        rows = min(usual, tokens.or_else(usual))
        batch = Setting(rows, None, Origin.DEFAULT, where if rows == usual else "max_num_tokens")
    rows = batch.or_else(1)
    if tokens.value is None:
        usual = HOST_MAX_NUM_TOKENS if on_host else DEFAULT_MAX_NUM_TOKENS
        default = max(rows, min(usual, rows * seq_len))
        reason = "max_batch_size" if default > usual else "max_batch_size x max_seq_len"
        tokens = Setting(default, None, Origin.DEFAULT, where if default == usual else reason)
    elif tokens.value < rows:
        raise InvalidSetting(
            "max_num_tokens",
            tokens.value,
            f"below max_batch_size = {rows}, and every running sequence decodes a token in each step",
            remedy=f"raise max_num_tokens to {rows} or lower max_batch_size to {tokens.value}",
        )
    return batch, tokens


def _check_positive(name: str, setting: Setting[int]) -> None:
    value = setting.value
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidSetting(name, setting.text or value, "not a whole number above 0", remedy="write 1 or more")
