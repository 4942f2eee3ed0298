"""Who is asked for memory, in which order, and what a failing one does to the others."""

from __future__ import annotations

import threading

import pytest

from tonnage.buffers.pressure import Pressure, Relief


def test_callbacks_are_asked_by_priority_until_it_is_enough() -> None:
    pressure, asked = Pressure(), []

    def giver(name: str, gives: int):
        def give(need: int) -> int:
            asked.append((name, need))
            return gives

        return give

    pressure.register("weights", giver("weights", 1000), priority=9)
    pressure.register("second", giver("second", 30))
    pressure.register("cache", giver("cache", 50), priority=-1)
    assert pressure.relieve(80) == Relief(80, ("cache gave 50 bytes", "second gave 30 bytes"))
    assert asked == [("cache", 80), ("second", 30)]
    assert pressure.relieve(0) == Relief()


def test_one_that_fails_is_told_and_the_rest_are_asked(caplog: pytest.LogCaptureFixture) -> None:
    pressure = Pressure()

    def broken(need: int) -> int:
        raise RuntimeError("gone")

    pressure.register("broken", broken)
    pressure.register("liar", lambda _: -5)
    pressure.register("good", lambda need: need)
    relief = pressure.relieve(10)
    assert relief == Relief(10, ("broken failed: RuntimeError('gone')", "liar gave 0 bytes", "good gave 10 bytes"))
    assert "broken gave nothing back" in caplog.text


def test_what_is_taken_off_the_list_is_not_asked() -> None:
    pressure = Pressure()
    remove = pressure.register("cache", lambda need: need)
    remove()
    remove()
    assert pressure.relieve(10) == Relief()


def test_callbacks_do_not_recurse_but_other_threads_may_ask() -> None:
    pressure, inner = Pressure(), []

    def give(need: int) -> int:
        if threading.current_thread() is threading.main_thread():
            inner.append(pressure.relieve(need))
            thread = threading.Thread(target=lambda: inner.append(pressure.relieve(need)))
            thread.start()
            thread.join()
        return need

    pressure.register("cache", give)
    assert pressure.relieve(7).given_bytes == 7
    assert inner == [Relief(0, ("nobody is asked from inside a callback",)), Relief(7, ("cache gave 7 bytes",))]
    assert pressure.relieve(7).given_bytes == 7  # and afterwards all is as before
