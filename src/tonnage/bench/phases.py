"""What a storm is made of: scripts that ask for what is hard on an engine, a list of moves before each of its steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from tonnage.bench.mix import PRIORITIES, SALTS, STOPS, Mix
from tonnage.bench.moves import Ask, Cancel, Move, Nap, Step, Take, View
from tonnage.bench.naps import TAG_SETS
from tonnage.bench.probes import Probes
from tonnage.caching import CacheParams
from tonnage.sampling import MAX_LOGPROBS, SamplingParams

Script = Callable[["Sky"], Iterator[list[Move]]]
#: Steps for which a script waits for what it wants to see before it goes on without.
PATIENCE = 300


@dataclass(slots=True, kw_only=True)
class Sky:
    """What scripts draw from and look at. Lengths are made for sequences of 4,096 tokens, and scale with others."""

    rng: random.Random
    vocab_size: int
    max_seq_len: int
    max_batch_size: int
    pool_tokens: int
    mix: Mix
    probes: Probes
    view: View = field(init=False)
    _number: int = 0

    def tokens(self, count: int) -> list[int]:
        return self.rng.choices(range(self.vocab_size), k=max(1, count))

    def part(self, low: int, high: int) -> int:
        """Tokens between these parts of 4,096 of the longest sequence, at least one."""
        return max(1, self.rng.randint(self.max_seq_len * low // 4096, self.max_seq_len * high // 4096))

    def ask(self, phase: str, token_ids: list[int], *, most: int, **given: Any) -> Ask:
        """A request of at most ``most`` tokens of output, less where that would be too long; what else is ``given``
        of ``SamplingParams`` and of ``Ask``."""
        self._number += 1
        own = {name: given.pop(name) for name in [*given] if name in Ask.__dataclass_fields__}
        params = {"seed": self.rng.randrange(2**64), "ignore_eos": True, **given}
        room = self.max_seq_len - len(token_ids)
        params["max_tokens"] = max(1, min(most, room))
        return Ask(
            id=f"{phase}-{self._number}", token_ids=token_ids, params=SamplingParams(**params), phase=phase, **own
        )

    def plain(self, phase: str, **given: Any) -> Ask:
        """100 to 1,024 tokens in and out."""
        return self.ask(phase, self.tokens(self.part(100, 1024)), most=self.part(100, 1024), **given)

    def num(self, part: int) -> int:
        """Requests: this part of a batch, at least two."""
        return max(2, self.max_batch_size // part)

    def until(self, is_so: Callable[[], bool], *, most: int = PATIENCE) -> Iterator[list[Move]]:
        for _ in range(most):
            if is_so():
                return
            yield []

    def until_full(self) -> Iterator[list[Move]]:
        """The batch is full, or somebody waits for memory."""
        yield from self.until(lambda: self.view.num_running >= self.max_batch_size or self.view.num_waiting > 0)

    def trickle(self, asks: Iterator[Ask], *, at_once: int) -> Iterator[list[Move]]:
        """So many before each step, while not too many wait."""
        while True:
            yield from self.until(lambda: self.view.num_waiting < 3 * self.max_batch_size)
            moves: list[Move] = [ask for _, ask in zip(range(at_once), asks, strict=False)]
            if not moves:
                return
            yield moves


def crowd(sky: Sky) -> Iterator[list[Move]]:
    """Two batches at once."""
    yield [sky.plain("crowd") for _ in range(2 * sky.max_batch_size)]
    yield from sky.until(lambda: sky.view.num_waiting < sky.max_batch_size)


def late(sky: Sky) -> Iterator[list[Move]]:
    """Into a full batch, one by one, so that each step changes what the sampler must do."""
    num_top = min(MAX_LOGPROBS, sky.vocab_size)
    kinds: tuple[Callable[[], dict[str, Any]], ...] = (
        lambda: {"repetition_penalty": 1.3, "presence_penalty": 1.5, "frequency_penalty": -1.5, "temperature": 0.8},
        lambda: {"logprobs": num_top},
        lambda: {"prompt_logprobs": num_top, "logprobs": num_top, "frequency_penalty": 2.0},
        lambda: {"logit_bias": {token: sky.rng.uniform(-100, 100) for token in sky.tokens(300)}, "top_k": 40},
        lambda: {"temperature": 1.2, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.1, "logprobs": num_top},
    )
    yield from sky.until_full()
    for number in range(sky.num(8)):
        prompt = sky.tokens(sky.part(16, 2048))
        yield [sky.ask("late", prompt, most=sky.part(50, 400), priority=5, **kinds[number % len(kinds)]())]
        yield from sky.until(lambda: False, most=sky.rng.randrange(4))


def prefix(sky: Sky) -> Iterator[list[Move]]:
    """3,000 tokens with which many begin; pushed out by as many as the pool holds; the same again, also salted."""
    shared = sky.tokens(sky.max_seq_len * 3000 // 4096)

    def sharing(**cache: Any) -> Iterator[Ask]:
        for _ in range(sky.num(4)):
            prompt = [*shared, *sky.tokens(sky.rng.randint(1, 24))][: sky.max_seq_len - 1]
            yield sky.ask("prefix", prompt, most=sky.part(16, 128), cache=CacheParams(**cache))

    def flood() -> Iterator[Ask]:
        left = sky.pool_tokens
        while left > 0:
            prompt = sky.tokens(sky.max_seq_len - 4)
            left -= len(prompt)
            yield sky.ask("prefix", prompt, most=2)

    yield from sky.trickle(sharing(), at_once=8)
    yield from sky.trickle(flood(), at_once=4)
    yield from sky.trickle(sharing(priority=80, retain_seconds=30.0), at_once=sky.num(4))
    yield from sky.trickle(sharing(salt=sky.rng.choice(SALTS)), at_once=8)


def turn(sky: Sky) -> Iterator[list[Move]]:
    """Steps full of prefill, and a full batch of decodes right behind them."""
    yield [sky.ask("turn", sky.tokens(sky.max_seq_len - sky.part(4, 64)), most=3) for _ in range(sky.num(8))]
    yield [sky.ask("turn", sky.tokens(sky.part(1, 16)), most=sky.part(128, 256)) for _ in range(sky.max_batch_size)]
    yield from sky.until(lambda: sky.view.num_waiting < sky.max_batch_size)


def bursts(sky: Sky) -> Iterator[list[Move]]:
    """Three times two batches of short requests at the same moment."""
    for _ in range(3):
        size = 2 * sky.max_batch_size
        yield [sky.ask("bursts", sky.tokens(sky.part(1, 64)), most=sky.part(1, 64)) for _ in range(size)]
        yield from sky.until(lambda: sky.view.num_waiting < sky.max_batch_size)


def cancels(sky: Sky) -> Iterator[list[Move]]:
    """Taken back while they wait, in the middle of their prompts, while they decode, from their own callbacks."""
    wanted: dict[str, str] = {}  # the stage in which each is to be taken back
    asks: list[Move] = []
    for number in range(sky.num(2)):
        stage = ("waiting", "prefilling", "decoding", "streaming")[number % 4]
        prompt = sky.tokens(sky.max_seq_len - sky.part(64, 128) if stage == "prefilling" else sky.part(16, 512))
        given: dict[str, Any] = {"priority": 0 if stage == "waiting" else 3}
        if stage == "streaming":
            given |= {"listens": True, "cancels_at_delta": sky.rng.randrange(20)}
        ask = sky.ask("cancels", prompt, most=sky.part(256, 512), **given)
        asks.append(ask)
        if stage != "streaming":
            wanted[ask.id] = stage
    yield asks
    for _ in range(PATIENCE):
        if not wanted:
            return
        due = [name for name, stage in wanted.items() if sky.view.stage(name) == stage and sky.rng.random() < 0.5]
        # One that is never seen in the stage was too fast for it.
        over = [name for name in wanted if sky.view.stage(name) is None]
        for name in {*due, *over}:
            del wanted[name]
        yield [Cancel(name) for name in due]
    yield [Cancel(name) for name in wanted]


def stops(sky: Sky) -> Iterator[list[Move]]:
    """Stop strings and ids, kept in the text or not, some not before their time; the model's own end; priorities."""

    def asks() -> Iterator[Ask]:
        for number in range(sky.num(2)):
            most = sky.part(64, 1024)
            given: dict[str, Any] = {"temperature": sky.rng.choice((0.0, 1.0)), "ignore_eos": number % 3 > 0}
            if number % 2:
                given |= {"stop": sky.rng.sample(STOPS, 2), "include_stop": sky.rng.random() < 0.5}
            else:
                given |= {"stop_token_ids": sky.tokens(max(8, sky.vocab_size // 64))}
            if number % 4 > 1:
                given["min_tokens"] = sky.rng.randint(1, max(1, most // 4))
            given |= {"priority": sky.rng.choice(PRIORITIES), "listens": number % 5 == 0}
            yield sky.ask("stops", sky.tokens(sky.part(16, 512)), most=max(most, given.get("min_tokens", 0)), **given)

    yield from sky.trickle(asks(), at_once=4)


def lengths(sky: Sky) -> Iterator[list[Move]]:
    """Sequences that end at the last token that there is room for: nearly all output, nearly all prompt, halves."""
    length = sky.max_seq_len
    prompts = (1, length // 2, length - 1, length - sky.part(2, 64))
    yield [
        sky.ask("lengths", sky.tokens(prompts[number % len(prompts)]), most=length)
        for number in range(sky.num(16))
    ]  # fmt: skip
    yield from sky.until(lambda: sky.view.num_waiting < sky.max_batch_size)


def odd(sky: Sky) -> Iterator[list[Move]]:
    """A batch of the ordinary mix: every parameter, senseless requests, callbacks that raise, conversations."""

    def asks() -> Iterator[Ask]:
        for _ in range(sky.num(1)):
            for ask in sky.mix.requests():
                yield replace(ask, phase="odd")

    yield from sky.trickle(asks(), at_once=8)


def probes(sky: Sky) -> Iterator[list[Move]]:
    """The probes, in the middle of it all."""
    asks = sky.probes.asks()
    yield from sky.until_full()
    yield [*asks]
    yield from sky.until(lambda: not any(sky.view.stage(ask.id) for ask in asks))


def nap(sky: Sky) -> Iterator[list[Move]]:
    """Asleep with a full batch; some arrive meanwhile."""
    yield from sky.until_full()
    asks = [sky.plain("nap") for _ in range(sky.num(8))]
    yield [Nap(sky.rng.choice(TAG_SETS), sky.rng.uniform(0.05, 1.0), asks)]
    yield from sky.until(lambda: False, most=20)


def neighbour(sky: Sky) -> Iterator[list[Move]]:
    """Another process takes what it may, in pieces, keeps it for a while and gives it back, three times."""
    for _ in range(3):
        for _ in range(sky.rng.randint(1, 3)):
            yield [Take(sky.rng.randint(10, 33))]
            yield from sky.until(lambda: False, most=sky.rng.randrange(60))
        yield from sky.until(lambda: False, most=sky.rng.randrange(100))
        yield [Take(0)]
        yield [Step()]


@dataclass(frozen=True, slots=True)
class Kind:
    """A phase: its script, and what a reader of the report should know of it."""

    script: Script
    meaning: str


PHASES: Mapping[str, Kind] = MappingProxyType(
    {
        "crowd": Kind(crowd, "two batches of 100 to 1,024 tokens in and out"),
        "late": Kind(late, "penalties, biases, 20 log-probabilities of output and prompt, into a full batch"),
        "prefix": Kind(prefix, "a prefix of 3,000 tokens shared by many, evicted, shared again"),
        "turn": Kind(turn, "steps full of prefill, then a full batch of decodes"),
        "bursts": Kind(bursts, "three times two batches of short requests at once"),
        "cancels": Kind(cancels, "taken back waiting, prefilling, decoding, streaming"),
        "stops": Kind(stops, "stop strings and ids, ends, priorities"),
        "lengths": Kind(lengths, "sequences up to the last token that fits"),
        "odd": Kind(odd, "everything at random, some of it senseless"),
        "probes": Kind(probes, "greedy requests whose text is compared"),
        "nap": Kind(nap, "the engine sleeps and wakes with a full batch"),
        "neighbour": Kind(neighbour, "another process takes memory and gives it back"),
    }
)
