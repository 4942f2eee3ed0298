"""What a request asks of the sampler: one frozen value, checked when it is made. No torch, no numpy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tonnage.caching import CacheParams
from tonnage.errors import InvalidSetting
from tonnage.units import Told, check_number, check_whole, shown

#: The most alternatives a request may ask for at each position; the sampler's buffers are sized for it.
MAX_LOGPROBS = 20
#: The most entries of one request's ``logit_bias``.
MAX_BIASED_TOKENS = 1024
#: The most stop strings of one request, and characters of all of them together: what looks for them is kept for each.
MAX_STOPS, MAX_STOP_CHARACTERS = 64, 1024
#: Priorities lie in [-MAX_PRIORITY, MAX_PRIORITY].
MAX_PRIORITY = 1_000_000

_GAMMA, _MIX_1, _MIX_2, _MASK = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 2**64 - 1
#: Keeps the seeds of samples out of the stream that the parent's own draws come from.
_CHILDREN = 0x6368696C6472656E


class LogitBias(Mapping[int, float]):
    """What is added to the logits of token ids, -100 to 100 each. Equal to any mapping with the same entries.

    It is never changed, so it can be hashed, pickled and copied, and with it the ``SamplingParams`` that hold it.
    Raises ``InvalidSetting``.
    """

    __slots__ = ("_entries",)

    def __init__(self, entries: Mapping[int, float]) -> None:
        if not isinstance(entries, Mapping):
            raise InvalidSetting(
                "logit_bias", shown(entries), "not a mapping from token ids to numbers", remedy="write {42: -100}"
            )
        if len(entries) > MAX_BIASED_TOKENS:
            raise InvalidSetting(
                "logit_bias",
                Told(f"{len(entries):,} entries"),
                "too many",
                remedy=f"write at most {MAX_BIASED_TOKENS:,}",
            )
        self._entries = dict(entries)
        for token, value in self._entries.items():
            check_whole("logit_bias", token, 0)
            check_number(f"logit_bias[{token}]", value, -100, 100)

    def __getitem__(self, token: int) -> float:
        return self._entries[token]

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __hash__(self) -> int:
        return hash(frozenset(self._entries.items()))

    def __repr__(self) -> str:
        return repr(self._entries)

    def __reduce__(self) -> tuple[type[LogitBias], tuple[dict[int, float]]]:
        return LogitBias, (self._entries,)


_NO_BIAS = LogitBias({})
_SHARED = CacheParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop. The defaults are greedy decoding.

    Filters apply in the order of the fields, on logits that penalties and biases have changed:

    max_tokens          tokens to generate at most; None: the engine's default, or what the length limit leaves
    min_tokens          no stop (end token, stop id, stop string) before that many tokens were generated
    temperature         0 takes the most probable token; otherwise logits are divided by it (0.01 to 100)
    top_k               keep the k most probable tokens, ties with the last one kept; 0: all
    top_p               keep the smallest set of most probable tokens that holds this share of the probability left by
                        top_k; 0 < top_p <= 1
    min_p               keep tokens at least this share as probable as the most probable one; 0 <= min_p <= 1
    repetition_penalty  divides positive logits of tokens seen in prompt or output, multiplies negative ones (Keskar
                        et al. 2019, arXiv:1909.05858); above 0, 1: off
    presence_penalty    subtracted once from the logits of tokens in the output so far; -2 to 2, 0: off
    frequency_penalty   subtracted from them for each time they occur; -2 to 2, 0: off
    logit_bias          added to the logits of these token ids, -100 to 100 each
    seed                the random numbers are a function of (seed, position) and of nothing else, so the same request
                        gives the same draws whatever runs beside it; None: drawn when the request arrives
    stop                strings that end the text (one may be given bare); the text stops before them
    stop_token_ids      ids that end the text, beside the model's own end tokens
    ignore_eos          go on past the model's own end tokens
    include_stop        keep the stop string in the text
    n                   independent samples of one prompt; sample i draws from the seed and i
    logprobs            natural-log probabilities of so many most probable tokens at every position, of the model
                        itself: before penalties, biases, temperature and filters. None or 0: of the chosen token only
    prompt_logprobs     the same for every prompt token but the first; None: none, 0: of the prompt's tokens only
    skip_special_tokens leave special tokens out of the text
    priority            larger goes first; equal ones in order of arrival. A request is passed by a bounded number of
                        later ones, so none starves
    cache               how its KV blocks are shared and kept (``CacheParams``)
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = _NO_BIAS
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    priority: int = 0
    cache: CacheParams = _SHARED

    def __post_init__(self) -> None:
        """Raise ``InvalidSetting`` for the first field that is out of range or of the wrong type."""
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, _as_tuple(name, getattr(self, name)))
        self._check_numbers()
        self._check_stops()
        object.__setattr__(self, "cache", CacheParams.read(self.cache))
        if not isinstance(self.logit_bias, LogitBias):
            object.__setattr__(self, "logit_bias", LogitBias(self.logit_bias))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether the request needs the penalty tables."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def samples(self) -> list[SamplingParams]:
        """The engine takes one sample a request: the same parameters ``n`` times, each with a seed of its own.

        Log-probabilities of the prompt are the same for all, and the first alone asks for them.
        """
        if self.n == 1:
            return [self]
        seeds = [None if self.seed is None else child_seed(self.seed, index) for index in range(self.n)]
        first, *others = (replace(self, n=1, seed=seed) for seed in seeds)
        return [first, *(replace(other, prompt_logprobs=None) for other in others)]

    def _check_numbers(self) -> None:
        if self.max_tokens is not None:
            check_whole("max_tokens", self.max_tokens, 1)
        check_whole("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidSetting(
                "min_tokens", self.min_tokens, f"above max_tokens = {self.max_tokens}", remedy="lower min_tokens"
            )
        check_number("temperature", self.temperature, 0, 100)
        if 0 < self.temperature < 0.01:
            raise InvalidSetting(
                "temperature", self.temperature, "so small that logits overflow", remedy="write 0 for greedy decoding"
            )
        check_whole("top_k", self.top_k, 0)
        check_number("top_p", self.top_p, 0, 1, above=True)
        check_number("min_p", self.min_p, 0, 1)
        check_number("repetition_penalty", self.repetition_penalty, 0, 100, above=True)
        check_number("presence_penalty", self.presence_penalty, -2, 2)
        check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.seed is not None:
            check_whole("seed", self.seed, -(2**63), 2**64 - 1)
        check_whole("n", self.n, 1, 128)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 0, MAX_LOGPROBS)
        check_whole("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)

    def _check_stops(self) -> None:
        for flag in ("ignore_eos", "include_stop", "skip_special_tokens"):
            if not isinstance(getattr(self, flag), bool):
                raise InvalidSetting(
                    flag, shown(getattr(self, flag)), "neither true nor false", remedy="write true or false"
                )
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidSetting(
                    "stop", shown(text), "not a string of at least one character", remedy="leave it out"
                )
        num_characters = sum(map(len, self.stop))
        if len(self.stop) > MAX_STOPS or num_characters > MAX_STOP_CHARACTERS:
            raise InvalidSetting(
                "stop",
                Told(f"{len(self.stop):,} strings of {num_characters:,} characters"),
                "too much to look for",
                remedy=f"write at most {MAX_STOPS} strings of {MAX_STOP_CHARACTERS} characters in all",
            )
        for token in self.stop_token_ids:
            check_whole("stop_token_ids", token, 0)


def child_seed(seed: int, index: int) -> int:
    """The seed of sample ``index``, from 0, of a request with ``seed``; sample 0 is the request itself.

    Seeds count modulo 2**64. A child is a word of the SplitMix64 stream of the parent's seed, as draws are
    (``engine.sampling.random``), under another key.
    """
    return seed & _MASK if index == 0 else _splitmix64(_splitmix64((seed ^ _CHILDREN) & _MASK, 0), index)


def _splitmix64(state: int, index: int) -> int:
    word = (state + (index + 1) * _GAMMA) & _MASK
    word = ((word ^ (word >> 30)) * _MIX_1) & _MASK
    word = ((word ^ (word >> 27)) * _MIX_2) & _MASK
    return word ^ (word >> 31)


def _as_tuple(name: str, value: object) -> tuple[object, ...]:
    if not isinstance(value, tuple | list | set | frozenset):
        raise InvalidSetting(name, shown(value), "not a list", remedy="write a list")
    return tuple(value)
