"""The shim is built once, by whatever compiler there is; where there is none, the reason is told and nothing breaks."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tonnage.buffers import shim_build
from tonnage.buffers.shim_build import SOURCE, build_shim
from tonnage.buffers.shim_heaps import Shim

pytestmark = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="no C compiler on this machine"
)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "TONNAGE_CACHE": str(tmp_path / "cache"), "HOME": str(tmp_path)}


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a real compiler makes of the source."""
    folder = tmp_path_factory.mktemp("library")
    built = build_shim(environ={"PATH": os.environ["PATH"], "TONNAGE_CACHE": str(folder)})
    assert built.path is not None
    return built.path


def copier(path: Path, library: Path, *, after: str = "") -> Path:
    """A compiler for tests that are not about compiling: it is asked for its version, and it makes ``library``."""
    return script(
        path, f'for last; do :; done; [ "$last" = --version ] && exit 0; {after}\nexec cp "{library}" "$last"'
    )


def test_the_source_compiles_without_a_warning(tmp_path: Path) -> None:
    strict = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror"]
    command = ["cc", *shim_build._FLAGS, *strict, str(SOURCE), "-o", str(tmp_path / "strict.so")]
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""


def test_it_is_built_once_and_then_found(environ: dict[str, str], tmp_path: Path) -> None:
    first = build_shim(environ=environ)
    assert (first.was_built, first.reason) == (True, "")
    assert first.seconds < 5  # 0.2 s alone on a machine: the rest is for one that is busy
    second = build_shim(environ=environ)
    assert (second.path, second.was_built) == (first.path, False)
    assert first.path is not None
    assert first.path.parent == tmp_path / "cache" / "shim"
    assert stat.S_IMODE(first.path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o700
    assert [path.name for path in first.path.parent.iterdir()] == [first.path.name]
    assert Shim(first.path).num_heaps == 16


def test_another_source_or_compiler_has_another_library(environ: dict[str, str], tmp_path: Path, library: Path) -> None:
    changed = tmp_path / "changed.c"
    changed.write_text(SOURCE.read_text() + "\n/* changed */\n")
    one, other = copier(tmp_path / "one", library), copier(tmp_path / "other", library)
    paths = {
        build_shim(environ={**environ, "CC": str(one)}).path,
        build_shim(environ={**environ, "CC": str(one)}, source=changed).path,
        build_shim(environ={**environ, "CC": str(other)}).path,
        build_shim(environ={**environ, "CC": f"{other} -g"}).path,
    }
    assert None not in paths
    assert len(paths) == 4


def test_without_a_compiler_it_says_what_was_looked_for(environ: dict[str, str], tmp_path: Path) -> None:
    built = build_shim(environ={**environ, "PATH": str(tmp_path)})
    assert (built.path, built.reason) == (None, "no C compiler: neither CC nor cc, gcc, clang in PATH")
    asked = build_shim(environ={**environ, "CC": "no-such-cc -O1"})
    assert (asked.path, asked.reason) == (None, "CC = 'no-such-cc -O1', and there is no 'no-such-cc' in PATH")
    unreadable = build_shim(environ={**environ, "CC": "'gcc"})
    assert unreadable.path is None
    assert "cannot be read" in unreadable.reason


@pytest.mark.parametrize("word", ["off", "OFF", "0", "no", "false"])
def test_it_can_be_switched_off(environ: dict[str, str], word: str) -> None:
    built = build_shim(environ={**environ, "TONNAGE_SHIM": word})
    assert (built.path, built.reason) == (None, f"TONNAGE_SHIM = {word!r} switches it off")
    assert not Path(environ["TONNAGE_CACHE"]).exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("exit 1", "without a word"),
        ('[ "$1" = --version ] && exit 0; echo "segments.c:1: fatal error: pthread.h" >&2; exit 1', "pthread.h"),
        ('[ "$1" = --version ] && exit 0; exit 0', "does not load"),  # an empty file where the library should be
        ('[ "$1" = --version ] && exit 0; for last; do :; done; echo nonsense > "$last"', "does not load"),
    ],
)
def test_a_broken_compiler_is_told_in_its_own_words(
    environ: dict[str, str], tmp_path: Path, text: str, reason: str
) -> None:
    broken = script(tmp_path / "broken", text)
    built = build_shim(environ={**environ, "CC": str(broken)})
    assert built.path is None
    assert reason in built.reason
    left = list(Path(environ["TONNAGE_CACHE"]).rglob("building-*"))
    assert left == []


def test_a_compiler_that_hangs_is_left(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shim_build, "_TIMEOUT_S", 0.2)
    built = build_shim(environ={**environ, "CC": str(script(tmp_path / "slow", "exec sleep 30"))})
    assert (built.path, built.reason.split(": ")[-1]) == (None, "not done after 0.2 s")


def test_a_library_of_another_version_is_not_used(environ: dict[str, str], tmp_path: Path) -> None:
    other = tmp_path / "other.c"
    other.write_text(SOURCE.read_text().replace("#define VERSION 1", "#define VERSION 7"))
    built = build_shim(environ=environ, source=other)
    assert built.path is None
    assert "version 7 and 1 is needed" in built.reason


def test_a_spoiled_library_in_the_cache_is_built_again(environ: dict[str, str], tmp_path: Path, library: Path) -> None:
    environ["CC"] = str(copier(tmp_path / "copier", library))
    path = build_shim(environ=environ).path
    assert path is not None
    # Spoiled under another name and moved there: what this process has loaded keeps its file.
    spoiled = path.with_name("spoiled")
    spoiled.write_bytes(b"not a library")
    spoiled.replace(path)
    code = (
        "import sys; from tonnage.buffers.shim_build import build_shim; from tonnage.buffers.shim_heaps import Shim;"
        "built = build_shim(); print(built.was_built, Shim(built.path).num_heaps)"
    )
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **environ}, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("True 16", "")


def test_a_folder_that_others_can_write_is_not_used(
    environ: dict[str, str], tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ["CC"] = str(copier(tmp_path / "copier", library))
    private = tmp_path / "tmp"
    private.mkdir()
    monkeypatch.setattr(shim_build.tempfile, "gettempdir", lambda: str(private))
    open_to_all = tmp_path / "cache" / "shim"
    open_to_all.mkdir(parents=True)
    open_to_all.chmod(0o777)
    path = build_shim(environ=environ).path
    assert path is not None
    assert path.parent == private / f"tonnage-{os.getuid()}"
    path.parent.chmod(0o777)
    refused = build_shim(environ=environ)
    assert refused.path is None
    assert refused.reason.count("can be written by others") == 2


def test_a_link_planted_in_the_temporary_folder_is_not_followed(
    environ: dict[str, str], tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "tmp" / f"tonnage-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(shim_build.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert build_shim(environ=environ).path is None


def test_many_processes_may_build_it_at_once(environ: dict[str, str], tmp_path: Path, library: Path) -> None:
    # Half of it is there for a while: whoever looked at its place meanwhile would find a library that does not load.
    half = f'head -c 5000 "{library}" > "$last"; sleep 0.3'
    environ["CC"] = str(copier(tmp_path / "slow", library, after=half))
    code = (
        "from tonnage.buffers.shim_build import build_shim; from tonnage.buffers.shim_heaps import Shim;"
        "path = build_shim().path; print(path, Shim(path).num_heaps)"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code], env={**os.environ, **environ}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(3)
    ]
    said = [process.communicate() for process in running]
    assert {error for _, error in said} == {b""}
    assert len({out for out, _ in said}) == 1
    assert said[0][0].endswith(b" 16\n")
    assert len(list((Path(environ["TONNAGE_CACHE"]) / "shim").iterdir())) == 1
