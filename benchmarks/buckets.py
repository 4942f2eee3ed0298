"""Which graph sizes serve a load best: lists fitted to the first half of a trace, judged on what came after.

Requests arrive in one of several ways and are played through decode steps. Lists are fitted to the batches of the
first half alone. Then every list plays the second half, and shifted traces with other rates and other lengths, from
the first request to the last, with the seats that its own graphs leave: what a graph takes is not there for the cache.

Step times are two models, and what was measured on a card (``--step-times``: a file that ``tonnage buckets`` reads).
Where that has no replays of padding alone, ``--attention`` takes what attention was measured to take by itself out of
the graphs' times: a padded row attends to nothing. Given step times, the figures are exact; no step is run here.

    python benchmarks/buckets.py --output benchmarks/results/buckets.json
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from filing import file_away, parser
from tonnage.graphs.guard import guarded
from tonnage.graphs.histogram import Histogram
from tonnage.graphs.load_files import read_step_times
from tonnage.graphs.optimise import Rules, frontier
from tonnage.graphs.price import Price
from tonnage.graphs.step_times import StepPoints, StepTimes, affine, measured, unpadded_ns
from tonnage.graphs.traffic import Played, Request, play, settled
from tonnage.planner.buckets import GENERATORS, default_sizes

RESULTS = Path(__file__).parent / "results"
#: Bytes of cache a token takes, as an 8B model with grouped heads in bf16, and layers of that model.
KV_TOKEN_BYTES, LAYERS = 128 * 1024, 32
#: Sequences of the models, and of the card as it was measured. Above so many the guard looks at multiples of 8 only.
BATCH, CARD_BATCH, FINE = 1024, 256, 256
MODELS = {
    "affine": affine(BATCH, base_ns=6_000_000, row_ns=6_000),
    "tiles of 8": affine(BATCH, base_ns=2_000_000, row_ns=12_000, tile_rows=8),
}
REQUEST_TOKENS, MEDIAN_TOKENS, SPREAD = 2500, 500, 0.5


@dataclass(frozen=True)
class Scenario:
    """A trace of ``seconds``. ``busy`` is the share of seats that its requests would keep taken, on average.

    arrivals  "even" (Poisson), "swings" (Poisson, its rate a sine with two periods), "bursts" (Poisson, at eight times
              the rate of the quiet for a third of the time, at random), "waves" (four times at once twice as many as
              keep those seats taken; each drains to its end)
    room      seats that the cache has without any graph, as a share of the batch that graphs are made for
    """

    arrivals: str
    busy: float
    seconds: int = 240
    room: float = 2.0
    length_factor: float = 1.0

    def requests(self, seed: str, times: StepTimes) -> list[Request]:
        """With log-normal lengths."""
        rng = random.Random(seed)
        seats = self.seats(0, times.max_batch_size, 0)
        at_once = max(1, round(self.busy * seats))
        mean_tokens = MEDIAN_TOKENS * self.length_factor * math.exp(SPREAD**2 / 2)
        # A request stays for as many steps as it has tokens: so many a second keep so many seats taken.
        rate = at_once / (mean_tokens / self.length_factor * times.unpadded(min(at_once, times.max_batch_size)) / 1e9)
        return [Request(int(at * 1e9), self._tokens(rng)) for at in self._arrivals(rng, rate, at_once)]

    def _tokens(self, rng: random.Random) -> int:
        drawn = rng.lognormvariate(math.log(MEDIAN_TOKENS * self.length_factor), SPREAD)
        return max(2, min(REQUEST_TOKENS, round(drawn)))

    def _arrivals(self, rng: random.Random, rate: float, at_once: int) -> Iterator[float]:
        if self.arrivals == "waves":
            for wave in range(4):
                yield from (wave * self.seconds / 4 for _ in range(2 * at_once))
            return
        at, highest = 0.0, 3 * rate
        is_burst, until = False, 0.0
        while (at := at + rng.expovariate(highest)) < self.seconds:
            while at >= until:
                is_burst = not is_burst
                until += rng.expovariate(1 / (5 if is_burst else 10))
            now = {"even": rate, "swings": rate * (1 + 0.8 * math.sin(4 * math.pi * at / self.seconds)),
                   "bursts": rate * (2.4 if is_burst else 0.3)}[self.arrivals]  # fmt: skip
            if rng.random() * highest < now:
                yield at

    def seats(self, num_graphs: int, most: int, graph_bytes: int) -> int:
        """Requests that the cache holds beside so many graphs."""
        kv_tokens = int(self.room * most * REQUEST_TOKENS) - num_graphs * graph_bytes // KV_TOKEN_BYTES
        return min(most, kv_tokens // REQUEST_TOKENS)


SCENARIOS = {
    "Poisson": Scenario("even", 0.6),
    "swings of a day": Scenario("swings", 0.5),
    "bursts": Scenario("bursts", 0.5),
    "waves that drain": Scenario("waves", 0.6),
    "memory binds": Scenario("even", 1.3, room=0.6),
    "light": Scenario("even", 0.08),
}
#: What a shifted trace has instead: arrivals and lengths, as factors.
SHIFTS = {"more": (1.25, 1.0), "longer": (1.0, 1.3), "less": (0.6, 1.0)}


def shifted(scenario: Scenario, factors: tuple[float, float]) -> Scenario:
    return replace(scenario, busy=scenario.busy * factors[0], length_factor=factors[1])


def lists_for(
    scenario: Scenario, first_half: Sequence[Request], times: StepTimes, graph_bytes: int
) -> dict[str, tuple[int, ...]]:
    """The reference's lists, and ours fitted to the first half: as many as +64, as many as x2, and by price."""
    most = times.max_batch_size
    lists = {name: make(most) for name, make in GENERATORS.items()}
    even = lists["+64"]
    seats = scenario.seats(len(even), most, graph_bytes)
    rules = Rules(
        max_batch_size=most, always=(seats,), most_padding=Fraction(1, 4), candidates_of=8 if most > FINE else 1
    )

    def choose(load: Histogram) -> tuple[int, ...]:
        return guarded(load, times, rules, beside=even).choice.sizes

    load = settled(first_half, choose, times, num_seats=seats, first=even)
    best = frontier(load, times, rules, most_graphs=len(even))
    price = Price(
        graph_bytes=graph_bytes, kv_token_bytes=KV_TOKEN_BYTES,
        request_tokens=REQUEST_TOKENS, num_running=max(1, min(seats, load.largest)),
    )  # fmt: skip
    return lists | {
        "fitted": choose(load),
        "fitted, no guard": best.of(len(even)).sizes,
        "fitted, as many as x2": best.of(len(lists["x2"])).sizes,
        "fitted, by price": best.under(price.share(times) * unpadded_ns(load, times)).sizes,
    }


def figures(played: Played, sizes: Sequence[int], seats: int, times: StepTimes, graph_bytes: int) -> dict[str, Any]:
    """``excess_percent`` is over un-padded steps of the same batches."""
    floor_ns = Fraction(unpadded_ns(played.histogram, times), played.histogram.num_steps)
    return {
        "graphs": len(sizes),
        "graph_bytes": len(sizes) * graph_bytes,
        "seats": seats,
        "mean_step_us": round(float(played.mean_step_ns) / 1000, 1),
        "tokens_per_second": round(played.tokens_per_second, 1),
        "finished_after_seconds": round(played.end_ns / 1e9, 3),
        "excess_percent": round(100 * float(played.mean_step_ns / floor_ns - 1), 3),
    }


def judge(
    scenario: Scenario, requests: Sequence[Request], lists: dict[str, tuple[int, ...]], times: StepTimes, graph: int
) -> dict[str, Any]:
    """Each list plays the requests."""
    told = {}
    for name, sizes in lists.items():
        seats = scenario.seats(len(sizes), times.max_batch_size, graph)
        told[name] = figures(play(requests, sizes, times, num_seats=seats), sizes, seats, times, graph)
    return told


def run(name: str, model: str, times: StepTimes, seed: int, graph_bytes: int) -> dict[str, Any]:
    scenario = SCENARIOS[name]
    requests = scenario.requests(f"{name} {seed}", times)
    half_ns = scenario.seconds * 10**9 // 2
    first = [each for each in requests if each.arrival_ns < half_ns]
    second = [Request(each.arrival_ns - half_ns, each.output_tokens) for each in requests if each.arrival_ns >= half_ns]
    lists = lists_for(scenario, first, times, graph_bytes)
    judged = {"first half": judge(scenario, first, lists, times, graph_bytes)}
    judged["second half"] = judge(scenario, second, lists, times, graph_bytes)
    for shift, factors in SHIFTS.items():
        drawn = shifted(scenario, factors).requests(f"{name} {seed} {shift}", times)
        judged[shift] = judge(scenario, drawn[: len(second)], lists, times, graph_bytes)
    return {"scenario": name, "step_times": model, "seed": seed, "fitted": lists["fitted"], "judged": judged}


def beside(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bar: ours against +64 at the same number of graphs, and against x2, on every trace that nothing saw."""
    rows = []
    for each in runs:
        for load, told in each["judged"].items():
            ours, even, doubling = told["fitted"], told["+64"], told["x2"]
            rows.append({
                "scenario": each["scenario"], "step_times": each["step_times"], "seed": each["seed"], "judged": load,
                "step_against_even_percent": _percent(ours["mean_step_us"], even["mean_step_us"]),
                "tokens_against_even_percent": _percent(ours["tokens_per_second"], even["tokens_per_second"]),
                "excess_percent": [ours["excess_percent"], even["excess_percent"], doubling["excess_percent"]],
                "is_worse": ours["excess_percent"] > even["excess_percent"],
            })  # fmt: skip
    return rows


def _percent(ours: float, other: float) -> float:
    return round(100 * (ours / other - 1), 3)


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each load and step time, over seeds: the second half, and the shifted traces together."""
    for key in dict.fromkeys((row["scenario"], row["step_times"]) for row in rows):
        mine = [row for row in rows if (row["scenario"], row["step_times"]) == key]
        for title, loads in (("second half", ("second half",)), ("shifted, all three", tuple(SHIFTS))):
            these = [row for row in mine if row["judged"] in loads]
            ours, even, doubling = (sum(row["excess_percent"][i] for row in these) / len(these) for i in range(3))
            step, tokens = (
                sum(row[f"{what}_against_even_percent"] for row in these) / len(these) for what in ("step", "tokens")
            )
            yield (
                f"| {key[0]} | {key[1]} | {title} | {doubling:.2f} % | {even:.2f} % | {ours:.2f} % "
                f"| {step:+.2f} % | {tokens:+.2f} % |"
            )


def card_times(step_times: Path, attention: Path | None, most: int) -> StepTimes:
    points = read_step_times(step_times)
    if attention is not None and "padding alone" not in points.told:
        points = without_attention(points, attention, most)
    return measured(points, most, file=step_times.name)


def without_attention(points: StepPoints, attention: Path, most: int) -> StepPoints:
    """What attention was measured to take by itself is the rows', and not the graph's."""
    rows = [row for row in json.loads(attention.read_text())["rows"] if (row["context"], row["page"]) == (1024, 16)]
    alone = measured(
        StepPoints({row["batch"]: round(1000 * LAYERS * row["layer_us"]) for row in rows}), most, file=attention.name
    )
    return StepPoints(
        {size: graph_ns - alone.at(size) for size, graph_ns in points.graph_ns.items()},
        {size: beside_ns + alone.at(size) for size, beside_ns in points.beside_ns.items()},
        "; attention, as it was measured alone, taken out of the graphs",
    )


def graph_price(file: Path) -> int:
    """Bytes of one more graph, as ``benchmarks/graph_bytes.py`` filed them. Where an engine's lines are all there is,
    the captured pool shared out among its graphs, which is more."""
    filed = json.loads(file.read_text())
    if "bytes_per_graph" in filed:
        return int(filed["bytes_per_graph"])
    pool = next(row["actual_bytes"] for row in filed["audit"] if row["line"] == "graphs")
    return int(pool // len(default_sizes(CARD_BATCH)))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--step-times", type=Path, default=RESULTS / "2026-11-30-h200-step-parts.json")
    options.add_argument("--attention", type=Path, default=RESULTS / "2026-11-30-h200-attention-decode.json")
    options.add_argument("--graph-bytes", type=Path, default=RESULTS / "2026-11-30-h200-serve-card-7a9c8bc.json")
    options.add_argument("--card-only", action="store_true", help="without the two models")
    args = options.parse_args()
    graph = graph_price(args.graph_bytes)
    models = {"H200": card_times(args.step_times, args.attention, CARD_BATCH), **({} if args.card_only else MODELS)}
    runs = [
        run(name, model, times, seed, graph)
        for name in SCENARIOS for model, times in models.items() for seed in range(args.seeds)
    ]  # fmt: skip
    rows = beside(runs)
    print(*summary(rows), sep="\n")
    worse = [row for row in rows if row["is_worse"]]
    unseen = [row for row in rows if row["judged"] != "first half"]
    num_worse = sum(row["is_worse"] for row in unseen)
    print(
        f"{len(unseen)} traces that nothing was fitted to; the fitted list pads more than +64 on {num_worse} of them:"
    )
    print(*worse, sep="\n")
    told = {model: times.told for model, times in models.items()}
    file_away(
        args.output,
        {"step_times": told, "graph_bytes": graph, "worse_than_even": worse, "runs": runs},
        commit=args.commit,
    )


if __name__ == "__main__":
    main()
