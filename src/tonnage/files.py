"""Files: written whole or not at all; and why one cannot be read or written, with what to do about it."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

#: What to do about a file that cannot be read, by the system's number for why.
_TO_READ = {
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.EISDIR: "name a file in it",
    errno.EACCES: "make it readable, or name another file",
    errno.EPERM: "make it readable, or name another file",
    errno.ENAMETOOLONG: "check the path",
    errno.ELOOP: "name the file itself, not a link to it",
}
#: The same of a file that cannot be written.
_TO_WRITE = {
    errno.ENOENT: "make its folder first, or choose another",
    errno.ENOTDIR: "choose a folder that is one",
    errno.EISDIR: "name a file in it",
    errno.EACCES: "choose a folder that may be written to",
    errno.EPERM: "choose a folder that may be written to",
    errno.EROFS: "choose a folder that may be written to",
    errno.EEXIST: "choose another name, or add --force",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOSPC: "free some space, or choose another disk",
    errno.EDQUOT: "free some space, or choose another disk",
}


def why(fault: Exception) -> str:
    """Why a file cannot be read or written, as the system tells it."""
    if isinstance(fault, UnicodeError):
        return "it is not UTF-8 text"
    return getattr(fault, "strerror", None) or str(fault)


def to_read(fault: Exception) -> str:
    """What to do about a file that cannot be read."""
    if isinstance(fault, UnicodeError):
        return "name a text file"
    return _TO_READ.get(getattr(fault, "errno", None) or 0, "name another file")


def to_write(fault: OSError) -> str:
    """What to do about a file that cannot be written."""
    return _TO_WRITE.get(fault.errno or 0, "choose another file")


def write_whole(path: Path, text: str, *, replaces: bool) -> None:
    """UTF-8 ``text`` under the name ``path``: beside it first, then renamed, so that nobody ever finds a part of it,
    whatever ends the process. A link is followed, and what is no plain file (a pipe) is written to as it is.

    Raises ``FileExistsError`` where there is one and it must not be replaced, else what the system raises.
    """
    target = Path(os.path.realpath(path))
    there = target.stat() if target.exists() else None
    if there is not None and not replaces:
        raise FileExistsError(17, "File exists", str(path))
    if there is not None and not stat.S_ISREG(there.st_mode):
        target.write_text(text, encoding="utf-8", newline="\n")
        return
    beside = target.with_name(f".{target.name[:200]}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8", newline="\n")
        if there is not None:
            beside.chmod(stat.S_IMODE(there.st_mode))
        if replaces:
            os.replace(beside, target)
        else:
            os.link(beside, target)  # unlike a rename it fails where somebody has made one meanwhile
    finally:
        with suppress(FileNotFoundError):
            beside.unlink()
