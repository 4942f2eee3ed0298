"""What start-up made is frozen while an engine serves, and is not any more when the last of them closes."""

from __future__ import annotations

import gc
import weakref

import pytest
from test_engine import options

from tonnage.engine import start
from tonnage.engine.collector import freeze, settle, thaw


class Holder:
    """Something that can be weakly referenced."""


@pytest.fixture(autouse=True)
def thawed():
    assert gc.get_freeze_count() == 0
    yield
    gc.unfreeze()


def cycle():
    one, other = Holder(), Holder()
    one.other, other.other = other, one
    return weakref.ref(one)


def test_a_frozen_heap_is_not_walked_and_its_cycles_come_back_with_the_thaw():
    holder = Holder()
    kept = Holder()
    kept.other = kept
    gone = weakref.ref(kept)
    freeze(holder)
    del kept
    gc.collect()
    assert gone() is not None
    thaw(holder)
    gc.collect()
    settle()
    assert gone() is None
    assert gc.get_freeze_count() == 0


def test_what_is_garbage_already_is_not_frozen():
    gone, holder = cycle(), Holder()
    freeze(holder)
    assert gone() is None
    thaw(holder)


def test_the_generation_stays_closed_while_another_holds_it():
    first, second = Holder(), Holder()
    freeze(first)
    freeze(second)
    thaw(first)
    assert gc.get_freeze_count() == 0  # whatever the first had can be collected
    settle()
    assert gc.get_freeze_count() > 0
    thaw(first)  # again: nothing
    assert gc.get_freeze_count() > 0
    thaw(second)
    settle()
    assert gc.get_freeze_count() == 0


def test_what_the_program_itself_had_frozen_stays_frozen():
    gc.freeze()
    holder = Holder()
    freeze(holder)
    thaw(holder)
    settle()
    assert gc.get_freeze_count() > 0


def test_two_engines_in_one_process(tiny_llama):
    first = start(options(tiny_llama))
    assert gc.get_freeze_count() > 10_000
    second = start(options(tiny_llama))
    first.close()
    assert gc.get_freeze_count() > 10_000
    second.close()
    second.close()
    assert gc.get_freeze_count() == 0
