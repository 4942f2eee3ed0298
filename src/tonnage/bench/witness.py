"""What a caller must find in a completion, checked against what was asked; nothing of the engine's own is used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tonnage.bench.moves import Ask

if TYPE_CHECKING:
    from tonnage.engine import Completion
    from tonnage.engine.request import Delta

RULES = {
    "outcomes": "they fail if their callback raised or a fault was made, are cancelled if asked, only then",
    "lengths": "none is longer than max_tokens or stops before min_tokens; none was all cached",
    "stops": "texts end before the stop string; stop reasons are asked for",
    "texts": "what a callback was told, joined, is the text, its tokens the tokens",
    "log-probabilities": "there are as many as were asked for, of every token",
}


class Raised(Exception):
    """What a callback of a soak raises."""


@dataclass(slots=True, eq=False)
class Heard:
    """What a callback was told: pieces of text, tokens, and the end, if it was told one."""

    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    num_deltas: int = 0
    has_raised: bool = False

    def take(self, delta: Delta) -> None:
        self.num_deltas += 1
        self.texts.append(delta.text)
        self.tokens += [told.token for told in delta.tokens]
        self.finish = None if delta.finish_reason is None else str(delta.finish_reason)


class Witness:
    """``check`` every completion. ``broken`` counts violations by rule; ``told`` describes the first few.

    ``has_sampler``: tokens come from a model through the sampler, which gives alternatives; a stub has none.
    ``explains``: whether a request may fail with such an error, for what was made to fail.
    """

    MAX_TOLD = 5

    def __init__(self, *, has_sampler: bool, explains: Callable[[str | None], bool] = lambda _: False) -> None:
        self.broken: Counter[str] = Counter()
        self.told: list[str] = []
        self._has_sampler, self._explains = has_sampler, explains

    def check(self, ask: Ask, completion: Completion, heard: Heard | None, *, was_cancelled: bool) -> None:
        self._check_outcome(ask, completion, heard, was_cancelled=was_cancelled)
        self._check_length(ask, completion)
        if completion.finish_reason == "stop":
            self._check_stop(ask, completion)
        if heard is not None and not heard.has_raised:
            self._check_heard(completion, heard)
        self._check_logprobs(ask, completion)

    def _check_outcome(self, ask: Ask, completion: Completion, heard: Heard | None, *, was_cancelled: bool) -> None:
        has_raised = heard is not None and heard.has_raised
        if completion.finish_reason == "error" and self._explains(completion.error):
            return
        if completion.finish_reason == "error" and not has_raised:
            self._break("outcomes", f"{ask.id} fails: {completion.error}")
        if completion.finish_reason == "cancelled" and not was_cancelled:
            self._break("outcomes", f"{ask.id} is cancelled and nobody asked for it")
        if (completion.error is None) == has_raised:
            self._break("outcomes", f"{ask.id}: its callback raised {has_raised}, its error is {completion.error}")

    def _check_length(self, ask: Ask, completion: Completion) -> None:
        generated, params = len(completion.token_ids), ask.params
        if params.max_tokens is not None:
            is_whole = generated == params.max_tokens
            if generated > params.max_tokens or (completion.finish_reason == "length" and not is_whole):
                self._break("lengths", f"{ask.id} has {generated} of {params.max_tokens} tokens")
        if completion.finish_reason == "stop" and generated < params.min_tokens:
            self._break("lengths", f"{ask.id} stops after {generated} tokens, min_tokens is {params.min_tokens}")
        most_cached = len(ask.token_ids) - 1 if params.cache.reuse and params.prompt_logprobs is None else 0
        if not 0 <= completion.num_cached_tokens <= most_cached:
            self._break("lengths", f"{ask.id} found {completion.num_cached_tokens} tokens of its prompt cached")
        if completion.num_prompt_tokens != len(ask.token_ids):
            self._break("lengths", f"{ask.id} had {len(ask.token_ids)} prompt tokens")

    def _check_stop(self, ask: Ask, completion: Completion) -> None:
        reason, params = completion.stop_reason, ask.params
        if isinstance(reason, str):
            found = completion.text.endswith(reason) if params.include_stop else reason not in _tail(completion, ask)
            if reason not in params.stop or not found:
                self._break("stops", f"{ask.id} stops at {reason!r} of {params.stop} with text {completion.text!r}")
        elif reason is None:
            if params.ignore_eos:
                self._break("stops", f"{ask.id} stops at the model's end, which it wanted to ignore")
        elif reason not in params.stop_token_ids or completion.token_ids[-1:] != (reason,):
            self._break("stops", f"{ask.id} stops at token {reason} of {params.stop_token_ids}")

    def _check_heard(self, completion: Completion, heard: Heard) -> None:
        name = completion.request_id
        if "".join(heard.texts) != completion.text:
            self._break("texts", f"{name} was told {''.join(heard.texts)!r}, its text is {completion.text!r}")
        if tuple(heard.tokens) != completion.token_ids:
            self._break("texts", f"{name} was told {len(heard.tokens)} tokens of {len(completion.token_ids)}")
        if heard.finish != completion.finish_reason:
            self._break("texts", f"{name} was told {heard.finish} and ended with {completion.finish_reason}")

    def _check_logprobs(self, ask: Ask, completion: Completion) -> None:
        num_tokens, params = len(completion.token_ids), ask.params
        if len(completion.logprobs) != num_tokens:
            self._break("log-probabilities", f"{ask.id} has {len(completion.logprobs)} for {num_tokens} tokens")
        if len(completion.top_logprobs) != (num_tokens if params.logprobs else 0):
            self._break("log-probabilities", f"{ask.id} has alternatives at {len(completion.top_logprobs)} tokens")
        if self._has_sampler and {len(top) for top in completion.top_logprobs} - {params.logprobs}:
            self._break("log-probabilities", f"{ask.id} wants {params.logprobs} alternatives")
        if completion.finish_reason in ("stop", "length"):
            due = 0 if params.prompt_logprobs is None else len(ask.token_ids) - 1
            told = [at.token for at in completion.prompt_logprobs]
            if told != (ask.token_ids[1:] if due else []):
                self._break("log-probabilities", f"{ask.id} has {len(told)} of its prompt, {due} are due")

    def _break(self, rule: str, told: str) -> None:
        assert rule in RULES
        self.broken[rule] += 1
        if self.broken[rule] <= self.MAX_TOLD:
            self.told.append(f"{rule}: {told}")


def _tail(completion: Completion, ask: Ask) -> str:
    """Where a stop string must not be: the text, unless min_tokens kept one from being looked for in its beginning."""
    return "" if ask.params.min_tokens else completion.text
