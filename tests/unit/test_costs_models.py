"""What a user may type for MODEL, with no network."""

from __future__ import annotations

import builtins
import sys
import types
from pathlib import Path

import pytest

from tonnage.costs import models
from tonnage.costs.models import find_config
from tonnage.costs.shapes import help_text
from tonnage.errors import ModelConfigError, ModelNotFound


def fake_hub(monkeypatch, *, cached=None, error=None):
    """A client that answers from its cache, or raises."""

    def download(*args, **kwargs):
        raise error

    hub = types.ModuleType("huggingface_hub")
    hub.try_to_load_from_cache = lambda *_: cached
    hub.hf_hub_url = lambda *_: "https://hub.invalid/config.json"
    hub.get_session = lambda: types.SimpleNamespace(head=lambda *_, **__: None)
    hub.hf_hub_download = download
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)


def test_the_embedded_default():
    config = find_config("SmolLM2")
    assert config.name == "SmolLM2-135M-Instruct"
    assert (config.num_layers, config.num_kv_heads, config.dtype) == (30, 3, "float32")


def test_a_folder_wins_over_an_alias(tmp_path, monkeypatch):
    folder = tmp_path / "smollm2"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelConfigError):
        find_config("smollm2")


@pytest.mark.parametrize(
    "text", ["./nothing", "/nothing/here", "nothing.json", "a/b/c", "sp ace", "nul\0", "x" * 5000, "~nobody/x"]
)
def test_no_such_path(text):
    with pytest.raises(ModelNotFound, match="no such folder or file"):
        find_config(text)


@pytest.mark.parametrize("text", ["", "  "])
def test_no_name_at_all(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match=r"^no model is named\. To change: name a folder"):
        find_config(text)


def test_a_folder_without_config(tmp_path):
    with pytest.raises(ModelNotFound, match=r"holds no config\.json"):
        find_config(tmp_path)


def test_without_the_hub_client(monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "huggingface_hub":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ModelNotFound, match=r"not installed.*give its folder"):
        find_config("owner/name")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("GatedRepoError", "access to it must be asked for"),
        ("RepositoryNotFoundError", "no such model, or it is private"),
        ("ConnectError", "cannot be reached"),
        ("OfflineModeIsEnabled", "offline"),
    ],
)
def test_the_hub_says_no(monkeypatch, capfd, kind, said):
    fake_hub(monkeypatch, error=type(kind, (Exception,), {})("a very long story"))
    with pytest.raises(ModelNotFound, match=said) as caught:
        find_config("owner/name")
    assert "very long story" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert capfd.readouterr() == ("", "")


def test_the_hub_client_has_it_cached(monkeypatch, tmp_path):
    file = tmp_path / "config.json"
    file.write_text((Path(models.__file__).parent / "data/smollm2-135m-instruct.json").read_text())
    fake_hub(monkeypatch, cached=str(file))
    assert find_config("owner/name").name == "owner/name"


@pytest.mark.parametrize("rest", ["", "/", "/tree/main", "/blob/main/config.json"])
def test_a_page_of_the_hub_names_its_model(rest: str) -> None:
    assert find_config(f"https://example.com/meta-llama/Llama-3.1-8B{rest}").name == find_config("llama-3.1-8b").name


def test_every_name_that_help_lists_is_found() -> None:
    for row in help_text().splitlines()[2:]:
        if not row.startswith("  "):
            break
        short, hub_id = row.split()[:2]
        assert find_config(hub_id).num_layers == find_config(short).num_layers
