"""A file that is written whole or not at all."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path


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
