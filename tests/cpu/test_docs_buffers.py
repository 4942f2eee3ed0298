"""The examples of docs/buffers.md run as they are written, on the host and a few thousand times smaller."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tonnage.errors import RangeReferenced

PAGE = (Path(__file__).parents[2] / "docs" / "buffers.md").read_text()
#: The card becomes a host of small pages, and sizes shrink with it. One line of the page shows what is refused.
INSTEAD = {
    "from tonnage.device.cuda import CudaDriver": "from tonnage.device.host import HostDriver",
    "CudaDriver(0)": "HostDriver(2**30, page_bytes=2**12)",
    "from tonnage.units import GiB, MiB": "GiB, MiB = 2**22, 2**12",
    "scratch.shrink(0)": "refused(lambda: scratch.shrink(0))",
}


def blocks() -> list[str]:
    found = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    for shown, run in INSTEAD.items():
        assert sum(shown in block for block in found) >= 1, shown
        found = [block.replace(shown, run) for block in found]
    return found


def test_the_examples_run() -> None:
    def refused(call: Any) -> None:
        with pytest.raises(RangeReferenced):
            call()

    replays: list[str] = []
    names: dict[str, Any] = {"refused": refused, "graph": SimpleNamespace(replay=lambda: replays.append("replay"))}
    for block in blocks():
        exec(compile(block, "docs/buffers.md", "exec"), names)
    assert replays == ["replay"]
    assert names["released"].freed_bytes == names["wake"].num_bytes > 0
    names.pop("view")
    names["device"].graphs.destroy("decode, batch 64")
    for one in ("weights", "table", "mirror", "scratch", "kv"):
        names.pop(one).close()
    names["device"].fences.quiesce()  # what was in a scope waits for the streams before it goes
    assert names["ledger"].accounted_bytes == 0
