"""Requests that can never be served are refused when they arrive, with what they need and what there is."""

from __future__ import annotations

from tonnage.config import Limits
from tonnage.engine.options import Chunking
from tonnage.engine.request import Request
from tonnage.errors import RequestRefused, ResourceError
from tonnage.resources.base import Deferral
from tonnage.resources.dispatcher import Dispatcher
from tonnage.sampling import SamplingParams


def refuse_impossible(
    request: Request, *, limits: Limits, chunking: Chunking, vocab_size: int, dispatcher: Dispatcher
) -> None:
    """Raises ``RequestRefused`` with the first reason why the request could never run."""
    _refuse_tokens(request, vocab_size)
    _refuse_length(request, limits, chunking)
    _refuse_encoder(request, limits)
    _refuse_params(request, limits, vocab_size)
    for refusal in dispatcher.refusals(request):
        if refusal.manager == "penalties":
            raise RequestRefused(
                request.id,
                f"Request {request.id!r} has penalties, and the tables that count tokens for them are switched off",
                remedy='send it without penalties, or start without "penalty tables" in disabled_claims',
            )
        raise RequestRefused(
            request.id,
            f"Request {request.id!r} can never fit into {refusal.manager}",
            need=f"{refusal.need} {refusal.unit}s",
            have=f"{refusal.have} {refusal.unit}s",
            remedy="shorten the prompt or max_tokens, or start with more memory",
        )


def _refuse_tokens(request: Request, vocab_size: int) -> None:
    if request.num_prompt_tokens == 0:
        raise RequestRefused(request.id, f"Request {request.id!r} has an empty prompt", remedy="send some text")
    if not all(0 <= token < vocab_size for token in request.token_ids):
        raise RequestRefused(
            request.id,
            f"Request {request.id!r} holds token ids outside the vocabulary",
            need=f"ids from 0 to {vocab_size - 1}",
            remedy="encode the prompt with this model's tokenizer",
        )


def _refuse_length(request: Request, limits: Limits, chunking: Chunking) -> None:
    limit, prompt = limits.max_seq_len, request.num_prompt_tokens
    if prompt >= limit:
        raise RequestRefused(
            request.id,
            f"The prompt of request {request.id!r} is too long",
            need=f"{prompt + 1} tokens (prompt and one to generate)",
            have=f"max_seq_len = {limit}",
            remedy=f"shorten the prompt to {limit - 1} tokens, or start with a larger max_seq_len and KV cache",
        )
    if request.max_total_tokens > limit:
        raise RequestRefused(
            request.id,
            f"Request {request.id!r} can never fit",
            need=f"{prompt} prompt tokens + {request.max_tokens} to generate",
            have=f"max_seq_len = {limit}",
            remedy=f"ask for max_tokens of at most {limit - prompt}",
        )
    if not chunking.is_on and prompt > limits.max_num_tokens:
        raise RequestRefused(
            request.id,
            f"The prompt of request {request.id!r} is longer than a step, and chunked prefill is off",
            need=f"{prompt} tokens in one step",
            have=f"max_num_tokens = {limits.max_num_tokens}",
            remedy="start with chunked prefill, or with a larger --max-num-tokens",
        )


def _refuse_encoder(request: Request, limits: Limits) -> None:
    if request.num_encoder_tokens > limits.max_encoder_tokens:
        raise RequestRefused(
            request.id,
            f"Request {request.id!r} needs more of the encoder than a step computes",
            need=f"{request.num_encoder_tokens} encoder tokens in one step",
            have=f"max_encoder_tokens = {limits.max_encoder_tokens}",
            remedy="send a smaller input, or start with a larger --max-encoder-tokens",
        )


def _refuse_params(request: Request, limits: Limits, vocab_size: int) -> None:
    params = request.params
    for name in ("logprobs", "prompt_logprobs"):
        asked = getattr(params, name) or 0
        if asked > min(limits.max_logprobs, vocab_size):
            raise RequestRefused(
                request.id,
                f"Request {request.id!r} asks for {name} = {asked}",
                have=f"at most {min(limits.max_logprobs, vocab_size)}",
                remedy=f"lower {name}",
            )
    if params.min_tokens > request.max_tokens:
        raise RequestRefused(
            request.id,
            f"Request {request.id!r} asks for min_tokens = {params.min_tokens}, more than it may generate",
            have=f"max_tokens = {request.max_tokens}",
            remedy="lower min_tokens",
        )
    unknown = _unknown_ids(params, vocab_size)
    if unknown:
        raise RequestRefused(
            request.id,
            f"Request {request.id!r} names token ids outside the vocabulary in {unknown}",
            need=f"ids from 0 to {vocab_size - 1}",
            remedy="take them from this model's tokenizer",
        )


def _unknown_ids(params: SamplingParams, vocab_size: int) -> str:
    """The first parameter that names a token the model does not have."""
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        if any(token >= vocab_size for token in ids):
            return name
    return ""


def held_back(request: Request, short: Deferral, needs: str) -> ResourceError:
    """Who runs alone waits for nobody but the caller, and would for ever. ``needs``: in words, all or more."""
    return ResourceError(
        f"request {request.id!r} runs alone and {needs} {short.need} {short.unit}s of {short.manager!r}, which has "
        f"{short.have}: {short.held_back} cannot be taken back. To change: close pins, or start with a larger KV cache"
    )
