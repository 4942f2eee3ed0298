"""The reference's own knobs, with its defaults and its rules; nothing here is derived.

``V1`` is its block manager, sized by a number of tokens; ``V2`` its page manager, sized by a quota of bytes.
"""

from __future__ import annotations

import os.path
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, TypeAlias, get_args

from tonnage.budget.reference.environment import Environment
from tonnage.errors import InvalidSetting
from tonnage.units import MiB

Manager: TypeAlias = Literal["V1", "V2"]

_KV_DTYPES = ("auto", "fp8", "fp8_ds_mla", "nvfp4", "float16", "bfloat16", "float32")
_STATE_DTYPES = ("auto", "float16", "bfloat16", "float32")
#: Distance from 1 that the sum of ``pool_ratio`` may have.
_RATIO_TOLERANCE = Fraction(1, 10**6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Speculative decoding as far as it takes memory.

    draft_tokens            drafts of one sequence and step, over all branches
    max_draft_tokens        the longest branch
    is_one_engine           target and draft run as one model
    shares_target_cache     the draft reads and writes the target's cache
    """

    draft_tokens: int
    max_draft_tokens: int
    is_one_engine: bool = True
    shares_target_cache: bool = False

    @property
    def tokens_per_step(self) -> int:
        """Tokens a sequence may gain in one step: its drafts and one more."""
        return self.draft_tokens + 1

    @property
    def extra_kv_tokens(self) -> int:
        """Entries beyond the end that a one-engine draft writes ahead."""
        return self.max_draft_tokens - 1 if self.is_one_engine and not self.shares_target_cache else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshots:
    """Which states of a recurrent model are kept for reuse; none by default.

    interval_tokens             one state every so many tokens; 0: none
    from_start, from_end        tokens at which one state more is kept; needs V2
    is_per_conversation         reuse of whole conversations, which switches the interval off
    """

    interval_tokens: int = 0
    from_start: tuple[int, ...] = ()
    from_end: tuple[int, ...] = ()
    is_per_conversation: bool = False

    @property
    def num_fixed(self) -> int:
        return len(self.from_start) + len(self.from_end)

    @property
    def effective_interval_tokens(self) -> int:
        return 0 if self.is_per_conversation else self.interval_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceKnobs:
    """Raises ``InvalidSetting`` when made with a value that the reference refuses.

    free_gpu_memory_fraction    0 <= f <= 1, of what is left beside the measured peak; V1 with uniform pools dies at 1
    max_tokens                  V1: a hard cap, and the number that sizes the pool. V2: a cap on usable tokens, turned
                                into a larger quota (see ``max_util_for_resume``). None: unset
    max_gpu_total_bytes         cap on KV bytes of this rank; 0: unset. V1 with uniform pools ignores it
    tokens_per_block            tokens of a page, a power of two above 1
    max_beam_width              sequences that one request may branch into
    has_seat_headroom           seats are doubled for steps that overlap (with one pipeline stage)
    is_overlapped               the next step is prepared while one runs
    speculation                 None: none
    max_attention_window        windows of the layers in tokens, repeated in turn; a negative one stands for a
                                recurrent state
    kv_dtype, state_dtype       of the cache, and of recurrent states
    snapshots                   of recurrent states
    enable_block_reuse, enable_chunked_prefill
    fp8_context_mla_kv_len_cap  attended tokens the context workspace is reserved for, instead of the worst case
    max_util_for_resume         V2: share of the quota that a resumed request may fill
    pool_ratio                  V2: share of bytes of each group of layers
    avg_seq_len                 V2: length by which the pools are shaped
    host_cache_bytes            None: none for V1, chosen by V2
    disk_cache_bytes, disk_cache_path
    encoder_cache_max_bytes     cache of embeddings, filled as images come; 0: none
    encoder_max_num_tokens, encoder_max_batch_size      shape of the encoder's probe; None: that of the text model
    cross_kv_cache_fraction     encoder's share of the pool; only with an encoder and a decoder, and then required
    manager                     V1 or V2
    environment                 the switches it reads from environment variables
    """

    free_gpu_memory_fraction: Fraction = Fraction(9, 10)
    max_tokens: int | None = None
    max_gpu_total_bytes: int = 0
    tokens_per_block: int = 32
    max_beam_width: int = 1
    has_seat_headroom: bool = True
    is_overlapped: bool = True
    speculation: Speculation | None = None
    max_attention_window: tuple[int, ...] | None = None
    kv_dtype: str = "auto"
    state_dtype: str = "auto"
    snapshots: Snapshots = field(default_factory=Snapshots)
    enable_block_reuse: bool = True
    enable_chunked_prefill: bool = False
    enable_pool_rebalance: bool = False
    fp8_context_mla_kv_len_cap: int | None = None
    max_util_for_resume: Fraction = Fraction(95, 100)
    pool_ratio: tuple[Fraction, ...] | None = None
    avg_seq_len: int | None = None
    host_cache_bytes: int | None = None
    disk_cache_bytes: int | None = None
    disk_cache_path: str | None = None
    encoder_cache_max_bytes: int = 128 * MiB
    encoder_max_num_tokens: int | None = None
    encoder_max_batch_size: int | None = None
    cross_kv_cache_fraction: Fraction | None = None
    manager: Manager = "V1"
    environment: Environment = field(default_factory=Environment)

    def __post_init__(self) -> None:
        _check_shares(self)
        _check_counts(self)
        _check_windows(self.max_attention_window)
        _check_pools(self)
        _check_states(self)
        _check_disk(self)


def check_group_count(knobs: ReferenceKnobs, *, num_layer_groups: int) -> None:
    """Raises ``InvalidSetting`` unless ``pool_ratio`` has one entry for each group of layers."""
    if knobs.pool_ratio is not None and len(knobs.pool_ratio) != num_layer_groups:
        what = f"{len(knobs.pool_ratio)} shares for {num_layer_groups} groups of layers"
        raise InvalidSetting("pool_ratio", _shown(knobs.pool_ratio), what, remedy="give one share for each group")


def cross_fraction(knobs: ReferenceKnobs, *, is_encoder_decoder: bool) -> Fraction | None:
    """The encoder's share. Raises ``InvalidSetting`` where it is needed and missing, or set and meaningless."""
    share = knobs.cross_kv_cache_fraction
    if is_encoder_decoder and share is None:
        what = "a model with an encoder and a decoder needs the encoder's share of the pool"
        raise InvalidSetting("cross_kv_cache_fraction", None, what, remedy="set it, for instance to 1/2")
    if not is_encoder_decoder and share is not None:
        what = "this model has no cache for an encoder"
        raise InvalidSetting("cross_kv_cache_fraction", str(share), what, remedy="leave it out")
    return share


def snapshot_interval(*, interval: int | None, old_alias: int | None) -> int:
    """Tokens between snapshots from the setting and its former name; 0: none. Setting both is an error."""
    if interval is not None and old_alias is not None:
        what = "it was renamed to periodic_snapshot_interval, and both are set"
        raise InvalidSetting("mamba_state_cache_interval", old_alias, what, remedy="keep periodic_snapshot_interval")
    return interval or old_alias or 0


def _check_shares(knobs: ReferenceKnobs) -> None:
    shares = {
        "free_gpu_memory_fraction": knobs.free_gpu_memory_fraction,
        "cross_kv_cache_fraction": knobs.cross_kv_cache_fraction,
    }
    for name, share in shares.items():
        if share is not None and not 0 <= share <= 1:
            raise InvalidSetting(name, str(share), "outside 0 <= share <= 1", remedy="write a share such as 0.9")
    if not 0 < knobs.max_util_for_resume <= 1:
        value = str(knobs.max_util_for_resume)
        raise InvalidSetting("max_util_for_resume", value, "outside 0 < share <= 1", remedy="0.95 is the default")


def _check_counts(knobs: ReferenceKnobs) -> None:
    at_least_0 = ("max_tokens", "max_gpu_total_bytes", "encoder_cache_max_bytes", "fp8_context_mla_kv_len_cap")
    least = dict.fromkeys((*at_least_0, "host_cache_bytes", "disk_cache_bytes", "encoder_max_num_tokens"), 0)
    least |= {"max_beam_width": 1, "avg_seq_len": 1}
    for name, smallest in least.items():
        value = getattr(knobs, name)
        if value is not None and value < smallest:
            raise InvalidSetting(name, value, f"must be at least {smallest}", remedy="leave it out, or raise it")
    tokens = knobs.tokens_per_block
    if tokens < 2 or tokens & (tokens - 1):
        raise InvalidSetting("tokens_per_block", tokens, "not a power of two above 1", remedy="32 is the default")


def _check_windows(windows: Sequence[int] | None) -> None:
    if windows is None:
        return
    remedy = "give one positive window for each layer of the pattern, or a negative one for a recurrent state"
    if not windows:
        raise InvalidSetting("max_attention_window", "", "no window in the list", remedy=remedy)
    if any(isinstance(window, bool) or not isinstance(window, int) or window == 0 for window in windows):
        raise InvalidSetting("max_attention_window", list(windows), "a window is no whole number but 0", remedy=remedy)


def _check_pools(knobs: ReferenceKnobs) -> None:
    if knobs.manager not in get_args(Manager):
        remedy = f"one of {', '.join(get_args(Manager))}"
        raise InvalidSetting("manager", knobs.manager, "the reference has no such manager", remedy=remedy)
    if knobs.kv_dtype not in _KV_DTYPES:
        raise InvalidSetting("kv_dtype", knobs.kv_dtype, "no such dtype", remedy=f"one of {', '.join(_KV_DTYPES)}")
    if knobs.kv_dtype == "fp8_ds_mla" and knobs.enable_pool_rebalance:
        what = "its records cannot move between pools"
        raise InvalidSetting("kv_dtype", knobs.kv_dtype, what, remedy="switch enable_pool_rebalance off")
    shares = knobs.pool_ratio
    if shares is None:
        return
    remedy = "give positive shares that sum to 1"
    if not shares or any(share <= 0 for share in shares):
        raise InvalidSetting("pool_ratio", _shown(shares), "a share is not above 0", remedy=remedy)
    total = sum(shares, start=Fraction(0))
    if abs(total - 1) > _RATIO_TOLERANCE:
        raise InvalidSetting("pool_ratio", _shown(shares), f"sums to {float(total):g}", remedy=remedy)


def _check_states(knobs: ReferenceKnobs) -> None:
    snapshots = knobs.snapshots
    if knobs.state_dtype not in _STATE_DTYPES:
        remedy = f"one of {', '.join(_STATE_DTYPES)}"
        raise InvalidSetting("state_dtype", knobs.state_dtype, "no such dtype for states", remedy=remedy)
    if snapshots.interval_tokens < 0:
        value = snapshots.interval_tokens
        raise InvalidSetting("periodic_snapshot_interval", value, "negative", remedy="0 keeps no snapshots")
    if snapshots.num_fixed and knobs.manager != "V2":
        what = "fixed snapshots need the page manager"
        raise InvalidSetting("additional_snapshot_offsets", snapshots.num_fixed, what, remedy='use manager "V2"')


def _check_disk(knobs: ReferenceKnobs) -> None:
    if not knobs.disk_cache_bytes:
        return
    if knobs.manager != "V2":
        what = "only the page manager keeps a tier on disk"
        raise InvalidSetting("disk_cache_bytes", knobs.disk_cache_bytes, what, remedy='use manager "V2"')
    if knobs.disk_cache_path is None or not os.path.isdir(knobs.disk_cache_path):
        what = "a tier on disk needs a folder that exists"
        raise InvalidSetting("disk_cache_path", knobs.disk_cache_path, what, remedy="name one, or leave the tier out")


def _shown(shares: Sequence[Fraction]) -> str:
    return ", ".join(str(share) for share in shares)
