"""Results as plain JSON values: what was generated, and of the rest what was asked for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tonnage.cli.asks import Ask

if TYPE_CHECKING:
    from tonnage.engine import Completion

Record = dict[str, Any]


def record_of(ask: Ask, completions: Sequence[Completion]) -> Record:
    """One request's line. With one sample its fields lie beside the id; with more they are a list, "samples"."""
    first = completions[0]
    record: Record = {"id": ask.id, "num_prompt_tokens": first.num_prompt_tokens}
    if ask.params.prompt_logprobs is not None:
        of_prompt = ((at.token, at.logprob, at.top) for at in first.prompt_logprobs)
        record["prompt_logprobs"] = _positions(of_prompt, with_top=bool(ask.params.prompt_logprobs))
    samples = [_sample(ask, each) for each in completions]
    return record | samples[0] if ask.params.n == 1 else record | {"samples": samples}


def _sample(ask: Ask, completion: Completion) -> Record:
    record: Record = {
        "text": completion.text,
        "finish_reason": str(completion.finish_reason),
        "stop_reason": completion.stop_reason,
        "num_generated_tokens": len(completion.token_ids),
        "num_cached_tokens": completion.num_cached_tokens,
        "waited": completion.waited,
        "num_suspended": completion.num_suspended,
    }
    if completion.error is not None:
        record["error"] = completion.error
    if ask.params.logprobs is not None:
        tops = completion.top_logprobs or ((),) * len(completion.token_ids)
        positions = zip(completion.token_ids, completion.logprobs, tops, strict=True)
        record["logprobs"] = _positions(positions, with_top=bool(ask.params.logprobs))
    return record


def _positions(
    positions: Iterable[tuple[int, float, Sequence[tuple[int, float]]]], *, with_top: bool
) -> list[dict[str, Any]]:
    return [
        {"token": token, "logprob": _finite(logprob)}
        | ({"top": [{"token": other, "logprob": _finite(value)} for other, value in top]} if with_top else {})
        for token, logprob, top in positions
    ]


def _finite(logprob: float) -> float | None:
    """JSON has no infinity; a token that the model gives no probability at all has null."""
    return logprob if math.isfinite(logprob) else None
