"""What a step reads, built from the batch on the host: token ids, pages, and what each row wants of the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tonnage.engine.batch import Batch
from tonnage.engine.managers import Managers
from tonnage.engine.picked import Scheduled
from tonnage.engine.request import Request
from tonnage.engine.sampling import SamplingRows
from tonnage.resources.mover import Ids
from tonnage.resources.penalties import PenaltyTensors
from tonnage.step import Ints, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSlice:
    """Prompt positions of one request whose log-probabilities the step makes.

    first    index, in the flattened batch, of the row of logits that predicts the first of ``targets``
    targets  the prompt tokens themselves, int64; consecutive positions
    """

    request_id: str
    first: int
    targets: Ints
    num_top: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepInputs:
    """``ids`` int64 [num_tokens], of which some may be ``pending``: a step that has not landed draws them. ``tables``
    are the page tables, int32 [slots, blocks] for each group of layers, and ``slots`` says which row of them each plan
    row reads. ``sampling``: one row for each that samples, in the plan's order; ``penalties``: the tables of token
    counts by slot, None while no request needs them."""

    plan: StepPlan
    ids: Ints
    tables: Sequence[Ids]
    slots: Ints
    sampling: SamplingRows
    penalties: PenaltyTensors | None = None
    prompts: Sequence[PromptSlice] = ()

    @property
    def table(self) -> Ids:
        """That of the first group."""
        return self.tables[0]

    @classmethod
    def of(cls, scheduled: Scheduled, batch: Batch, managers: Managers) -> StepInputs:
        plan, slots = scheduled.plan, scheduled.slots
        return cls(
            plan=plan,
            ids=batch.token_ids(plan, slots),
            tables=tuple(managers.kv.tables.values()),
            slots=slots,
            sampling=batch.sampling.rows(slots[plan.samples], plan.ends[plan.samples]),
            penalties=managers.penalties.tables(),
            prompts=_prompt_slices(plan, slots, batch),
        )


def _prompt_slices(plan: StepPlan, slots: Ints, batch: Batch) -> list[PromptSlice]:
    # Decodes have no prompt left: in a step of decodes there is nothing to look for. A chunk of one token, in a step
    # with no room for more, looks like one but for what it does not sample.
    if not plan.shape.prefill_rows and plan.samples.all():
        return []
    offsets = np.cumsum(plan.counts) - plan.counts
    found = []
    for row in np.flatnonzero((plan.counts > 1) | (plan.starts == 0) | ~plan.samples).tolist():
        request = batch.requests[int(slots[row])]
        if request is not None and request.params.prompt_logprobs is not None:
            piece = _prompt_slice(request, int(plan.starts[row]), int(plan.counts[row]), int(offsets[row]))
            if piece is not None:
                found.append(piece)
    return found


def _prompt_slice(request: Request, start: int, count: int, offset: int) -> PromptSlice | None:
    """The logits at position p predict token p + 1. What an earlier run of the request told is not told again."""
    assert request.params.prompt_logprobs is not None
    first = max(start, len(request.prompt_logprobs))
    last = min(start + count, request.num_prompt_tokens - 1)
    if first >= last:
        return None
    targets = np.array(request.token_ids[first + 1 : last + 1], np.int64)
    return PromptSlice(
        request_id=request.id,
        first=offset + first - start,
        targets=targets,
        num_top=request.params.prompt_logprobs,
    )
