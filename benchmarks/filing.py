"""What every figure is filed with: when, on what, with which versions, by which command, of which commit."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "cuda-bindings",
    "cupy-cuda13x",
    "rmm-cu13",
    "torch_memory_saver",
    "numpy",
)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options every benchmark of memory has."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=("host", "cuda"), default="host")
    made.add_argument("--output", type=Path, help="file the figures here, as JSON")
    made.add_argument("--commit", default=None, help="what to file as the commit where there is no git")
    return made


def header(commit: str | None = None) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(Path(word).name if word.startswith("/") else word for word in [sys.executable, *sys.argv]),
        "commit": commit or _git_commit(),
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "gpu": _gpu()},
        "versions": {"python": platform.python_version(), **_versions()},
    }


def file_away(path: Path | None, figures: Mapping[str, Any], *, commit: str | None = None) -> None:
    """Write the figures with their header, or nothing without a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**header(commit), **figures}, indent=1) + "\n")


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _gpu() -> str | None:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _git_commit() -> str | None:
    try:
        asked = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        return asked.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
