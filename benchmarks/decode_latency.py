"""Whether long prompts hold up sequences that decode: times between tokens of 8 decodes while prompts keep arriving.

The workload ``stalls`` on the embedded model: prompts of 2,000 random tokens arrive one after another, with some quiet
steps between them, while 8 sequences decode. The bar is on the slowest hundredth of all times between tokens.

    python benchmarks/decode_latency.py --output benchmarks/results/decode-latency.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tonnage.bench.measure import measure
from tonnage.bench.report import bench_document, figures, show_bench, text_of
from tonnage.bench.workloads import Span, workload
from tonnage.config import LimitKnobs, Setting
from tonnage.engine import EngineOptions, start
from tonnage.report.draw import console_for
from tonnage.units import MiB

#: p99 of the time between tokens is at most so many times its median.
BAR = 3.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--memory-mib", type=int, default=1536)
    parser.add_argument("--output-tokens", type=int, default=256, help="of each decode; decides how long it takes")
    parser.add_argument("--chunk-tokens", type=int, help="prompt tokens in a step that also decodes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    limits = LimitKnobs(max_seq_len=Setting(2048), max_batch_size=Setting(16), max_num_tokens=Setting(512))
    options = EngineOptions(
        model=given.model, memory_bytes=given.memory_mib * MiB, limit_knobs=limits, chunk_tokens=given.chunk_tokens
    )
    drawn = workload("stalls", output_tokens=Span(given.output_tokens, given.output_tokens), seed=given.seed)
    with start(options) as engine:
        measured = measure(engine, drawn, num_warmup=1)
        result = engine.result()
    show_bench(measured, result, console_for(sys.stderr))
    times = figures(measured).percentiles_us
    every, quiet = times["time_between_tokens"], times.get("time_between_tokens, uninterrupted")
    assert every is not None, "nothing was decoded"
    assert quiet is not None, "no prompt came between: raise --output-tokens"
    found = {
        "p99_to_p50": round(every["p99"] / every["p50"], 2),
        "p99_to_p50_uninterrupted": round(every["p99"] / quiet["p50"], 2),
        "bar": f"both <= {BAR:g}: prompts come so often that the p50 of all gaps is one that they lengthen",
    }
    print(json.dumps(found, indent=1))
    if given.output is not None:
        document = bench_document(measured, result, command=sys.argv)
        given.output.write_text(text_of({**document, **found}))
    return 0 if max(found["p99_to_p50"], found["p99_to_p50_uninterrupted"]) <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
