"""The page of invariants names all 47; it and the page of guarantees name only tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "invariants.md").read_text()
PAGES = [PAGE, (ROOT / "docs" / "guarantees.md").read_text()]


def test_every_invariant_has_its_row():
    rows = re.findall(r"^\| (\d+) \| [^|]+ \| [^|]+ \|$", PAGE, re.MULTILINE)
    assert [int(row) for row in rows] == list(range(1, 48))


@pytest.mark.parametrize("page", PAGES, ids=["invariants", "guarantees"])
def test_the_tests_it_names_exist(page):
    named = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page)))
    assert named
    missing = []
    for file, name in named:
        path = ROOT / file
        found = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        if name and name not in found:
            missing.append(f"{file}::{name}")
    assert not missing
