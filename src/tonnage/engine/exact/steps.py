"""Steps of a model of which nothing is real, one trace each: what the executor does, without its inputs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from tonnage.costs.activations import SAMPLER_TILE_ELEMENTS
from tonnage.engine.exact.skeleton import Skeleton
from tonnage.engine.exact.trace import Trace, Tracer
from tonnage.engine.sampling import Sampler, SamplingRows, SamplingTable
from tonnage.resources.penalties import PenaltyTensors
from tonnage.sampling import SamplingParams

#: Where the sampler's tensors without bytes lie; what it uploads is counted there, what it fills on the host is not.
_NOWHERE = "meta"
#: A row with every feature but penalties, which are added where requests may have them: as the engine's probe asks.
_EVERYTHING: dict[str, Any] = {
    "temperature": 0.9,
    "top_k": 50,
    "top_p": 0.9,
    "min_p": 0.01,
    "logit_bias": {0: 1.0},
    "min_tokens": 3,
    "stop_token_ids": (0,),
    "seed": 0,
}
_PENALTIES: dict[str, Any] = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5}


def forward(skeleton: Skeleton, *, num_tokens: int, logits_rows: int) -> Trace:
    """One forward over ``num_tokens``, then ``logits_rows`` rows of logits; fewer rows than tokens are picked first."""
    with skeleton.running():
        ids, positions = (torch.zeros(1, num_tokens, dtype=torch.int64) for _ in range(2))
        places = torch.zeros(logits_rows, dtype=torch.int64)
        tracer = Tracer([*skeleton.known, ids, positions, places])
        with tracer.watching(skeleton.model, skeleton.compiled_parts), tracer:
            hidden = skeleton.base(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state[0]
            if logits_rows:
                chosen = hidden.index_select(0, places) if logits_rows < num_tokens else hidden
                logits = skeleton.head(chosen)
                del chosen, logits
            del hidden
    return tracer.trace


@lru_cache(maxsize=16)  # a search for limits that fit changes the tokens of a step, not its rows
def sampling(
    *,
    hidden_bytes: int,
    logits_rows: int,
    vocab_size: int,
    dtype: str,
    num_logprobs: int,
    penalties: bool,
    tile_elements: int,
    is_plain: bool = False,
) -> Trace:
    """Rows of logits, and a draw from each with everything that a request may ask for; ``is_plain``: of the most
    probable token, with nothing else. The step's hidden states stay beside them. Equal questions share one trace."""
    tables = _tables(logits_rows, vocab_size) if penalties else None
    logits, tracer = _logits(logits_rows, vocab_size, dtype)
    asked = sampling_rows(
        logits_rows, num_logprobs=min(num_logprobs, vocab_size), penalties=penalties, is_plain=is_plain
    )
    with tracer:
        hidden = torch.empty(hidden_bytes, dtype=torch.uint8, device=_NOWHERE)
        made = torch.empty_like(logits)
        drawn = Sampler(vocab_size, tile_elements=tile_elements).draw(made, asked, tables)
        del made, drawn, hidden
    return tracer.trace


def sampling_rows(num_rows: int, *, num_logprobs: int, penalties: bool, is_plain: bool) -> SamplingRows:
    """What so many requests ask of the sampler: everything, or the most probable token."""
    asked = {**_EVERYTHING, **(_PENALTIES if penalties else {}), "logprobs": num_logprobs}
    params = SamplingParams() if is_plain else SamplingParams(**asked)
    table = SamplingTable(num_rows)
    for slot in range(num_rows):
        table.set(slot, params, seed=slot, stop_ids=frozenset((0,)), num_prompt_tokens=1)
    return table.rows(np.arange(num_rows), np.ones(num_rows, np.int64))


def prompt_logprobs(
    *, hidden_bytes: int, logits_rows: int, vocab_size: int, dtype: str, num_logprobs: int, tile_elements: int
) -> Trace:
    """As many rows of a prompt's logits as are made at once, beside the prompt's hidden states."""
    logits, tracer = _logits(logits_rows, vocab_size, dtype)
    targets = torch.zeros(logits_rows, dtype=torch.int64, device=_NOWHERE)
    with tracer:
        hidden = torch.empty(hidden_bytes, dtype=torch.uint8, device=_NOWHERE)
        made = torch.empty_like(logits)
        top = min(num_logprobs, vocab_size)
        told = Sampler(vocab_size, tile_elements=tile_elements).told(made, targets, num_top=top)
        del made, hidden, told
    return tracer.trace


def tile_elements(device_kind: str) -> int:
    return SAMPLER_TILE_ELEMENTS[device_kind]


def _logits(rows: int, vocab_size: int, dtype: str) -> tuple[torch.Tensor, Tracer]:
    logits = torch.empty(rows, vocab_size, dtype=getattr(torch, dtype), device=_NOWHERE)
    return logits, Tracer([logits], device=_NOWHERE)


def _tables(num_slots: int, vocab_size: int) -> PenaltyTensors:
    """Made before anything is watched: they stay, and whoever keeps them has claimed them."""
    return PenaltyTensors(
        counts=torch.empty(num_slots, vocab_size, dtype=torch.int32, device=_NOWHERE),
        seen=torch.empty(num_slots, vocab_size, dtype=torch.bool, device=_NOWHERE),
    )
