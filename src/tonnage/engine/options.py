"""What a caller asks of the engine."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tonnage.attention.choice import choose
from tonnage.budget.reference.knobs import ReferenceKnobs
from tonnage.config import DEFAULT_BLOCK_TOKENS, Knobs, LimitKnobs
from tonnage.errors import InvalidSetting
from tonnage.hardware import is_host
from tonnage.units import check_number, check_whole, round_up, shown

#: Prefill tokens in a step that also decodes, where nothing else was asked for. On a CPU a token costs the same in
#: prefill and decode, so this many beside a batch of decodes make a step of about twice the time. A card reads all
#: weights for a batch of decodes, and computes prefill meanwhile: there a step takes as many as it can.
TOKENS_BESIDE_DECODES = 64
#: Stands for the attention backend that is best where the engine runs.
AUTO = "auto"
#: Of the time between two steps of a busy engine a small part, and still hundreds of megabytes on a fast link.
TRANSFER_SLICE_S = 0.01
#: No step waits for its transfers for longer.
MAX_TRANSFER_SLICE_S = 3600
#: Time between two looks at who holds what of a card; a host is looked at between steps alone.
WATCH_INTERVAL_S = 0.1
#: Above it a watch would see nothing of what comes and goes.
MAX_WATCH_INTERVAL_S = 60

#: What each field must be, in words, for those whose type is all that is checked here.
_TYPES: dict[str, tuple[type | tuple[type, ...], str, str]] = {
    "model": (str, "not a text", "write a folder, a .gguf file, smollm2, or a hub id"),
    "device": (str, "not a text", "write cpu, cuda, or cuda:1"),
    "attention": (str, "not a text", "write a name, or leave it out"),
    "knobs": (Knobs, "no Knobs", "give Knobs(kv_tokens=Setting(8192)), or leave it out"),
    "limit_knobs": (LimitKnobs, "no LimitKnobs", "give LimitKnobs(max_seq_len=Setting(4096)), or leave it out"),
    "dtype": ((str, type(None)), "not a text", 'write "bfloat16", or leave it out'),
    "chunk_tokens": ((int, str, type(None)), "neither a number of tokens nor none", "write 64, or none"),
    "fence": (bool, "neither True nor False", "write False, or leave it out"),
    "random_weights": (bool, "neither True nor False", "write True, or leave it out"),
    "compile": (bool, "neither True nor False", "write False, or leave it out"),
    "overlap": ((bool, type(None)), "neither True nor False", "write False, or leave it out"),
    "static_pool": (bool, "neither True nor False", "write True, or leave it out"),
    "torch_segments": (bool, "neither True nor False", "write True, or leave it out"),
    "reference": ((ReferenceKnobs, type(None)), "no ReferenceKnobs", "give ReferenceKnobs(), or leave it out"),
    "plan_file": ((str, Path, type(None)), "not a path", "name a file, or leave it out"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunking:
    """How prompts are cut. ``max_tokens``: the longest chunk, whole blocks; ``beside_decodes``: all chunks of a step
    that also decodes; None: as much as a step computes. ``is_on`` False: a prompt is computed in one step.
    """

    is_on: bool = True
    max_tokens: int | None = None
    beside_decodes: int | None = None

    @classmethod
    def of(
        cls, chunk_tokens: int | Literal["none"] | None, *, block_tokens: int, device_kind: str = "host"
    ) -> Chunking:
        """From ``EngineOptions.chunk_tokens``. Raises ``InvalidSetting``."""
        if chunk_tokens is None and device_kind == "cuda":
            return cls()
        if chunk_tokens is None:
            return cls(beside_decodes=round_up(TOKENS_BESIDE_DECODES, block_tokens))
        if chunk_tokens == "none":
            return cls(is_on=False)
        if isinstance(chunk_tokens, bool) or not isinstance(chunk_tokens, int) or chunk_tokens < 1:
            raise InvalidSetting(
                "chunk_tokens", chunk_tokens, "neither a number of tokens nor none", remedy="write 64, or none"
            )
        return cls(max_tokens=round_up(chunk_tokens, block_tokens), beside_decodes=round_up(chunk_tokens, block_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """``model``: a folder, a .gguf file, ``smollm2`` or a hub id. ``device``: "cpu", "cuda", or "cuda:1".

    ``attention``: a backend, or "auto": ``sdpa`` on the host; on a card the fastest that is there for the model
    (``attention.choice``).

    ``memory_bytes`` is the size of the host device; a card has its own, and ``total_bytes`` bounds what is taken of it.

    On the host device ``memory_bytes`` is a hard cap on what the process may take beyond what it held after its
    imports; None takes what the system has available. ``dtype`` of weights and compute: default the model's own.

    ``chunk_tokens`` cuts prompts: at most so many prefill tokens in a step (rounded up to whole blocks). None: what a
    step computes; on the host few in one that also decodes, so that decodes are not held up. "none": prompts are not
    cut, and one longer than a step is refused.

    ``compile``: on a card, layers run under ``torch.compile``, which takes some seconds of the first start.

    ``overlap``: each step is launched before the one before it has been looked at, so that the device never waits for
    the host. None: on a card, where alone it gains anything.

    ``random_weights``: nothing is loaded and the text means nothing, for measuring a model of which only config.json is
    at hand; without a tokenizer prompts are bytes and texts are letters.

    ``scratch_head_bytes`` at the head of the KV pool, in whole blocks, are kept for scratch: running sequences never
    take them for good, cached blocks borrow them. ``transfer_slice_s``: so many seconds of the link to the host may
    the transfers of one step take.

    ``reference``: the plan is made by the reference policy with these knobs, not by ours; the engine is the same.

    ``fence`` makes that cap hard for the whole process: an allocation past it fails. Switch it off where the same
    process holds other large things of its own; the ledger then still reports what passes the cap.

    ``static_pool``: the device's virtual memory is not used, as where it has none: the pool is sized before the graphs
    are captured, by what the planner declares for them.

    ``torch_segments``: on a card, steps get their memory from an arena of the planned size, counted segment by segment,
    and not from torch's own pool (docs/torch-boundary.md says what that costs).

    ``plan_file``: what this start measures is kept there with its plan, and a later start that would measure the same
    takes it from there. ``watch_interval_s``: so often a thread looks at who holds what of the device; 0: never, None:
    ten times a second on a card and never on the host.
    """

    model: str
    device: str = "cpu"
    memory_bytes: int | None = None
    knobs: Knobs = field(default_factory=Knobs)
    limit_knobs: LimitKnobs = field(default_factory=LimitKnobs)
    dtype: str | None = None
    attention: str = AUTO
    chunk_tokens: int | Literal["none"] | None = None
    fence: bool = True
    random_weights: bool = False
    compile: bool = True
    overlap: bool | None = None
    scratch_head_bytes: int = 0
    transfer_slice_s: float = TRANSFER_SLICE_S
    reference: ReferenceKnobs | None = None
    plan_file: str | Path | None = None
    static_pool: bool = False
    torch_segments: bool = False
    watch_interval_s: float | None = None

    def __post_init__(self) -> None:
        """Raise ``InvalidSetting`` for a value of another type, a size or a time that cannot be, and for the size of a
        card."""
        for name, (kinds, told, remedy) in _TYPES.items():
            _check_type(name, getattr(self, name), kinds, told, remedy=remedy)
        if self.watch_interval_s is not None:
            check_number("watch_interval_s", self.watch_interval_s, 0, MAX_WATCH_INTERVAL_S)
        check_number("transfer_slice_s", self.transfer_slice_s, 0, MAX_TRANSFER_SLICE_S, above=True)
        check_whole("scratch_head_bytes", self.scratch_head_bytes, 0)
        if self.memory_bytes is None:
            return
        if self.device_kind == "cuda":
            raise InvalidSetting(
                "memory_bytes",
                shown(self.memory_bytes),
                f"cuda:{self.ordinal} is a card and has a size of its own",
                remedy="leave it out (--memory, memory=); total_bytes bounds what the engine takes of the card",
            )
        check_whole("memory_bytes", self.memory_bytes, 1)

    @property
    def device_kind(self) -> str:
        """ "host" or "cuda", as plans and cards call them."""
        return "host" if is_host(self.device) else "cuda"

    @property
    def is_ahead(self) -> bool:
        """Whether steps overlap."""
        return self.device_kind == "cuda" if self.overlap is None else self.overlap

    @property
    def ordinal(self) -> int:
        """Which of the devices of its kind. Raises ``InvalidSetting`` for what is no device."""
        match = re.fullmatch(r"cuda(?::(\d{1,3}))?", self.device) if self.device_kind == "cuda" else None
        if match is None and self.device_kind == "cuda":
            raise InvalidSetting("device", self.device, "no device", remedy="write cpu, cuda, or cuda:1")
        return int(match[1] or 0) if match else 0

    @property
    def watch_s(self) -> float:
        """Seconds between two looks of the watch; 0: there is none."""
        if self.watch_interval_s is None:
            return WATCH_INTERVAL_S if self.device_kind == "cuda" else 0
        return self.watch_interval_s

    @property
    def attention_backend(self) -> str:
        """The one that was asked for, or the fastest for the device of those that no model asks anything of."""
        return choose(self.device_kind) if self.attention == AUTO else self.attention

    @property
    def block_tokens(self) -> int:
        """Tokens in one KV block, by whichever policy plans."""
        if self.reference is not None:
            return self.reference.tokens_per_block
        return self.knobs.block_tokens.or_else(DEFAULT_BLOCK_TOKENS)

    @property
    def host_kv_bytes(self) -> int:
        """Host memory for evicted blocks, by whichever policy plans; 0: none, as where no block is used again."""
        if self.reference is not None:
            return (self.reference.host_cache_bytes or 0) if self.reference.enable_block_reuse else 0
        if not self.limit_knobs.prefix_caching.or_else(True):
            return 0
        return self.knobs.host_kv_bytes.or_else(0)

    @property
    def kv_dtype(self) -> str | None:
        """Of the cache as it was asked for; None: that of the weights."""
        if self.reference is not None:
            return None if self.reference.kv_dtype == "auto" else self.reference.kv_dtype
        return self.knobs.kv_dtype.value


def _check_type(name: str, value: Any, kinds: type | tuple[type, ...], told: str, *, remedy: str) -> None:
    """A bool is an int to Python, and to nobody who writes a number."""
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise InvalidSetting(name, shown(value), told, remedy=remedy)
