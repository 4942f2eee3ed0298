"""What a step gave: the tokens drawn, with their log-probabilities."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, overload

#: The most probable tokens of a position, most probable first, as (token id, natural-log probability).
Top: TypeAlias = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One position: the token that stands there, its natural-log probability, and the most probable alternatives.

    ``top`` holds (token id, log-probability), most probable first; empty where none were asked for.
    """

    token: int
    logprob: float
    top: Top = ()


class Logprobs(Sequence[TokenLogprobs]):
    """Positions one after the other, kept as numbers and not as objects: 8 bytes each, and 8 for every alternative.

    A prompt of 100,000 tokens with 20 alternatives each is 17 MB this way, and would be 240 MB as tuples. Entries are
    made when they are read. All have as many alternatives as the first. ``tops`` shows these alone.
    """

    __slots__ = ("_ids", "_logprobs", "_num_top", "_tokens", "_values")

    def __init__(self, entries: Iterable[TokenLogprobs] = ()) -> None:
        self._num_top = 0
        self._tokens, self._logprobs = array("i"), array("f")
        self._ids, self._values = array("i"), array("f")
        self.extend(entries)

    def append(self, entry: TokenLogprobs) -> None:
        if not self._tokens:
            self._num_top = len(entry.top)
        assert len(entry.top) == self._num_top
        self._tokens.append(entry.token)
        self._logprobs.append(entry.logprob)
        for token, logprob in entry.top:
            self._ids.append(token)
            self._values.append(logprob)

    def extend(self, entries: Iterable[TokenLogprobs]) -> None:
        for entry in entries:
            self.append(entry)

    @property
    def num_bytes(self) -> int:
        """Bytes of the numbers."""
        return sum(
            len(numbers) * numbers.itemsize for numbers in (self._tokens, self._logprobs, self._ids, self._values)
        )

    @property
    def tops(self) -> Sequence[Top]:
        return _Tops(self)

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TokenLogprobs]: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobs | Sequence[TokenLogprobs]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        first, last = at * self._num_top, (at + 1) * self._num_top
        top = tuple(zip(self._ids[first:last], self._values[first:last], strict=True))
        return TokenLogprobs(self._tokens[at], self._logprobs[at], top)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<Logprobs of {len(self)} positions, {self._num_top} alternatives each>"


class _Tops(Sequence[Top]):
    """The alternatives of each position."""

    __slots__ = ("_of",)

    def __init__(self, of: Logprobs) -> None:
        self._of = of

    def __len__(self) -> int:
        return len(self._of)

    @overload
    def __getitem__(self, index: int) -> Top: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Top]: ...
    def __getitem__(self, index: int | slice) -> Top | Sequence[Top]:
        if isinstance(index, slice):
            return [entry.top for entry in self._of[index]]
        return self._of[index].top

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<alternatives at {len(self)} positions>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One entry per sampling row of the plan, in its order; ``finite``: whether the row's logits were all numbers.

    top     alternatives at the sampled position, for the rows (by index here) that asked
    prompt  prompt positions whose log-probabilities this step made, by request, in order of position
    """

    request_ids: Sequence[str]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    finite: Sequence[bool]
    top: Mapping[int, Top] = field(default_factory=dict)
    prompt: Mapping[str, Sequence[TokenLogprobs]] = field(default_factory=dict)


class Pending(Protocol):
    """A step that was launched."""

    def outcome(self) -> Outcome:
        """Waits until it has run. Raises what the device says of it."""


@dataclass(frozen=True, slots=True)
class Landed:
    """A step that had run before ``launch`` returned."""

    found: Outcome

    def outcome(self) -> Outcome:
        return self.found
