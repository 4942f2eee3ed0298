"""The page of a plan in headless Chromium: its script looks up and shows, and nothing runs over its edges.

A copy of the page gets one more script, which does what a reader would do and writes down what it sees.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from page_samples import HOSTILE, hostile_page, made_page

from tonnage.report.page import Page, page_text

pytestmark = pytest.mark.browser

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-extensions", "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip
#: What a reader would do, and what is seen then. The first length and batch size are picked by the keyboard's event.
READER = """
const seen = { errors: window.broken, resources: performance.getEntriesByType("resource").length };
const section = document.querySelector(".series"), form = section.querySelector(".pick");
seen.before = section.querySelector(".told").textContent;
seen.isHidden = form.hidden;
for (const input of form.querySelectorAll("input")) input.value = 0;
form.dispatchEvent(new Event("input", { bubbles: true }));
seen.picked = section.querySelector(".told").textContent;
seen.outputs = [...form.querySelectorAll("output")].map((each) => each.textContent);
seen.selected = [...section.querySelectorAll(".sel")].map((each) => each.id);
const isFirst = (line) => line.getAttribute("x1") === line.dataset.stops.split(",")[0];
seen.cursors = [...section.querySelectorAll(".cursor")].map(isFirst);
section.querySelector(".own").dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
seen.hovered = section.querySelector(".told").textContent;
seen.over = document.documentElement.scrollWidth - document.documentElement.clientWidth;
seen.width = document.documentElement.clientWidth;
seen.bars = [...document.querySelectorAll(".bar")].map((bar) => bar.scrollWidth - bar.clientWidth);
seen.ground = getComputedStyle(document.body).backgroundColor;
const links = [...document.querySelectorAll(".bar a")];
links[0].focus();
seen.focused = document.activeElement === links[0];
seen.bold = document.querySelectorAll("b:not(.key):not(.span b)").length;
const out = document.createElement("pre");
out.id = "seen"; out.textContent = JSON.stringify(seen); document.body.append(out);
"""


def browse(page: Page, folder: Path, *flags: str, width: int = 1200, reader: bool = True, scripts: bool = True) -> str:
    """The document as Chromium has it once its scripts have run."""
    text = page_text(page)
    if reader:
        text = text.replace(
            "<title>", "<script>window.broken = []; onerror = (what) => broken.push(what);</script><title>", 1
        )
        text = text.replace("</body>", f"<script>{READER}</script></body>", 1)
    if not scripts:
        text = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    file = folder / "page.html"
    file.write_text(text, encoding="utf-8")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    argv = [
        program, *FLAGS, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900", *flags, "--dump-dom",
        file.as_uri(),
    ]  # fmt: skip
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=120).stdout


def seen_in(document: str) -> dict[str, Any]:
    found = re.search(r'<pre id="seen">(.*?)</pre>', document, re.DOTALL)
    assert found is not None, document[-500:]
    return json.loads(unescape(found[1]))


def test_a_reader_picks_a_shape_and_sees_its_plan(tmp_path: Path) -> None:
    _, page = made_page("qwen3-30b-a3b")
    seen = seen_in(browse(page, tmp_path))
    (series,) = page.series
    length, batch = series.lengths.index(series.own[0]), series.batches.index(series.own[1])
    assert (seen["errors"], seen["resources"], seen["isHidden"]) == ([], 0, False)
    assert seen["before"] == seen["hovered"] == series.cells[length][batch].told
    assert seen["picked"] == series.cells[0][0].told
    assert seen["outputs"] == [f"{series.lengths[0]:,}", f"{series.batches[0]:,}"]
    assert seen["selected"] == ["c0-0-0"]
    assert seen["cursors"] == [True, True]
    assert seen["focused"]
    assert seen["bars"] == [0] * len(seen["bars"])
    assert seen["over"] <= 0


def test_a_narrow_window_and_the_dark(tmp_path: Path) -> None:
    """Chromium opens no window narrower than 500."""
    _, page = made_page("qwen3.6-27b")
    seen = seen_in(browse(page, tmp_path, "--blink-settings=preferredColorScheme=0", width=500))
    assert seen["errors"] == []
    assert seen["width"] <= 500
    assert seen["over"] <= 0
    assert seen["ground"] == "rgb(22, 24, 27)"


def test_without_its_script_bar_and_tables_are_there(tmp_path: Path) -> None:
    """Chromium prints no document with scripts switched off, so the page loses its own."""
    _, page = made_page("llama-3.1-8b")
    document = browse(page, tmp_path, reader=False, scripts=False)
    assert "<script" not in document
    assert document.count('class="seg') >= len(page.segments)
    assert document.count('class="cell') == sum(len(row) for row in page.series[0].cells)
    assert '<form class="pick" hidden' in document
    assert 'class="sel' not in document


def test_markup_from_outside_stays_text(tmp_path: Path) -> None:
    document = browse(hostile_page(), tmp_path)
    seen = seen_in(document)
    assert seen["errors"] == []
    assert seen["bold"] == 0
    assert seen["picked"] == HOSTILE
    assert 'alert("x")' not in "".join(re.findall(r"<script>(.*?)</script>", document, re.DOTALL))
