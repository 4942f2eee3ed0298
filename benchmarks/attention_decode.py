"""How much of K and V the paged decode of a backend reads in a second: batch by context by page, all layers in a graph.

The shape is Llama-3.1-8B's (32 query heads over 8, of 128, bfloat16) with ``--layers`` layers side by side in a block,
page tables drawn at random. Only attention is timed (partial outputs and their combination included); what appending
the new token adds is told beside it, and so is what the host spends on loading a step, plans included. A pool that
would not fit is cut, and pages then serve several rows: it remains far larger than the cache of the card.
``--backend`` says whose; ``--sweep`` tries tile sizes, warps and stages of Triton's and files the best of each page.

    python benchmarks/attention_decode.py --output benchmarks/results/attention-decode.json
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import torch

from filing import file_away, parser
from tonnage.attention import make_backend
from tonnage.attention.base import Rows
from tonnage.attention.triton import TritonBackend, _Layer
from tonnage.attention.triton_tuning import Tuning
from tonnage.config import Limits
from tonnage.units import GiB, ceil_div

HEADS, KV_HEADS, DIM = 32, 8, 128
TOKEN_BYTES = 2 * KV_HEADS * DIM * 2
MOST_POOL_BYTES = 64 * GiB
WANTED = _Layer(scaling=DIM**-0.5, window=None, softcap=None, sinks=None)


class Scratch:
    """Plain tensors, for a benchmark without an arena."""

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")


class Case:
    """One batch over one pool: ``attend`` and ``forward`` run every layer of it once, ``load`` loads its step."""

    def __init__(
        self, pool: torch.Tensor, *, backend: str, batch: int, context: int, tuning: Tuning | None = None
    ) -> None:
        page, num_blocks = pool.shape[3], ceil_div(context, pool.shape[3])
        self.num_layers, self.batch = pool.shape[1], batch
        self.backend: Any = make_backend(backend, pool)
        if tuning is not None:
            self.backend.__dict__["decode_tuning"] = tuning
        rng = np.random.default_rng(batch)
        times = ceil_div(batch * num_blocks, pool.shape[0])
        pages = np.concatenate([rng.permutation(pool.shape[0]) for _ in range(times)])[: batch * num_blocks]
        ends = np.full(batch, context, np.int64)
        table = pages.astype(np.int32).reshape(batch, num_blocks)
        limits = Limits(
            max_seq_len=num_blocks * page, max_batch_size=batch, max_num_tokens=batch, max_logits_rows=batch
        )
        packed = torch.randn(1, batch, HEADS + 2 * KV_HEADS, DIM, dtype=pool.dtype, device="cuda").transpose(1, 2)
        self.query, self.key, self.value = packed.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        self.out = self.query.new_empty(batch, HEADS, DIM)
        self.rows = Rows(starts=ends - 1, ends=ends, table=table, slots=np.arange(batch))
        self.static, scratch = self.backend.static_inputs(limits), Scratch()
        self.step = self.backend.captured(self.static, batch, scratch)
        self.forward()  # all padding: whatever is planned or compiled by the first step
        self.load()
        self.step = self.backend.captured(self.static, batch, scratch)

    def load(self) -> None:
        self.backend.load(self.static, self.rows, self.batch)

    def attend(self) -> None:
        for layer in range(self.num_layers):
            if isinstance(self.backend, TritonBackend):
                group, pages = self.backend._layers[layer]
                table = self.step.decode.tables[group]
                self.backend._decode(self.step.decode, table, pages, self.query, self.out, WANTED)
            else:
                queries, (part,) = self.query[0].transpose(0, 1), self.step.parts
                self.backend._attend(
                    self.step, part, layer, queries, self.out, scaling=WANTED.scaling, kind=(None, None)
                )

    def forward(self) -> None:
        for layer in range(self.num_layers):
            self.backend.forward(self.step, layer, self.query, self.key, self.value, scaling=WANTED.scaling)


def host_microseconds(call: Callable[[], None], *, repeats: int) -> float:
    """The median of so many calls, the card being idle at the start of each."""
    taken = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        taken.append((time.perf_counter() - started) * 1e6)
    return statistics.median(taken)


def microseconds(call: Callable[[], None], *, repeats: int) -> list[float]:
    """Of each of so many replays of a graph of ``call``."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(3):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1000 for begin, end in events]


def measure(
    pool: torch.Tensor, batch: int, context: int, *, backend: str, repeats: int, tuning: Tuning | None = None
) -> dict[str, Any]:
    case = Case(pool, backend=backend, batch=batch, context=context, tuning=tuning)
    attention = microseconds(case.attend, repeats=repeats)
    both = statistics.median(microseconds(case.forward, repeats=repeats))
    middle = statistics.median(attention)
    num_bytes = batch * context * TOKEN_BYTES * case.num_layers
    found = {
        "backend": backend,
        "batch": batch,
        "context": context,
        "page": pool.shape[3],
        "gb_per_s": round(num_bytes / middle / 1000),
        "layer_us": round(middle / case.num_layers, 2),
        "append_layer_us": round((both - middle) / case.num_layers, 2),
        "load_host_us": round(host_microseconds(case.load, repeats=repeats), 1),
        "samples_us": [round(sample, 1) for sample in attention],
    }
    if isinstance(case.backend, TritonBackend):
        used = case.backend.decode_tuning
        found["tuning"] = {"keys": used.keys, **used.launch}
        found["num_splits"] = case.step.decode.num_splits
    return found


def pools(num_layers: int, pages: list[int], batches: list[int], contexts: list[int]) -> Iterator[torch.Tensor]:
    """One pool for each page size, for the largest batch."""
    for page in pages:
        wanted = max(batches) * max(ceil_div(context, page) for context in contexts)
        num_slabs = min(wanted, MOST_POOL_BYTES // (num_layers * page * TOKEN_BYTES))
        pool = torch.empty(num_slabs, num_layers, 2, page, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        yield pool.normal_()


def tunings(page: int) -> Iterator[Tuning]:
    for keys, warps, stages in product((16, 32, 64, 128), (2, 4, 8), (2, 3, 4, 5)):
        # Stages of keys and values in shared memory, of which a block has 227 KiB; a program alone is too few.
        if keys * DIM * 2 * 2 * stages <= 200 * 1024 and (keys <= 64 or page >= 64):
            yield Tuning(keys=keys, num_warps=warps, num_stages=stages)


def sweep(pool: torch.Tensor, cases: list[tuple[int, int]], *, repeats: int) -> Iterator[dict[str, Any]]:
    """Every tuning over all cases, as the geometric mean of its rates, the best first."""
    found = []
    for tuning in tunings(pool.shape[3]):
        rates = {}
        for batch, context in cases:
            one = measure(pool, batch, context, backend="triton", repeats=repeats, tuning=tuning)
            rates[f"{batch}x{context}"] = one["gb_per_s"]
        mean = math.exp(statistics.fmean(map(math.log, rates.values())))
        row = {"page": pool.shape[3], "keys": tuning.keys, **tuning.launch, "mean": round(mean), **rates}
        print(row, file=sys.stderr)
        found.append(row)
    yield from sorted(found, key=lambda row: -row["mean"])


def main() -> int:
    options = parser(__doc__)
    options.set_defaults(device="cuda")
    options.add_argument("--backend", nargs="+", choices=("triton", "flashinfer"), default=["triton"])
    options.add_argument("--layers", type=int, default=16)
    options.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    options.add_argument("--context", type=int, nargs="+", default=[1024, 8192])
    options.add_argument("--page", type=int, nargs="+", default=[16, 64])
    options.add_argument("--repeats", type=int, default=15)
    options.add_argument("--sweep", action="store_true", help="try tunings instead, and file them, best first")
    given = options.parse_args()
    if given.device != "cuda" or not torch.cuda.is_available():
        options.error("needs a CUDA device")
    rows = []
    for pool in pools(given.layers, given.page, given.batch, given.context):
        cases = list(product(given.batch, given.context))
        if given.sweep:
            rows += sweep(pool, cases, repeats=given.repeats)
            continue
        for (batch, context), backend in product(cases, given.backend):
            rows.append(measure(pool, batch, context, backend=backend, repeats=given.repeats))
            print({key: value for key, value in rows[-1].items() if key != "samples_us"}, file=sys.stderr)
    shape = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "dtype": "bfloat16", "layers": given.layers}
    file_away(given.output, {"shape": shape, "rows": rows}, commit=given.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
