"""A failure lets go of the tensors of the step that failed: in functions that close over them, and in compiled code."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from itertools import count

import pytest
import torch
from tiny import save_tiny_llama

from tonnage.attention.sdpa import SdpaBackend
from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.engine import EngineOptions, start, startup
from tonnage.engine.compiled import compile_layers
from tonnage.engine.faults import release_frames
from tonnage.errors import StartupError


class Held:
    """What a step would have on the device."""


def launch(action):
    action()


def failing(found):
    """``found`` gets a reference to what the frames hold."""
    held = Held()
    found.append(weakref.ref(held))

    def run():
        raise ValueError(f"of {held}")

    launch(lambda: run())


@contextmanager
def letting_go(found):
    try:
        yield
    except ValueError as error:
        release_frames(error)
        found.append(found[0]() is None)
        raise


def test_what_a_function_closes_over_is_let_go_while_the_error_still_rises():
    found = []
    with pytest.raises(ValueError, match="of ") as failed, letting_go(found):
        failing(found)
    assert found[1], "a frame or its function holds it"
    (note,) = failed.value.__notes__
    assert note.startswith("Raised in:")
    assert "in run" in note
    assert "in failing" in note


def test_causes_are_let_go_as_well():
    found = []

    def wrapped():
        try:
            failing(found)
        except ValueError as error:
            raise RuntimeError("of it") from error

    with pytest.raises(RuntimeError) as failed:
        wrapped()
    release_frames(failed.value)
    assert found[0]() is None
    assert "in run" in failed.value.__cause__.__notes__[0]


def test_errors_behind_a_cause_in_groups_and_in_a_ring_are_let_go_as_well():
    found = []

    def caught(behind=None):
        try:
            failing(found)
        except ValueError as error:
            error.__cause__ = behind
            return error

    first = caught()
    second = caught(behind=first)
    first.__context__ = second
    group = ExceptionGroup("several", [second, ExceptionGroup("more", [caught()])])
    release_frames(group)
    release_frames(group)
    assert [ref() for ref in found] == [None] * 3
    assert [len(error.__notes__) for error in (first, second)] == [1, 1]


def test_an_error_that_its_own_function_caught_and_handed_on_lets_go_of_that_frame_and_function():
    found = []

    def gives_back(held):
        def run():
            try:
                raise ValueError(f"of {held}")
            except ValueError as error:
                return error

        return run

    held = Held()
    found.append(weakref.ref(held))
    error = gives_back(held)()
    del held
    assert found[0]() is not None
    release_frames(ExceptionGroup("of two steps", [error]))
    assert found[0]() is None
    assert "in run" in error.__notes__[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("small"), max_position_embeddings=512)


@pytest.fixture(params=["eager", "compiled"])
def options(request, folder, monkeypatch):
    if request.param == "compiled":
        made = startup._Startup.make_executor

        def make(self, limits):
            compile_layers(self.model, backend="eager")
            made(self, limits)

        monkeypatch.setattr(startup._Startup, "make_executor", make)
    limits = LimitKnobs(max_batch_size=Setting(4), max_num_tokens=Setting(64), max_seq_len=Setting(128))
    return EngineOptions(model=str(folder), knobs=Knobs(kv_tokens=Setting(2048)), limit_knobs=limits)


def test_a_start_that_runs_out_of_memory_gives_everything_back(options, monkeypatch):
    """In the first step, in the middle and in the last; that memory stays mapped would be a warning, hence an error."""
    forward, numbers, failing_at = SdpaBackend.forward, count(1), 0

    def counted(self, *args, **kwargs):
        if next(numbers) == failing_at:
            raise torch.OutOfMemoryError("no memory for it")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(SdpaBackend, "forward", counted)
    with start(options):
        num_calls = next(numbers) - 1
    assert num_calls > 2
    for nth in (1, num_calls // 2, num_calls):
        numbers, failing_at = count(1), nth
        with pytest.raises(StartupError, match="OutOfMemoryError: no memory for it"):
            start(options)
