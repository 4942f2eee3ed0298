"""Scopes: the innermost counts, threads do not see each other's, and small tables keep their bytes."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tonnage.buffers.restore import Restore
from tonnage.buffers.scopes import current, pop_vm, preserve_contents, push_vm, scope


@pytest.fixture(autouse=True)
def outside():
    assert current() is None
    yield
    assert current() is None


def in_thread(ask):
    """What ``ask`` returns on a thread of its own."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(ask()))
    thread.start()
    thread.join()
    return found[0]


def pop_refused() -> bool:
    with pytest.raises(IndexError):
        pop_vm()
    return True


def test_scopes_nest() -> None:
    with scope("kv") as kv:
        assert (current(), kv.tag, kv.restore, kv.stream) == (kv, "kv", Restore.NONE, None)
        with scope("weights", restore=Restore.PINNED) as weights:
            assert (current(), weights.restore) == (weights, Restore.PINNED)
        assert current() is kv


def test_a_scope_is_left_when_it_raises() -> None:
    with pytest.raises(KeyError), scope("kv"):
        raise KeyError
    assert current() is None


def test_push_and_pop() -> None:
    first, second = push_vm("a"), push_vm("b", restore=Restore.CPU)
    assert (pop_vm(), pop_vm()) == (second, first)
    with pytest.raises(IndexError, match="no scope"):
        pop_vm()
    with pytest.raises(IndexError, match="no global scope"):
        pop_vm(global_scope=True)


def test_a_scope_needs_a_tag_and_a_known_mode() -> None:
    with pytest.raises(ValueError, match="tag"):
        push_vm("")
    with pytest.raises(ValueError, match="'disk'"):
        push_vm("a", restore="disk")  # type: ignore[arg-type]


def test_other_threads_are_not_caught() -> None:
    with scope("kv"):
        assert in_thread(current) is None
        assert in_thread(pop_refused)


def test_a_global_scope_holds_for_threads_without_one_of_their_own() -> None:
    def own() -> object:
        with scope("own"):
            return current().tag  # type: ignore[union-attr]

    with scope("everywhere", global_scope=True) as outer, scope("inner", global_scope=True) as inner:
        assert in_thread(current) is inner
        assert in_thread(own) == "own"
        with scope("mine") as mine:
            assert current() is mine
        assert current() is inner
        assert outer.tag == "everywhere"


def test_tasks_inherit_and_do_not_disturb() -> None:
    async def inner() -> str:
        with scope("task"):
            await asyncio.sleep(0)
            return current().tag  # type: ignore[union-attr]

    async def outer() -> list[str]:
        with scope("main"):
            found = list(await asyncio.gather(inner(), inner()))
            return [*found, current().tag]  # type: ignore[union-attr]

    assert asyncio.run(outer()) == ["task", "task", "main"]


@pytest.mark.parametrize("global_scope", [False, True])
@pytest.mark.parametrize("restore", [Restore.NONE, Restore.MEMSET])
def test_small_tables_keep_their_bytes_under_the_same_tag(restore: Restore, global_scope: bool) -> None:
    with scope("kv", restore=restore, global_scope=global_scope) as outer:
        with preserve_contents() as kept:
            assert (kept, kept.tag, kept.restore) == (current(), "kv", Restore.CPU)
        with preserve_contents(restore=Restore.PINNED) as kept:
            assert kept.restore is Restore.PINNED
        assert current() is outer


def test_preserving_where_nothing_is_discarded_is_refused() -> None:
    with pytest.raises(ValueError, match="outside all scopes"), preserve_contents():
        pass
    with (
        scope("kv", restore=Restore.CPU),
        pytest.raises(ValueError, match="'kv', which keeps contents already"),
        preserve_contents(),
    ):
        pass
    with scope("kv"), pytest.raises(ValueError, match="does not preserve"), preserve_contents(restore=Restore.MEMSET):
        pass
