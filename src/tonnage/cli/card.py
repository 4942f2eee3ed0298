"""Options of the verbs that put load on an engine, for where it runs on a card."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

import typer


@dataclass(frozen=True, slots=True, kw_only=True)
class CardOptions:
    """What is loaded and compiled."""

    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Load nothing: a folder with a config.json will do.")
    ] = False
    no_compile: Annotated[
        bool, typer.Option("--no-compile", help="On a card, run layers as they are, not compiled.")
    ] = False

    def onto(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The keywords of ``EngineOptions`` with these in them."""
        found = dict(settings)
        if self.random_weights:
            found["random_weights"] = True
        if self.no_compile:
            found["compile"] = False
        return found


def card_ordinal(settings: dict[str, Any]) -> int | None:
    """The number of the card that is asked for; None for the host, and for what is no device."""
    match = re.fullmatch(r"cuda(?::(\d{1,3}))?", settings.get("device", "cpu"))
    return int(match[1] or 0) if match else None
