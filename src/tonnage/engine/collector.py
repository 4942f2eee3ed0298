"""Python's garbage collector beside engines: what start-up made is not walked through again and again."""

from __future__ import annotations

import gc
import threading
from weakref import WeakSet

_lock = threading.RLock()
#: Whoever asked and has not thawed: the permanent generation is one for the whole process.
_holders: WeakSet[object] = WeakSet()
#: Whether the program had frozen something of its own before the first of them.
_was_frozen = False


def freeze(holder: object) -> None:
    """Collect once, then leave all that is alive now out of later collections, until ``thaw(holder)``.

    Modules, plans, compiled code and captured graphs are some hundred thousand objects that live as long as the
    engine; a full collection in the middle of serving would walk through them all.
    """
    global _was_frozen
    with _lock:
        if not _holders:
            _was_frozen = gc.get_freeze_count() > 0
        _holders.add(holder)
        gc.collect()
        gc.freeze()


def thaw(holder: object) -> None:
    """``holder`` is about to go, and its cycles can be collected again; without ``freeze`` before, this does nothing.

    The permanent generation opens as a whole: ``settle``, behind the collection, closes it again for the others.
    """
    with _lock:
        if holder in _holders:
            _holders.discard(holder)
            gc.unfreeze()


def settle() -> None:
    """What is alive goes back into the permanent generation while somebody holds it, or if the program had one."""
    global _was_frozen
    with _lock:
        if (_holders or _was_frozen) and gc.get_freeze_count() == 0:
            gc.freeze()
        if not _holders:
            _was_frozen = False
