"""Makes the packages of the engine rooms impossible to import, as on a laptop that has only the core installed.

``TONNAGE_TESTS_CORE_ONLY=1`` in the environment switches it on: for ``tests/unit`` through its conftest, and for
``python tests/without_engine.py MODULE...``, which imports the modules named and prints what failed.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder

SWITCH = "TONNAGE_TESTS_CORE_ONLY"
BLOCKED = frozenset({"torch", "numpy", "transformers", "safetensors"})


class _Refuser(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> None:
        if fullname.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{fullname} is blocked: rows 0 to 4 need neither torch nor numpy", name=fullname)


def is_asked() -> bool:
    return os.environ.get(SWITCH) == "1"


def block() -> None:
    """From here on nobody imports them; raises if somebody has already."""
    early = sorted(BLOCKED & set(sys.modules))
    if early:
        raise RuntimeError(f"imported before the block: {', '.join(early)}")
    sys.meta_path.insert(0, _Refuser())


def main(modules: Sequence[str]) -> int:
    block()
    failures = 0
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            failures += 1
            print(f"{module}: {error}")
    return min(failures, 1)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
