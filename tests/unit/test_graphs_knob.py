"""The knob ``graphs``: what may be written, what is refused by name, and files of chosen sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.config import LimitKnobs, Origin, Setting
from tonnage.costs.models import find_config
from tonnage.errors import InputError, InvalidSetting
from tonnage.planner import resolve_limits
from tonnage.planner.buckets import GENERATORS, default_sizes, every
from tonnage.planner.graphs import graph_sizes, named_sizes, read_graphs, read_sizes, uncovered

LLAMA_8B = find_config(str(Path(__file__).parents[2] / "examples" / "configs" / "llama-3.1-8b"))


def sizes(setting: Setting[str], *, most: int = 64, on_host: bool = False, step_tokens: int = 1) -> tuple[int, ...]:
    return graph_sizes(
        setting, max_batch_size=most, max_num_tokens=most * step_tokens, step_tokens=step_tokens, on_host=on_host
    )


def written(folder: Path, document: object) -> str:
    path = folder / "Chosen Sizes.JSON"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(path)


@pytest.mark.parametrize(
    ("text", "kept", "made"),
    [
        ("off", "none", ()),
        ("NONE", "none", ()),
        ("auto", "default", default_sizes(64)),
        ("Default", "default", default_sizes(64)),
        (" X2 ", "x2", GENERATORS["x2"](64)),
        ("+64", "+64", every(64, 64)),
        ("+8", "+8", every(8, 64)),
        ("8,1,8, 4", "1,4,8", (1, 4, 8)),
        ("7", "7", (7,)),
    ],
)
def test_what_may_be_written(text: str, kept: str, made: tuple[int, ...]) -> None:
    assert read_graphs(text) == kept
    assert read_graphs(kept) == kept, "what is kept reads as itself"
    assert read_sizes(text, max_batch_size=64) == made
    assert sizes(Setting(text)) == made


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x3", "not a list of batch sizes"),
        ("+7", "not a list of batch sizes"),
        ("", "not a list of batch sizes"),
        ("-1", "not a list of batch sizes"),
        ("often", "not a list of batch sizes"),
        ("1,,2", "not a number"),
        ("1;2", "not a "),
        ("0,1", "zero"),
        ("1.5", "not a whole number"),
        (",".join(map(str, range(1, 1100))), "more than 1024"),
        ("piecewise", "a step of prompts, in pieces"),
        ("FULL_AND_PIECEWISE", "a step of prompts, in pieces"),
        ("encoder", "an encoder has no graphs here"),
    ],
    ids=lambda text: text[:12],
)
def test_what_may_not(text: str, told: str) -> None:
    with pytest.raises(InvalidSetting, match=told) as caught:
        read_graphs(text, knob="--graphs")
    assert caught.value.knob == "--graphs"
    assert caught.value.remedy
    assert "\n" not in str(caught.value)


def test_a_size_that_no_step_could_replay() -> None:
    with pytest.raises(InvalidSetting, match="65 is above max_batch_size = 64"):
        sizes(Setting.flag("1,65", "1,65", "--graphs"))


def test_a_host_takes_what_means_none() -> None:
    for text in (None, "none", "off", "default", "auto"):
        assert sizes(Setting(text), on_host=True) == ()
    for text in ("x2", "1,2"):
        with pytest.raises(InvalidSetting, match="a host captures no graphs"):
            sizes(Setting(text), on_host=True)


@given(st.sets(st.integers(1, 300), min_size=1, max_size=20), st.integers(1, 200), st.integers(1, 5))
def test_a_list_of_another_engine_is_cut_at_what_a_step_can_reach(drawn: set[int], most: int, step_tokens: int) -> None:
    asked = Setting(",".join(map(str, sorted(drawn))), "typed", Origin.PEER, "--like vllm:cudagraph_capture_sizes")
    made = sizes(asked, most=most, step_tokens=step_tokens)
    within = {size for size in drawn if size <= most}
    assert made == tuple(sorted(within | ({most} if within != drawn else set())))


@given(st.sets(st.integers(1, 300), min_size=1))
def test_sizes_survive_being_written(drawn: set[int]) -> None:
    assert named_sizes(read_graphs(",".join(map(str, drawn)))) == tuple(sorted(drawn))


def test_a_list_that_ends_early_is_told_of() -> None:
    told = uncovered(Setting("1,2,4"), (1, 2, 4), max_batch_size=256)
    assert told.startswith("graphs end at 4")
    for asked, made in (
        (Setting(), (1, 2)),
        (Setting("none"), ()),
        (Setting("256"), (256,)),
        (Setting("1,8", None, Origin.FIT), (1, 8)),
    ):
        assert uncovered(asked, made, max_batch_size=256) == ""


# -- files ---------------------------------------------------------------------------------------------------------


def test_a_file_of_chosen_sizes(tmp_path: Path) -> None:
    lists = [{"name": "x2", "sizes": [1, 2]}, {"name": "fitted", "sizes": [8, 24, 64]}]
    path = written(tmp_path, {"schema": "tonnage.buckets/1", "lists": lists})
    assert read_graphs(path) == "8,24,64"
    limits, _ = resolve_limits(LLAMA_8B, LimitKnobs(max_batch_size=Setting(64)), graphs=Setting(path))
    assert limits.graph_batch_sizes == (8, 24, 64)
    with pytest.raises(InvalidSetting, match="64 is above max_batch_size = 32"):
        read_sizes(path, max_batch_size=32)


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ("{", "not a file of graph sizes"),
        ([1, 2], "not a file of graph sizes"),
        ({"schema": "tonnage.plan/1"}, "not a file of graph sizes"),
        ({"schema": "tonnage.buckets/1"}, "holds no list called fitted"),
        ({"schema": "tonnage.buckets/1", "lists": [{"name": "x2", "sizes": [1]}]}, "holds no list called fitted"),
        ({"schema": "tonnage.buckets/1", "lists": [{"name": "fitted", "sizes": [0, True]}]}, "holds no list called"),
        ({"schema": "tonnage.buckets/1", "lists": [{"name": "fitted", "sizes": []}]}, "holds no list called fitted"),
    ],
)
def test_files_that_hold_none(tmp_path: Path, document: object, told: str) -> None:
    path = written(tmp_path, document)
    with pytest.raises(InputError, match=told) as caught:
        read_graphs(path, knob="--graphs")
    assert path in str(caught.value)
    assert "tonnage buckets" in str(caught.value.remedy)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"missing.json' cannot be read: No such file"):
        read_graphs(str(tmp_path / "missing.json"))
