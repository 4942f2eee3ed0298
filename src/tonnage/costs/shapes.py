"""Shapes of published models that come with the package, so that a plan needs neither files nor a network.

``data/shapes.json`` holds each as its config.json would have it, abbreviated to what decides about bytes, with where
that was read, and other ids under which the same shape was published, with what differs there (positions, a
quantisation). The file is parsed when the first name is looked up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from tonnage.costs.config import ModelConfig
from tonnage.errors import ModelNotFound

#: How alike a name must be to be suggested.
ALIKE = 0.75
_TRUST = {"read": "read from a config.json", "known": "as published", "inferred": "inferred"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One name that a user may type. ``config`` is the parsed config.json that it stands for.

    source  "read" from a config.json, "known" from the published one, "inferred" from figures that were logged
    origin  whose config.json was read; empty where none was
    notes   what to doubt about it; a plan repeats them
    """

    name: str
    source: str
    origin: str
    notes: tuple[str, ...]
    config: Mapping[str, object]

    def read(self) -> ModelConfig:
        config = ModelConfig.from_dict(self.config, name=self.name)
        return replace(config, notes=(*config.notes, *self.notes))


def shape_names() -> tuple[str, ...]:
    """Every built-in shape by its short name, in order."""
    return tuple(_data()["shapes"])


def find_shape(text: str) -> Shape | None:
    """The built-in shape of that name or hub id; case and punctuation do not matter. None where there is none.

    Raises ``ModelNotFound`` for a model that was met in logs and whose shape nobody told.
    """
    wanted = _plain(text)
    unknown: Mapping[str, str] = _data()["unknown"]
    for name, why in unknown.items():
        if wanted == _plain(name):
            raise ModelNotFound(
                f"{name} is not among the built-in shapes: {why}", knob="model", value=text,
                remedy="give its config.json, or the folder that holds it",
            )  # fmt: skip
    found = _spellings().get(wanted)
    return None if found is None else _shape(found)


def close_shapes(text: str) -> tuple[str, ...]:
    """Up to three names that are spelt much like ``text``: ids for an id, short names for anything else."""
    import difflib  # only a misspelt name needs it

    alike = {spelling: name for spelling, name in _spellings().items() if ("/" in spelling) == ("/" in text)}
    near = difflib.get_close_matches(_plain(text), alike, n=9, cutoff=ALIKE)
    return tuple(dict.fromkeys(_shown(alike[spelling], text) for spelling in near))[:3]


def _shown(key: str, text: str) -> str:
    """A key as its user would write it: an id keeps its owner only beside another id."""
    return key if "/" in text else key.rpartition("/")[2]


def help_text() -> str:
    """Every built-in shape on a line: its name, the id it was published under, and how its shape is known."""
    import textwrap

    shapes = _data()["shapes"]
    rows = [(name, str(entry["hub"]), _TRUST[entry["source"]] + _mark(entry)) for name, entry in shapes.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    notes = [f"* {name}: {entry['note']}" for name, entry in shapes.items() if entry.get("note")]
    return "\n".join(
        [
            "MODEL is a folder, a config.json, a hub id, or one of these shapes, which need no files and no network:",
            "",
            f"  {'smollm2':<{widths[0]}}  {'HuggingFaceTB/SmolLM2-135M-Instruct':<{widths[1]}}  {_TRUST['read']}",
            *(f"  {name:<{widths[0]}}  {hub:<{widths[1]}}  {trust}" for name, hub, trust in rows),
            "",
            *(line for note in notes for line in textwrap.wrap(note, 100, subsequent_indent="  ")),
            "",
            f"{len(_data()['names'])} more ids of the same shapes are known, such as",
            "meta-llama/Meta-Llama-3-8B-Instruct, some with the quantisation that their names say.",
            "Case and punctuation do not matter.",
            "",
        ]
    )


def _mark(entry: Mapping[str, object]) -> str:
    return " *" if entry.get("note") else ""


@cache
def _data() -> dict[str, dict[str, Any]]:
    text = (Path(__file__).parent / "data" / "shapes.json").read_text(encoding="utf-8")
    made: dict[str, dict[str, Any]] = json.loads(text)
    return made


def _plain(name: str) -> str:
    """Letters and digits; the slash of a hub id stays, for an owner is no part of a name."""
    return re.sub(r"[^a-z0-9/]", "", name.lower())


@cache
def _spellings() -> dict[str, str]:
    """Plain spelling -> the key of a shape or of another id. Short names win over ids, and ids over their ends."""
    data = _data()
    found: dict[str, str] = {}
    ids = {entry["hub"]: name for name, entry in data["shapes"].items()} | {name: name for name in data["names"]}
    for name in data["shapes"]:
        found[_plain(name)] = name
    for hub_id, key in ids.items():
        found[_plain(hub_id)] = key
    for hub_id, key in ids.items():
        for end in _ends(hub_id):
            found.setdefault(end, key)
    return found


def _ends(hub_id: str) -> Iterator[str]:
    """An id without its owner, as people write it."""
    end = _plain(hub_id.rpartition("/")[2])
    yield end
    if end.startswith("meta"):
        yield end.removeprefix("meta")


def _shape(key: str) -> Shape:
    """The shape of a short name, or of another id with what differs there."""
    data = _data()
    other = data["names"].get(key, {})
    told: dict[str, Any] = {"shape": other} if isinstance(other, str) else other
    entry = data["shapes"][told.get("shape", key)]
    return Shape(
        name=key,
        source=entry["source"],
        origin=entry.get("from", ""),
        notes=tuple(note for note in (entry.get("note"), told.get("note")) if note),
        config=_merged(entry["config"], told.get("with", {})),
    )


def _merged(config: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """The config with the fields of ``changes``; what belongs to a nested text model goes there, objects are merged."""
    made = dict(config)
    inner = made.get("text_config")
    for key, value in changes.items():
        own = made.get(key)
        if isinstance(value, Mapping) and isinstance(own, Mapping):
            made[key] = _merged(own, value)
        elif isinstance(inner, Mapping) and key in inner:
            inner = {**inner, key: value}
        else:
            made[key] = value
    if inner is not None:
        made["text_config"] = inner
    return made
