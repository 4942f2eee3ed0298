"""The glossary tells of types that exist, in the files that it names, and of every public one that rooms share."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tonnage.config import Knobs, LimitKnobs

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "tonnage"
PAGE = (ROOT / "docs" / "glossary.md").read_text()
ROWS = [
    tuple(cell.strip() for cell in row) for row in re.findall(r"^\|([^|]+)\|([^|]+)\|([^|]+)\|([^|]+)\|$", PAGE, re.M)
]
WORDS = [row for row in ROWS if row[0] != "word" and not set(row[0]) <= set("-")]


def classes(file: str) -> set[str]:
    return {node.name for node in ast.parse((SOURCE / file).read_text()).body if isinstance(node, ast.ClassDef)}


def test_every_line_of_a_table_is_a_row_of_four():
    assert len(ROWS) == sum(line.startswith("|") for line in PAGE.splitlines())
    assert len(WORDS) > 80


@pytest.mark.parametrize("row", WORDS, ids=lambda row: row[0])
def test_the_type_is_in_the_file(row):
    word, meaning, kind, file = row
    assert word
    assert len(meaning.split()) >= 3
    if "–" in (kind, file):
        assert kind == file == "–"
        return
    assert kind.strip("`") in classes(file.strip("`"))


@pytest.mark.parametrize("file", ["config.py", "layout.py", "terms.py"])
def test_every_public_class_has_a_row(file):
    told = {row[2].strip("`") for row in WORDS if row[3] == f"`{file}`"}
    assert {name for name in classes(file) if not name.startswith("_")} <= told


def test_every_knob_is_named():
    for kind in (Knobs, LimitKnobs):
        for name in kind.__dataclass_fields__:
            assert f"`{name}`" in PAGE, name


def test_no_word_has_two_rows():
    words = [row[0] for row in WORDS]
    assert sorted(words) == sorted(set(words))
