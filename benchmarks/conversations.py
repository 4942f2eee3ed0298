"""Conversations of several turns behind a few system prompts: the text that caches of prefixes are measured on.

Every turn begins with everything said before it. Two conversations with the same system prompt share that and nothing
else. The same seed gives the same conversations.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Conversation:
    """``said``: all tokens so far; ``questions`` to come, and an answer to each, for who computes none."""

    id: int
    said: list[int]
    questions: list[list[int]]
    answers: list[list[int]]
    is_open: bool = False
    turn: int = field(default=0, init=False)

    def ask(self) -> tuple[list[int], list[int]]:
        """The prompt of the next turn, and its answer."""
        self.is_open = True
        return self.said + self.questions[self.turn], self.answers[self.turn]

    def answer(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """That turn is over, and the next one begins with it."""
        self.said, self.is_open = [*prompt, *tokens], False
        self.turn += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Conversations of ``num_turns`` turns, each with a question and an answer of a length within these bounds."""

    num_conversations: int
    num_systems: int
    system_tokens: int
    num_turns: int
    question_tokens: tuple[int, int]
    answer_tokens: tuple[int, int]
    vocab_size: int = 30_000

    def conversations(self, seed: int) -> list[Conversation]:
        rng = random.Random(seed)
        systems = [self._text(rng, self.system_tokens) for _ in range(self.num_systems)]
        return [
            Conversation(
                id=number,
                said=list(rng.choice(systems)),
                questions=[self._text(rng, rng.randint(*self.question_tokens)) for _ in range(self.num_turns)],
                answers=[self._text(rng, rng.randint(*self.answer_tokens)) for _ in range(self.num_turns)],
            )
            for number in range(self.num_conversations)
        ]

    def _text(self, rng: random.Random, num_tokens: int) -> list[int]:
        return [rng.randrange(1, self.vocab_size) for _ in range(num_tokens)]

    @property
    def most_tokens(self) -> int:
        """What the longest conversation can come to."""
        return self.system_tokens + self.num_turns * (self.question_tokens[1] + self.answer_tokens[1])


class Arrivals:
    """Which conversation goes on next: all turns in a random order, but none before the one it answers is over."""

    def __init__(self, conversations: Sequence[Conversation], seed: int) -> None:
        self._waiting = [one for one in conversations for _ in one.questions]
        random.Random(seed).shuffle(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def pop(self) -> Conversation | None:
        """None: all that wait are open."""
        for place, one in enumerate(self._waiting):
            if not one.is_open:
                return self._waiting.pop(place)
        return None

    def put_back(self, one: Conversation) -> None:
        """It could not begin yet: it is the next to be asked."""
        one.is_open = False
        self._waiting.insert(0, one)
