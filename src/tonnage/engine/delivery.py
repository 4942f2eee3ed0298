"""From a step's outcome to its requests, from there to those who listen, and in the end to a completion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from tonnage.engine.outcome import Outcome, TokenLogprobs
from tonnage.engine.request import Completion, Delta, Finish, Request
from tonnage.engine.text import Text


def take(outcome: Outcome, running: Mapping[str, Request]) -> tuple[list[Request], list[tuple[Request, Delta]]]:
    """Each sampling row's token to its request, if that is still ``running``; returns those that ended, and what is to
    be told to listeners."""
    for request_id, told in outcome.prompt.items():
        if request_id in running:
            running[request_id].prompt_logprobs.extend(told)
    ended: list[Request] = []
    deltas: list[tuple[Request, Delta]] = []
    requests = map(running.get, outcome.request_ids)
    rows = zip(requests, outcome.tokens, outcome.logprobs, outcome.finite, strict=True)
    for row, (request, token, logprob, is_finite) in enumerate(rows):
        if request is None:
            continue
        if not is_finite:
            request.finish, request.error = Finish.ERROR, "the model's logits are not finite numbers"
            ended.append(request)
            continue
        is_last = request.append(token, logprob)
        if request.wants_more:
            deltas += _more(request, TokenLogprobs(token, logprob, outcome.top.get(row, ())))
            is_last = request.finish is not None
        if is_last:
            ended.append(request)
    return ended, deltas


def _more(request: Request, token: TokenLogprobs) -> Iterator[tuple[Request, Delta]]:
    """What a request asked for besides its tokens."""
    if request.params.logprobs:
        request.alternatives.append(token)
    if request.stream is not None:
        yield from _streamed(request, token)


def _streamed(request: Request, token: TokenLogprobs) -> Iterator[tuple[Request, Delta]]:
    """Text of a request that streams or looks for stop strings; a stop string ends it here."""
    assert request.stream is not None
    text = request.stream.push(token.token, check_stop=request.num_generated_tokens >= request.params.min_tokens)
    if request.stream.matched is not None:
        request.finish, request.stop_reason = Finish.STOP, request.stream.matched
    elif request.finish is not None:
        text += request.stream.flush()
    if request.on_delta is not None:
        yield request, Delta(request_id=request.id, text=text, tokens=(token,), finish_reason=request.finish)


def tell_all(deltas: Iterable[tuple[Request, Delta]]) -> BaseException | None:
    """Everybody hears what is new; also one that another's callback has cancelled: the token is part of its text.

    A callback that raises fails its own request and no other. The first thing raised that is no ``Exception`` (an exit,
    a cancelled task) is returned, for the caller to raise when all is consistent.
    """
    first: BaseException | None = None
    for request, delta in deltas:
        error = _tell(request, delta)
        first = first or error
    return first


def tell_end(request: Request) -> BaseException | None:
    """A listener hears of an end that no token brought, with the text that was held back. Returns as ``tell_all``."""
    if request.stream is None:
        return None
    rest = request.stream.flush()
    if request.finish not in (Finish.CANCELLED, Finish.ERROR):
        return None
    return _tell(request, Delta(request_id=request.id, text=rest, finish_reason=request.finish))


def _tell(request: Request, delta: Delta) -> BaseException | None:
    if request.on_delta is None:
        return None
    try:
        request.on_delta(delta)
    except BaseException as error:  # noqa: BLE001 - see ``tell_all``
        request.on_delta = None  # it will not be asked again
        request.finish = Finish.ERROR
        request.error = request.error or f"on_delta raised {type(error).__name__}: {error}"
        return None if isinstance(error, Exception) else error
    return None


def completion_of(request: Request, text: Text) -> Completion:
    """What the caller gets of a request that has ended."""
    assert request.finish is not None
    if request.stream is not None:
        told = request.stream.told  # what was streamed, to the letter
    else:
        told = text.decode(request.generated_ids, skip_special_tokens=request.params.skip_special_tokens)
    return Completion(
        request_id=request.id,
        text=told,
        token_ids=tuple(request.generated_ids),
        logprobs=tuple(request.logprobs),
        top_logprobs=request.alternatives.tops,
        prompt_logprobs=request.prompt_logprobs,
        num_prompt_tokens=request.num_prompt_tokens,
        finish_reason=request.finish,
        stop_reason=request.stop_reason,
        error=request.error,
        waited=request.waited,
        num_suspended=request.num_suspended,
        num_cached_tokens=request.num_cached_tokens,
    )
