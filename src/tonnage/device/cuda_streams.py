"""Streams and events of a CUDA device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from tonnage.device.cuda_api import CAPTURE_IMPLICIT, INVALID_CONTEXT, INVALID_VALUE, NOT_READY
from tonnage.device.cuda_pages import CudaPages
from tonnage.errors import DriverError

#: The default stream, the legacy one and the calling thread's: names that each context reads as its own stream.
NAMED_STREAMS = (0, 1, 2)
#: All other handles are addresses, and no address is below this.
FIRST_ADDRESS = 2**16


class StreamBook:
    """The driver's object for each handle of a stream, ours or made elsewhere (by torch, say); made when first asked.

    Whoever finds a handle in ``known`` may use the stream at once. One that is missed goes through ``enter``, which
    refuses a lost device and makes our context current; so nothing stays in there when the device is lost, and the
    named streams, which are the current context's, whichever that is, are never in it. A handle that cannot be a
    stream, or that was one of ours and is destroyed, raises ``DriverError``: the driver would read wherever it points.
    """

    def __init__(self, wrap: Callable[[int], Any], enter: Callable[[str], None]) -> None:
        self.known: dict[int, Any] = {}
        self.destroyed: set[int] = set()
        self._wrap, self._enter = wrap, enter
        self._named = {handle: wrap(handle) for handle in NAMED_STREAMS}

    def __getitem__(self, handle: int) -> Any:
        found = self.known.get(handle)
        if found is None:
            self._enter("stream")
            found = self._named.get(handle)
        if found is None:
            if handle < FIRST_ADDRESS or handle in self.destroyed:
                raise DriverError("stream", "INVALID_HANDLE", f"no stream {handle:#x}")
            self.known[handle] = found = self._wrap(handle)
        return found


class CudaStreams(CudaPages):
    """Stream and event calls of ``Driver``; see ``CudaDriver``.

    Streams made here do not wait for the default stream, nor it for them. A destroyed stream is kept and handed out
    again: its address would otherwise become somebody else's stream, and a stale handle could not be told from it.
    Events are ours alone.
    """

    __slots__ = ("_is_capturing", "_known_streams")  # read at every allocation, like those of ``CudaMemory``

    def __init__(self, ordinal: int, *, api: Any = None) -> None:
        super().__init__(ordinal, api=api)
        self._streams = StreamBook(self._api.module.CUstream, self._enter)
        self._is_capturing = self._api.function("cuStreamIsCapturing")
        self._known_streams = self._streams.known
        self._own_streams: dict[int, int] = {}  # handle -> priority
        self._idle_streams: defaultdict[int, list[int]] = defaultdict(list)  # priority -> handles
        self._events: dict[int, Any] = {}

    def _set_refusal(self, error: DriverError) -> None:
        super()._set_refusal(error)
        self._known_streams.clear()

    def stream_create(self, *, priority: int) -> int:
        """Lower numbers go first; what lies outside the device's range is taken as its nearest end."""
        self._check("stream_create")
        with self._lock:
            if self._idle_streams[priority]:
                handle = self._idle_streams[priority].pop()
                self._streams.destroyed.discard(handle)
                return handle
            flags = self._api.module.CUstream_flags.CU_STREAM_NON_BLOCKING
            made = self._call("cuStreamCreateWithPriority", int(flags), priority)
            self._known_streams[int(made)] = made
            self._own_streams[int(made)] = priority
            return int(made)

    def stream_destroy(self, stream: int) -> None:
        """Only what ``stream_create`` returned; work that is queued on it still runs."""
        self._check("stream_destroy")
        with self._lock:
            if stream not in self._own_streams or stream in self._streams.destroyed:
                raise DriverError("stream_destroy", "INVALID_HANDLE", f"no stream {stream:#x} was created here")
            if self.stream_capturing(stream):
                raise DriverError("stream_destroy", "INVALID_VALUE", f"stream {stream:#x} is being captured")
            self._known_streams.pop(stream, None)
            self._streams.destroyed.add(stream)
            self._idle_streams[self._own_streams[stream]].append(stream)

    def stream_sync(self, stream: int) -> None:
        self._check("stream_sync")
        self._call("cuStreamSynchronize", self._streams[stream])

    def stream_wait(self, stream: int, event: int) -> None:
        self._check("stream_wait")
        self._call("cuStreamWaitEvent", self._streams[stream], self._event("stream_wait", event), 0)

    def stream_capturing(self, stream: int) -> bool:
        """Whether the stream is being captured. Stream 0 counts as captured while any stream of the context is that
        it would wait for: nothing may be asked of it then."""
        try:
            on = self._known_streams[stream]
        except KeyError:
            on = self._streams[stream]
        status, state = self._is_capturing(on)
        if status:
            if int(status) in (INVALID_CONTEXT, INVALID_VALUE):  # for want of our context, perhaps
                self._enter("stream_capturing")
                status, state = self._is_capturing(on)
            if int(status) == CAPTURE_IMPLICIT:
                return True
            if status:
                raise self._failed("cuStreamIsCapturing", status)
        return int(state) != 0

    def event_create(self) -> int:
        """An event without a time, the cheap kind."""
        made = self._call("cuEventCreate", int(self._api.module.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        self._events[int(made)] = made
        return int(made)

    def event_destroy(self, event: int) -> None:
        found = self._event("event_destroy", event)
        self._events.pop(event, None)  # first: as soon as it is destroyed, another thread's event may have this handle
        self._call("cuEventDestroy", found)

    def event_record(self, event: int, *, stream: int) -> None:
        self._call("cuEventRecord", self._event("event_record", event), self._streams[stream])

    def event_done(self, event: int) -> bool:
        self._enter("event_done")
        (status,) = self._relaxed(self._api.function("cuEventQuery"), self._event("event_done", event))
        if status and int(status) != NOT_READY:
            raise self._failed("cuEventQuery", status)
        return not status

    def event_sync(self, event: int) -> None:
        self._call("cuEventSynchronize", self._event("event_sync", event))

    def _event(self, call: str, event: int) -> Any:
        self._check(call)
        found = self._events.get(event)
        if found is None:
            raise DriverError(call, "INVALID_HANDLE", f"no event {event:#x}")
        return found
