"""Steps that Ctrl-C must not cut in two.

Python delivers a signal as soon as a call of the driver returns, before its result is remembered: a page would be
lost, or believed mapped that is gone. So the signal waits until the step is over and everything is in the books.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what ``signal`` puts an enumeration around, at ten times the cost
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from types import FrameType
from typing import Any

_SIGINT = int(signal.SIGINT)


class _Uninterrupted(ContextDecorator):
    """``with uninterrupted:`` or ``@uninterrupted``: SIGINT is noted inside, and handled as before at the end.

    At the end of the outermost, that is, also when the body raised; however often it came, once. Only on the main
    thread, where Python runs its handlers, and only where the handler is Python's: what the system does by itself
    needs no help. Costs a microsecond or two: not for the path of every allocation.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._before: Callable[[int, FrameType | None], Any] | None = None
        self._noted: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if not _on_main_thread():
            return
        if self._depth == 0:
            before = _signal.getsignal(_SIGINT)
            if before != self._note:  # it is, for a finaliser that runs between these lines
                self._noted, self._before = None, before if callable(before) else None
                if self._before is not None:
                    _signal.signal(_SIGINT, self._note)
        self._depth += 1  # a signal before this point raises out of here, and nothing was begun

    def __exit__(self, *error: object) -> None:
        if not _on_main_thread():
            return
        self._depth -= 1
        if self._depth or self._before is None:
            return
        try:
            if _signal.getsignal(_SIGINT) == self._note:  # else the body chose another handler
                _signal.signal(_SIGINT, self._before)
        finally:  # another signal may be handled right here
            noted, self._noted = self._noted, None
        if noted is not None:
            self._before(*noted)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = number, frame


uninterrupted = _Uninterrupted()


@contextmanager
def undone_if_interrupted(undo: Callable[[], None]) -> Iterator[None]:
    """As ``uninterrupted``, around making something: when a signal then keeps it from its caller, ``undo`` is called.

    Inside another ``uninterrupted`` nothing keeps it from the caller. A body that raises undoes its own.
    """
    is_made = False
    try:
        with uninterrupted:
            yield
            is_made = True
    except BaseException:
        if is_made:
            with uninterrupted:
                undo()
        raise


def _on_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident
