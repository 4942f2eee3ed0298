"""Calls of the Python API on their way through an engine: what was asked, its samples as they end, the outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, TypeAlias

from tonnage.engine.core import Engine
from tonnage.engine.interrupts import deferred_interrupts
from tonnage.engine.outcome import TokenLogprobs, Top
from tonnage.engine.request import Completion, Finish, OnDelta, Request
from tonnage.errors import InputError, InvalidSetting, TonnageError, UserError
from tonnage.sampling import SamplingParams

#: A text, or the token ids of one.
Prompt: TypeAlias = str | Sequence[int]
#: Messages with "role" and "content".
Conversation: TypeAlias = Sequence[Mapping[str, str]]
#: One for all prompts, or one for each.
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One text generated for a prompt.

    logprobs       natural logs of the model's own probabilities, one per generated token
    top_logprobs   the alternatives at each of them, as (token id, log-probability); empty if none were asked for
    finish_reason  "stop", "length", "cancelled" or "error"; ``error`` says why it failed
    stop_reason    the stop string or stop id that ended it; None for the model's end token
    num_suspended  so often it gave its memory up and was computed again
    num_cached_tokens  of the prompt, those that this sample found in the KV cache when it was first admitted
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: Sequence[Top]
    finish_reason: Finish
    stop_reason: str | int | None
    error: str | None
    num_suspended: int
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What came of one prompt: ``params.n`` samples, in the order of their seeds.

    ``prompt_logprobs``: of every prompt token but the first, if asked for. ``num_cached_tokens``: of the prompt, those
    that the first sample found in the KV cache: what earlier texts left there. The other samples find what the first
    computed as well, and each says how much (``Sample.num_cached_tokens``).
    """

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_logprobs: Sequence[TokenLogprobs]
    samples: tuple[Sample, ...]

    @property
    def text(self) -> str:
        """The text of the first sample."""
        return self.samples[0].text


# -- what was asked ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One prompt: ``source`` is the keyword of ``Engine.request`` that says what it is. ``where``: "prompts[3]"."""

    source: Mapping[str, Any]
    params: SamplingParams
    where: str = ""


def ask_stream(prompt: Prompt | None, params: SamplingParams | None, messages: Conversation | None) -> Ask:
    """One sample of one prompt or conversation. Raises ``InputError`` for both or neither, and for what is none.

    Raises ``InvalidSetting`` for more samples: a stream could not tell them apart.
    """
    if (prompt is None) == (messages is None):
        raise InputError("A stream has either a prompt or messages", remedy="give one of them")
    source = _prompt(prompt, "prompt") if prompt is not None else _conversation(messages, "messages")
    (ask,) = _asks([source], params, "")
    if ask.params.n > 1:
        raise InvalidSetting("n", ask.params.n, "a stream is one sample", remedy="open n streams, or use generate")
    return ask


def ask_prompts(prompts: Prompt | Sequence[Prompt], params: Params) -> list[Ask]:
    """One prompt or several. Raises ``InputError`` for what is no prompt and for another number of params."""
    if isinstance(prompts, str) or _is_ids(prompts):
        return _asks([_prompt(prompts, "prompts")], params, "")
    listed = _list(prompts, "prompts", "a text, token ids, or a list of these")
    return _asks([_prompt(one, f"prompts[{i}]") for i, one in enumerate(listed)], params, "prompts")


def ask_conversations(conversations: Conversation | Sequence[Conversation], params: Params) -> list[Ask]:
    """One conversation or several. Raises ``InputError`` as ``ask_prompts`` does."""
    listed = _list(conversations, "messages", "a list of messages, or a list of such lists")
    if listed and isinstance(listed[0], Mapping):
        return _asks([_conversation(listed, "messages")], params, "")
    return _asks([_conversation(one, f"messages[{i}]") for i, one in enumerate(listed)], params, "messages")


def _asks(sources: Sequence[Mapping[str, Any]], params: Params, name: str) -> list[Ask]:
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(sources)
    listed = _list(params, "params", "a SamplingParams, or a list of them")
    if not all(isinstance(one, SamplingParams) for one in listed):
        raise InputError("params holds something that is no SamplingParams", remedy="write SamplingParams(top_p=0.9)")
    if len(listed) != len(sources):
        raise InputError(
            f"There are {len(listed)} params for {len(sources)} prompts", remedy="give one for all, or one for each"
        )
    asked = enumerate(zip(sources, listed, strict=True))
    return [Ask(source=s, params=p, where=f"{name}[{i}]" if name else "") for i, (s, p) in asked]


def _prompt(prompt: object, where: str) -> Mapping[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Sequence) and (_is_ids(prompt) or not prompt):
        return {"token_ids": [int(token) for token in prompt]}
    raise InputError(f"{where} is neither a text nor a list of token ids", remedy='write "Hello", or [504, 3575]')


def _conversation(messages: object, where: str) -> Mapping[str, Any]:
    listed = _list(messages, where, "a list of messages")
    if not all(isinstance(message, Mapping) for message in listed):
        raise InputError(
            f"{where} holds something that is no message", remedy='write [{"role": "user", "content": "Hello"}]'
        )
    return {"messages": [dict(message) for message in listed]}


def _list(value: object, where: str, wanted: str) -> Sequence[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise InputError(f"{where} is {type(value).__name__}", need=wanted, remedy=f"give {wanted}")
    return value


def _is_ids(value: object) -> bool:
    """A list of whole numbers; an empty one may be a list of anything."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or not value:
        return False
    return all(isinstance(token, Integral) and not isinstance(token, bool) for token in value)


# -- what is said ------------------------------------------------------------------------------------------------


def raise_if_failed(output: Output) -> None:
    """Who reads a stream sees pieces of text: a failure must not look like the end of them."""
    (sample,) = output.samples
    if sample.finish_reason is Finish.ERROR:
        raise TonnageError(f"{output.request_id} failed: {sample.error}")


def closed_error(name: str) -> UserError:
    return UserError(f"This {name} is closed", remedy="make another one, or use it before the end of its with block")


# -- on its way --------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False, kw_only=True)
class _Pending:
    """One prompt with a request for each of its samples."""

    id: str
    requests: list[Request]
    completions: dict[str, Completion] = field(default_factory=dict)

    def output(self) -> Output:
        completions = [self.completions[request.id] for request in self.requests]
        first = completions[0]
        return Output(
            request_id=self.id,
            num_prompt_tokens=first.num_prompt_tokens,
            num_cached_tokens=first.num_cached_tokens,
            prompt_logprobs=first.prompt_logprobs,
            samples=tuple(_sample(completion) for completion in completions),
        )


@dataclass(slots=True, eq=False, kw_only=True)
class Call:
    """Prompts that came together. ``num_left`` samples have not ended yet; ``on_done`` hears when the last one has."""

    name: str
    pending: list[_Pending]
    num_left: int
    on_done: Callable[[Call], None] | None = None

    @property
    def is_done(self) -> bool:
        return self.num_left == 0

    def outputs(self) -> list[Output]:
        """In the order of the prompts; not before the call is done."""
        assert self.is_done
        return [pending.output() for pending in self.pending]


class Desk:
    """Takes calls to one engine and hands each what ended for it. On the engine's thread, as the engine itself."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._calls: dict[str, Call] = {}
        self._open: dict[str, tuple[Call, _Pending]] = {}  # by id of a request

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    @property
    def can_step(self) -> bool:
        """There is work, and the engine is awake; or somebody's end to tell."""
        return self.engine.has_ended or (self.engine.has_work and not self.engine.is_asleep)

    def open(
        self,
        name: str,
        asks: Sequence[Ask],
        *,
        on_delta: OnDelta | None = None,
        on_done: Callable[[Call], None] | None = None,
    ) -> Call:
        """Submit a call under a name of its own, once all its prompts are found possible.

        Raises ``RequestRefused`` or ``InputError`` for the first that is not, saying which; nothing is submitted then.
        An interrupt may come when the call is open and not yet returned: ``cancel`` takes its name, known beforehand.
        """
        pending = [
            self._check(ask, f"{name}[{index}]" if len(asks) > 1 else name, on_delta) for index, ask in enumerate(asks)
        ]
        num_samples = sum(len(one.requests) for one in pending)
        call = Call(name=name, pending=pending, num_left=num_samples, on_done=on_done)
        try:
            self._calls[name] = call
            for one in pending:
                for request in one.requests:
                    self._open[request.id] = call, one
                    self.engine.submit(request)
        except BaseException:
            self.cancel(name)
            raise
        if call.is_done:
            self._finish(call)
        return call

    def step(self) -> None:
        """One step of the engine; what ended goes to its call. An interrupt waits until all of it is there."""
        with deferred_interrupts():
            for completion in self.engine.step():
                self._take(completion)

    def cancel(self, name: str) -> None:
        """Stop what is left of a call and give back its memory; ``on_done`` hears nothing. Unknown names are fine.

        An interrupt waits until all of it is stopped.
        """
        with deferred_interrupts():
            call = self._calls.pop(name, None)
            for pending in call.pending if call is not None else ():
                for request in pending.requests:
                    if self._open.pop(request.id, None) is not None:
                        self.engine.cancel(request.id)

    def _check(self, ask: Ask, id: str, on_delta: OnDelta | None) -> _Pending:
        params = ask.params.samples()
        ids = [id] if len(params) == 1 else [f"{id}.{sample}" for sample in range(len(params))]
        try:
            requests = [
                self.engine.request(one, p, **ask.source, on_delta=on_delta) for one, p in zip(ids, params, strict=True)
            ]
        except UserError as refused:
            raise _at(ask.where, refused) from None
        return _Pending(id=id, requests=requests)

    def _take(self, completion: Completion) -> None:
        call, pending = self._open.pop(completion.request_id, (None, None))
        if call is None or pending is None:
            return  # of a call that was cancelled
        pending.completions[completion.request_id] = completion
        call.num_left -= 1
        if call.is_done:
            self._finish(call)

    def _finish(self, call: Call) -> None:
        self._calls.pop(call.name, None)
        if call.on_done is not None:
            call.on_done(call)


def _at(where: str, refused: UserError) -> UserError:
    """The same error, which tells its place among the prompts."""
    if not where:
        return refused
    told = copy.copy(refused)
    told.what = f"{where}: {refused.what}"
    told.args = (told.paragraph(),)
    return told


def _sample(completion: Completion) -> Sample:
    return Sample(
        text=completion.text,
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        top_logprobs=completion.top_logprobs,
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        error=completion.error,
        num_suspended=completion.num_suspended,
        num_cached_tokens=completion.num_cached_tokens,
    )
