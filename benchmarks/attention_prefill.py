"""How fast prompts are attended to: fresh ones, and a chunk on a cached past, over pages drawn at random.

The shape is Llama-3.1-8B's (32 query heads over 8, of 128, bfloat16). Operations are those of the causal half alone:
4 * heads * dim for each query and key before it. Time is of a layer, new keys and values written included, except for
``torch``: its own attention over keys that lie one behind the other, which no engine with pages has, as a yardstick.
``--sweep`` tries tile sizes, warps and stages of Triton's, and files the best of each case.

    python benchmarks/attention_prefill.py --device cuda --output benchmarks/results/attention-prefill.json
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from itertools import product
from typing import Any

import numpy as np
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from attention_decode import DIM, HEADS, KV_HEADS, Scratch
from filing import file_away, parser
from tonnage.attention import flashinfer, make_backend
from tonnage.attention.base import Rows
from tonnage.attention.flashinfer_modules import find_module
from tonnage.attention.triton_tuning import Tuning
from tonnage.units import ceil_div

#: Rows, tokens cached before each, tokens computed of each.
CASES = ((8, 0, 1024), (1, 0, 8192), (1, 6144, 2048))
BACKENDS = ("torch", "triton", "flashinfer fa2", "flashinfer fa3")
#: Queries of a program and keys of a tile, warps, stages.
SWEEP = [
    Tuning(queries=queries, keys=keys, num_warps=warps, num_stages=stages)
    for queries, keys, warps, stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4))
    if queries * keys <= 128 * 64 or stages < 4
]


def microseconds(call: Callable[[], None], *, repeats: int, layers: int) -> list[float]:
    """Of one layer, for each of so many runs of ``layers`` calls."""
    for _ in range(3):
        call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        for _ in range(layers):
            call()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1000 / layers for begin, end in events]


def paged(
    name: str, *, page: int, rows: int, cached: int, count: int, tuning: Tuning | None = None
) -> Callable[[], None]:
    """A call that attends in one layer through a backend of ours."""
    num_blocks = ceil_div(cached + count, page)
    pool = torch.randn(rows * num_blocks, 2, 2, page, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    backend: Any = make_backend(name.split()[0], pool)
    if tuning is not None:
        backend.prefill_tuning = tuning
    table = np.random.default_rng(0).permutation(rows * num_blocks).astype(np.int32).reshape(rows, num_blocks)
    starts = np.full(rows, cached, np.int64)
    step = backend.prepare(Rows(starts=starts, ends=starts + count, table=table, slots=np.arange(rows)), Scratch())
    packed = torch.randn(1, rows * count, HEADS + 2 * KV_HEADS, DIM, dtype=pool.dtype, device="cuda").transpose(1, 2)
    query, key, value = packed.split([HEADS, KV_HEADS, KV_HEADS], dim=1)

    def call() -> None:
        backend.forward(step, 1, query, key, value, scaling=DIM**-0.5)

    return call


def unpaged(*, rows: int, cached: int, count: int) -> Callable[[], None]:
    def made(tokens: int) -> torch.Tensor:
        return torch.randn(rows, HEADS, tokens, DIM, dtype=torch.bfloat16, device="cuda")

    query, key, value = made(count), made(cached + count), made(cached + count)
    bias = causal_lower_right(count, cached + count)

    def call() -> None:
        if cached:
            scaled_dot_product_attention(query, key, value, attn_mask=bias)
        else:
            scaled_dot_product_attention(query, key, value, is_causal=True)

    return call


def measure(
    name: str, *, page: int, rows: int, cached: int, count: int, repeats: int, tuning: Tuning | None = None
) -> dict[str, Any]:
    def found(family: str, variant: Any) -> Any:
        return None if family == "fa3" and name.endswith("fa2") else find_module(family, variant)

    flashinfer.find_module = found  # type: ignore[assignment]
    shape = {"rows": rows, "cached": cached, "count": count}
    call = unpaged(**shape) if name == "torch" else paged(name, page=page, tuning=tuning, **shape)
    samples = microseconds(call, repeats=repeats, layers=8)
    operations = 4 * HEADS * DIM * rows * (count * cached + count * (count + 1) // 2)
    middle = statistics.median(samples)
    return {
        "backend": name, **shape, "page": page, "tflop_per_s": round(operations / middle / 10**6, 1),
        "layer_us": round(middle, 1), "samples_us": [round(sample, 1) for sample in samples],
    }  # fmt: skip


def swept(*, repeats: int, **case: int) -> list[dict[str, Any]]:
    """Every tuning that the card can run, the fastest first."""
    found = []
    for tuning in SWEEP:
        try:
            row = measure("triton", repeats=repeats, tuning=tuning, **case)
        except Exception as error:  # noqa: BLE001 - too many registers, or too much shared memory
            print(tuning, type(error).__name__, file=sys.stderr)
            continue
        found.append({"tuning": asdict(tuning), **row})
    return sorted(found, key=lambda row: -row["tflop_per_s"])


def main() -> int:
    options = parser(__doc__)
    options.set_defaults(device="cuda")
    options.add_argument("--backend", nargs="+", choices=BACKENDS, default=BACKENDS)
    options.add_argument("--page", type=int, default=16)
    options.add_argument("--repeats", type=int, default=15)
    options.add_argument("--sweep", action="store_true")
    given = options.parse_args()
    if given.device != "cuda" or not torch.cuda.is_available():
        options.error("needs a CUDA device")
    found = []
    for rows, cached, count in CASES:
        if given.sweep:
            tried = swept(page=given.page, rows=rows, cached=cached, count=count, repeats=given.repeats)
            found += tried
            print(*(str({key: one[key] for key in ("tuning", "tflop_per_s")}) for one in tried[:4]), sep="\n")
            continue
        for name in given.backend:
            shape = {"page": given.page, "rows": rows, "cached": cached, "count": count}
            found.append(measure(name, repeats=given.repeats, **shape))
            print({key: value for key, value in found[-1].items() if key != "samples_us"}, file=sys.stderr)
    shape = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "dtype": "bfloat16"}
    file_away(given.output, {"shape": shape, "rows": found}, commit=given.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
