"""Command lines in rows: a shell reads back the very words, at any width."""

from __future__ import annotations

import io
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tonnage.hardware import find_card
from tonnage.peers import equivalents
from tonnage.planner import find_config, plan_without_device
from tonnage.report.flags import command
from tonnage.report.shell import GOES_ON, pasteable
from tonnage.report.table import show_plan

PLAN = plan_without_device(find_config("smollm2"), card=find_card("H100"))
WORDS = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\x00\r\n"), max_size=12), min_size=1)


def joined(rows: str) -> str:
    return rows.replace("\\\n", " ")


@given(words=WORDS, width=st.integers(1, 120), label=st.integers(0, 14))
def test_the_words_come_back(words: list[str], width: int, label: int) -> None:
    rows = pasteable(shlex.join(words), width, indent=" " * label)
    assert shlex.split(joined(rows)) == words


@given(words=st.lists(st.from_regex(r"(--)?[a-z]{1,9}", fullmatch=True), min_size=1), width=st.integers(20, 100))
def test_rows_fit_and_are_no_shorter_than_they_must(words: list[str], width: int) -> None:
    rows = pasteable(shlex.join(words), width).splitlines()
    assert all(len(row) <= width for row in rows)
    assert all(row.endswith(GOES_ON) for row in rows[:-1])
    assert not rows[-1].endswith("\\")


@pytest.mark.parametrize(
    ("text", "width", "rows"),
    [
        ("tonnage plan m --tp 2", 80, ["tonnage plan m --tp 2"]),
        ("tonnage plan m --tp 2 --pp 4", 24, ["tonnage plan m --tp 2 \\", "    --pp 4"]),
        ("tonnage plan m --tp 2", 18, ["tonnage plan m \\", "    --tp 2"]),
        ("x --without 'penalty tables'", 20, ["x --without \\", "    'penalty tables'"]),
        ("x --flag --size 2", 12, ["x --flag \\", "    --size \\", "    2"]),
    ],
)
def test_an_option_keeps_its_value_where_there_is_room(text: str, width: int, rows: list[str]) -> None:
    assert pasteable(text, width).splitlines() == rows


def test_bash_reads_what_is_shown() -> None:
    text = pasteable("printf %s@ 'a b' --c \"it's\" --d '$HOME' '`x`' --e 1", 16)
    done = subprocess.run(["bash", "-c", text], check=True, capture_output=True, text=True)
    assert done.stdout == "a b@--c@it's@--d@$HOME@`x`@--e@1@"


@pytest.mark.parametrize("width", [40, 60, 100, 160])
def test_flags_of_other_engines_can_be_pasted(width: int) -> None:
    out = io.StringIO()
    show_plan(PLAN, Console(file=out, width=width, highlight=False, markup=False, emoji=False))
    end = out.getvalue().split("About the same pool elsewhere\n")[1]
    for each in equivalents(PLAN)[:2]:
        shown = end.split(f"{each.engine.title:<14}", 1)[1].split("by its share")[0].rstrip()
        flags = command(each, (*each.limits, *each.exact))
        assert subprocess.run(["bash", "-n", "-c", f"engine {shown}"], check=False).returncode == 0
        assert shlex.split(joined(shown)) == flags.split()


@pytest.mark.parametrize("width", [50, 60, 70, 87])
def test_a_narrow_plan_keeps_to_its_columns(width: int) -> None:
    """What is known of a line stands under it; nothing falls to the first column of the next row."""
    config = Path(__file__).parents[2] / "examples" / "configs" / "llama-3.1-8b"
    out = io.StringIO()
    plan = plan_without_device(find_config(str(config)), card=find_card("H100"))
    show_plan(plan, Console(file=out, width=width, highlight=False, markup=False, emoji=False))
    lines = out.getvalue().split("About the same pool elsewhere")[0].splitlines()
    assert not [
        row for row in lines if row.startswith(("derived", "predicted", "assumed", "declared", "how", "at once"))
    ]
    told = " ".join(out.getvalue().split())
    assert "derived: the model's parameters lie in one arena" in told or "known how" in told
    assert max(map(len, (row.rstrip() for row in lines))) <= width
