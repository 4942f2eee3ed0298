"""Graphs that an engine is asked for where none can be: told before anything is loaded."""

from __future__ import annotations

import pytest
from tiny import save_tiny_llama

from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.engine.options import EngineOptions
from tonnage.engine.settings import engine_options
from tonnage.engine.target import Target
from tonnage.errors import InvalidSetting


@pytest.fixture(scope="module", name="folder")
def folder_fixture(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


def target(folder, graphs: Setting[str], **options) -> Target:
    limits = LimitKnobs(max_batch_size=Setting(8), max_num_tokens=Setting(64))
    return Target.read(EngineOptions(model=str(folder), knobs=Knobs(graphs=graphs), limit_knobs=limits, **options))


def test_sizes_reach_the_limits_of_an_engine_whose_backend_captures(folder, monkeypatch):
    monkeypatch.setattr("tonnage.engine.target.require_triton", lambda *_: None)  # nothing is run here
    for text, made in (("x2", (1, 2, 4, 8)), ("off", ()), ("auto", (1, 2, 4, 8)), ("3,5", (3, 5))):
        assert target(folder, Setting(text), device="cuda", attention="triton").limits.graph_batch_sizes == made


def test_a_backend_that_is_not_captured(folder):
    for text in (None, "none", "default"):
        assert target(folder, Setting(text), device="cuda", attention="sdpa").limits.graph_batch_sizes == ()
    with pytest.raises(InvalidSetting, match="'sdpa' are not captured") as caught:
        target(folder, Setting("x2"), device="cuda", attention="sdpa")
    assert "triton" in caught.value.remedy


def test_a_host(folder):
    for text in (None, "off", "auto"):
        assert target(folder, Setting(text)).limits.graph_batch_sizes == ()
    with pytest.raises(InvalidSetting, match="a host captures no graphs"):
        target(folder, Setting("+64"))


def test_the_keyword_of_python():
    asked = engine_options("m", {"graphs": "+64"}).knobs.graphs
    assert (asked.value, asked.text, asked.where) == ("+64", "+64", "graphs")
    with pytest.raises(InvalidSetting, match="graphs = 'often'"):
        engine_options("m", {"graphs": "often"})
    with pytest.raises(InvalidSetting, match="in pieces"):
        engine_options("m", {"graphs": "piecewise"})
