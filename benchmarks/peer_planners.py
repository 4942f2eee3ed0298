"""Offline planners on the rows that our own is judged on: `python benchmarks/peer_planners.py PYTHON PYTHON2 OUT.json`.

PYTHON is the interpreter of an environment with vramscout 0.7.0 and modelinfo-cli 1.4.4, PYTHON2 of one with
aiconfigurator 0.12.0; nothing else of them is used, and no network. Each gets what it can take: the config.json, the
card's total of the record, the utilisation, the ranks and the length; modelinfo also the size of the checkpoint, which
it would read from the files' headers; aiconfigurator the sequences and the tokens of a step, and the one release of
vLLM that it has tables for on that card. What one refuses is an empty figure with its own words.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))

import peer_rows

from tonnage.costs.layers import Experts
from tonnage.costs.price import weights_price
from tonnage.peers.vllm.nontorch import is_linked
from tonnage.peers.vllm.setup import resolve
from tonnage.units import GiB

#: Run by the other interpreter: one row on its standard input, the pool of one rank in GiB on its output.
MODELINFO = """
import json, sys
from modelinfo.calculator import calculate_footprint
row = json.load(sys.stdin)
found = calculate_footprint(
    {"__metadata__": {"lazy_fetch": True, "total_size": row["checkpoint_bytes"]}}, config=row["config"],
    gpu_count=row["tp"], topology="nvlink" if row["is_linked"] else "pcie4", is_vllm=True,
    gpu_vram_bytes=row["total_bytes"] * row["tp"], gpu_util=row["utilisation"])
print(found["vllm_metrics"]["paged_kv_pool"] / row["tp"] / 2**30)
"""
#: Run by the third interpreter: a folder with a config.json, one row on its standard input.
AICONFIGURATOR = """
import json, logging, sys
logging.disable(logging.CRITICAL)
from aiconfigurator_core.sdk.memory import estimate_kv_cache
row = json.load(sys.stdin)
found = estimate_kv_cache(
    row["folder"], row["system"], "vllm", row["release"], max_num_tokens=row["chunk"],
    max_batch_size=row["sequences"], memory_fraction_kind="of_total", memory_fraction_value=row["utilisation"],
    tp_size=row["tp"], gpu_memory_capacity_bytes_override=row["total_bytes"],
    **({"moe_tp_size": row["tp"], "moe_ep_size": 1} if row["has_experts"] else {}))
print("POOL", found["total_kv_size_bytes"] / 2**30)
"""
#: What aiconfigurator calls a card, by the first letters of ours, and the release it has tables for.
SYSTEMS = {"H100": "h100_sxm", "80GB-class": "a100_sxm", "A100": "a100_sxm", "L40S": "l40s", "H200": "h200_sxm"}
ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM", "opt": "OPTForCausalLM", "mixtral": "MixtralForCausalLM",
    "gemma2": "Gemma2ForCausalLM", "gpt_oss": "GptOssForCausalLM", "granite": "GraniteForCausalLM",
    "phi3": "Phi3ForCausalLM", "deepseek_v2": "DeepseekV2ForCausalLM", "gemma3": "Gemma3ForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration", "llama4": "Llama4ForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration", "kimi_vl": "KimiVLForConditionalGeneration",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
}  # fmt: skip


def row_of(name: str) -> dict[str, object]:
    """What both are told of one start."""
    launch = peer_rows.launch_of(peer_rows.records()[name])
    setup = resolve(launch)
    raw = {key: value for key, value in launch.config.raw.items() if key not in ("source", "note", "read_from")}
    raw["architectures"] = [ARCHITECTURES.get(str(raw["model_type"]), "")]
    return {
        "config": raw, "tp": launch.rank.tp, "total_bytes": launch.card.total_bytes,
        "utilisation": float(setup.utilisation), "length": setup.max_model_len, "chunk": setup.batched_tokens,
        "is_linked": is_linked(launch.card), "kv_dtype": launch.kv_dtype or "auto",
        "checkpoint_bytes": weights_price(launch.config).quantity.bytes, "sequences": setup.max_num_seqs,
        "has_experts": any(isinstance(layer.feed_forward, Experts) for layer in launch.config.layers),
        "system": next((system for name, system in SYSTEMS.items() if launch.card.name.startswith(name)), None),
    }  # fmt: skip


def modelinfo(python: Path, row: dict[str, object]) -> dict[str, object]:
    done = _run([str(python), "-c", MODELINFO], text=json.dumps(row))
    if done.returncode:
        return {"pool_gib": None, "why": _last(done.stderr)}
    return {"pool_gib": round(float(done.stdout), 3)}


def vramscout(python: Path, row: dict[str, object]) -> dict[str, object]:
    """Budget less everything that it charges but the cache."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(row["config"]), encoding="utf-8")
        done = _run([
            str(python.parent / "vramscout"), folder, "--engine", "vllm", "--json", "--tp", str(row["tp"]),
            "--gpu-memory-utilization", str(row["utilisation"]), "--vram-gib", str(row["total_bytes"] / GiB),
            "--context", str(row["length"]), "--prefill-chunk", str(row["chunk"]), "--kv-dtype", str(row["kv_dtype"]),
        ])  # fmt: skip
    try:
        found = json.loads(done.stdout)
        charged = sum(value for part, value in found["parts_gib"].items() if part not in ("KV cache",))
        return {"pool_gib": round(found["memory_budget_gib"] - charged, 3)}
    except (ValueError, KeyError):
        return {"pool_gib": None, "why": _last(done.stderr or done.stdout)}


def aiconfigurator(python: Path, row: dict[str, object]) -> dict[str, object]:
    """The pool of one rank by its own model of the release it knows."""
    if row["system"] is None:
        return {"pool_gib": None, "why": "no such card"}
    systems = next(python.parents[1].glob("lib/python*/site-packages/aiconfigurator_core/systems/data"))
    releases = sorted(path.name for path in (systems / str(row["system"]) / "gemm" / "vllm").glob("*"))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(row["config"]), encoding="utf-8")
        told = {**row, "folder": folder, "release": releases[-1] if releases else None}
        done = _run([str(python), "-c", AICONFIGURATOR], text=json.dumps(told))
    lines = [line for line in done.stdout.splitlines() if line.startswith("POOL ")]
    if done.returncode or not lines:
        return {"pool_gib": None, "why": _last(done.stderr.replace(folder, "MODEL"))}
    return {"pool_gib": round(float(lines[-1].split()[1]), 3)}


def _run(command: list[str], *, text: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=120, env=environment, check=False
    )


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:160] if lines else "no answer"


def main(python: str, second: str, out: str) -> None:
    lists = peer_rows.eligible()
    found = {}
    for name in (*lists["pool"], *lists["pool_at_default"]):
        row = row_of(name)
        found[name] = {
            "vramscout 0.7.0": vramscout(Path(python), row),
            "modelinfo 1.4.4": modelinfo(Path(python), row),
            "aiconfigurator 0.12.0": aiconfigurator(Path(second), row),
        }
        print(name, found[name])
    about = "Pools in GiB of one rank as offline planners give them; made by benchmarks/peer_planners.py"
    Path(out).write_text(json.dumps({"about": about, "rows": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:4])
