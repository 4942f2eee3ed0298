"""The page of a plan, without a browser: what is in it, that nothing gets out of it, and that it asks nobody."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cli_fakes import Ended, tonnage_fixture  # noqa: F401 - a fixture
from hypothesis import given
from hypothesis import strategies as st
from page_samples import HOSTILE, SAMPLES, Seen, hostile_page, made_page, seen

from tonnage.budget.grid import Grid, GridCell
from tonnage.config import LimitKnobs, Setting
from tonnage.errors import DoesNotFit
from tonnage.hardware import find_card
from tonnage.planner import find_config, plan_without_device
from tonnage.planner.grid import LEAST_LENGTH, MOST_BATCHES, MOST_LENGTHS, axes, grid_without_device
from tonnage.report.codec import to_json
from tonnage.report.draw import share
from tonnage.report.page import PAGE_SCHEMA, page_of, page_text
from tonnage.report.page_charts import _log_ticks, _ticks, short
from tonnage.report.page_parts import _OTHER, COLOURS
from tonnage.terms import LineKind
from tonnage.units import format_bytes

Program = Callable[..., Ended]
TEMPLATE = Path(__file__).parents[2] / "src/tonnage/report/data/page.html"


@pytest.mark.parametrize("model", SAMPLES)
def test_a_page_is_one_small_file_that_asks_nobody(model):
    text = page_text(made_page(model)[1])
    assert len(text.encode()) < 200_000
    assert "<!--" not in text
    assert not re.search(r"https?:|//[a-z]|@import|url\(|\bimport\b|fetch|XMLHttp|WebSocket", text)
    page = seen(model)
    (policy,) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    assert not any(name in attributes for _, attributes in page.tags for name in ("src", "srcset", "action", "data"))
    assert all((attributes["href"] or "").startswith("#") for tag, attributes in page.tags if "href" in attributes)
    assert {tag for tag, _ in page.tags} <= SAFE


SAFE = {
    "a", "b", "body", "circle", "dd", "details", "div", "dl", "dt", "figcaption", "figure", "footer", "form", "g", "h1",
    "h2", "h3", "head", "header", "html", "i", "input", "label", "li", "line", "main", "meta", "nav", "output", "p",
    "polygon", "polyline", "rect", "script", "section", "small", "span", "style", "summary", "svg", "table", "tbody",
    "td", "text", "th", "thead", "title", "tr", "ul",
}  # fmt: skip


@pytest.mark.parametrize("model", SAMPLES)
def test_every_link_has_a_place_and_every_id_is_one(model):
    page = seen(model)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = {(attributes["href"] or "")[1:] for attributes in page.all("a")}
    assert targets <= set(ids)
    assert len(targets) == len(made_page(model)[1].segments)


@pytest.mark.parametrize("model", SAMPLES)
def test_the_bar_is_the_device(model):
    made, page = made_page(model)
    assert sum(segment.bytes for segment in page.segments) == made.device_bytes
    nav = seen(model).all("a", class_="seg")[: len(page.segments)]
    widths = [float(re.search(r"width:([\d.]+)%", found["style"] or "")[1]) for found in nav]
    assert sum(widths) == pytest.approx(100, abs=0.01)
    for segment, found in zip(page.segments, nav, strict=True):
        told = found["aria-label"] or ""
        assert told.startswith(f"{segment.name}: {format_bytes(segment.bytes)}")
        assert share(segment.bytes, made.device_bytes) in told
        assert segment.source in told


@pytest.mark.parametrize("model", SAMPLES)
def test_what_is_not_exact_has_its_least_and_its_most_on_the_page(model):
    made, _ = made_page(model)
    loose = [line for line in made.lines if line.bytes and line.low != line.high]
    text = " ".join(seen(model).text.split())
    assert loose
    assert all(line.name in text for line in made.lines if line.bytes)
    for line in loose:
        assert line.reason in text
    assert len(seen(model).all("span", class_="span")) == len(loose)


@pytest.mark.parametrize("model", SAMPLES)
def test_the_script_has_the_page_and_no_more(model):
    made, page = made_page(model)
    data = seen(model).data
    assert data == json.loads(json.dumps(to_json(page)))
    assert data["schema"] == PAGE_SCHEMA
    (series,) = data["series"]
    assert series["own"] == [made.limits.max_seq_len, made.limits.max_batch_size]
    script = seen(model).scripts[1]
    assert "series.cells[length][batch]" in script
    assert not re.search(r"Math\.|[^=]\*\s|innerHTML|eval|document\.write", script)  # it looks up, and computes nothing


def test_the_plan_is_a_cell_of_its_own_grid():
    for model in SAMPLES:
        made, page = made_page(model)
        (series,) = page.series
        length, batch = series.own
        cell = series.cells[series.lengths.index(length)][series.batches.index(batch)]
        assert (cell.kv_tokens, cell.refused) == (made.kv.tokens, "")
        assert cell.num_sequences == min(made.max_concurrency, made.limits.max_batch_size)
        pool = made.line(LineKind.KV)
        assert format_bytes(pool.bytes) in cell.told


@pytest.mark.parametrize(("model", "card"), [("llama-3.1-8b", "H100"), ("qwen3.6-27b", "H200"), ("gpt-oss-20b", "L4")])
def test_every_cell_is_the_plan_of_its_shape(model, card):
    config, device = find_config(model), find_card(card)
    asked = {"card": device, "limit_knobs": LimitKnobs()}
    grid = grid_without_device(config, lengths=(2048, 32_768), batches=(3, 200), shown=lambda each: each[0], **asked)
    for row in grid.cells:
        for cell in row:
            limits = LimitKnobs(max_seq_len=Setting(cell.max_seq_len), max_batch_size=Setting(cell.max_batch_size))
            if cell.refused:
                with pytest.raises(DoesNotFit) as caught:
                    plan_without_device(config, card=device, limit_knobs=limits)
                need, have = caught.value.need_bytes, caught.value.have_bytes
                assert cell.refused == f"needs {format_bytes(need)}, has {format_bytes(have)}"
                continue
            made = plan_without_device(config, card=device, limit_knobs=limits)
            assert (cell.kv_tokens, cell.num_sequences) == (made.kv.tokens, made.max_concurrency)
            pool = made.line(LineKind.KV)
            assert (cell.kv_bytes, cell.low, cell.high) == (pool.bytes, pool.low, pool.high)
            assert cell.num_running <= cell.max_batch_size


def test_a_refused_shape_says_why():
    _, page = made_page("smollm2")
    refused = [cell for row in page.series[0].cells for cell in row if cell.refused]
    assert refused
    assert all("needs" in cell.refused and "refused, needs" in cell.told for cell in refused)
    assert len(seen("smollm2").all("td", class_="no")) == len(refused)


@given(own=st.integers(1, 2**21), rows=st.integers(1, 5000), positions=st.integers(1, 2**24))
def test_axes_hold_the_plans_own_shape(own, rows, positions):
    made, _ = made_page("llama-3.1-8b")
    limits = replace(made.limits, max_seq_len=own, max_batch_size=rows)
    lengths, batches = axes(replace(made, limits=limits), positions=positions)
    for values, mine, most in ((lengths, own, MOST_LENGTHS), (batches, rows, MOST_BATCHES)):
        assert list(values) == sorted(set(values))
        assert mine in values
        assert len(values) <= most
    assert lengths[-1] == max(own, positions)
    assert lengths[0] <= max(LEAST_LENGTH, own)


def test_nothing_from_outside_gets_out():
    text = page_text(hostile_page())
    page = Seen(text)
    assert len(page.scripts) == 2
    assert "alert" not in page.scripts[1]
    assert page.comments == []
    assert page.data["model"] == HOSTILE
    assert page.data["series"][0]["cells"][0][0]["told"] == HOSTILE
    assert {tag for tag, _ in page.tags} <= SAFE
    assert page.text.count(HOSTILE) >= 15  # as text, wherever it was put
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert "<b title" not in text


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * each for each in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("kind", [*COLOURS, "other"])
def test_text_on_every_colour_can_be_read(kind):
    assert contrast(*COLOURS.get(kind, _OTHER)) >= 4.5


def test_every_kind_of_line_has_a_colour_of_its_own():
    assert set(COLOURS) == {kind.value for kind in LineKind}
    assert len({fill for fill, _ in COLOURS.values()}) == len(COLOURS)


def test_lines_and_words_stand_out_in_light_and_dark():
    light, dark = (
        dict(re.findall(r"--(\w+): (#[0-9a-f]+)", block))
        for block in re.findall(r":root \{([^}]*)\}", TEMPLATE.read_text())
    )
    for theme in (light, dark):
        assert all(contrast(theme[name], theme["ground"]) >= 4.5 for name in ("ink", "dim"))
        assert all(contrast(theme[f"s{i}"], theme["ground"]) >= 3 for i in range(6))
        assert contrast(theme["ink"], theme["warn"]) >= 4.5
        assert contrast(theme["dim"], theme["soft"]) >= 4.5


@pytest.mark.parametrize(
    ("number", "told"),
    [(0, "0"), (512, "512"), (1024, "1Ki"), (163_840, "160Ki"), (2**20, "1Mi"), (600_000, "600k"), (2.5e6, "2.5M")],
)
def test_numbers_on_axes(number, told):
    assert short(number) == told


@given(st.integers(0, 10**9))
def test_ticks_reach_what_is_drawn(most):
    ticks = _ticks(most)
    assert ticks[0] == 0
    assert ticks[-1] >= most
    assert 2 <= len(ticks) <= 6
    logs = _log_ticks(most)
    assert logs[0] == 1
    assert logs[-1] >= most


def test_a_grid_finds_its_cells():
    cell = GridCell(max_seq_len=2, max_batch_size=3, kv_tokens=7, num_sequences=9)
    grid = Grid(lengths=(2,), batches=(3,), cells=((cell,),))
    assert grid.at(2, 3).num_running == 3
    with pytest.raises(ValueError, match="not in"):
        grid.at(2, 4)


def test_the_command_writes_it(tonnage: Program, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    ended = tonnage("plan", "smollm2", "--gpu", "T4", "--html", str(file), "--json")
    assert (ended.code, ended.err) == (0, "")
    page = Seen(file.read_text(encoding="utf-8"))
    assert page.data["model"] == json.loads(ended.out)["model_name"]
    assert page.data["warnings"] == json.loads(ended.out)["warnings"]
    before = file.read_bytes()
    refused = tonnage("plan", "smollm2", "--gpu", "L4", "--html", str(file))
    assert refused.code == 2
    assert f"--html {file} exists" in refused.err
    assert file.read_bytes() == before
    assert tonnage("plan", "smollm2", "--gpu", "L4", "--html", str(file), "--force").code == 0
    assert file.read_bytes() != before


def test_two_files_of_one_name_are_refused_before_anything_is_written(tonnage: Program, tmp_path: Path) -> None:
    file = str(tmp_path / "x")
    ended = tonnage("plan", "smollm2", "--gpu", "T4", "--html", file, "--output", file)
    assert (ended.code, "--output and --html both write" in ended.err) == (2, True)
    assert not Path(file).exists()
    assert tonnage("plan", "smollm2", "--gpu", "T4", "--html", str(tmp_path / "no" / "x")).code == 2
    beside = tonnage("plan", "smollm2", "--gpu", "T4", "--html", file, "--engine", "vllm==0.19")
    assert (beside.code, "--html is about our own plan" in beside.err) == (2, True)
    assert not Path(file).exists()


def test_other_engines_knobs_and_stages_are_on_the_page(tonnage: Program, tmp_path: Path) -> None:
    file = tmp_path / "p.html"
    like = ("--like", "vllm:gpu_memory_utilization=0.9", "--like", "vllm:max_model_len=8K", "--pp", "2")
    ended = tonnage("plan", "llama-3.1-70b", "--gpu", "h200", "--html", str(file), "--json", *like)
    assert ended.code == 0
    made, data = json.loads(ended.out), Seen(file.read_text()).data
    (series,) = data["series"]
    assert series["own"][0] == 8192
    cell = series["cells"][series["lengths"].index(8192)][series["batches"].index(series["own"][1])]
    assert cell["kv_tokens"] == made["kv"]["tokens"]
    assert ["rank", "0 of 2 (tp 1, pp 2, ep 1)"] in data["facts"] or any("of 2" in fact[1] for fact in data["facts"])


def test_more_owners_than_letters_have_keys_of_their_own():
    made, page = made_page("llama-3.1-8b")
    assert len({segment.key for segment in page.segments}) == len(page.segments)
    length, rows = made.limits.max_seq_len, made.limits.max_batch_size
    cell = GridCell(max_seq_len=length, max_batch_size=rows, refused="too large")
    grid = Grid(lengths=(length,), batches=(rows,), cells=((cell,),))
    many = page_of(replace(made, lines=made.lines * 9), grid, version="0.0.0")
    assert len(many.segments) > 60
    assert len({segment.key for segment in many.segments}) == len(many.segments)
    assert f'id="owner-{many.segments[-1].key}"' in page_text(many)
