"""What the user asked for (``Knobs``, ``LimitKnobs``) and what came of it (``Limits``): two types, both frozen.

A ``Setting`` remembers the value, the text that was typed, and where it came from, so that every report can say
which default or flag caused a number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from fractions import Fraction
from typing import Generic, TypeVar

from tonnage.errors import InvalidSetting
from tonnage.units import MiB, shown

T = TypeVar("T")


class Origin(StrEnum):
    """Where a setting came from."""

    DEFAULT = "default"
    FLAG = "flag"
    ENV = "env"
    FILE = "file"
    API = "api"
    PEER = "peer"  # translated from another engine's knob
    FIT = "fit"  # chosen by us because the user left it open


@dataclass(frozen=True, slots=True)
class Setting(Generic[T]):
    """One knob: ``value`` (None: not set), the ``text`` typed, its ``origin``, and ``where`` (flag or file name)."""

    value: T | None = None
    text: str | None = None
    origin: Origin = Origin.DEFAULT
    where: str | None = None

    @classmethod
    def flag(cls, value: T, text: object, where: str) -> Setting[T]:
        return cls(value, str(text), Origin.FLAG, where)

    @property
    def is_set(self) -> bool:
        return self.value is not None

    def or_else(self, default: T) -> T:
        return default if self.value is None else self.value


def unset() -> Setting[T]:
    return Setting()


def _check_wrapped(given: Iterable[tuple[str, object]]) -> None:
    for name, setting in given:
        if not isinstance(setting, Setting):
            remedy = f"wrap it, {name}=Setting(value), or give plain values to tonnage.engine.settings.engine_options"
            raise InvalidSetting(name, shown(setting), "a plain value, and no Setting", remedy=remedy)


#: Of files that ``tonnage buckets`` writes, and the list in them that was chosen: what ``graphs`` takes of such a file.
BUCKETS_SCHEMA, FITTED_LIST = "tonnage.buckets/1", "fitted"
DEFAULT_KEEP_FREE_BYTES = 256 * MiB
DEFAULT_BLOCK_TOKENS = 16
DEFAULT_MAX_BATCH_SIZE = 256
DEFAULT_MAX_NUM_TOKENS = 8192
DEFAULT_ADAPTER_RANK = 16
DEFAULT_ENCODER_CACHE_BYTES = 128 * MiB
#: How requests are admitted to the KV cache; the first is the default.
ADMISSION_POLICIES = ("optimistic", "reserve_all")


def parse_admission(value: object, *, knob: str = "admission") -> str:
    """The name of a policy; "reserve-all" and capitals are fine. Raises ``InvalidSetting``."""
    name = value.strip().lower().replace("-", "_") if isinstance(value, str) else ""
    if name not in ADMISSION_POLICIES:
        raise InvalidSetting(knob, shown(value), "no such policy", remedy=f"write {' or '.join(ADMISSION_POLICIES)}")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """What was asked about money. Nothing here is derived; ``Setting.value is None`` means not set.

    total_bytes      everything the engine may take on this device, context and graphs included
    keep_free_bytes  bytes of the device left alone, an explicit line (default 256 MiB)
    kv_bytes         cap on the KV pool
    kv_tokens        cap on the KV pool, in tokens
    kv_fraction      share of (cap - every line that does not depend on the number of tokens); default 1
    kv_dtype         dtype the cache is allocated in; default: the dtype of the weights
    block_tokens     tokens in one KV block (default 16)
    admission        "optimistic" (default): by expected lengths, running requests may be suspended; "reserve_all"
    state_dtype      dtype of recurrent states (default: as the model says, else float32)
    attended_tokens  the most tokens one step may attend to, which bounds scratch that grows with them; never less
                     than one sequence of max_seq_len (default: all running sequences at full length at once)
    scratch          "cap" (default): such scratch shares the budget with the pool, and steps are kept within what it
                     got; "reserve": its worst case is set aside whole, and no step is ever held back
    graphs           decode batch sizes that get a CUDA graph: "none", "default", "x2", "+64", "+8", numbers between
                     commas, or a file of ``tonnage buckets --output``
    host_kv_bytes    host memory for blocks that are evicted from the device, of all ranks together (default, and 0:
                     none); it is not asked for where no prefixes are cached
    disk_kv_bytes    its room comes later; a set value is refused
    disabled_claims  claims switched off by name; the report shows each
    """

    total_bytes: Setting[int] = field(default_factory=unset)
    keep_free_bytes: Setting[int] = field(default_factory=unset)
    kv_bytes: Setting[int] = field(default_factory=unset)
    kv_tokens: Setting[int] = field(default_factory=unset)
    kv_fraction: Setting[Fraction] = field(default_factory=unset)
    kv_dtype: Setting[str] = field(default_factory=unset)
    state_dtype: Setting[str] = field(default_factory=unset)
    block_tokens: Setting[int] = field(default_factory=unset)
    host_kv_bytes: Setting[int] = field(default_factory=unset)
    disk_kv_bytes: Setting[int] = field(default_factory=unset)
    scratch: Setting[str] = field(default_factory=unset)
    attended_tokens: Setting[int] = field(default_factory=unset)
    admission: Setting[str] = field(default_factory=unset)
    graphs: Setting[str] = field(default_factory=unset)
    disabled_claims: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Raise ``InvalidSetting`` for a value that is no ``Setting``."""
        _check_wrapped(self.items())
        claims: object = self.disabled_claims
        if not isinstance(claims, frozenset):
            remedy = 'write frozenset({"penalty tables"})'
            raise InvalidSetting("disabled_claims", shown(claims), "not a frozenset", remedy=remedy)

    def items(self) -> list[tuple[str, Setting[object]]]:
        """Every knob with its name, in declaration order (``disabled_claims`` is not a Setting)."""
        return [(f.name, getattr(self, f.name)) for f in fields(self) if f.name != "disabled_claims"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitKnobs:
    """What was asked about shapes; resolved into ``Limits`` once the model is known.

    max_seq_len     tokens of one sequence, prompt and output (default: the model's length, or the largest that fits)
    max_batch_size  sequences running at once (default 256)
    max_num_tokens  tokens computed in one step (default 8,192)

    prefix_caching  blocks of a text are kept and used again by texts that begin alike (default yes; never where layers
                    keep a recurrent state, unless snapshot_tokens)

    What requests may ask for beyond plain text; only plans know these, but for prompt_logprobs:

    max_draft_tokens        tokens drafted ahead for a sequence in a step (default 0)
    lookahead_steps         steps prepared while one runs (default 0); any of them doubles the seats, and each needs a
                            token a sequence more
    snapshot_tokens         a recurrent state is kept every so many tokens, so that prefixes can be used again (default
                            0: none are)
    max_adapters            low-rank adapters resident at once (default 0), of at most max_adapter_rank (default 16)
    max_encoder_tokens      tokens an encoder computes at once (default: max_num_tokens where there is one, else 0)
    encoder_cache_bytes     cache of an encoder's outputs (default 128 MiB for a model that has one, else 0)
    prompt_logprobs         log-probabilities of the prompt's own tokens (default no)
    """

    max_seq_len: Setting[int] = field(default_factory=unset)
    max_batch_size: Setting[int] = field(default_factory=unset)
    max_num_tokens: Setting[int] = field(default_factory=unset)
    max_draft_tokens: Setting[int] = field(default_factory=unset)
    lookahead_steps: Setting[int] = field(default_factory=unset)
    snapshot_tokens: Setting[int] = field(default_factory=unset)
    max_adapters: Setting[int] = field(default_factory=unset)
    max_adapter_rank: Setting[int] = field(default_factory=unset)
    max_encoder_tokens: Setting[int] = field(default_factory=unset)
    encoder_cache_bytes: Setting[int] = field(default_factory=unset)
    prompt_logprobs: Setting[bool] = field(default_factory=unset)
    prefix_caching: Setting[bool] = field(default_factory=unset)

    def __post_init__(self) -> None:
        """Raise ``InvalidSetting`` for a value that is no ``Setting``."""
        _check_wrapped(self.items())

    def items(self) -> list[tuple[str, Setting[object]]]:
        """Every limit with its name, in declaration order."""
        return [(each.name, getattr(self, each.name)) for each in fields(self)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resolved shapes; no None. Tokens and counts, all >= 0; the first three >= 1.

    max_logits_rows is the number of rows the vocabulary projection runs for in one step: one per sequence here.
    max_encoder_tokens and encoder_cache_bytes are 0 for a model without an encoder; prompt_logprobs: whether requests
    may ask for the log-probabilities of their own prompt.
    """

    max_seq_len: int
    max_batch_size: int
    max_num_tokens: int
    max_logits_rows: int
    max_logprobs: int = 0
    max_draft_tokens: int = 0
    lookahead_steps: int = 0
    snapshot_tokens: int = 0
    max_adapters: int = 0
    max_adapter_rank: int = 0
    max_encoder_tokens: int = 0
    encoder_cache_bytes: int = 0
    prompt_logprobs: bool = False
    graph_batch_sizes: tuple[int, ...] = ()
    prefix_caching: bool = False
    chunked_prefill: bool = True
    penalties: bool = False

    @property
    def extra_tokens(self) -> int:
        """KV entries beyond a sequence's end: drafts that may be rejected, and steps ahead of what is known."""
        return self.max_draft_tokens + self.lookahead_steps
