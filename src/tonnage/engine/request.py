"""A request on its way through the engine, and what comes out of it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tonnage.config import Limits
from tonnage.engine.outcome import Logprobs, TokenLogprobs, Top
from tonnage.engine.stops import TextStream
from tonnage.engine.text import Message, Text
from tonnage.errors import InputError
from tonnage.sampling import SamplingParams

DEFAULT_MAX_TOKENS = 128


class Finish(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # the model's end token, a stop id or a stop string
    LENGTH = "length"  # max_tokens generated
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one step added to a request: ``text`` is "" while half a character or a possible stop string is held back.

    The texts of all deltas joined are the completion's text. ``finish_reason`` is set on the last one. No tokens:
    the request ended without one (cancelled, or failed).
    """

    request_id: str
    text: str
    tokens: tuple[TokenLogprobs, ...] = ()
    finish_reason: Finish | None = None


#: Called with what each step adds to a request.
OnDelta = Callable[[Delta], None]


def prompt_ids(
    id: str,
    text: Text,
    *,
    prompt: str | None = None,
    messages: Sequence[Message] | None = None,
    token_ids: Sequence[int] | None = None,
) -> list[int]:
    """Tokens of exactly one of a text, a conversation, or token ids. Raises ``InputError`` if more or none is given."""
    if sum(given is not None for given in (prompt, messages, token_ids)) != 1:
        raise InputError(
            f"Request {id!r} must give exactly one of prompt, messages, token_ids",
            remedy="give one, and leave the others out",
        )
    if messages is not None:
        return text.encode_chat(messages)
    return text.encode(prompt) if prompt is not None else list(token_ids or ())


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One sequence: its tokens, how far they are computed, and its limits. All lengths in tokens.

    ::

        0            num_computed_tokens        len(token_ids)       max_total_tokens
        |-- in the KV cache --|-- known, to compute --|-- still to generate --|

    ``arrival`` numbers requests in order of submission; ``seed`` is the sampler's key, drawn if none was given.
    ``stream`` makes its text as it grows, for a request that streams or has stop strings. ``num_cached_tokens`` of the
    prompt were in the cache when it was first admitted. ``num_encoder_tokens`` are computed with its first chunk.
    """

    id: str
    token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    seed: int = 0
    adapter_id: int | None = None
    on_delta: OnDelta | None = None
    stream: TextStream | None = None
    num_encoder_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    logprobs: list[float] = field(default_factory=list)
    alternatives: Logprobs = field(default_factory=Logprobs)
    prompt_logprobs: Logprobs = field(default_factory=Logprobs)
    finish: Finish | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    arrival: int = -1
    slot: int = -1  # while it runs
    num_suspended: int = 0
    num_overtaken: int = 0
    waited: bool = False  # at least one step went by without memory for it
    deferrals_before: int = 0  # how often the queue had stood still when it was submitted
    arrived_ns: int = field(default_factory=time.monotonic_ns)
    # Fields and not properties: they are read at every token.
    max_total_tokens: int = field(init=False)
    wants_more: bool = field(init=False)  # than tokens: their text as it grows, or alternatives

    @classmethod
    def of(
        cls,
        id: str,
        ids: list[int],
        params: SamplingParams,
        *,
        text: Text,
        limits: Limits,
        on_delta: OnDelta | None = None,
    ) -> Request:
        """From a prompt's ``ids``. ``max_tokens`` left out is ``DEFAULT_MAX_TOKENS``, or what max_seq_len leaves after
        the prompt if that is less."""
        room = limits.max_seq_len - len(ids)
        own_stops = frozenset() if params.ignore_eos else text.stop_ids
        return cls(
            id=id,
            token_ids=ids,
            num_prompt_tokens=len(ids),
            max_tokens=params.max_tokens or max(1, params.min_tokens, min(DEFAULT_MAX_TOKENS, room)),
            params=params,
            stop_ids=own_stops | frozenset(params.stop_token_ids),
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            on_delta=on_delta,
            stream=TextStream(text, params) if on_delta is not None or params.stop else None,
        )

    def __post_init__(self) -> None:
        self.max_total_tokens = self.num_prompt_tokens + self.max_tokens
        self.wants_more = self.stream is not None or bool(self.params.logprobs)

    @property
    def priority(self) -> int:
        return self.params.priority

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def generated_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def append(self, token: int, logprob: float) -> bool:
        """Take a sampled token and tell by it whether the request is done; stop strings are looked for elsewhere."""
        token_ids = self.token_ids
        token_ids.append(token)
        self.logprobs.append(logprob)
        if token in self.stop_ids:
            self.finish = Finish.STOP
            self.stop_reason = token if token in self.params.stop_token_ids else None
        elif len(token_ids) >= self.max_total_tokens:
            self.finish = Finish.LENGTH
        else:
            return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a finished request gave.

    logprobs         natural logs of the model's own probabilities, one per generated token
    top_logprobs     the alternatives at each of them, as (token id, log-probability); empty if none were asked for
    prompt_logprobs  of every prompt token but the first, if asked for
    stop_reason      the stop string or stop id that ended it; None for the model's end token
    waited           it had to wait for memory; num_suspended: so often it gave its memory up and was computed again
    num_cached_tokens  of the prompt that were not computed, since the cache held them when it was first admitted
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_prompt_tokens: int
    finish_reason: Finish
    error: str | None
    waited: bool
    stop_reason: str | int | None = None
    top_logprobs: Sequence[Top] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    num_suspended: int = 0
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands; token counts and request counts.

    ``num_loading`` of those that run wait for blocks from the host. ``cached_prompt_tokens``: of the requests that
    have finished, ``Completion.num_cached_tokens`` of all of them.
    """

    num_finished: int
    num_running: int
    num_waiting: int
    kv_used_tokens: int
    kv_total_tokens: int
    generated_tokens: int
    num_suspensions: int = 0
    num_loading: int = 0
    cached_prompt_tokens: int = 0
