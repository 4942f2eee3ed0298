"""The page of invariants names all 47 and only tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "invariants.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)))


def test_every_invariant_has_its_row():
    rows = re.findall(r"^\| (\d+) \| [^|]+ \| [^|]+ \|$", PAGE, re.MULTILINE)
    assert [int(row) for row in rows] == list(range(1, 48))


def test_the_tests_it_names_exist():
    assert NAMED
    missing = []
    for file, name in NAMED:
        path = ROOT / file
        found = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        if name and name not in found:
            missing.append(f"{file}::{name}")
    assert not missing
