"""Builds the C shim behind torch's segments, once per machine and source; where it cannot, it says why.

Nothing binary is shipped: a compiler makes the library from ``shim/segments.c`` in well under a second, into a folder
that only this user can write. Several processes may do so at once; each replaces the file whole.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parent / "shim" / "segments.c"
#: "off" leaves torch's segments where torch puts them.
SWITCH = "TONNAGE_SHIM"
#: What ``tonnage_version`` of the source answers.
VERSION = 1

_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O2", "-std=c11", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden")
_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class ShimBuild:
    """The library at ``path``, or None and the ``reason``. ``was_built``: now, rather than found in the cache."""

    path: Path | None
    reason: str = ""
    compiler: str = ""
    was_built: bool = False
    seconds: float = 0.0


class _CannotBuild(Exception):
    """Why there is no library, in words for the report."""


def build_shim(*, environ: Mapping[str, str] | None = None, source: Path = SOURCE) -> ShimBuild:
    """Find the library in the cache or build it, and try that it loads. Never raises for what this machine lacks.

    ``environ`` (the process's own by default) may hold CC, PATH, TONNAGE_SHIM, TONNAGE_CACHE and XDG_CACHE_HOME.
    """
    environ = os.environ if environ is None else environ
    started = time.monotonic()
    try:
        if environ.get(SWITCH, "").strip().lower() in {"off", "0", "no", "false"}:
            raise _CannotBuild(f"{SWITCH} = {environ[SWITCH]!r} switches it off")
        compiler = _find_compiler(environ)
        path = _cache_folder(environ) / f"segments-{_key(compiler, source)}.so"
        was_built = _problem(path) is not None
        if was_built:
            _compile(compiler, source, path)
            if problem := _problem(path):
                raise _CannotBuild(f"{shlex.join(compiler)} made {path}, which does not load: {problem}")
    except _CannotBuild as error:
        return ShimBuild(path=None, reason=str(error))
    except OSError as error:
        return ShimBuild(path=None, reason=f"{error.filename or 'the cache'}: {error.strerror or error}")
    seconds = time.monotonic() - started
    return ShimBuild(path=path, compiler=shlex.join(compiler), was_built=was_built, seconds=seconds)


def _find_compiler(environ: Mapping[str, str]) -> list[str]:
    """CC with its arguments, or the first usual name that is there."""
    search = environ.get("PATH", os.defpath)
    try:
        asked = shlex.split(environ.get("CC", ""))
    except ValueError as error:
        raise _CannotBuild(f"CC = {environ['CC']!r} cannot be read: {error}") from error
    for command in [asked] if asked else [[name] for name in _COMPILERS]:
        if found := shutil.which(command[0], path=search):
            return [found, *command[1:]]
    if asked:
        raise _CannotBuild(f"CC = {environ['CC']!r}, and there is no {asked[0]!r} in PATH")
    raise _CannotBuild(f"no C compiler: neither CC nor {', '.join(_COMPILERS)} in PATH")


def _key(compiler: list[str], source: Path) -> str:
    """Another source, compiler, set of flags or machine never meets this library."""
    about = _run([*compiler, "--version"], doing="ask for its version")
    parts = (source.read_text(), shlex.join(compiler), about, *_FLAGS, platform.machine(), *platform.libc_ver())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _cache_folder(environ: Mapping[str, str]) -> Path:
    """A folder that only this user can write: whoever can write there runs code in our process."""
    home = Path(environ.get("HOME") or os.path.expanduser("~"))
    told = environ.get("TONNAGE_CACHE") or Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "tonnage"
    temporary = Path(tempfile.gettempdir()) / f"tonnage-{os.getuid()}"
    problems = []
    for folder in (Path(told) / "shim", temporary):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            about = folder.lstat()
        except OSError as error:
            problems.append(f"{folder}: {error.strerror}")
            continue
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o022:
            problems.append(f"{folder} can be written by others")
        elif not os.access(folder, os.W_OK | os.X_OK):
            problems.append(f"{folder} cannot be written")
        else:
            return folder
    raise _CannotBuild(f"no folder for it: {'; '.join(problems)}")


def _compile(compiler: list[str], source: Path, path: Path) -> None:
    """Beside its place first, then moved there: another process sees no library or a whole one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix="building-", suffix=".so")
    os.close(handle)
    try:
        _run([*compiler, *_FLAGS, str(source), "-o", name], doing=f"compile {source.name}")
        Path(name).chmod(0o700)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


def _run(command: list[str], *, doing: str) -> str:
    """What the command prints; raises ``_CannotBuild`` with the first lines of its complaint."""
    told = f"{command[0]} cannot {doing}"
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise _CannotBuild(f"{told}: not done after {_TIMEOUT_S} s") from None
    except OSError as error:
        raise _CannotBuild(f"{told}: {error.strerror}") from error
    if done.returncode != 0:
        complaint = " / ".join(done.stderr.decode(errors="replace").split("\n")[:3]).strip(" /")
        raise _CannotBuild(f"{told}: exit status {done.returncode}: {complaint[:400] or 'without a word'}")
    return done.stdout.decode(errors="replace")


def _problem(path: Path) -> str | None:
    """Why the library at ``path`` cannot be used; None: it can."""
    if not path.is_file():
        return "it is not there"
    try:
        version = ctypes.CDLL(str(path)).tonnage_version()
    except (OSError, AttributeError) as error:
        return str(error)
    return None if version == VERSION else f"it is version {version} and {VERSION} is needed"
