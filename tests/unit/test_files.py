"""Files are whole or not there, whatever happens meanwhile."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tonnage.files import write_whole


def names(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


def test_a_file_is_made_once_and_replaced_where_that_was_asked(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    write_whole(file, "one\n", replaces=False)
    file.chmod(0o600)
    with pytest.raises(FileExistsError):
        write_whole(file, "two\n", replaces=False)
    assert file.read_text() == "one\n"
    write_whole(file, "three\n", replaces=True)
    assert file.read_bytes() == b"three\n"
    assert file.stat().st_mode & 0o777 == 0o600
    assert names(tmp_path) == {"plan.json"}


@pytest.mark.parametrize("replaces", [True, False])
def test_what_fails_on_the_way_leaves_what_was_there(tmp_path: Path, monkeypatch, replaces: bool) -> None:
    file = tmp_path / "plan.json"
    if replaces:
        file.write_text("old")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace" if replaces else "link", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(file, "new", replaces=replaces)
    assert names(tmp_path) == ({"plan.json"} if replaces else set())
    assert not replaces or file.read_text() == "old"


def test_somebody_who_makes_it_meanwhile_is_not_written_over(tmp_path: Path, monkeypatch) -> None:
    file, real = tmp_path / "plan.json", os.link

    def late(source: Path, target: Path) -> None:
        file.write_text("theirs")
        real(source, target)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(FileExistsError):
        write_whole(file, "ours", replaces=False)
    assert file.read_text() == "theirs"
    assert names(tmp_path) == {"plan.json"}


def test_links_are_followed_and_pipes_are_written_to(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    write_whole(tmp_path / "link.json", "new", replaces=True)
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_text() == "new"
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_whole(pipe, "through", replaces=True)
    reader.join()
    assert read == ["through"]
    assert pipe.is_fifo()
