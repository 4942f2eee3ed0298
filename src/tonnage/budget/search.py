"""The largest whole number for which something holds, by halving the interval."""

from __future__ import annotations

from collections.abc import Callable


def largest(holds: Callable[[int], bool], *, low: int, high: int) -> int | None:
    """The largest n in ``[low, high]`` with ``holds(n)``; None if not even ``low``.

    ``holds`` must be monotone: once false, false for everything larger.
    """
    if low > high or not holds(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


def smallest(holds: Callable[[int], bool], *, low: int, high: int) -> int | None:
    """The smallest n in ``[low, high]`` with ``holds(n)``, once true, true for all larger; None if nowhere."""
    found = largest(lambda n: holds(-n), low=-high, high=-low)
    return None if found is None else -found
