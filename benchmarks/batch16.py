"""Sixteen requests at once: Tonnage against a loop of transformers' ``generate`` and against its static batch.

All three in one process, one after the other, on the same float32 weights; run it alone on the machine. Times on a
shared machine mean nothing by themselves: the figures are the two ratios.

    python benchmarks/batch16.py --output benchmarks/results/batch16.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from tonnage.config import LimitKnobs, Setting
from tonnage.engine import EngineOptions, start
from tonnage.engine.models import model_folder, quiet_transformers
from tonnage.sampling import SamplingParams
from tonnage.units import MiB

PROMPT_TOKENS = 35


def make_prompts(count: int) -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder("smollm2"))
    ids = tokenizer((Path(__file__).parents[1] / "LICENSE").read_text())["input_ids"]
    return [ids[60 * i : 60 * i + PROMPT_TOKENS - 4 + i % 8] for i in range(count)]


def ours(engine: Any, prompts: list[list[int]], new_tokens: int) -> int:
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        engine.submit(engine.request(f"r{i}", params, token_ids=prompt))
    total = 0
    while engine.has_work:
        total += sum(len(completion.token_ids) for completion in engine.step())
    return total


def generate(model: Any, batch: list[list[int]], new_tokens: int) -> int:
    width = max(map(len, batch))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in batch])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    return int((out.shape[1] - width) * len(batch))


def rate(run: Callable[[], int]) -> float:
    began = time.perf_counter()
    return run() / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    prompts = make_prompts(16)
    with quiet_transformers():
        model = transformers.AutoModelForCausalLM.from_pretrained(model_folder("smollm2"), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    limits = LimitKnobs(max_seq_len=Setting(256), max_batch_size=Setting(16), max_num_tokens=Setting(512))
    samples: dict[str, list[float]] = {"tonnage": [], "generate_loop": [], "generate_batch": []}
    with start(EngineOptions(model="smollm2", memory_bytes=2048 * MiB, limit_knobs=limits)) as engine:
        ours(engine, prompts, 4)
        generate(model, prompts[:1], 4)
        # Interleaved, so that whatever else the machine does falls on all three alike.
        for _ in range(args.repeats):
            samples["tonnage"].append(rate(lambda: ours(engine, prompts, args.new_tokens)))
            samples["generate_loop"].append(
                rate(lambda: sum(generate(model, [prompt], args.new_tokens) for prompt in prompts))
            )
            samples["generate_batch"].append(rate(lambda: generate(model, prompts, args.new_tokens)))
    medians = {name: statistics.median(values) for name, values in samples.items()}
    report = {
        "command": " ".join(sys.argv),
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "tokens_per_second": {name: [round(value, 2) for value in values] for name, values in samples.items()},
        "ratio_to_generate_loop": round(medians["tonnage"] / medians["generate_loop"], 2),
        "ratio_to_generate_batch": round(medians["tonnage"] / medians["generate_batch"], 2),
        "bar": "ratio_to_generate_loop >= 4",
    }
    text = json.dumps(report, indent=1)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
