"""The examples and every snippet of docs/python-api.md, run with a tiny random model in place of the real one."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
from tiny import save_tiny_llama

from tonnage import LLM, SamplingParams

ROOT = Path(__file__).parent.parent.parent
MAX_LINES = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """As long as the real one is asked to be; any token id below its vocabulary's 50,000 exists."""
    return str(save_tiny_llama(tmp_path_factory.mktemp("long"), max_position_embeddings=1024, vocab_size=4096))


def run(name, model, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, model])
    names = runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return names, capsys.readouterr().out


def test_every_example_is_run_here_and_short():
    examples = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "examples").glob("*.py")}
    assert examples.keys() == {"generate.py", "stream.py", "serve_many_async.py"}
    assert max(examples.values()) <= MAX_LINES


def test_generate(model, monkeypatch, capsys):
    names, told = run("generate.py", model, monkeypatch, capsys)
    assert re.match(r"KV cache for [\d,]+ tokens\n", told)
    assert all(f"\n{question}\n  [" in told for question in names["QUESTIONS"])
    assert len(re.findall(r"^  \[(?:length, 40|stop, \d+) tokens\] ", told, re.MULTILINE)) == 8


def test_stream(model, monkeypatch, capsys):
    names, told = run("stream.py", model, monkeypatch, capsys)
    with LLM(model, memory="320MiB", max_seq_len=1024, fence=False) as llm:
        params = SamplingParams(max_tokens=80, stop="\n\n")
        (output,) = llm.chat([{"role": "user", "content": names["QUESTION"]}], params)
    text, _, rest = told.rpartition(f"\n\n{len(output.samples[0].token_ids)} tokens, ended by ")
    assert text == output.text
    assert re.search(r"^weights +planned +[\d,]+ bytes, holds +[\d,]+$", rest, re.MULTILINE)


def test_serve_many_async(model, monkeypatch, capsys):
    _, told = run("serve_many_async.py", model, monkeypatch, capsys)
    assert re.findall(r"^ ?(\d+) hung up: ", told, re.MULTILINE) == ["5"]
    heard = {int(number) for number in re.findall(r"^ ?(\d+) heard: ", told, re.MULTILINE)}
    assert heard == set(range(24)) - {5}
    # It may have been told everything before it hung up.
    assert re.search(r"^(23 finished, 1|24 finished, 0) cancelled, \d+ had to wait for memory;$", told, re.MULTILINE)
    assert told.endswith("\n0 of 1024 KV tokens in use\n")


def test_the_snippets_about_the_prefix_cache(model):
    page = (ROOT / "docs" / "prefix-cache.md").read_text()
    asked, pinned = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert '"smollm2"' in pinned
    names = {}
    for snippet in (asked, pinned.replace('"smollm2"', repr(model))):
        exec(compile(snippet, "prefix-cache.md", "exec"), names)
    assert names["options"].host_kv_bytes == names["engine"].plan.host.kv_bytes == 64 * 2**20
    assert names["pin"].ids


def test_every_snippet_of_the_page(model, capsys):
    page = (ROOT / "docs" / "python-api.md").read_text()
    snippets = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(snippets) == page.count("```") // 2 == 6
    names, told = {}, []
    for snippet in snippets:
        assert '"smollm2"' in snippet
        exec(compile(snippet.replace('"smollm2"', repr(model)), "python-api.md", "exec"), names)
        told.append(capsys.readouterr().out)
    prompts, chat, stream, several, refused, memory = told
    assert prompts == "".join(output.text + "\n" for output in names["outputs"])
    assert chat.count("length None ") == 2
    assert "length" in stream
    assert several.endswith("]\n")
    assert re.match(r"prompts\[1\]: .*max_seq_len = 64", refused)
    assert re.search(r"tokens of KV cache\n(.*\n)*weights \d+", memory)
