"""Named workloads: how many requests, of which lengths, arriving when. Nothing here knows an engine."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType

from tonnage.errors import InvalidSetting
from tonnage.units import parse_count

MICROSECONDS = 10**6
#: Prompts are made before the clock starts, and so many tokens take most of a gigabyte.
MOST_PROMPT_TOKENS = 20_000_000


@dataclass(frozen=True, slots=True)
class Span:
    """Token counts, drawn uniformly from ``low`` to ``high``, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, *, knob: str) -> Span:
        """``"1024"`` or ``"100-1024"``. Raises ``InvalidSetting``."""
        low, dash, high = text.partition("-")
        first = parse_count(low, knob=knob)
        last = parse_count(high, knob=knob) if dash else first
        if last < first:
            raise InvalidSetting(knob, text, "ends before it begins", remedy=f"write {last}-{first}")
        return cls(first, last)

    def scaled(self, scale: Fraction) -> Span:
        """Every length times ``scale``, at least one token."""
        return Span(max(1, int(self.low * scale)), max(1, int(self.high * scale)))

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,}-{self.high:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A workload before it is drawn.

    interrupting  lengths of prompts that arrive one after another while the requests decode; each asks for one token.
                  A new one comes once the one before has its token and the decodes had ``QUIET_STEPS`` to themselves
    rate_per_second   at which requests arrive where nothing else is asked for; None: all at once
    """

    num_requests: int
    input_tokens: Span
    output_tokens: Span
    interrupting: Span | None = None
    rate_per_second: Fraction | None = None


#: Steps that decodes have to themselves between two interrupting prompts.
QUIET_STEPS = 16

#: The named workloads; the first five, and their lengths, are those that engines are commonly compared by.
WORKLOADS: Mapping[str, Shape] = MappingProxyType(
    {
        "single": Shape(num_requests=1, input_tokens=Span(1024, 1024), output_tokens=Span(256, 256)),
        "batch32": Shape(num_requests=32, input_tokens=Span(1024, 1024), output_tokens=Span(256, 256)),
        "batch256": Shape(num_requests=256, input_tokens=Span(1024, 1024), output_tokens=Span(256, 256)),
        "prefill": Shape(num_requests=256, input_tokens=Span(1024, 1024), output_tokens=Span(1, 1)),
        "uniform": Shape(num_requests=256, input_tokens=Span(100, 1024), output_tokens=Span(100, 1024)),
        "long": Shape(num_requests=512, input_tokens=Span(1000, 1000), output_tokens=Span(1000, 1000)),
        "stalls": Shape(
            num_requests=8, input_tokens=Span(32, 32), output_tokens=Span(512, 512), interrupting=Span(2000, 2000)
        ),
        # About half of what a fast card can serve: times between tokens at a load that is no overload.
        "arrivals": Shape(
            num_requests=256,
            input_tokens=Span(100, 1024),
            output_tokens=Span(100, 1024),
            rate_per_second=Fraction(8),
        ),
    }
)


#: One name for those that an engine on a card is held to.
BARS = "bars"
BAR_WORKLOADS = ("single", "prefill", "uniform", "long", "arrivals")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request: it arrives ``arrival_us`` microseconds after the start. Lengths in tokens."""

    arrival_us: int
    num_input_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A workload drawn from its shape: the same name, shape, rate and seed give the same jobs and prompts.

    rate_per_second  arrivals of a Poisson process; None: all at once
    """

    name: str
    shape: Shape
    rate_per_second: Fraction | None
    seed: int
    jobs: tuple[Job, ...]

    def prompt(self, job: int, vocab_size: int) -> list[int]:
        """Token ids of a job, drawn uniformly; low ids, where tokenizers keep special ones, are left out."""
        return _tokens(random.Random(f"{self.seed} {job}"), self.jobs[job].num_input_tokens, vocab_size)

    def interruptions(self, vocab_size: int) -> Iterator[list[int]]:
        """Prompts without end for the requests to be interrupted by; none where the shape has none."""
        rng = random.Random(f"{self.seed} interrupting")
        while self.shape.interrupting is not None:
            yield _tokens(rng, self.shape.interrupting.draw(rng), vocab_size)


def workload(
    name: str,
    *,
    num_requests: int | None = None,
    input_tokens: Span | None = None,
    output_tokens: Span | None = None,
    scale: Fraction = Fraction(1),
    rate_per_second: Fraction | None = None,
    seed: int = 0,
) -> Workload:
    """A named workload, changed where asked; ``scale`` multiplies all lengths, given ones too.

    Raises ``InvalidSetting`` for a name that there is not, and for more tokens of prompts than are made.
    """
    if name not in WORKLOADS:
        raise InvalidSetting("--workload", name, "no such workload", remedy=f"write one of {', '.join(WORKLOADS)}")
    shape = WORKLOADS[name]
    rate_per_second = rate_per_second or shape.rate_per_second
    shape = replace(
        shape,
        num_requests=num_requests or shape.num_requests,
        input_tokens=(input_tokens or shape.input_tokens).scaled(scale),
        output_tokens=(output_tokens or shape.output_tokens).scaled(scale),
        interrupting=shape.interrupting and shape.interrupting.scaled(scale),
        rate_per_second=rate_per_second,
    )
    _check_size(shape)
    return Workload(
        name=name, shape=shape, rate_per_second=rate_per_second, seed=seed,
        jobs=tuple(_jobs(shape, rate_per_second, random.Random(seed))),
    )  # fmt: skip


def _check_size(shape: Shape) -> None:
    most = max(shape.input_tokens.high, shape.interrupting.high if shape.interrupting else 0)
    if shape.num_requests * most > MOST_PROMPT_TOKENS:
        raise InvalidSetting(
            "--input-tokens",
            str(shape.input_tokens),
            f"with {shape.num_requests:,} requests that is more than {MOST_PROMPT_TOKENS:,} tokens of prompts",
            remedy="lower --requests, --input-tokens or --scale",
        )


def workload_names(text: str) -> tuple[str, ...]:
    """Names between commas; ``BARS`` stands for all of its. Raises ``InvalidSetting`` for one that there is not."""
    names: list[str] = []
    for name in (part.strip() for part in text.split(",")):
        if name != BARS and name not in WORKLOADS:
            told = (
                f"write one of {', '.join(WORKLOADS)}, or several between commas; {BARS} are {', '.join(BAR_WORKLOADS)}"
            )
            raise InvalidSetting("--workload", name, "no such workload", remedy=told)
        names += BAR_WORKLOADS if name == BARS else (name,)
    return tuple(dict.fromkeys(names))


def _jobs(shape: Shape, rate_per_second: Fraction | None, rng: random.Random) -> Iterator[Job]:
    at = 0.0
    for _ in range(shape.num_requests):
        if rate_per_second is not None:
            at += rng.expovariate(float(rate_per_second))
        yield Job(
            arrival_us=int(at * MICROSECONDS),
            num_input_tokens=shape.input_tokens.draw(rng),
            num_output_tokens=shape.output_tokens.draw(rng),
        )


def _tokens(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return rng.choices(range(min(1000, vocab_size // 2), vocab_size), k=count)
