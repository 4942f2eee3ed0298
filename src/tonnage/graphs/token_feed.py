"""Tokens that one step drew and the next one reads, on the device: the host need not know them in between."""

from __future__ import annotations

import numpy as np
import torch

from tonnage.buffers.torch_copies import upload_one
from tonnage.step import Ints


def pending(slots: Ints) -> Ints:
    """What stands for the token ids that sequences in ``slots`` have drawn, and the host has not seen: -1 - slot."""
    return -1 - slots


class TokenFeed:
    """One row a slot of the batch. Device tensors, int64 [num_slots] each, at addresses that stay:

    newest     what the slot's sequence drew last
    given      token ids of a captured step's rows that the host knows
    positions  where they stand in their sequences
    sources    where each row finds its token: a place in [newest | given]
    slots      of each row

    All but ``newest`` are written by ``load``, in one copy, for the next replay.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device, self._num_slots = device, num_slots
        self._all = torch.zeros((5, num_slots), dtype=torch.int64, device=device)
        self.newest, self.given, self.positions, self.sources, self.slots = self._all

    def load(self, ids: Ints, positions: Ints, slots: Ints) -> None:
        """Rows of a step of decodes: what is not known of ``ids`` is ``pending``. Does not wait for the device."""
        num = ids.size
        staged = torch.zeros((4, self._num_slots), dtype=torch.int64, pin_memory=self._device.type == "cuda")
        given, to_positions, sources, to_slots = staged.numpy()
        given[:num], to_positions[:num], to_slots[:num] = ids, positions, slots
        sources[:num] = np.where(ids < 0, pending(ids), self._num_slots + np.arange(num))
        self._all[1:].copy_(staged, non_blocking=True)

    def ids(self, num_rows: int) -> torch.Tensor:
        """Token ids [num_rows] of the loaded step: to be captured."""
        return self._all.view(-1).index_select(0, self.sources[:num_rows])

    def upload(self, ids: Ints) -> torch.Tensor:
        """Token ids of any step, int64 [T]; what is not known of them is ``pending``."""
        there = upload_one(ids, self._device)
        if ids.size and ids.min() < 0:
            there = torch.where(there < 0, self.newest[(-1 - there).clamp(min=0)], there)
        return there

    def keep(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """``tokens`` are what the sequences in ``slots`` drew, int64 both."""
        self.newest.index_copy_(0, slots, tokens)
