"""What a launch will do and what to change, found without a GPU: findings with stable codes."""

from tonnage.peers.lint.case import Case
from tonnage.peers.lint.finding import CODES, Finding, Linted, Severity

__all__ = ["CODES", "Case", "Finding", "Linted", "Severity"]
