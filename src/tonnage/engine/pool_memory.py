"""The memory of the KV pool and of the scratch beside it, whether the device has virtual memory or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tonnage.attention import make_backend
from tonnage.attention.pages import Pages, page_shapes
from tonnage.buffers import VaArena
from tonnage.buffers.torch_view import as_tensor, typed_view
from tonnage.config import Limits
from tonnage.engine.site import KV, Site
from tonnage.engine.target import Target
from tonnage.layout import DTYPE_BYTES
from tonnage.terms import LineKind, worst_bytes
from tonnage.workspace import ScratchArena

if TYPE_CHECKING:
    import torch

    from tonnage.attention.base import Backend


class PoolMemory:
    """Two arenas, the tensor over the first, and the attention backend that works on it.

    With virtual memory the addresses of the largest conceivable pool are reserved when it is first filled, and only
    what is behind them changes: graphs that were captured over a floor stay right while the pool grows. Without it
    (``is_static``) every size is an allocation of its own at another address, so a pool that graphs know cannot grow.
    """

    def __init__(self, target: Target, site: Site) -> None:
        self._target, self._site = target, site
        self.is_static = not site.driver.capabilities().vmm
        self._kv: VaArena | None = None
        self._scratch: VaArena | None = None
        self._tensor: torch.Tensor | None = None
        self._backend: Backend | None = None

    @property
    def arena(self) -> VaArena:
        assert self._kv is not None, "the pool was not filled"
        return self._kv

    @property
    def tensor(self) -> torch.Tensor:
        """[blocks, ...] over all addresses of the pool; only blocks that were filled may be touched."""
        assert self._tensor is not None, "the pool was not filled"
        return self._tensor

    @property
    def backend(self) -> Backend:
        assert self._backend is not None, "the pool was not filled"
        return self._backend

    @property
    def kv_bytes(self) -> int:
        """What the pool has of the device now."""
        return 0 if self._kv is None else self._kv.committed_bytes

    def fill(self, num_slabs: int, limits: Limits) -> None:
        """At least so many blocks have memory; what they held stays where they had some. ``limits`` bound the scratch.

        Raises ``BufferOOM`` for want of memory, and ``ValueError`` for a static pool that would have to grow.
        """
        num_bytes = num_slabs * self._target.kv.slab_bytes
        if self._kv is None:
            self._reserve(num_slabs, limits)
        elif self.is_static and num_bytes > self._kv.size_bytes:
            raise ValueError("a static pool does not grow: empty it before")
        self.arena.commit(num_bytes)

    def scratch(self, limits: Limits) -> ScratchArena:
        """All the scratch that steps within ``limits`` may ask for."""
        assert self._scratch is not None, "the pool was not filled"
        return ScratchArena(self._scratch, self._target.scratch(), limits=limits, chip=self._site.chip)

    def empty(self) -> None:
        """Give the memory of both back, before it is filled to another size; nobody works on it. Raises what closing
        an arena raises."""
        if self._kv is None or self._scratch is None:
            return
        if not self.is_static:
            for arena in (self._kv, self._scratch):
                arena.decommit(0)
            return
        self._tensor = self._backend = None
        for arena in (self._kv, self._scratch):
            arena.close()
        self._kv = self._scratch = None

    def _reserve(self, num_slabs: int, limits: Limits) -> None:
        layout, capacity = self._target.kv, self._site.capacity_bytes
        scratch_bytes = capacity
        if self.is_static:
            scratch_bytes = max(1, worst_bytes(self._target.scratch(), limits, self._site.chip))
        else:
            num_slabs = max(1, capacity // layout.slab_bytes)
        self._kv = self._site.arena("kv cache", LineKind.KV, reserve_bytes=num_slabs * layout.slab_bytes, tag=KV)
        self._scratch = self._site.arena("attention scratch", LineKind.SCRATCH, reserve_bytes=scratch_bytes, tag=KV)
        dtype = layout.groups[0].parts[0].dtype
        shape = (num_slabs, layout.slab_bytes // DTYPE_BYTES[dtype])
        self._tensor = typed_view(as_tensor(self._kv), 0, shape, dtype)
        shapes, places = page_shapes(layout)
        pages = Pages(slabs=self._tensor, shapes=shapes, places=places)
        self._backend = make_backend(self._target.options.attention_backend, pages)
