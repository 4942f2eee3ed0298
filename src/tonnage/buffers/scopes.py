"""Scopes: memory allocated inside one has its tag, and can be released and materialised by it.

The stack belongs to the thread (to the context, so asyncio tasks inherit it): allocations of other threads are not
caught by surprise. A scope with ``global_scope=True`` holds for every thread that has no scope of its own, worker
threads of a library included. Outside all scopes virtual memory is not used.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tonnage.buffers.restore import Restore

if TYPE_CHECKING:
    from tonnage.buffers.stream import Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeConfig:
    """What a scope says of the memory allocated in it. ``stream``: where contents are restored, None for the
    stream of the allocation."""

    tag: str
    restore: Restore = Restore.NONE
    stream: Stream | None = None


_stack: ContextVar[tuple[ScopeConfig, ...]] = ContextVar("tonnage_scopes", default=())
_global_stack: list[ScopeConfig] = []
_global_lock = threading.Lock()
#: The tags of all scopes that were ever opened. While there is none, an allocation need not look for its scope.
tags_opened: set[str] = set()


def current() -> ScopeConfig | None:
    """The innermost scope of this thread, else the innermost global one, else None: no virtual memory."""
    own = _stack.get()
    if own:
        return own[-1]
    if not _global_stack:  # looked at without the lock: every allocation comes by here
        return None
    with _global_lock:
        return _global_stack[-1] if _global_stack else None


def push_vm(
    tag: str, *, restore: Restore = Restore.NONE, stream: Stream | None = None, global_scope: bool = False
) -> ScopeConfig:
    """Enter a scope without a ``with``; ``pop_vm`` leaves it. Raises ``ValueError`` for an empty tag."""
    if not tag:
        raise ValueError("a scope needs a tag: memory is released and materialised by it")
    config = ScopeConfig(tag=tag, restore=Restore(restore), stream=stream)
    tags_opened.add(tag)
    if global_scope:
        with _global_lock:
            _global_stack.append(config)
    else:
        _stack.set((*_stack.get(), config))
    return config


def pop_vm(*, global_scope: bool = False) -> ScopeConfig:
    """Leave the innermost scope of this thread, or the innermost global one. Raises ``IndexError`` outside all."""
    if global_scope:
        with _global_lock:
            if not _global_stack:
                raise IndexError("no global scope is open")
            return _global_stack.pop()
    own = _stack.get()
    if not own:
        raise IndexError("no scope is open on this thread")
    _stack.set(own[:-1])
    return own[-1]


@contextmanager
def scope(
    tag: str, *, restore: Restore = Restore.NONE, stream: Stream | None = None, global_scope: bool = False
) -> Iterator[ScopeConfig]:
    """Memory allocated inside has ``tag`` and comes back as ``restore`` says, copied on ``stream``.

    Scopes nest; the innermost counts. What was allocated keeps its tag when the scope is left.
    """
    config = push_vm(tag, restore=restore, stream=stream, global_scope=global_scope)
    try:
        yield config
    finally:
        pop_vm(global_scope=global_scope)


@contextmanager
def preserve_contents(*, restore: Restore = Restore.CPU) -> Iterator[ScopeConfig]:
    """Inside a scope that discards contents: small tables allocated here sleep with it but keep their bytes.

    Raises ``ValueError`` outside such a scope, and for a ``restore`` that discards.
    """
    outer = current()
    if outer is None or not outer.restore.discards:
        where = "outside all scopes" if outer is None else f"inside scope {outer.tag!r}, which keeps contents already"
        raise ValueError(f"preserve_contents belongs inside a scope that discards contents, not {where}")
    if Restore(restore).discards:
        raise ValueError(f"restore={restore!s} does not preserve contents: use cpu or pinned")
    with scope(outer.tag, restore=restore, stream=outer.stream) as config:
        yield config
