"""The command line: one file per verb, and rooms are imported inside the verb, so that starting costs little."""

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; a Ctrl-C while it is still being imported ends it quietly."""
    try:
        from tonnage.cli.app import main as run
    except KeyboardInterrupt:
        return 130
    return run(argv)
