"""Which failures of a step are for want of memory, and whose."""

from __future__ import annotations

import re
import traceback
from types import TracebackType

from tonnage.errors import BufferOOM, DeclarationExceeded, DriverOOM

#: What torch's CPU allocator says; it has no exception type of its own.
_TORCH_CPU_OOM = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory(?:: you tried to allocate (\d+))?"
)
#: Name of torch's own exception where a device allocator fails (torch.OutOfMemoryError).
_TORCH_OOM = "OutOfMemoryError"


def culprit(error: BaseException) -> str | None:
    """Who ran out of memory, in a few words with the bytes asked for where known; None for any other failure.

    A plan that holds leaves every step its memory, so running out is a defect of someone's declaration: it is named.
    """
    if isinstance(error, DeclarationExceeded):
        declared = f"{error.declared_bytes:,} declared"
        return f"attention backend {error.backend!r}: {error.asked_bytes:,} bytes of scratch, {declared}"
    if isinstance(error, BufferOOM):
        return f"{error.owner}: {error.size_bytes:,} bytes"
    if isinstance(error, DriverOOM):
        return f"the device's {error.call}"
    if isinstance(error, MemoryError):
        return f"host memory{_place(error)}"
    told = _TORCH_CPU_OOM.search(str(error))
    if told is not None:
        size = f"{int(told[1]):,} bytes of " if told[1] else ""
        return f"{size}tensors{_place(error)}"
    if type(error).__name__ == _TORCH_OOM:
        return f"tensors of the device{_place(error)}"
    return None


def release_frames(error: BaseException) -> None:
    """Let go of what the frames of ``error``, and of all errors behind it, hold: the failed step's tensors. Where it
    was raised stays as text in its notes.

    A frame that is emptied still holds its function, and with that whatever the function closes over: a lambda its
    step, compiled code a layer's weights. So tracebacks are cut; of ``error`` itself the first frame stays, which is
    that of whoever handles it.
    """
    waiting, released = [error], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in released:  # errors may name each other
            continue
        released.add(id(one))
        _cut(one, keeps_first=one is error)
        behind = [one.__cause__, one.__context__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ())]
        waiting += [further for further in behind if further is not None]


def _cut(error: BaseException, *, keeps_first: bool) -> None:
    trace = error.__traceback__
    if trace is None:
        return
    if told := traceback.format_tb(trace)[int(keeps_first) :]:
        error.add_note("Raised in:\n" + "".join(told).rstrip())
    traceback.clear_frames(trace)
    rest: TracebackType | None = trace
    while rest is not None:  # a ``with`` that the error passes through holds it from its own frame on
        rest.tb_next, rest = None, rest.tb_next
    if not keeps_first:
        error.__traceback__ = None


def _place(error: BaseException) -> str:
    """The function that asked, as " in module:line function"."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    last = frames[-1]
    return f", in {last.name} ({last.filename.rsplit('/', 1)[-1]}:{last.lineno})"
