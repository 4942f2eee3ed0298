"""The command line: one file per verb, and rooms are imported inside the verb, so that starting costs little."""

from tonnage.cli.app import main

__all__ = ["main"]
