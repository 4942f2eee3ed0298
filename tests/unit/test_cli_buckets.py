"""``tonnage buckets``: what it chooses, prints, draws and refuses."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import Ended, tonnage_fixture  # noqa: F401 - a fixture

from tonnage.planner.buckets import GENERATORS

Program = Callable[..., Ended]
PRICED = ["--kv-token-bytes", "36KiB", "--request-tokens", "2500", "--running", "200", "--graph-bytes", "10MB"]


@pytest.fixture(name="load")
def load_fixture(tmp_path: Path) -> Path:
    """A peak at 180 of 256."""
    rng = random.Random(1)
    counts = Counter(max(1, min(256, round(rng.gauss(180, 12)))) for _ in range(4000))
    path = tmp_path / "steps.csv"
    path.write_text("batch_size,count\n" + "".join(f"{size},{count}\n" for size, count in sorted(counts.items())))
    return path


def made(tonnage: Program, *argv: object) -> dict[str, Any]:
    ended = tonnage("buckets", *argv, "--json")
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


def of(document: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in document["lists"] if each["name"] == name)


def test_as_many_graphs_as_the_even_list_and_fewer_padded_steps(tonnage: Program, load: Path) -> None:
    document = made(tonnage, load)
    assert document["schema"] == "tonnage.buckets/1"
    assert [each["name"] for each in document["lists"]] == ["x2", "+64", "+8", "fitted"]
    for name, make in GENERATORS.items():
        assert of(document, name)["sizes"] == list(make(256))
    even, fitted = of(document, "+64"), of(document, "fitted")
    assert len(fitted["sizes"]) == len(even["sizes"])
    assert fitted["excess_ppm"] < even["excess_ppm"] / 2
    assert fitted["mean_step_ns"] < even["mean_step_ns"]
    assert fitted["tokens_per_second"] > even["tokens_per_second"]
    assert fitted["graph_bytes"] == len(fitted["sizes"]) * 2**20
    assert fitted["kv_tokens"] is None is fitted["whole_ppm"] is document["price_ppm"]
    excess = [point["excess_ppm"] for point in document["curve"]]
    assert excess == sorted(excess, reverse=True)


def test_the_flag_it_prints_is_one_that_a_plan_takes(tonnage: Program, load: Path) -> None:
    document = made(tonnage, load)
    flag = document["flag"].split()
    assert flag[:3] == ["tonnage", "plan", "MODEL"]
    model = Path(__file__).parents[2] / "examples" / "configs" / "llama-3.1-8b"
    plan = tonnage("plan", model, "--device", "H100", "--max-seq-len", "4096", *flag[3:], "--json")
    assert plan.code == 0, plan.err
    assert json.loads(plan.out)["limits"]["graph_batch_sizes"] == of(document, "fitted")["sizes"]
    shown = tonnage("buckets", load).out
    assert flag[-1] in shown.split(), "the list is printed whole, however wide"


def test_the_file_it_writes_is_one_that_a_plan_takes(tonnage: Program, load: Path, tmp_path: Path) -> None:
    path = tmp_path / "sizes.json"
    ended = tonnage("buckets", load, "--output", path, "--json")
    assert ended.code == 0, ended.err
    assert path.read_text() == ended.out
    model = Path(__file__).parents[2] / "examples" / "configs" / "llama-3.1-8b"
    flags = ["--device", "H100", "--max-seq-len", "4096", "--graphs", path]
    plan = tonnage("plan", model, *flags, "--json")
    assert plan.code == 0, plan.err
    document = json.loads(plan.out)
    assert document["limits"]["graph_batch_sizes"] == of(json.loads(ended.out), "fitted")["sizes"]
    assert document["knobs"]["graphs"]["text"] == str(path)
    assert tonnage("buckets", load, "--output", path).code == 2, "the file exists"
    assert tonnage("buckets", load, "--output", path, "--force").code == 0
    refused = tonnage("buckets", load, "--output", tmp_path / "sizes.txt")
    assert refused.code == 2
    assert "a file for --graphs ends in .json" in refused.err


def test_pictures_and_table(tonnage: Program, load: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(load.parent)  # a long path would fill the lines
    monkeypatch.setenv("COLUMNS", "100")
    ended = tonnage("buckets", load.name, "--judge", load.name, *PRICED)
    assert (ended.code, ended.err) == (0, "")
    told = " ".join(ended.out.split())
    assert "4,000 steps, at most" in told
    assert "assumed: measure yours and give --step-times" in told
    assert "^ a size with a graph" in told
    assert "the line is +64; 2 x2, 6 +64, f fitted" in told
    assert "KV tokens with memory" in told
    assert all(f"\n{name} " in ended.out for name in ("x2", "+64", "+8", "fitted"))
    assert max(map(len, ended.out.split("\ntonnage plan")[0].splitlines())) <= 100


def test_judged_on_another_load(tonnage: Program, load: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"40": 10}')
    document = made(tonnage, load, "--judge", other, "--judge", load)
    assert document["judged"] == ["other.json", "steps.csv"]
    assert of(document, "+64")["judged_ppm"] == [0, of(document, "+64")["excess_ppm"]]


def test_by_price(tonnage: Program, load: Path) -> None:
    document = made(tonnage, load, "--num-graphs", "auto", *PRICED)
    fitted = of(document, "fitted")
    assert fitted["whole_ppm"] == min(each["whole_ppm"] for each in document["lists"])
    assert len(fitted["sizes"]) < len(of(document, "x2")["sizes"])
    assert 200 in fitted["sizes"], "where memory binds the load sits at --running"
    assert fitted["kv_tokens"] == round(len(fitted["sizes"]) * 10**7 / (36 * 1024))
    assert abs(fitted["whole_ppm"] - fitted["excess_ppm"] - len(fitted["sizes"]) * document["price_ppm"]) <= 12


def test_so_many_graphs_and_sizes_that_must_be_there(tonnage: Program, load: Path) -> None:
    document = made(tonnage, load, "--num-graphs", "9", "--always", "100,7")
    sizes = of(document, "fitted")["sizes"]
    assert {7, 100, 256} <= set(sizes)
    assert len(sizes) == 9
    free = made(tonnage, load, "--num-graphs", "1", "--most-padding", "none")
    assert of(free, "fitted")["sizes"] == [256]


def test_without_the_guard_the_load_alone_decides(tonnage: Program, load: Path) -> None:
    guarded, free = (of(made(tonnage, load, flag), "fitted") for flag in ("--guard", "--no-guard"))
    assert free["excess_ppm"] <= guarded["excess_ppm"]
    assert len(free["sizes"]) == len(guarded["sizes"])


def test_requests_are_played(tonnage: Program, tmp_path: Path) -> None:
    rng, now_us, rows = random.Random(2), 0.0, ["arrival_us,output_tokens"]
    for _ in range(300):
        now_us += rng.expovariate(40) * 1e6
        rows.append(f"{now_us:.1f},{rng.randint(20, 60)}")
    path = tmp_path / "requests.csv"
    path.write_text("\n".join(rows))
    document = made(tonnage, path, "--max-batch-size", "64", "--base-us", "8000", "--row-us", "20")
    tokens = sum(int(row.split(",")[1]) - 1 for row in rows[1:])
    assert sum(size * count for size, count in enumerate(document["steps"])) == tokens


def test_measured_step_times(tonnage: Program, load: Path, tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    path.write_text("batch_size,step_us\n1,4000\n128,5000\n129,7000\n256,7000.5\n")
    document = made(tonnage, load, "--step-times", path)
    assert document["step_times"] == "4 measured sizes, straight lines between"
    assert "assumed" not in " ".join(document["notes"])
    path.write_text("batch_size,step_us\n1,4000\n128,5000\n")
    ended = tonnage("buckets", load, "--step-times", path)
    assert ended.code == 2
    assert "end at batch size 128, and max_batch_size is 256" in ended.err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--num-graphs", "auto"], "weighs graphs against memory"),
        (["--num-graphs", "3"], "take 4. To change: allow 4 graphs, or more padding"),
        (["--num-graphs", "0"], "zero"),
        (["--max-batch-size", "100"], "has steps of"),
        (["--max-batch-size", "1M"], "above 8,192"),
        (["--running", "10"], "a price of memory takes"),
        ([*PRICED[:4], "--running", "300"], "above --max-batch-size = 256"),
        (["--base-us", "0"], "not a time"),
        (["--row-us", "x"], "not a time"),
        (["--most-padding", "2"], "outside 0 < share <= 1"),
        (["--always", "300"], "300 is above max_batch_size = 256"),
        (["--step-times", "t.csv", "--base-us", "3"], "keep one of them"),
        (["--num-graphs", "1000000000"], "write at most 1024, or auto"),
        (["--max-batch-size", "8192", "--num-graphs", "1024"], "write at most 512, or auto"),
        (["--judge", "missing.csv"], "missing.csv: cannot be read"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_what_is_refused(tonnage: Program, load: Path, flags: list[str], told: str) -> None:
    ended = tonnage("buckets", load, *flags)
    assert (ended.code, ended.out) == (2, "")
    assert told in ended.err


def test_a_load_that_cannot_be_read(tonnage: Program, tmp_path: Path) -> None:
    ended = tonnage("buckets", tmp_path / "no.csv")
    assert ended.code == 2
    assert "no.csv: cannot be read: No such file" in ended.err


def test_the_page_shows_what_it_says(tonnage: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "graph-buckets.md").read_text()
    blocks = dict(re.findall(r"^```(json|console)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    command, _, told = blocks["console"].partition("\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    (tmp_path / "steps.json").write_text(blocks["json"])
    ended = tonnage(*command.removeprefix("$ tonnage ").split())
    assert (ended.code, ended.err) == (0, "")
    assert [row.rstrip() for row in ended.out.splitlines()] == told.splitlines()
