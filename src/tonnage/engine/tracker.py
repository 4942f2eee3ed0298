"""Bytes of tensor storage alive inside a forward, counted by watching every operation's outputs.

A CPU build of torch keeps no allocator statistics, so the peak of a probe is counted here. Memory that a kernel
takes inside itself never becomes a tensor and is not seen; the process's own peak, read beside it, shows that.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class StorageTracker(TorchDispatchMode):
    """``with StorageTracker(known) as tracker: forward()``; then ``tracker.peak_bytes``.

    ``known`` tensors (weights, pool, inputs) and the arguments of each operation existed before it and cost nothing.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_in((args, kwargs)):
            self._know(tensor.untyped_storage())
        result = self._run(func, args, kwargs)
        for tensor in tensors_in(result):
            self._count(tensor.untyped_storage())
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return func(*args, **kwargs)

    def _know(self, storage: torch.UntypedStorage) -> None:
        """It was there before: until it dies, when its address may become another storage's."""
        key = storage._cdata
        if key not in self._seen:
            self._seen.add(key)
            weakref.finalize(storage, self._seen.discard, key)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, num_bytes: int) -> None:
        # The address will be reused by another storage, which must count again.
        self._seen.discard(key)
        self.live_bytes -= num_bytes


def tensors_in(tree: Any) -> Iterable[torch.Tensor]:
    """Every tensor among the arguments or results of an operation."""
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor))
