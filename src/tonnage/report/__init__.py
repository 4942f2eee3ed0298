"""What a person and a program read: plans, runs and their differences, as tables and as JSON.

Every view and every file comes from one data class, so that both always say the same.
"""

from tonnage.report.diff import Diff, diff_files, diff_text
from tonnage.report.files import check_writable, read_file, write_file
from tonnage.report.plan_json import PlanFile, parse_plan, plan_document, plan_text
from tonnage.report.run import RunResult, StageRecord
from tonnage.report.run_json import RunFile, parse_run, run_document, run_text

__all__ = [
    "Diff",
    "PlanFile",
    "RunFile",
    "RunResult",
    "StageRecord",
    "check_writable",
    "diff_files",
    "diff_text",
    "parse_plan",
    "parse_run",
    "plan_document",
    "plan_text",
    "read_file",
    "run_document",
    "run_text",
    "write_file",
]
