"""Changes to the logits before anything is chosen: penalties, biases, and stops that come too early."""

from __future__ import annotations

import torch

from tonnage.buffers.torch_copies import upload_one
from tonnage.engine.sampling.rows import Edits, Penalties, SamplingRows
from tonnage.engine.sampling.select import column, index, pick
from tonnage.resources.penalties import PenaltyTensors


def edited(logits: torch.Tensor, rows: SamplingRows, tables: PenaltyTensors | None, *, in_place: bool) -> torch.Tensor:
    """float32 ``logits`` [rows, V] as ``rows`` want them: a copy unless ``in_place`` or nothing changes."""
    if rows.penalties is None and rows.edits is None:
        return logits
    logits = logits if in_place else logits.clone()
    if rows.penalties is not None:
        assert tables is not None, "penalties without their tables"
        _penalise(logits, rows.penalties, tables)
    if rows.edits is not None:
        _add(logits, rows.edits)
    return logits


def count(tokens: torch.Tensor, penalties: Penalties, tables: PenaltyTensors) -> None:
    """The step drew ``tokens``, int64 [rows] of its sampling rows: one more of each for the rows with penalties.

    On the device, so that the next step finds them though the host has not seen them.
    """
    device = tokens.device
    slots, drawn = index(penalties.slots, device), tokens.index_select(0, index(penalties.rows, device))
    # A slot is there once, so that nothing is counted twice at one place.
    tables.counts.index_put_((slots, drawn), tables.counts[slots, drawn] + 1)


def _penalise(logits: torch.Tensor, penalties: Penalties, tables: PenaltyTensors) -> None:
    """Repetition first (Keskar et al. 2019, as transformers has it), then frequency and presence as OpenAI defines
    them: logit - count * frequency - (count > 0) * presence, over the output alone."""
    device, float32 = logits.device, torch.float32
    slots = index(penalties.slots, device)
    mine = pick(logits, penalties.rows)
    counts = tables.counts.index_select(0, slots)
    if (penalties.repetition != 1).any():
        met = tables.seen.index_select(0, slots).logical_or_(counts > 0)
        mine = torch.where(met, _repeated(mine, column(penalties.repetition, device, float32)), mine)
        del met
    if penalties.frequency.any():
        mine = mine.sub(counts * column(penalties.frequency, device, float32))
    if penalties.presence.any():
        mine = mine.sub(counts.clamp_(max=1) * column(penalties.presence, device, float32))
    logits.index_copy_(0, index(penalties.rows, device), mine)


def _repeated(logits: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return torch.where(logits < 0, logits * factor, logits / factor)


def _add(logits: torch.Tensor, edits: Edits) -> None:
    """Ids outside the vocabulary have no logit."""
    known = edits.tokens < logits.shape[1]
    rows, tokens = (index(ids[known], logits.device) for ids in (edits.rows, edits.tokens))
    values = upload_one(edits.values[known], logits.device).float()
    logits.index_put_((rows, tokens), values, accumulate=True)
