"""Pages of plans for tests: what a page is made of, and its pieces as a parser of HTML sees them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from typing import Any

from tonnage.hardware import card_for, find_card
from tonnage.planner import find_config, plan_without_device
from tonnage.planner.grid import axes, grid_without_device
from tonnage.report.page import Page, page_of, page_text
from tonnage.terms import MemoryPlan
from tonnage.units import parse_bytes

#: Dense, mixture of experts, hybrid on a unified machine, latent with refused cells.
SAMPLES = {
    "llama-3.1-8b": "H100", "qwen3-30b-a3b": "H200", "qwen3.6-27b": "GB10", "deepseek-v2-lite": "A100-40",
    "smollm2": "2080MiB",
}  # fmt: skip
HOSTILE = "</script><script>alert(\"x\")</script>&<!--slot:data--><b title='a'>"


@cache
def made_page(model: str) -> tuple[MemoryPlan, Page]:
    config, where = find_config(model), SAMPLES[model]
    card = card_for(None, parse_bytes(where, knob="")) if where.endswith("iB") else find_card(where)
    made = plan_without_device(config, card=card)
    lengths, batches = axes(made, positions=config.max_position_embeddings)
    grid = grid_without_device(
        config, lengths=lengths, batches=batches, shown=lambda stages: stages[0], card=card, knobs=made.knobs,
        limit_knobs=made.limit_knobs,
    )  # fmt: skip
    return made, page_of(made, grid, version="0.0.0")


def hostile_page() -> Page:
    """Every text that can come from outside is markup that wants to get out."""
    _, page = made_page("llama-3.1-8b")
    first = replace(page.segments[0], name=HOSTILE, reason=HOSTILE, ref=HOSTILE, source=HOSTILE)
    parts = replace(page.segments[2], parts=(first,))
    series = page.series[0]
    cell = replace(series.cells[0][0], told=HOSTILE, refused=HOSTILE)
    cells = ((cell, *series.cells[0][1:]), *series.cells[1:])
    return replace(
        page, model=HOSTILE, device=HOSTILE, headline=HOSTILE, version=HOSTILE, facts=((HOSTILE, HOSTILE), *page.facts),
        segments=(first, page.segments[1], parts, *page.segments[3:]), warnings=(HOSTILE,),
        steps=((HOSTILE,) * 5, *page.steps), caps=((HOSTILE,) * 4, *page.caps),
        series=(replace(series, name=HOSTILE, cells=cells),),
    )  # fmt: skip


class Seen(HTMLParser):
    """Tags with their attributes, the text, and the content of scripts, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.comments: list[str] = []
        self.text = ""
        self._in = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            self.scripts[-1] += data
        elif self._in != "style":
            self.text += data

    def all(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        """Attributes of every such tag; ``class_`` is one of its classes."""
        wanted = attributes.pop("class_", None)
        return [
            found
            for name, found in self.tags
            if name == tag
            and all(found.get(key) == value for key, value in attributes.items())
            and (wanted is None or wanted in (found.get("class") or "").split())
        ]

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])


@cache
def seen(model: str) -> Seen:
    return Seen(page_text(made_page(model)[1]))
