"""Which graph sizes serve a load best: lists fitted to the first half of a trace, judged on what came after.

Requests arrive at random, at a rate that swings over the trace, and are played through decode steps. Lists are fitted
to the batches of the first half alone. Then every list plays the second half, and a shifted trace with other rates and
other lengths, from its first request to its last, with the seats that its own graphs leave: what a graph takes is not
there for the cache. Nothing is measured on a device here: step times are the two models of the check in docs, and the
figures are exact for them.

    python benchmarks/buckets.py --output benchmarks/results/buckets.json
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from filing import file_away, parser
from tonnage.costs.context import GRAPH_BYTES
from tonnage.graphs.guard import guarded
from tonnage.graphs.histogram import Histogram
from tonnage.graphs.optimise import Rules, frontier
from tonnage.graphs.price import Price
from tonnage.graphs.step_times import StepTimes, affine, unpadded_ns
from tonnage.graphs.traffic import Played, Request, play, settled
from tonnage.planner.buckets import GENERATORS

#: Bytes of cache a token and a graph take, as an 8B model with grouped heads in bf16 on one card.
KV_TOKEN_BYTES, GRAPH = 128 * 1024, GRAPH_BYTES[1]
BATCH = 1024
MODELS = {
    "affine": affine(BATCH, base_ns=6_000_000, row_ns=6_000),
    "tiles of 8": affine(BATCH, base_ns=2_000_000, row_ns=12_000, tile_rows=8),
}


@dataclass(frozen=True)
class Scenario:
    """A trace: seconds, mean arrivals a second, how far they swing, and output lengths (median, spread of the log).

    kv_tokens  of cache without any graph; ``request_tokens`` are set aside for each request, so seats are what is left
    """

    seconds: int
    rate: float
    swing: float
    median_tokens: int
    spread: float
    kv_tokens: int
    request_tokens: int

    def requests(self, seed: str) -> list[Request]:
        """Poisson arrivals by thinning, with two swings over the trace; log-normal lengths."""
        rng, now, made = random.Random(seed), 0.0, []
        highest = self.rate * (1 + self.swing)
        while True:
            now += rng.expovariate(highest)
            if now >= self.seconds:
                return made
            rate = self.rate * (1 + self.swing * math.sin(4 * math.pi * now / self.seconds))
            tokens = round(rng.lognormvariate(math.log(self.median_tokens), self.spread))
            if rng.random() * highest < rate:
                made.append(Request(int(now * 1e9), max(2, min(self.request_tokens, tokens))))

    def seats(self, num_graphs: int) -> int:
        """Requests that the cache holds beside so many graphs."""
        left = self.kv_tokens - num_graphs * GRAPH // KV_TOKEN_BYTES
        return min(BATCH, left // self.request_tokens)


SCENARIOS = {
    "steady": Scenario(600, 60.0, 0.0, 700, 0.5, 4_000_000, 2500),
    "tides": Scenario(600, 60.0, 0.8, 700, 0.5, 4_000_000, 2500),
    "memory binds": Scenario(240, 90.0, 0.1, 1000, 0.4, 660_000, 2500),
    "light": Scenario(600, 12.0, 0.5, 500, 0.6, 4_000_000, 2500),
}
#: What the shifted trace has instead: arrivals and lengths, as factors.
SHIFTS = {"more": (1.25, 1.0), "longer": (1.0, 1.3), "less": (0.6, 1.0)}


def shifted(scenario: Scenario, factors: tuple[float, float]) -> Scenario:
    return replace(scenario, rate=scenario.rate * factors[0], median_tokens=round(scenario.median_tokens * factors[1]))


def lists_for(scenario: Scenario, first_half: Sequence[Request], times: StepTimes) -> dict[str, tuple[int, ...]]:
    """The reference's lists, and ours fitted to the first half: as many as +64, as many as x2, and by price."""
    lists = {name: make(BATCH) for name, make in GENERATORS.items()}
    even = lists["+64"]
    seats = scenario.seats(len(even))
    rules = Rules(max_batch_size=BATCH, always=(seats,), most_padding=Fraction(1, 4), candidates_of=8)

    def choose(load: Histogram) -> tuple[int, ...]:
        return guarded(load, times, rules, beside=even).choice.sizes

    load = settled(first_half, choose, times, num_seats=seats, first=even)
    best = frontier(load, times, rules, most_graphs=len(even))
    price = Price(
        graph_bytes=GRAPH, kv_token_bytes=KV_TOKEN_BYTES,
        request_tokens=scenario.request_tokens, num_running=max(1, min(seats, load.largest)),
    )  # fmt: skip
    return lists | {
        "fitted": choose(load),
        "fitted, no guard": best.of(len(even)).sizes,
        "fitted, as many as x2": best.of(len(lists["x2"])).sizes,
        "fitted, by price": best.under(price.share(times) * unpadded_ns(load, times)).sizes,
    }


def figures(played: Played, sizes: Sequence[int], seats: int, floor_ns: Fraction) -> dict[str, Any]:
    return {
        "graphs": len(sizes),
        "graph_bytes": len(sizes) * GRAPH,
        "seats": seats,
        "mean_step_us": round(float(played.mean_step_ns) / 1000, 1),
        "tokens_per_second": round(played.tokens_per_second, 1),
        "finished_after_seconds": round(played.end_ns / 1e9, 3),
        "excess_percent": round(100 * float(played.mean_step_ns / floor_ns - 1), 3),
    }


def judge(scenario: Scenario, requests: Sequence[Request], lists: dict[str, tuple[int, ...]], times: StepTimes) -> Any:
    """Each list plays the requests; ``excess_percent`` is over un-padded steps of the same batches."""
    told = {}
    for name, sizes in lists.items():
        seats = scenario.seats(len(sizes))
        played = play(requests, sizes, times, num_seats=seats)
        floor_ns = Fraction(unpadded_ns(played.histogram, times), played.histogram.num_steps)
        told[name] = figures(played, sizes, seats, floor_ns)
    return told


def run(name: str, model: str, seed: int) -> dict[str, Any]:
    scenario, times = SCENARIOS[name], MODELS[model]
    requests = scenario.requests(f"{name} {seed}")
    half_ns = scenario.seconds * 10**9 // 2
    first = [each for each in requests if each.arrival_ns < half_ns]
    second = [Request(each.arrival_ns - half_ns, each.output_tokens) for each in requests if each.arrival_ns >= half_ns]
    lists = lists_for(scenario, first, times)
    judged = {"second half": judge(scenario, second, lists, times)}
    for shift, factors in SHIFTS.items():
        drawn = shifted(scenario, factors).requests(f"{name} {seed} {shift}")
        judged[shift] = judge(scenario, drawn[: len(second)], lists, times)
    return {"scenario": name, "step_times": model, "seed": seed, "fitted": lists["fitted"], "judged": judged}


def beside(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bar: ours against +64 at the same number of graphs, and against x2, on every trace that nothing saw."""
    rows = []
    for each in runs:
        for load, told in each["judged"].items():
            ours, even, doubling = told["fitted"], told["+64"], told["x2"]
            rows.append({
                "trace": f"{each['scenario']}, {each['step_times']}, seed {each['seed']}, {load}",
                "step_against_even_percent": _percent(ours["mean_step_us"], even["mean_step_us"]),
                "tokens_against_even_percent": _percent(ours["tokens_per_second"], even["tokens_per_second"]),
                "excess_percent": [ours["excess_percent"], even["excess_percent"], doubling["excess_percent"]],
            })  # fmt: skip
    return rows


def _percent(ours: float, other: float) -> float:
    return round(100 * (ours / other - 1), 3)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=3)
    args = options.parse_args()
    runs = [run(name, model, seed) for name in SCENARIOS for model in MODELS for seed in range(args.seeds)]
    rows = beside(runs)
    for row in rows:
        ours, even, doubling = row["excess_percent"]
        print(f"{row['trace']:<52} fitted {ours:6.2f} %   +64 {even:6.2f} %   x2 {doubling:6.2f} %")
    worse = [row["trace"] for row in rows if row["excess_percent"][0] > row["excess_percent"][1]]
    print(f"{len(rows)} traces, {len(worse)} on which the fitted list pads more than +64: {worse}")
    file_away(args.output, {"worse_than_even": worse, "beside": rows, "runs": runs}, commit=args.commit)


if __name__ == "__main__":
    main()
