"""``tonnage diff``: what moved between two plans or runs, by how much, and why."""

from __future__ import annotations

import sys
from typing import Annotated

from tonnage.cli import options as opt


def diff(
    before: Annotated[str, opt.argument("A")],
    after: Annotated[str, opt.argument("B")],
    as_json: opt.AsJson = False,
) -> None:
    """Show what moved between two plans or runs, how far and why.

    A and B were written by plan --output, run --run-file, or either with --json.
    """
    from tonnage.report import diff_files, diff_text, read_file

    made = diff_files(read_file(before), read_file(after), names=(before, after))
    if as_json:
        print(diff_text(made), end="")
        return

    from tonnage.report.diff_table import show_diff
    from tonnage.report.draw import console_for

    show_diff(made, console_for(sys.stdout))
