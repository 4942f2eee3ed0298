"""``tonnage report``: a plan file or a run file, for a person or as JSON."""

from __future__ import annotations

import sys
from typing import Annotated

from tonnage.cli import options as opt


def report(
    file: Annotated[str, opt.argument("FILE")],
    as_json: opt.AsJson = False,
) -> None:
    """Show a plan or a run that was kept in a file.

    FILE was written by plan --output, run --run-file, or either with --json.
    """
    from tonnage.report import PlanFile, read_file

    kept = read_file(file)
    if as_json:
        print(kept.text(), end="")
        return

    from tonnage.report.draw import console_for
    from tonnage.report.run_table import show_run
    from tonnage.report.table import show_plan

    console = console_for(sys.stdout)
    if isinstance(kept, PlanFile):
        show_plan(kept.plan, console)
    else:
        show_run(kept.result, console, with_plan=True)
