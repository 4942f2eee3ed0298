"""A request on its way through the engine, and what comes out of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

#: Called with the request's id, each new token and the text it adds ("" while half a character is held back).
OnToken = Callable[[str, int, str], None]


class Finish(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # the model's end token
    LENGTH = "length"  # max_tokens generated
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence: its tokens, how far they are computed, and its limits. All lengths in tokens.

    ::

        0            num_computed_tokens        len(token_ids)       max_total_tokens
        |-- in the KV cache --|-- known, to compute --|-- still to generate --|
    """

    id: str
    token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    on_token: OnToken | None = None
    num_computed_tokens: int = 0
    logprobs: list[float] = field(default_factory=list)
    finish: Finish | None = None
    error: str | None = None
    waited: bool = False  # at least one step went by without memory for it
    deferrals_before: int = 0  # how often the queue had stood still when it was submitted
    arrived_ns: int = field(default_factory=time.monotonic_ns)

    @property
    def max_total_tokens(self) -> int:
        return self.num_prompt_tokens + self.max_tokens

    @property
    def num_to_compute(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def generated_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def append(self, token: int, logprob: float) -> None:
        """Take a sampled token and decide whether the request is done."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if token in self.stop_ids:
            self.finish = Finish.STOP
        elif len(self.token_ids) >= self.max_total_tokens:
            self.finish = Finish.LENGTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a finished request gave. ``logprobs`` are natural logs, one per generated token; ``waited``: for memory."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_prompt_tokens: int
    finish_reason: Finish
    error: str | None
    waited: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands; token counts and request counts."""

    num_finished: int
    num_running: int
    num_waiting: int
    kv_used_tokens: int
    kv_total_tokens: int
    generated_tokens: int
