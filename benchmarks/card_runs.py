"""``tonnage bench`` and ``tonnage soak`` on a card with the shape that the bars are about, and what is filed of them.

Llama-3.1-8B's shape with random bfloat16 weights, 8,192 tokens a step, 256 sequences, 4,096 tokens each.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tonnage.cli.app import main
from tonnage.config import LimitKnobs, Setting
from tonnage.engine import Engine, EngineOptions
from tonnage.terms import LineKind
from tonnage.units import GiB

LLAMA_8B = Path(__file__).parents[1] / "examples" / "configs" / "llama-3.1-8b"
SHAPE = ("--random-weights", "--dtype", "bfloat16", "--max-batch-size", "256", "--max-num-tokens", "8192",
         "--max-seq-len", "4096")  # fmt: skip


def tonnage(verb: str, *flags: str, model: str = str(LLAMA_8B)) -> tuple[int, dict[str, Any]]:
    """The exit code, and the JSON that the verb keeps; its table is printed. Raises ``SystemExit`` if there is none."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "kept.json"
        code = main([verb, model, *SHAPE, *flags, "--output", str(kept)])
        if not kept.exists():
            raise SystemExit(code or 1)
        return code, json.loads(kept.read_text())


def llama_options(**changed: Any) -> EngineOptions:
    """The same for a script that drives the engine itself; its prompts are all alike, so nothing is found cached."""
    limits = LimitKnobs(
        max_batch_size=Setting(256), max_num_tokens=Setting(8192), max_seq_len=Setting(4096),
        prefix_caching=Setting(False),
    )  # fmt: skip
    fixed = {"model": str(LLAMA_8B), "device": "cuda", "dtype": "bfloat16", "random_weights": True}
    return EngineOptions(**{**fixed, "attention": "triton", "limit_knobs": limits, **changed})


def started(engine: Engine) -> dict[str, Any]:
    """Of an engine's start: its pool, and how long each stage took."""
    stages = {stage.name: stage.elapsed_ms for stage in engine.stages}
    return {"kv_bytes": engine.plan.kv.bytes, "stages_ms": stages}


def beside_weights_and_kv_gib(audit: Iterable[Mapping[str, Any]]) -> float:
    """What the engine takes that is neither weights nor KV, GiB."""
    left_out = {str(kind) for kind in (LineKind.KV, LineKind.WEIGHTS, LineKind.KEEP_FREE, LineKind.FOREIGN)}
    return sum(row["actual_bytes"] or 0 for row in audit if row["line"] not in left_out) / GiB
