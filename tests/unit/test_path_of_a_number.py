"""docs/path-of-a-number.md and docs/curve.md are executed: every block must print what its page shows, and prose may
not invent numbers.

Where the plan has changed for a good reason, ``python tests/unit/test_path_of_a_number.py`` writes what is printed
now into the blocks of both pages; their sentences are then to be read again.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer 0.20 names what click 8.5 has deprecated
    from tonnage.cli.app import main

ROOT = Path(__file__).resolve().parents[2]
PAGE, CURVE = (ROOT / "docs" / name for name in ("path-of-a-number.md", "curve.md"))
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: Rows of a long output that the page leaves out.
LEFT_OUT = "[...]"


@dataclass(frozen=True)
class Said:
    """A command or statement of the page, and the output that stands below it."""

    source: str
    output: str


def parts(kind: str, body: str) -> Iterator[Said]:
    """Each ``$ command`` or ``>>> statement`` with the rows up to the next one."""
    prompt, more = ("$ ", None) if kind == "console" else (">>> ", "... ")
    source: list[str] = []
    output: list[str] = []
    for row in body.splitlines(keepends=True):
        if row.startswith(prompt):
            if source:
                yield Said("".join(source), "".join(output))
            source, output = [row], []
        elif more and row.startswith(more) and not output:
            source.append(row)
        else:
            output.append(row)
    yield Said("".join(source), "".join(output))


def run(kind: str, source: str, names: dict[str, object]) -> str:
    """What it prints, standing in the repository's root with no hub and 96 columns."""
    out = io.StringIO()
    here = Path.cwd()
    os.chdir(ROOT)
    try:
        with contextlib.redirect_stdout(out), mock.patch.dict(os.environ, {"HF_HUB_OFFLINE": "1", "COLUMNS": "96"}):
            if kind == "console":
                program, *argv = shlex.split(source.removeprefix("$ "))
                assert program == "tonnage"
                assert main(argv) == 0
            else:
                text = re.sub(r"^(>>>|\.\.\.) ", "", source, flags=re.MULTILINE)
                exec(compile(text, "page", "single"), names)
    finally:
        os.chdir(here)
    return "".join(row.rstrip() + "\n" for row in out.getvalue().splitlines())


def shortened(printed: str, shown: str) -> str:
    """``printed`` without the rows that ``shown`` leaves out. What stands between two such places is found by its first
    row, and counts as many rows as are shown."""
    if LEFT_OUT not in shown:
        return printed
    head, *middle, tail = (piece.splitlines(keepends=True) for piece in shown.split(LEFT_OUT + "\n"))
    rows = printed.splitlines(keepends=True)
    kept = rows[: len(head)]
    for piece in middle:
        at = rows.index(piece[0])
        kept += [LEFT_OUT + "\n", *rows[at : at + len(piece)]]
    return "".join([*kept, LEFT_OUT + "\n", *rows[len(rows) - len(tail) :]])


def executed(page: str) -> Iterator[tuple[Said, str]]:
    """Everything on the page in order, with what it prints."""
    names: dict[str, object] = {}
    for kind, body in BLOCK.findall(page):
        for said in parts(kind, body):
            yield said, shortened(run(kind, said.source, names), said.output)


@cache
def results(page: Path) -> list[tuple[Said, str]]:
    return list(executed(page.read_text()))


@pytest.mark.parametrize(("page", "least"), [(PAGE, 20), (CURVE, 3)], ids=["path", "curve"])
def test_everything_prints_what_the_page_shows(page: Path, least: int) -> None:
    for said, printed in results(page):
        assert said.output == printed, said.source
    assert len(results(page)) >= least


@pytest.mark.parametrize("page", [PAGE, CURVE], ids=["path", "curve"])
def test_prose_has_no_number_that_is_not_computed(page: Path) -> None:
    """Each number of two digits or more in a sentence stands in a command, a statement or an output."""
    prose = BLOCK.sub("", page.read_text())
    computed = " ".join(said.source + printed for said, printed in results(page)).replace(",", "")
    numbers = {number.replace(",", "").rstrip(".") for number in re.findall(r"(?<![\w.-])\d[\d,.]*\d", prose)}
    assert numbers or page == CURVE
    missing = sorted(number for number in numbers if not re.search(rf"(?<![\d.]){re.escape(number)}(?![\d])", computed))
    assert not missing


def test_the_arithmetic_of_the_page_is_a_chain() -> None:
    """The derivation as it is printed, followed with a pencil."""
    (table,) = (printed for said, printed in results(PAGE) if "plan.steps:" in said.source)
    now = 80 * 2**30
    for row in table.splitlines():
        found = re.fullmatch(r"(?:[a-z_]+ )+ *(-|tokens for) *([\d,]+) -> *([\d,]+)", row)
        assert found is not None, row
        amount, after = (int(found[place].replace(",", "")) for place in (2, 3))
        if found[1] == "-":
            assert now - amount == after, row
            now = after
        else:
            assert after == now // amount * 16


def test_a_wrong_figure_on_the_page_is_noticed() -> None:
    page = PAGE.read_text()
    tokens = re.search(r">>> plan\.kv\.tokens\n(\d+)\n", page)
    assert tokens is not None
    wrong = page.replace(f">>> plan.kv.tokens\n{tokens[1]}", f">>> plan.kv.tokens\n{int(tokens[1]) + 16}")
    assert any(said.output != printed for said, printed in executed(wrong))


def renewed(page: str) -> str:
    """The page with what is printed now below each command and statement."""
    names: dict[str, object] = {}

    def block(found: re.Match[str]) -> str:
        kind, body = found[1], found[2]
        rows = [said.source + shortened(run(kind, said.source, names), said.output) for said in parts(kind, body)]
        return f"```{kind}\n{''.join(rows)}```"

    return BLOCK.sub(block, page)


if __name__ == "__main__":
    for each in (PAGE, CURVE):
        each.write_text(renewed(each.read_text()))
    sys.exit(0)
