"""Our KV manager beside other engines' block pools and radix caches: the same conversations, operations per second.

An operation is a sequence that begins (its prefix found and held, room for its prompt), a token that is appended to
one, or a sequence that ends. 64 sequences run at once in a pool that the conversations outgrow several times over, so
that blocks are evicted all the time. Times are of the processor, in one thread, so that other work on the machine
counts little. The tokens that were found in the cache are counted for all of them.

Hits differ a little, and why: ours also finds the tokens of a last block that is not full, which is copied, and keeps
such blocks, which takes room from whole ones; SGLang evicts whole runs of blocks, as they were inserted. Ours alone
also keeps the page table of slots, the reservation of whole lives and the undo of every call.

Peers install without a GPU: ``pip install --no-deps --target DIR vllm sglang`` and what their imports then ask for.

    python benchmarks/peers_blocks.py --peers DIR --output benchmarks/results/peers-blocks.json
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from conversations import Arrivals, Conversation, Trace
from filing import file_away, parser
from peer_pools import BLOCK_TOKENS, PEERS, OurPool, Pool, Size, installed

KINDS = ("begin", "append", "end")
TRACE = Trace(
    num_conversations=400, num_systems=8, system_tokens=400, num_turns=5, question_tokens=(20, 200),
    answer_tokens=(32, 256),
)  # fmt: skip


@dataclass(slots=True)
class Running:
    """``sequence``: as the pool made it; ``num_answered`` tokens of the answer were appended."""

    sequence: Any
    conversation: Conversation
    prompt: list[int]
    answer: list[int]
    num_answered: int = 0


class Run:
    """One contestant through the whole trace; ``seconds`` in its calls, by what they are for."""

    def __init__(self, pool: Pool, *, num_rows: int, seed: int) -> None:
        self.pool, self.num_rows = pool, num_rows
        self.arrivals = Arrivals(TRACE.conversations(seed), seed)
        self.running: list[Running] = []
        self.seconds, self.counts = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0)
        self.asked_tokens = self.hit_tokens = self.partial_tokens = 0
        while self.arrivals or self.running:
            self._begin()
            self._append()
            self._end()

    @property
    def operations_per_second(self) -> float:
        return sum(self.counts.values()) / sum(self.seconds.values())

    def _timed(self, kind: str, call: Callable[..., Any], *given: Any) -> Any:
        began = time.thread_time()
        found = call(*given)
        self.seconds[kind] += time.thread_time() - began
        return found

    def _begin(self) -> None:
        while len(self.running) < self.num_rows and (one := self.arrivals.pop()) is not None:
            prompt, answer = one.ask()
            sequence = self.pool.sequence(f"{one.id}.{one.turn}", prompt, len(answer))
            found = self._timed("begin", self.pool.admit, sequence)
            if found is None:  # not now, for example because a neighbour computes its prefix: it comes a step later
                self.arrivals.put_back(one)
                return
            self.counts["begin"] += 1
            self.asked_tokens += len(prompt)
            self.hit_tokens += found
            self.partial_tokens += found % BLOCK_TOKENS
            self.running.append(Running(sequence, one, prompt, answer))

    def _append(self) -> None:
        tokens = [one.answer[one.num_answered] for one in self.running]
        self._timed("append", self.pool.step, [one.sequence for one in self.running], tokens)
        self.counts["append"] += len(tokens)
        for one in self.running:
            one.num_answered += 1

    def _end(self) -> None:
        for one in self.running:
            if one.num_answered == len(one.answer):
                self._timed("end", self.pool.end, one.sequence)
                self.counts["end"] += 1
                one.conversation.answer(one.prompt, one.answer)
        self.running = [one for one in self.running if one.num_answered < len(one.answer)]


def measure(names: dict[str, type[Any]], size: Size, *, repeats: int, seed: int) -> dict[str, list[Run]]:
    """Runs of all contestants in turns, so that whatever else the machine does falls on all alike."""
    runs: dict[str, list[Run]] = {name: [] for name in names}
    gc.disable()
    for _ in range(repeats):
        for name, pool in names.items():
            gc.collect()
            runs[name].append(Run(pool(size), num_rows=size.num_rows, seed=seed))
            print(f"{name:8} {runs[name][-1].operations_per_second:12,.0f} operations/s", file=sys.stderr)
    gc.enable()
    return runs


def summary(runs: list[Run]) -> dict[str, Any]:
    last = runs[-1]
    return {
        "operations_per_second": round(statistics.median(run.operations_per_second for run in runs)),
        "us_per_operation": {
            kind: round(statistics.median(run.seconds[kind] / run.counts[kind] for run in runs) * 1e6, 2)
            for kind in KINDS
        },
        "seconds": [round(sum(run.seconds.values()), 3) for run in runs],
        "hit_tokens": last.hit_tokens,
        "of_them_in_partial_blocks": last.partial_tokens,
        "hit_rate": round(last.hit_tokens / last.asked_tokens, 4),
    }


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[parser(None)],
        conflict_handler="resolve",
    )
    options.add_argument("--peers", type=Path, action="append", default=[], help="a folder of installed packages")
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--blocks", type=int, default=20_000)
    options.add_argument("--rows", type=int, default=64, help="sequences that run at once")
    options.add_argument("--seed", type=int, default=6)
    asked = options.parse_args()
    sys.path += [str(folder) for folder in asked.peers]
    torch.set_num_threads(1)
    versions = installed()
    size = Size(num_blocks=asked.blocks, num_rows=asked.rows, max_tokens=TRACE.most_tokens)
    runs = measure({"ours": OurPool} | {name: PEERS[name] for name in versions}, size, repeats=asked.repeats,
                   seed=asked.seed)  # fmt: skip
    found = {name: summary(taken) for name, taken in runs.items()}
    ours = found["ours"]["operations_per_second"]
    ratios = {name: round(ours / found[name]["operations_per_second"], 2) for name in versions}
    for name, row in found.items():
        print(f"{name:8} {row}")
    print(f"ours over theirs: {ratios or 'no peer is installed'}")
    figures = {
        "peers": versions,
        "blocks": asked.blocks,
        "block_tokens": BLOCK_TOKENS,
        "rows": asked.rows,
        "trace": asdict(TRACE) | {"seed": asked.seed},
        "operations": runs["ours"][-1].counts,
        "asked_tokens": runs["ours"][-1].asked_tokens,
        "ours_over_theirs": ratios,
        **found,
    }
    file_away(asked.output, figures, commit=asked.commit)


if __name__ == "__main__":
    main()
