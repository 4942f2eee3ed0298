"""The second try of a step that failed, and the smaller steps that follow one that ran out of memory."""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.errors import TonnageError

#: So many steps after one that ran out of memory are no larger than its second try.
CAREFUL_STEPS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A step that may be tried once more, with at most ``retry_tokens``; ``too_long`` are the requests whose rows have
    more than that, and ``told`` what they end with if they may not be cut."""

    retry_tokens: int
    is_out_of_memory: bool = False
    too_long: tuple[str, ...] = ()
    told: str = ""


def told(error: Exception) -> str:
    """What a request that fails with the error says."""
    return str(error) if isinstance(error, TonnageError) else f"{type(error).__name__}: {error}"


class Care:
    """How large the next step may be: smaller for a while after one that ran out of memory, or each would run twice."""

    def __init__(self, *, max_num_tokens: int) -> None:
        self._max_num_tokens = max_num_tokens
        self._careful_tokens = 0
        self._steps_left = 0

    def learn(self, failed: Failed) -> None:
        """The steps that come are no larger than the second try of this one."""
        self._steps_left, self._careful_tokens = CAREFUL_STEPS, failed.retry_tokens

    def next_limit(self) -> int:
        """Tokens of the next step.

        Steps that find nothing small enough count as well, so that a prompt that may not be cut gets its turn again.
        """
        if not self._steps_left:
            return self._max_num_tokens
        self._steps_left -= 1
        return min(self._max_num_tokens, self._careful_tokens)
