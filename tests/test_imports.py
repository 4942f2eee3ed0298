"""Rows 0 to 4 work where torch and numpy are not installed: proved in processes that cannot import them.

Their tests are those of ``tests/unit``, which ``make test`` runs in such processes.
"""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import without_engine

ROOT = Path(__file__).parent.parent


def core_rooms() -> list[str]:
    """The rooms that the import contract keeps free of torch and numpy: the table in pyproject.toml is the only one."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    core = next(contract for contract in contracts if "torch" in contract.get("forbidden_modules", ()))
    return list(core["source_modules"])


def modules_of(room: str) -> list[str]:
    spec = importlib.util.find_spec(room)
    assert spec is not None, f"{room} is in the contract but does not exist"
    inside = pkgutil.walk_packages(spec.submodule_search_locations or [], prefix=f"{room}.")
    return [room, *(module.name for module in inside)]


def run(*args: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, without_engine.SWITCH: "1"}
    return subprocess.run([sys.executable, *args], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_every_module_of_the_core_imports_alone():
    modules = [module for room in core_rooms() for module in modules_of(room)]
    assert len(modules) >= len(core_rooms()) > 5
    done = run(str(Path(without_engine.__file__)), "tonnage", *modules)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", sorted(without_engine.BLOCKED))
def test_the_block_holds(module):
    done = run(str(Path(without_engine.__file__)), module)
    assert (done.returncode, "is blocked" in done.stdout) == (1, True), done.stdout + done.stderr
