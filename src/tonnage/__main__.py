"""``python -m tonnage`` is ``tonnage``."""

import sys

from tonnage.cli import main

if __name__ == "__main__":
    sys.exit(main())
