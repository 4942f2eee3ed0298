"""Requests that begin alike: what prefix caching leaves to compute, and whether it changes a word.

The demo model serves the same requests twice, all with one long system prompt, with reuse on and with reuse off. The
bar: the second run with reuse computes under 15 % of the prefill tokens of the first, and the texts of all four runs
are the same.

    python benchmarks/shared_prompt.py --output benchmarks/results/shared-prompt.json
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from filing import file_away, parser
from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.engine import Engine, EngineOptions, start
from tonnage.sampling import SamplingParams
from tonnage.units import MiB

NUM_REQUESTS, SYSTEM_TOKENS, QUESTION_TOKENS, NEW_TOKENS = 32, 400, 12, 24
BAR_SHARE = 0.15


def prompts(engine: Engine) -> list[list[int]]:
    ids = engine.text.encode((Path(__file__).parents[1] / "LICENSE").read_text())
    system, rest = ids[:SYSTEM_TOKENS], ids[SYSTEM_TOKENS:]
    return [system + rest[QUESTION_TOKENS * i : QUESTION_TOKENS * (i + 1)] for i in range(NUM_REQUESTS)]


def run(engine: Engine, name: str) -> dict[str, Any]:
    """Serve all requests at once. Prefill tokens are those of rows that compute part of a prompt."""
    computed = 0
    waiting = {f"{name}-{i}": prompt for i, prompt in enumerate(prompts(engine))}

    def observe(event: Any) -> None:
        nonlocal computed
        if event.kind == "computed" and event.start < len(waiting[event.request_id]):
            computed += event.count

    engine.observe = observe
    began = time.perf_counter()
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    for request_id, prompt in waiting.items():
        engine.submit(engine.request(request_id, params, token_ids=prompt))
    texts: dict[str, tuple[int, ...]] = {}
    while engine.has_work:
        texts |= {done.request_id.removeprefix(name): done.token_ids for done in engine.step()}
    return {
        "prefill_tokens": computed,
        "seconds": round(time.perf_counter() - began, 2),
        "texts": [texts[key] for key in sorted(texts)],
    }


def measure(*, reuse: bool) -> list[dict[str, Any]]:
    options = EngineOptions(
        model="smollm2",
        memory_bytes=1536 * MiB,
        knobs=Knobs(kv_tokens=Setting(16_384)),
        limit_knobs=LimitKnobs(
            max_seq_len=Setting(640), max_batch_size=Setting(16), max_num_tokens=Setting(512),
            prefix_caching=Setting(reuse),
        ),
        fence=False,
    )  # fmt: skip
    with start(options) as engine:
        return [run(engine, name) for name in ("first", "second")]


def main() -> int:
    given = parser(__doc__).parse_args()
    runs = {"reuse": measure(reuse=True), "no_reuse": measure(reuse=False)}
    texts = [one.pop("texts") for found in runs.values() for one in found]
    first, second = (one["prefill_tokens"] for one in runs["reuse"])
    figures = {
        "requests": NUM_REQUESTS,
        "system_tokens": SYSTEM_TOKENS,
        "runs": runs,
        "second_of_first": round(second / first, 4),
        "first_of_no_reuse": round(first / runs["no_reuse"][0]["prefill_tokens"], 4),
        "bar": f"second run at most {BAR_SHARE} of the first, texts identical",
        "texts_identical": all(one == texts[0] for one in texts),
    }
    for name, value in figures.items():
        print(f"{name:18} {value}")
    file_away(given.output, figures, commit=given.commit)
    return 0 if second < BAR_SHARE * first and figures["texts_identical"] else 1


if __name__ == "__main__":
    sys.exit(main())
