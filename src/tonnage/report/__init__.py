"""What a person and a program read: plans, runs and their differences, as tables and as JSON.

Every view and every file comes from one data class, so that both always say the same. Names are looked up when they
are first used: drawing a plan should not pay for reading a run.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tonnage.report.diff import Diff, diff_files, diff_text
    from tonnage.report.files import check_writable, read_file, write_file
    from tonnage.report.plan_json import PlanFile, parse_plan, plan_document, plan_text
    from tonnage.report.run import RunResult, StageRecord, WatchRecord
    from tonnage.report.run_json import RunFile, parse_run, run_document, run_text
    from tonnage.report.start_json import StartFigures, parse_start, start_text

_ROOMS = {
    "diff": ("Diff", "diff_files", "diff_text"),
    "files": ("check_writable", "read_file", "write_file"),
    "plan_json": ("PlanFile", "parse_plan", "plan_document", "plan_text"),
    "run": ("RunResult", "StageRecord", "WatchRecord"),
    "run_json": ("RunFile", "parse_run", "run_document", "run_text"),
    "start_json": ("StartFigures", "parse_start", "start_text"),
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [
    "Diff",
    "PlanFile",
    "RunFile",
    "RunResult",
    "StageRecord",
    "StartFigures",
    "WatchRecord",
    "check_writable",
    "diff_files",
    "diff_text",
    "parse_plan",
    "parse_run",
    "parse_start",
    "plan_document",
    "plan_text",
    "read_file",
    "run_document",
    "run_text",
    "start_text",
    "write_file",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
