"""What a soak asks for: a seeded random mix of requests, of cancellations, and of bursts and quiet times."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tonnage.bench.moves import Ask, Move, Settle, Step, View
from tonnage.caching import CacheParams
from tonnage.sampling import SamplingParams

#: Values that ``SamplingParams`` must refuse, each alone.
BAD_VALUES: tuple[Mapping[str, Any], ...] = (
    {"max_tokens": 0}, {"max_tokens": True}, {"min_tokens": -1}, {"min_tokens": 5, "max_tokens": 4},
    {"temperature": -1.0}, {"temperature": float("nan")}, {"temperature": 0.001}, {"top_k": -1}, {"top_k": 1.5},
    {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": -0.1}, {"repetition_penalty": 0.0}, {"presence_penalty": 3.0},
    {"frequency_penalty": float("inf")}, {"logit_bias": {1: 1000.0}}, {"logit_bias": [1]}, {"seed": 2**64},
    {"stop": [""]}, {"stop": 5}, {"stop_token_ids": [-1]}, {"n": 0}, {"logprobs": 21}, {"prompt_logprobs": -1},
    {"priority": "high"}, {"cache": "always"},
)  # fmt: skip

#: Stop strings that letters run into often.
STOPS = ("e", "th", "a b", "qq", "zx", "and", ". ", "\n", "aaa")
PRIORITIES = (-3, 0, 0, 0, 1, 7)
SALTS = ("a", "b")
#: Texts that many prompts begin with, and conversations that go on.
NUM_SYSTEM_PROMPTS, MAX_CONVERSATIONS = 8, 64
#: One request in so many makes no sense or can never fit.
NUM_PER_BAD = 20
#: The queue is let run down to this many batches before more requests come.
MAX_WAITING_BATCHES = 4


@dataclass(slots=True, kw_only=True)
class Mix:
    """Requests for an engine of these sizes; the same ``seed`` gives the same ones, where it is told the same.

    Some prompts are new from their first token, more begin with one of a few system prompts or are a conversation that
    returns with what it was answered (``heard``). System prompts are of whole blocks and not, up to half a sequence.
    """

    seed: int
    vocab_size: int
    max_seq_len: int
    max_batch_size: int
    block_tokens: int = 16
    _rng: random.Random = field(init=False)
    _number: int = 0
    _are_long: bool = False
    _system_prompts: list[list[int]] = field(default_factory=list)
    _conversations: list[tuple[list[int], str | None]] = field(default_factory=list)  # the newest last; and its salt

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        most = max(1, self.max_seq_len // 2)
        lengths = [self._rng.randint(1, max(1, most // self.block_tokens)) * self.block_tokens for _ in range(4)]
        lengths += [self._rng.randint(1, most) for _ in range(NUM_SYSTEM_PROMPTS - len(lengths))]
        self._system_prompts = [self._tokens(min(most, length)) for length in lengths]

    def moves(self, view: View) -> Iterator[Move]:
        """Bursts, and between two of them some steps; more where too many wait."""
        most = MAX_WAITING_BATCHES * self.max_batch_size
        while True:
            yield from self.burst()
            num_quiet, num_steps = self.quiet_steps(), 0
            while view.has_work and (num_quiet is None or num_steps < num_quiet or view.num_waiting > most):
                yield Step()
                num_steps += 1
            if not view.has_work:
                yield Settle()

    def heard(self, ask: Ask, generated: Sequence[int]) -> None:
        """What a request of the mix was answered."""
        if ask.goes_on and generated:
            self._conversations.append(([*ask.token_ids, *generated], ask.params.cache.salt))
            del self._conversations[:-MAX_CONVERSATIONS]

    def burst(self) -> Iterator[Ask]:
        """Requests that come at the same moment: one, some, or more than can run.

        Now and then all of them go on for long, where the ones before were mostly short: the moment when a policy that
        expects the past to go on has let in too many.
        """
        self._are_long = self._chance(0.15)
        sizes = (4, 8, 16) if self._are_long else (1, 1, 2, 4, self.max_batch_size, 2 * self.max_batch_size)
        for _ in range(self._rng.choice(sizes)):
            yield from self.requests()

    def quiet_steps(self) -> int | None:
        """Steps until the next burst; None: until nothing is left to do."""
        return None if self._chance(0.05) else self._rng.choice((0, 1, 1, 3, 10, 10, 30, 100))

    def requests(self) -> Iterator[Ask]:
        """One request, or one for each of several samples."""
        self._number += 1
        ask = self._impossible() if self._chance(1 / NUM_PER_BAD) else self._ask()
        for sample, own in enumerate(ask.params.samples()):
            yield replace(ask, id=f"{ask.id}.{sample}", params=own)

    def _ask(self) -> Ask:
        token_ids, salt = self._prompt()
        listens = self._chance(0.4)
        return Ask(
            id=f"r{self._number}",
            token_ids=token_ids,
            params=self._params(self.max_seq_len - len(token_ids), salt),
            goes_on=self._chance(0.4),
            cancel_after_steps=self._rng.choice((0, 0, 1, 2, 5, 20, 60)) if self._chance(0.08) else None,
            cancels_when_done=self._chance(0.1),
            listens=listens,
            cancels_at_delta=self._rng.randrange(8) if listens and self._chance(0.08) else None,
            cancels_another=self._chance(0.5),
            raises_at_delta=self._rng.randrange(8) if listens and self._chance(0.05) else None,
        )

    def _impossible(self) -> Ask:
        """Too long, empty, or with token ids that there are not."""
        ask, kind = self._ask(), self._rng.randrange(6)
        long = self._tokens(self.max_seq_len + self._rng.randrange(3))
        room = self.max_seq_len - len(ask.token_ids)
        beyond = self.vocab_size + self._rng.randrange(3)
        made = (
            replace(ask, token_ids=long),
            replace(ask, params=replace(ask.params, min_tokens=0, max_tokens=room + 1 + self._rng.randrange(3))),
            replace(ask, token_ids=[], is_malformed=True),
            replace(ask, token_ids=[*ask.token_ids, beyond], is_malformed=True),
            replace(ask, params=replace(ask.params, logit_bias={beyond: 1.0}), is_malformed=True),
            replace(ask, params=replace(ask.params, stop_token_ids=[beyond]), is_malformed=True),
        )
        return made[kind]

    def _prompt(self) -> tuple[list[int], str | None]:
        """Tokens of a prompt, and the salt that it comes with."""
        salt = self._rng.choice(SALTS) if self._chance(0.1) else None
        kind, most = self._rng.random(), self.max_seq_len - 1
        if kind < 0.3 and self._conversations:
            told, theirs = self._rng.choice(self._conversations)
            return [*told, *self._tokens(self._rng.randint(0, 24))][:most], theirs if self._chance(0.9) else salt
        if kind < 0.7:
            own = self._tokens(self._rng.randint(0, 24))
            return [*self._rng.choice(self._system_prompts), *own][:most], salt
        return self._tokens(self._prompt_tokens()), salt

    def _prompt_tokens(self) -> int:
        most = self.max_seq_len - 1
        longest = self._rng.choices((16, most // 16, most // 4, most), weights=(50, 35, 12, 3))[0]
        return self._rng.randint(1, min(most, max(1, longest)))

    def _tokens(self, count: int) -> list[int]:
        return self._rng.choices(range(self.vocab_size), k=count)

    def _params(self, room: int, salt: str | None) -> SamplingParams:
        """Each feature now and then, so that most steps mix rows with different ones. ``room``: tokens left."""
        rng, chance = self._rng, self._chance
        # A seed that the engine drew would not come again.
        given: dict[str, Any] = {"seed": rng.randrange(2**64), "cache": self._cache_params(salt)}
        most = min(room, 1 + int(rng.expovariate(1 / rng.choice((4, 40, 40, 160)))))
        if self._are_long:
            given |= {"max_tokens": rng.randint(-(-room // 4), room), "ignore_eos": True}
        elif not chance(0.05):
            given["max_tokens"] = most
            if chance(0.1):
                given["min_tokens"] = rng.randint(0, most)
        if chance(0.5):
            given["temperature"] = rng.uniform(0.2, 2.0)
        features: dict[str, Callable[[], Any]] = {
            "top_k": lambda: rng.randint(1, 50),
            "top_p": lambda: rng.uniform(0.05, 1.0),
            "min_p": lambda: rng.uniform(0.0, 0.5),
            "repetition_penalty": lambda: rng.uniform(0.8, 1.5),
            "presence_penalty": lambda: rng.uniform(-2.0, 2.0),
            "frequency_penalty": lambda: rng.uniform(-2.0, 2.0),
            "logit_bias": lambda: {token: rng.uniform(-100.0, 100.0) for token in self._tokens(rng.randint(1, 5))},
            "stop": lambda: rng.sample(STOPS, rng.randint(1, 3)),
            "include_stop": lambda: True,
            "stop_token_ids": lambda: self._tokens(rng.randint(1, 3)),
            "skip_special_tokens": lambda: False,
            "n": lambda: rng.randint(2, 3),
            "logprobs": lambda: rng.randint(0, min(20, self.vocab_size)),
            "prompt_logprobs": lambda: rng.randint(0, min(20, self.vocab_size)),
        }
        given |= {name: draw() for name, draw in features.items() if chance(0.12)}
        if chance(0.3):
            given["ignore_eos"] = True
        if chance(0.4):
            given["priority"] = rng.choice(PRIORITIES)
        return SamplingParams(**given)

    def _cache_params(self, salt: str | None) -> CacheParams:
        rng = self._rng
        given: dict[str, Any] = {"salt": salt, "reuse": not self._chance(0.05)}
        if self._chance(0.2):
            given["priority"] = rng.choice((0, 10, 34, 36, 80, 100))
            given["retain_seconds"] = rng.choice((None, 0.05, 1.0, 60.0))
            given["retain_tokens"] = rng.choice((None, 0, self.block_tokens, self.max_seq_len // 4))
        return CacheParams(**given)

    def _chance(self, probability: float) -> bool:
        return self._rng.random() < probability
