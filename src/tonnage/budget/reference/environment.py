"""The switches that the reference reads from environment variables, and its look at the device before it starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from tonnage.errors import InvalidSetting
from tonnage.units import GiB

#: Elements of one tile of the sparse indexer's logits.
DEFAULT_INDEXER_ELEMENTS = 2**31
#: What torch is left short of when its share of the device is set at the end.
TORCH_MARGIN_BYTES = 32 * 2**20
#: Every variable that is read, by the field that holds it.
VARIABLES = {
    "skip_estimation": "TRTLLM_SKIP_KV_CACHE_ESTIMATION",
    "indexer_elements": "TLLM_INDEXER_MQA_LOGITS_ELEM_BUDGET",
    "mha_threshold_tokens": "TRTLLM_MLA_SHORT_SEQ_MHA_THRESHOLD",
    "window_shares": "TRTLLM_WINDOW_SIZE_SHARES",
    "warn_fraction": "TLLM_STARTUP_FREE_MEM_WARN_RATIO",
    "info_fraction": "TLLM_STARTUP_FREE_MEM_INFO_RATIO",
    "least_bytes": "TLLM_STARTUP_FREE_MEM_MIN_GIB",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """skip_estimation      TRTLLM_SKIP_KV_CACHE_ESTIMATION=1: no probe
    indexer_elements        TLLM_INDEXER_MQA_LOGITS_ELEM_BUDGET: fp32 elements of one tile of indexer logits
    mha_threshold_tokens    TRTLLM_MLA_SHORT_SEQ_MHA_THRESHOLD: above 0, short contexts take the dense latent path
    window_shares           TRTLLM_WINDOW_SIZE_SHARES: V1's share of bytes for each window; None: equal
    warn_fraction, info_fraction, least_bytes      when a device that is not empty at the start is worth words
    """

    skip_estimation: bool = False
    indexer_elements: int = DEFAULT_INDEXER_ELEMENTS
    mha_threshold_tokens: int = 0
    window_shares: tuple[Fraction, ...] | None = None
    warn_fraction: Fraction = Fraction(3, 4)
    info_fraction: Fraction = Fraction(9, 10)
    least_bytes: int = 2 * GiB

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> Environment:
        """From a process's variables. Raises ``InvalidSetting`` for numbers that cannot be read.

        The ratios of the first look fall back to their defaults instead, as the reference does. A malformed element
        budget breaks the reference's import, and a switch that says "yes" is off there; here both are errors.
        """
        shares = variables.get("TRTLLM_WINDOW_SIZE_SHARES")
        return cls(
            skip_estimation=_count(variables, "TRTLLM_SKIP_KV_CACHE_ESTIMATION", 0, 0) == 1,
            indexer_elements=_count(variables, "TLLM_INDEXER_MQA_LOGITS_ELEM_BUDGET", DEFAULT_INDEXER_ELEMENTS, 1),
            mha_threshold_tokens=_count(variables, "TRTLLM_MLA_SHORT_SEQ_MHA_THRESHOLD", 0, 0),
            window_shares=None if shares is None else _shares(shares),
            warn_fraction=_lenient(variables, "TLLM_STARTUP_FREE_MEM_WARN_RATIO", Fraction(3, 4), most=1),
            info_fraction=_lenient(variables, "TLLM_STARTUP_FREE_MEM_INFO_RATIO", Fraction(9, 10), most=1),
            least_bytes=int(_lenient(variables, "TLLM_STARTUP_FREE_MEM_MIN_GIB", Fraction(2)) * GiB),
        )


def first_look(*, free_bytes: int, total_bytes: int, environment: Environment, has_strangers: bool = False) -> str:
    """How loudly a device that is not empty is reported at the start: "", "info" or "warning".

    Nothing where less than ``least_bytes`` are taken; a warning as soon as another process is known to hold any.
    """
    if has_strangers:
        return "warning"
    if total_bytes - free_bytes < environment.least_bytes:
        return ""
    share = Fraction(free_bytes, total_bytes)
    return "warning" if share < environment.warn_fraction else "info" if share < environment.info_fraction else ""


def torch_fraction(*, free_bytes: int, reserved_bytes: int, total_bytes: int) -> Fraction:
    """Share of the device that torch may hold at the end: a ceiling, so that it drops its cache before it fails."""
    return max(Fraction(0), Fraction(free_bytes + reserved_bytes - TORCH_MARGIN_BYTES, total_bytes))


def window_byte_shares(shares: tuple[Fraction, ...] | None, num_windows: int) -> tuple[Fraction, ...]:
    """V1's share of bytes for each window: equal unless given. Raises ``InvalidSetting`` for a wrong count or sum."""
    if shares is None:
        return (Fraction(1, num_windows),) * num_windows
    text = ", ".join(str(share) for share in shares)
    if len(shares) != num_windows:
        what = f"{len(shares)} shares for {num_windows} windows"
        raise InvalidSetting("TRTLLM_WINDOW_SIZE_SHARES", text, what, remedy="give one for each window")
    if sum(shares) != 1:
        raise InvalidSetting("TRTLLM_WINDOW_SIZE_SHARES", text, "does not sum to 1", remedy="let them sum to exactly 1")
    return shares


def _count(variables: Mapping[str, str], name: str, default: int, least: int) -> int:
    text = variables.get(name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise InvalidSetting(name, text, f"not a whole number of at least {least}", remedy=f"{default} is the default")
    return value


def _shares(text: str) -> tuple[Fraction, ...]:
    try:
        return tuple(Fraction(part.strip()) for part in text.split(","))
    except (ValueError, ZeroDivisionError):
        what = "not a list of numbers"
        raise InvalidSetting("TRTLLM_WINDOW_SIZE_SHARES", text, what, remedy="write numbers with commas") from None


def _lenient(variables: Mapping[str, str], name: str, default: Fraction, *, most: int | None = None) -> Fraction:
    """The value, or the default for what is no number, not finite, negative or above ``most``."""
    try:
        value = float(variables.get(name, default))
    except ValueError:
        return default
    if not math.isfinite(value) or value < 0 or (most is not None and value > most):
        return default
    return Fraction(variables[name]) if name in variables else default
