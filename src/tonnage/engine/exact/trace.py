"""A forward, watched: every storage that comes and goes, every operation that makes or changes one, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from tonnage.engine.exact.ops import is_created, is_fused, written
from tonnage.engine.exact.segments import BLOCK_BYTES, Event
from tonnage.engine.tracker import StorageTracker, tensors_in
from tonnage.units import round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A storage that an operation made: its number, bytes, and the dtype of the tensor over it."""

    storage: int
    num_bytes: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """An operation that made or changed a storage; views are none. Storages that were there before have no number.

    is_fused    a compiler computes it inside the kernels around it
    is_created  it reads no tensor
    module      path of the module that asked for it
    """

    name: str
    is_fused: bool
    is_created: bool
    module: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    makes: tuple[Made, ...]


@dataclass(slots=True)
class Region:
    """What runs as one compiled function: ``events[begin:end]`` and ``ops[first_op:last_op]`` of a trace."""

    begin: int
    first_op: int
    end: int = -1
    last_op: int = -1


@dataclass(slots=True)
class Trace:
    """``events`` are storages by number and bytes, as they came and went; ``at`` says which operation each belongs to
    (the one before it, for what died between two)."""

    events: list[Event] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Top:
    """The highest point of a sequence of events: bytes alive, rounded as the allocator rounds them, and which event."""

    num_bytes: int
    event: int


def top_of(events: Sequence[Event]) -> Top:
    live = best = place = 0
    for number, (_, num_bytes) in enumerate(events):
        size = round_up(abs(num_bytes), BLOCK_BYTES)
        live += size if num_bytes > 0 else -size
        if live > best:
            best, place = live, number
    return Top(num_bytes=best, event=place)


class Tracer(StorageTracker):
    """Counts as ``StorageTracker`` does, and writes down what it sees in ``trace``."""

    def __init__(self, known: Iterable[torch.Tensor] = (), *, device: str | None = None) -> None:
        """``device``: only storages there count."""
        super().__init__(known)
        self.trace, self._device = Trace(), device
        self._numbers: dict[int, int] = {}
        self._next = 0
        self._made: list[Made] = []
        self._dtypes: dict[int, torch.dtype] = {}
        self._modules: list[str] = [""]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._made = []
        given = dict(kwargs or {})
        reads, writes = self._known_numbers((args, given)), self._known_numbers(written(func, args, given))
        result = super().__torch_dispatch__(func, types, args, given)
        if self._made or writes:
            self.trace.ops.append(
                Op(
                    name=func._schema.name,
                    # Of complex numbers compilers write no code.
                    is_fused=is_fused(func) and not any(made.dtype.is_complex for made in self._made),
                    is_created=is_created(func),
                    module=self._modules[-1],
                    reads=reads,
                    writes=writes,
                    makes=tuple(self._made),
                )
            )
        return result

    def watching(self, model: torch.nn.Module, parts: Sequence[torch.nn.Module]) -> ExitStack:
        """Until it is left: note which module runs, and take each of ``parts`` for a region."""
        stack, wanted = ExitStack(), set(parts)
        for name, module in model.named_modules():
            is_part = module in wanted
            enter, leave = self._enterer(name, is_part=is_part), self._leaver(is_part=is_part)
            for handle in (module.register_forward_pre_hook(enter), module.register_forward_hook(leave)):
                stack.callback(handle.remove)
        return stack

    def _enterer(self, name: str, *, is_part: bool) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._modules.append(name)
            if is_part:
                self.trace.regions.append(Region(begin=len(self.trace.events), first_op=len(self.trace.ops)))

        return enter

    def _leaver(self, *, is_part: bool) -> Callable[..., None]:
        def leave(*_: Any) -> None:
            self._modules.pop()
            if is_part:
                region = self.trace.regions[-1]
                region.end, region.last_op = len(self.trace.events), len(self.trace.ops)

        return leave

    def _known_numbers(self, tree: Any) -> tuple[int, ...]:
        keys = (tensor.untyped_storage()._cdata for tensor in tensors_in(tree))
        return tuple(dict.fromkeys(self._numbers[key] for key in keys if key in self._numbers))

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        result = super()._run(func, args, kwargs)
        self._dtypes = {tensor.untyped_storage()._cdata: tensor.dtype for tensor in tensors_in(result)}
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        if self._device is not None and storage.device.type != self._device:
            self._know(storage)
            return
        super()._count(storage)
        self._numbers[key], number = self._next, self._next
        self._next += 1
        self._made.append(Made(storage=number, num_bytes=num_bytes, dtype=self._dtypes[key]))
        self._note(number, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        super()._forget(key, num_bytes)
        self._note(self._numbers.pop(key), -num_bytes)

    def _note(self, number: int, num_bytes: int) -> None:
        if num_bytes:
            self.trace.events.append((number, num_bytes))
            # A storage belongs to the operation that is being run, a death to the one before.
            self.trace.at.append(len(self.trace.ops) - (num_bytes < 0))
