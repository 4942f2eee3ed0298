"""What becomes of drafts, the guessed tokens of a step: some are kept and the rest was computed in vain."""

from __future__ import annotations

from typing import cast

import numpy as np

from tonnage.errors import ResourceError
from tonnage.resources.base import DraftOutcome, StepOutcome
from tonnage.step import Ints, StepPlan


def rejected_drafts(plan: StepPlan, outcome: StepOutcome | None) -> Ints:
    """Tokens at the end of each row that are not kept; of a step that sampled nothing, all its drafts.

    Raises ``ResourceError`` for an outcome that cannot be.
    """
    drafts = plan.drafts if plan.drafts is not None else np.zeros_like(plan.counts)
    accepted = np.zeros_like(drafts) if outcome is None else cast(DraftOutcome, outcome).accepted
    rejected: Ints = drafts - accepted
    if ((accepted < 0) | (rejected < 0) | (rejected >= plan.counts)).any():
        raise ResourceError(f"{accepted.tolist()} of {drafts.tolist()} drafts were accepted")
    return rejected
