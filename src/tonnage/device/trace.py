"""Any driver, with a log of what it was asked, in words that are the same on every device.

Addresses and handles get names in the order in which they appear (``va0``, ``handle3``, ``stream1``), places inside a
range read ``va0+2p``, and sizes count pages of the device (``4p``) where they are whole ones. So the same scenario on
two devices, whatever they answer, leaves equal logs; ``replay`` does on one what another was asked.
"""

from __future__ import annotations

import ast
import inspect
import re
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tonnage.device.decorator import CALLS, Call, DriverDecorator
from tonnage.device.driver import Driver
from tonnage.device.ranges import RangeBook
from tonnage.errors import DriverError

#: Questions: what they answer depends on the device or the moment, and they change nothing.
QUESTIONS = frozenset(
    ("activate", "capabilities", "probe_again", "mem_info", "own_bytes", "pool_stats", "event_done", "stream_capturing")
)
#: What an address or a handle is called by the call that made it; the first kind have a size.
_RANGES = {
    "va_reserve": "va",
    "pool_alloc": "block",
    "mem_alloc": "mem",
    "host_alloc": "host",
    "managed_alloc": "managed",
}
_HANDLES = {
    "phys_create": "handle", "phys_import": "handle", "multicast_create": "handle", "phys_export": "fd",
    "pool_create": "pool", "stream_create": "stream", "event_create": "event",
}  # fmt: skip
#: What a parameter holds, by its name. All others are plain numbers.
_ADDRESSES, _SIZES = {"addr", "dst", "src"}, {"size", "align", "keep"}
#: And these hold several.
_SEVERAL = {"dsts": "dst", "srcs": "src", "sizes": "size"}
_KINDS = {"handle": "handle", "multicast": "handle", "pool": "pool", "stream": "stream", "event": "event", "fd": "fd"}

_TOUCHING = {"copy", "copy_many", "fill"}

_SIGNATURES = {name: inspect.signature(getattr(Driver, name)) for name in CALLS}
_LINE = re.compile(r"(?P<call>\w+)\((?P<args>.*)\)(?: -> (?P<result>.+))?")


class TraceDriver(DriverDecorator):
    """``log`` has one line per call: ``map(va0+1p, 1p, handle0)``, with `` -> name`` of what it made or
    `` -> ! DriverOOM`` of what it raised. Calls in ``quiet`` are not logged. ``in_pages=False`` keeps sizes in bytes.
    """

    log: list[str]

    def __init__(self, driver: Driver, *, quiet: frozenset[str] = QUESTIONS, in_pages: bool = True) -> None:
        super().__init__(driver)
        self.log, self._quiet = [], quiet
        self._names = _Names(driver.capabilities().page_bytes if in_pages else None)
        self._lock = threading.RLock()

    def text(self) -> str:
        return "\n".join(self.log)

    def _around(self, call: str) -> Call | None:
        if call in self._quiet:
            return None
        signature = _SIGNATURES[call]

        def traced(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                given = signature.bind(None, *args, **kwargs).arguments
                del given["self"]
                asked = f"{call}({self._words(signature, given)})"
                try:
                    result = getattr(self.wrapped, call)(*args, **kwargs)
                except Exception as error:
                    self.log.append(f"{asked} -> ! {type(error).__name__}")
                    raise
                name = self._names.made(call, result, given.get("size", 0))
                self.log.append(f"{asked} -> {name}" if name else asked)
                return result

        return traced

    def _words(self, signature: inspect.Signature, given: dict[str, Any]) -> str:
        words = []
        for name, value in given.items():
            parameter = signature.parameters[name]
            if value == parameter.default:
                continue  # said or not, it is the same
            word = self._names.word(name, value)
            words.append(f"{name}={word}" if parameter.kind is parameter.KEYWORD_ONLY else word)
        return ", ".join(words)


class _Names:
    """Names of addresses and handles by their value, and sizes in words."""

    def __init__(self, page_bytes: int | None) -> None:
        self._page_bytes = page_bytes
        self._num: Counter[str] = Counter()
        self._handles: dict[tuple[str, int], str] = {("stream", 0): self._new("stream")}  # the legacy stream is there
        # Ranges keep their names when they are freed, until something else lies there.
        self._ranges: RangeBook[str] = RangeBook()

    def word(self, parameter: str, value: Any) -> str:
        if parameter in _SEVERAL:
            return f"[{', '.join(self.word(_SEVERAL[parameter], one) for one in value)}]"
        if parameter in _ADDRESSES:
            return self._place(value)
        if parameter in _SIZES:
            return self._size(value)
        kind = _KINDS.get(parameter)
        if kind is None:
            return repr(value)
        if kind == "stream" and (kind, value) not in self._handles:  # one made elsewhere is as good as one made here
            self._handles[kind, value] = self._new(kind)
        return self._handles.get((kind, value), f"{kind}?{value}")

    def made(self, call: str, result: Any, size: int) -> str:
        if call in _HANDLES:
            kind = _HANDLES[call]
            self._handles[kind, result] = name = self._new(kind)
            return name
        if call not in _RANGES:
            return ""
        for old in self._ranges.overlapping(result, size):
            self._ranges.remove(old.start)
        return self._ranges.add(result, size, self._new(_RANGES[call])).value

    def _new(self, kind: str) -> str:
        self._num[kind] += 1
        return f"{kind}{self._num[kind] - 1}"

    def _place(self, addr: int) -> str:
        found = self._ranges.overlapping(addr, 1)
        if not found:
            return f"?{addr}"
        offset = addr - found[0].start
        return found[0].value + (f"+{self._size(offset)}" if offset else "")

    def _size(self, size: int) -> str:
        if self._page_bytes is None:
            return hex(size)
        whole, rest = divmod(size, self._page_bytes)
        return f"{whole}p" if whole > 0 and not rest else str(size)


def replay(log: Iterable[str], driver: Driver) -> list[str]:
    """Ask ``driver`` all that ``log`` says was asked of another; returns its own log, to be compared.

    Raises ``ValueError`` for a line that is none, that speaks of what no line made, or that touches memory of which
    the trace knows nothing but where it once lay.
    """
    traced = TraceDriver(driver)
    page_bytes = driver.capabilities().page_bytes
    values: dict[str, int] = {"stream0": 0}
    for line in log:
        found = _LINE.fullmatch(line)
        if found is None or found["call"] not in CALLS or (found["call"] in _TOUCHING and "?" in found["args"]):
            raise ValueError(f"not a line that can be replayed: {line!r}")
        args, kwargs = _arguments(found["args"], values, page_bytes)
        try:
            result = getattr(traced, found["call"])(*args, **kwargs)
        except DriverError:
            continue  # the log has it
        if found["result"] and not found["result"].startswith("!"):
            values[found["result"]] = result
    return traced.log


def _arguments(text: str, values: dict[str, int], page_bytes: int) -> tuple[list[Any], dict[str, Any]]:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for word in re.findall(r"(?:\w+=)?(?:\([^)]*\)|\[[^\]]*\]|[^,\s]+)", text):
        name, _, value = word.rpartition("=")
        read = _value(value, values, page_bytes)
        if name:
            kwargs[name] = read
        else:
            args.append(read)
    return args, kwargs


def _value(word: str, values: dict[str, int], page_bytes: int) -> Any:
    if word.startswith("["):
        return [_value(one, values, page_bytes) for one in word[1:-1].split(", ") if one]
    if (first := word.partition("+"))[0] in values:
        return values[first[0]] + (_value(first[2], values, page_bytes) if first[2] else 0)
    if re.fullmatch(r"\d+p", word):
        return int(word[:-1]) * page_bytes
    if re.fullmatch(r"\w*\?\d+", word):  # nobody made it there either
        return int(word.partition("?")[2])
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError) as error:
        raise ValueError(f"{word!r} was made by no line of this trace") from error
