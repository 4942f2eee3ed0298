"""Every exception that Tonnage raises on purpose.

::

    TonnageError
    ├── UserError                 the user can mend it; one paragraph, no traceback, exit code 2
    │   ├── InvalidSetting        a value that cannot be read or lies outside its range   (also a ValueError)
    │   ├── ModelNotFound         no such folder, file, or hub model within reach
    │   ├── ModelConfigError      a config.json that cannot be read or lacks a field
    │   ├── UnsupportedModel      a model this release does not run, with the reason
    │   ├── InputError            a prompt file, plan file or line of one that cannot be used
    │   ├── DoesNotFit            the plan is refused: need, have, shortfall, checked remedies  (also a MemoryError)
    │   └── RequestRefused        one request that can never be served
    ├── DriverError               a device call failed: call and code
    │   ├── DriverOOM             ... for want of memory                                     (also a MemoryError)
    │   ├── DriverUnsupported     ... because this device cannot do it
    │   └── DeviceLost            ... and every later call will too
    ├── BufferOOM                 the BufferManager's ladder is exhausted                     (also a MemoryError)
    │   └── CannotMaterialize     memory put to sleep cannot come back now; nothing was lost
    ├── BufferInUse               memory cannot be closed while something still looks at it
    ├── NotMaterialized           memory that sleeps was used
    ├── ForkedProcess             device memory was used in a child of the process that made it
    ├── CaptureError              an allocation or a page-table edit during a stream capture
    ├── RangePoisoned             memory whose release failed half way was used; only freeing it is left
    ├── RangeReferenced           a captured graph or a registration holds this range where it is
    ├── GraphRangeUnmapped        a graph would replay over memory that is not mapped
    ├── GraphInputError           what a graph reads was given in another shape, or replaced  (also a ValueError)
    ├── DeclarationExceeded       scratch asked for beyond what its backend declared          (also a MemoryError)
    ├── StartupError              a stage of start-up failed: stage, history, remedy
    ├── ResourceError             a resource manager was used wrongly: a defect of ours
    ├── TransferFailed            blocks did not come from the host; who waits for them computes them
    └── LedgerError               an account was used wrongly: a defect of ours

User errors carry the knob, the value, what was needed, what there is, and what to change. ``assert`` is for us.
"""

from __future__ import annotations

from collections.abc import Sequence


class TonnageError(Exception):
    """Base of everything raised on purpose."""

    exit_code = 1


class UserError(TonnageError):
    """Something the user can mend, told in one paragraph: what, need, have, what to change.

    ``what`` states the problem with the knob and the value in it; ``need``, ``have`` and ``remedy`` are
    optional sentences or fragments. ``str()`` of the error is the paragraph.
    """

    exit_code = 2

    def __init__(
        self,
        what: str,
        *,
        knob: str | None = None,
        value: object = None,
        need: str | None = None,
        have: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.what, self.knob, self.value = what, knob, value
        self.need, self.have, self.remedy = need, have, remedy
        super().__init__(self.paragraph())

    def paragraph(self) -> str:
        parts = [_sentence(self.what)]
        if self.need:
            parts.append(_sentence(f"Need: {self.need}"))
        if self.have:
            parts.append(_sentence(f"Have: {self.have}"))
        if self.remedy:
            parts.append(_sentence(f"To change: {self.remedy}"))
        return " ".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), dict(self.__dict__), self.args)


class InvalidSetting(UserError, ValueError):
    """A setting that cannot be read or lies outside its range; ``knob`` and ``value`` are always set."""

    def __init__(self, knob: str, value: object, what: str, *, remedy: str | None = None) -> None:
        super().__init__(f"{knob} = {value!r}: {what}", knob=knob, value=value, remedy=remedy)


class ModelNotFound(UserError):
    """No such folder, file or hub model within reach."""


class ModelConfigError(UserError):
    """A config.json that cannot be read or lacks a field the cost model needs."""


class UnsupportedModel(UserError):
    """A model that this release refuses to run, with the reason."""


class InputError(UserError):
    """A prompt file, plan file, or one line of it, that cannot be used."""


class DoesNotFit(UserError, MemoryError):
    """The plan is refused. ``remedies`` were each checked by re-planning; ``where`` is "device" or "host"."""

    def __init__(
        self,
        what: str,
        *,
        need_bytes: int,
        have_bytes: int,
        remedies: Sequence[str] = (),
        need: str | None = None,
        have: str | None = None,
        where: str = "device",
    ) -> None:
        self.need_bytes, self.have_bytes, self.where = need_bytes, have_bytes, where
        self.remedies = tuple(remedies)
        super().__init__(what, need=need, have=have, remedy="; or ".join(self.remedies) or None)

    @property
    def shortfall_bytes(self) -> int:
        return max(0, self.need_bytes - self.have_bytes)

    def told_as(
        self, *, what: str | None = None, remedies: Sequence[str] | None = None, where: str | None = None
    ) -> DoesNotFit:
        """The same sums, told in other words, with other remedies, or of another place."""
        return DoesNotFit(
            what or self.what,
            need_bytes=self.need_bytes,
            have_bytes=self.have_bytes,
            remedies=self.remedies if remedies is None else remedies,
            need=self.need,
            have=self.have,
            where=where or self.where,
        )


class RequestRefused(UserError):
    """One request that can never be served, refused on arrival; the others go on."""

    def __init__(self, request_id: str, what: str, **fields: str | None) -> None:
        self.request_id = request_id
        super().__init__(what, knob=None, value=request_id, **fields)


class DriverError(TonnageError):
    """A device call failed. ``call`` is the driver function, ``code`` its error code or name."""

    def __init__(self, call: str, code: str, detail: str = "") -> None:
        self.call, self.code, self.detail = call, code, detail
        super().__init__(f"{call} failed: {code}" + (f" ({detail})" if detail else ""))


class DriverOOM(DriverError, MemoryError):
    """A device call failed for want of memory."""


class DriverUnsupported(DriverError):
    """This device cannot do what was asked."""


class DeviceLost(DriverError):
    """The context is dead; every later call fails too."""


class BufferOOM(TonnageError, MemoryError):
    """The BufferManager could not get memory. Sizes in bytes.

    used_bytes, capacity_bytes  of the device, or of the host where the memory is the host's
    reserved_bytes              kept by our own pool, live or not; None where there is no pool
    stream                      handle of the stream the request was for, None for none
    top_owners                  (owner, bytes) of the largest accounts, largest first
    """

    def __init__(
        self,
        *,
        size_bytes: int,
        used_bytes: int,
        capacity_bytes: int,
        owner: str,
        detail: str = "",
        reserved_bytes: int | None = None,
        stream: int | None = None,
        top_owners: Sequence[tuple[str, int]] = (),
    ) -> None:
        self.size_bytes, self.used_bytes, self.capacity_bytes = size_bytes, used_bytes, capacity_bytes
        self.owner, self.reserved_bytes, self.stream = owner, reserved_bytes, stream
        self.top_owners = tuple(top_owners)
        on = "" if stream is None else f" on stream {stream:#x}"
        kept = "" if reserved_bytes is None else f", {reserved_bytes:,} of them reserved by our pool"
        most = ", ".join(f"{name} {held:,}" for name, held in self.top_owners)
        super().__init__(
            f"{owner} asked for {size_bytes:,} bytes{on}; {used_bytes:,} of {capacity_bytes:,} bytes are in use{kept}"
            + (f"; most is held by {most}" if most else "")
            + (f" ({detail})" if detail else "")
        )


class CannotMaterialize(BufferOOM):
    """Memory that was released cannot come back now. Nothing was lost and nothing is half done: try again later."""


class BufferInUse(TonnageError):
    """Memory cannot be closed while something still looks at it; the message names what."""


class NotMaterialized(TonnageError):
    """Memory that was released (asleep) was used before it was materialised again."""


class ForkedProcess(TonnageError):
    """Device memory was used in a child of the process that made it: it does not pass through a fork."""


class CaptureError(TonnageError):
    """An allocation or a page-table edit was asked for while a stream is being captured into a graph."""


class RangePoisoned(TonnageError):
    """Memory whose release failed half way: it is out of use for good, and only freeing it may be tried."""


class RangeReferenced(TonnageError):
    """A range cannot go: a captured graph replays over it, or it is registered with a library by physical page."""


class GraphInputError(TonnageError, ValueError):
    """An input of a captured graph that is not what was declared, or whose memory was replaced since."""


class GraphRangeUnmapped(TonnageError):
    """A graph was to be launched while part of what it touches is not mapped; it was not launched."""


class DeclarationExceeded(TonnageError, MemoryError):
    """A backend asked its scratch arena for more than it declared. Sizes in bytes."""

    def __init__(self, *, backend: str, asked_bytes: int, declared_bytes: int, shape: object = None) -> None:
        self.backend, self.asked_bytes, self.declared_bytes, self.shape = backend, asked_bytes, declared_bytes, shape
        super().__init__(
            f"attention backend {backend!r} asked for {asked_bytes:,} bytes of scratch but declared "
            f"{declared_bytes:,}" + (f" for {shape}" if shape is not None else "")
        )


class StartupError(TonnageError):
    """A stage of start-up failed; ``history`` holds one line per stage that ran, with memory before and after."""

    def __init__(self, stage: str, cause: str, *, history: Sequence[str], remedy: str) -> None:
        self.stage, self.cause, self.history, self.remedy = stage, cause, tuple(history), remedy
        told = "; ".join(self.history) or "nothing ran before"
        super().__init__(f"start-up failed in stage {stage!r}: {cause}. Before it: {told}. To change: {remedy}")


class ResourceError(TonnageError):
    """A resource manager was used wrongly (freed twice, closed, unknown, cyclic): a defect, never the user's."""


class TransferFailed(TonnageError):
    """KV blocks did not come from the host. They are out of the cache; who waits for them computes all by itself."""


class LedgerError(TonnageError):
    """An account was used wrongly (closed twice, below zero ...): a defect of ours, never of the user."""


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else text + "."


def _rebuild(cls: type[UserError], state: dict[str, object], args: tuple[object, ...]) -> UserError:
    """Unpickle without calling the keyword-only constructors."""
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error
