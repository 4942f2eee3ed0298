"""The text of one sequence as it may be told: no half characters, and nothing that a stop string could still take."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache

from tonnage.engine.text import Detokenizer, Text
from tonnage.sampling import SamplingParams


class TextStream:
    """Tokens in, text out: ``push`` returns what may be told, and what was told is never taken back.

    Held back are halves of a character and the longest end of the text that is the beginning of a stop string. The
    stop string that ends first ends the text; of several that end at one place, the longest. Where the borders
    between tokens lie changes nothing. ``params`` gives ``stop``, ``include_stop`` and ``skip_special_tokens``: a
    special token that is skipped is no text, and no stop string finds it.

    told     everything returned so far: without the stop string, unless ``include_stop``
    matched  the stop string that ended the text; nothing is told after it
    """

    def __init__(self, text: Text, params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(text, skip_special_tokens=params.skip_special_tokens)
        self._stops = _stop_strings(tuple(params.stop)) if params.stop else None
        self._include_stop = params.include_stop
        self._state = 0
        self._held = ""  # whole characters, the beginning of a stop string
        self._pieces: list[str] = []
        self.matched: str | None = None

    @property
    def told(self) -> str:
        return "".join(self._pieces)

    def push(self, token_id: int, *, check_stop: bool = True) -> str:
        """What the next token allows to be told.

        ``check_stop`` False: no stop string may end with this token, because fewer than ``min_tokens`` are there. One
        that would is text like any other; one that begins in it and ends with a later token counts.
        """
        if self.matched is not None:
            return ""
        piece = self._detokenizer.push(token_id)
        return self._tell(piece if self._stops is None else self._search(self._stops, piece, check_stop=check_stop))

    def flush(self) -> str:
        """What was held back, when the sequence ends for another reason; the half of a character as U+FFFD."""
        if self.matched is not None:
            return ""
        held, self._held = self._held, ""
        return self._tell(held + self._detokenizer.flush())

    def _tell(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece

    def _search(self, stops: _StopStrings, piece: str, *, check_stop: bool) -> str:
        text, end = self._held + piece, len(self._held)
        for character in piece:
            self._state = stops.step(self._state, character)
            end += 1
            found = stops.longest[self._state]
            if found is not None and check_stop:
                self.matched, self._held = found, ""
                return text[: end if self._include_stop else end - len(found)]
        # A stop string that is told anyway needs no holding back.
        whole = len(text) if self._include_stop else len(text) - stops.begun[self._state]
        self._held = text[whole:]
        return text[:whole]


class _StopStrings:
    """All stop strings searched at once, one step a character (Aho and Corasick 1975, doi:10.1145/360825.360855).

    A state stands for the longest end of the text that begins a stop string; state 0 is the empty one. By state:

    begun    so many last characters may still become a stop string: its length, if a stop string goes on from it
    longest  the longest stop string that ends here
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self.begun = [0]
        self.longest: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self._shorter = [0] * len(self._next)  # the state of the next shorter end that begins a stop string
        self._link()

    def step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(character, 0)

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._next[state].get(character)
            if following is None:
                following = self._next[state][character] = len(self._next)
                self._next.append({})
                self.begun.append(self.begun[state] + 1)
                self.longest.append(None)
            state = following
        self.longest[state] = stop

    def _link(self) -> None:
        """Breadth first, so that a shorter end is finished before the states that fall back to it."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            shorter = self._shorter[state]
            self.longest[state] = self.longest[state] or self.longest[shorter]
            if not self._next[state]:
                self.begun[state] = self.begun[shorter]
            for character, following in self._next[state].items():
                self._shorter[following] = self.step(shorter, character)
                queue.append(following)


@lru_cache(maxsize=16)  # some 300 bytes a character of the stop strings, which are few: at most 5 MB
def _stop_strings(stops: tuple[str, ...]) -> _StopStrings:
    """Made once for all samples and requests that have the same stop strings; never changed afterwards."""
    return _StopStrings(stops)
