"""How long ``tonnage plan`` takes from nothing, with torch and numpy blocked: best of several fresh processes.

Prints JSON with every sample and the versions it ran with; exits 1 where the best is not under ``--limit-ms``.

    python benchmarks/cli_start.py --output benchmarks/results/cli-start.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples" / "configs" / "llama-3.1-8b"
BLOCKED = ("torch", "numpy")

#: Runs in the child before anything else; a child that reached for a blocked module fails instead of being timed.
SITE_CUSTOMIZE = f"""
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED!r}:
            raise ImportError(f"{{name}} is blocked here")

sys.meta_path.insert(0, Block())
"""


def command(*, as_json: bool) -> list[str]:
    return [sys.executable, "-m", "tonnage", "plan", str(MODEL), "--memory", "80GiB", *(["--json"] if as_json else [])]


def elapsed_ms(args: list[str], environment: dict[str, str]) -> float:
    """Milliseconds of one process, start to exit. Raises ``CalledProcessError`` where it fails."""
    began = time.perf_counter()
    subprocess.run(args, env=environment, check=True, capture_output=True)
    return (time.perf_counter() - began) * 1000


def measure(*, samples: int) -> dict[str, list[float]]:
    """Milliseconds of every sample, for the table and for JSON. One run first fills the caches of byte code."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(SITE_CUSTOMIZE)
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        check_block(environment)
        found = {}
        for name, as_json in (("table", False), ("json", True)):
            elapsed_ms(command(as_json=as_json), environment)
            taken = [elapsed_ms(command(as_json=as_json), environment) for _ in range(samples)]
            found[name] = [round(value, 1) for value in taken]
        return found


def check_block(environment: dict[str, str]) -> None:
    for module in BLOCKED:
        done = subprocess.run([sys.executable, "-c", f"import {module}"], env=environment, capture_output=True)
        assert b"is blocked here" in done.stderr, f"{module} can be imported: the figures would mean nothing"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--limit-ms", type=float, default=300.0)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    samples = measure(samples=given.samples)
    best = {name: min(values) for name, values in samples.items()}
    result: dict[str, Any] = {
        "benchmark": "cli_start",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": "tonnage plan examples/configs/llama-3.1-8b --memory 80GiB",
        "blocked": list(BLOCKED),
        "samples_ms": samples,
        "best_ms": best,
        "limit_ms": given.limit_ms,
        "within_limit": max(best.values()) < given.limit_ms,
        "versions": {name: version(name) for name in ("tonnage", "typer", "click", "rich")},
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "load": list(os.getloadavg()),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if given.output is not None:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(text + "\n")
    return 0 if result["within_limit"] else 1


if __name__ == "__main__":
    sys.exit(main())
