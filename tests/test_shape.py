"""The code stays small enough to read in an afternoon: long functions and files need a reason, in the tables here."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from tonnage import config, layout, terms

SOURCE = Path(__file__).parent.parent / "src"
MAX_FUNCTION_LINES, MAX_FILE_LINES = 60, 400

#: "path:qualified name" -> why the function is better long; "path" -> why the file is. Paths start at src/.
LONG_FUNCTIONS: dict[str, str] = {}
LONG_FILES: dict[str, str] = {
    "tonnage/terms.py": "the vocabulary that passes between rooms: declarations with their units, read in one place",
}

#: Fragments that say less than the house's endings ``_bytes``, ``_tokens``, ``_fraction`` and the start ``num_``.
BANNED_WORDS = {"mem": "memory, or what it holds", "sz": "_bytes", "ratio": "_fraction"}


def files() -> dict[str, str]:
    return {path.relative_to(SOURCE).as_posix(): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}


def functions(tree: ast.AST, prefix: str = "") -> list[tuple[str, int]]:
    """(qualified name, lines from ``def`` to the last one), nested functions and methods included."""
    found = []
    for node in ast.iter_child_nodes(tree):
        inner = prefix
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{prefix}{node.name}."
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append((prefix + node.name, (node.end_lineno or node.lineno) - node.lineno + 1))
        found += functions(node, inner)
    return found


def lengths() -> tuple[dict[str, int], dict[str, int]]:
    """Lines of every function and of every file."""
    texts = files()
    per_function = {f"{path}:{name}": n for path, text in texts.items() for name, n in functions(ast.parse(text))}
    return per_function, {path: len(text.splitlines()) for path, text in texts.items()}


def public_fields() -> list[str]:
    return [
        f"{name}.{field.name}"
        for module in (config, layout, terms)
        for name, kind in vars(module).items()
        if dataclasses.is_dataclass(kind) and not name.startswith("_") and kind.__module__ == module.__name__
        for field in dataclasses.fields(kind)
        if not field.name.startswith("_")
    ]


def test_the_longest_are_told(capsys):
    per_function, per_file = lengths()
    with capsys.disabled():
        print(f"\n{len(per_file)} files, {sum(per_file.values()):,} lines, {len(per_function)} functions, ", end="")
        print(f"median {sorted(per_function.values())[len(per_function) // 2]} lines; the longest:")
        for table in (per_function, per_file):
            for name, num_lines in sorted(table.items(), key=lambda entry: -entry[1])[:10]:
                print(f"{num_lines:6d}  {name}")


@pytest.mark.parametrize(
    ("kind", "limit", "reasons"),
    [(0, MAX_FUNCTION_LINES, LONG_FUNCTIONS), (1, MAX_FILE_LINES, LONG_FILES)],
    ids=["functions", "files"],
)
def test_what_is_long_has_a_reason(kind, limit, reasons):
    table = lengths()[kind]
    long = {name: num_lines for name, num_lines in table.items() if num_lines > limit}
    assert not set(long) - set(reasons), f"over {limit} lines without a reason: {long}"
    assert not set(reasons) - set(long), "reasons for what is no longer long: remove them"


@pytest.mark.parametrize("name", public_fields())
def test_names_say_their_unit(name):
    words = set(re.split(r"[._]", name.lower().removesuffix("s")))
    banned = sorted(words & set(BANNED_WORDS))
    assert not banned, f"{name}: instead of {banned[0]!r} say {BANNED_WORDS[banned[0]]}"


def test_no_two_test_files_have_one_name():
    """They are modules without packages: of two of one name pytest can only collect one, as ``make test-gpu`` would."""
    names = [path.name for path in Path(__file__).parent.rglob("*.py") if path.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))


def test_unit_tests_need_neither_torch_nor_numpy():
    """They run where both are blocked and nowhere else: one that skips without them would never run."""
    needy = re.compile(r"^\s*(?:import|from) (?:torch|numpy)\b|importorskip", re.MULTILINE)
    unit = (Path(__file__).parent / "unit").glob("*.py")
    assert [path.name for path in unit if needy.search(path.read_text())] == []
